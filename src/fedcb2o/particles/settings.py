"""Validation of the settings of `minimize`: numbers, counts, functions, device and memory.

The argument `name` is the name of the setting in messages.
"""

import os
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

import torch

from fedcb2o import consensus
from fedcb2o.errors import ConfigError
from fedcb2o.plugins import to_python

Schedule = float | Callable[[int], float]
"""A parameter, or a function of the step n."""

# Approximate float64 copies of an ensemble in memory: particles, as drawn, noise, and a step's.
_ENSEMBLE_COPIES = 4


def check_number(name: str, value: Any, where: str = "") -> float:
    """Convert a setting to a number; `where` is added to the message, such as the step."""
    try:
        value = to_python(value)
        if isinstance(value, str | bytes):
            raise TypeError(value)
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{name} must be a number, got {_short_repr(value)}{where}") from error


def check_count(name: str, value: Any, least: int | None = 1) -> int:
    """Convert a setting to a whole number; `least` is None for no limit."""
    value = to_python(value)
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or (least is not None and value < least):
        bound = "" if least is None else f", at least {least}"
        raise ConfigError(f"{name} must be a whole number{bound}, got {_short_repr(value)}")
    return int(value)


def check_optional_count(name: str, value: Any, least: int = 1) -> int | None:
    """Convert a setting to a whole number; None stays None."""
    return None if value is None else check_count(name, value, least)


def check_positive(
    values: Mapping[str, Any], *, finite: bool = True, or_zero: bool = False
) -> dict[str, float]:
    """Return settings as numbers, and refuse those that are not above 0."""
    numbers = {}
    for name, value in values.items():
        number = check_number(f"`{name}`", value)
        numbers[name] = number
        is_in_range = number > 0 or (or_zero and number == 0)
        if not is_in_range or (finite and number == torch.inf):
            bound = "at least 0" if or_zero else "above 0"
            raise ConfigError(f"`{name}` must be {bound}{' and finite' * finite}, got {value}")
    return numbers


def check_choices(choices: Mapping[str, tuple[Any, tuple[Any, ...]]]) -> None:
    """Refuse a setting that is not one of its choices; names have the value and the choices."""
    for name, (value, valid) in choices.items():
        is_word = isinstance(value, str)
        if not any(value is choice or (is_word and value == choice) for choice in valid):
            raise ConfigError(
                f"{name} must be {' or '.join(map(repr, valid))}, got {_short_repr(value)}"
            )


def schedule_value(name: str, value: Schedule, n: int) -> float:
    """Return the value of a parameter at a step."""
    if callable(value):
        value = value(n)
    if type(value) is not float:
        value = check_number(f"`{name}`", value, f" at step {n}")
    if name == "beta":
        consensus.validate_beta(value)
    elif not 0 <= value < torch.inf:
        raise ConfigError(f"`{name}` must be at least 0 and finite, got {value} at step {n}")
    return value


def check_function(name: str, value: Any, expected: str = "a function", hint: str = "") -> None:
    """Refuse a setting that is not a function."""
    if not callable(value):
        raise ConfigError(f"{name} must be {expected}, got {_short_repr(value)}{hint}")


def check_device(name: Any) -> torch.device:
    """Return a PyTorch device by its name; None for the CPU."""
    try:
        device = torch.device("cpu" if name is None else name)
        # A device that PyTorch knows need not be in this machine.
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, TypeError) as error:
        version = torch.__version__
        raise ConfigError(f"`device` = {name!r} is none that PyTorch {version} finds") from error
    return device


def check_memory(runs: int, num_particles: int, dim: int) -> None:
    """Refuse ensembles that need more memory than the machine has."""
    needed = 8 * _ENSEMBLE_COPIES * runs * num_particles * dim
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > available:
        prefix = f"{runs:,} runs of " if runs > 1 else ""
        raise ConfigError(
            f"{prefix}{num_particles:,} particles of {dim:,} coordinates need about"
            f" {needed / 2**30:,.0f} GiB of memory, and this machine has"
            f" {available / 2**30:,.0f}: take fewer"
        )


def _short_repr(value: Any) -> str:
    """Return the repr of a value, or its type where that is long."""
    text = repr(value)
    return f"a {type(value).__name__}" if len(text) > 60 or "\n" in text else text
