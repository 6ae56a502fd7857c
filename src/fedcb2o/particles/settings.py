"""The settings of `minimize`, checked once: numbers, counts, functions, the device, and what memory they would take.

`name` is what a message calls a setting.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch

from fedcb2o import consensus
from fedcb2o.errors import ConfigError

Schedule = float | Callable[[int], float]
"""A parameter, or a function of the step."""

_ENSEMBLE_COPIES = 4  # of an ensemble in float64, about: the particles, as they were drawn, their noise, and a step's


def check_number(name: str, value: Any, where: str = "") -> float:
    """A setting as a number; raises ConfigError where it is none."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError(value)
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{name} must be a number, got {_short_repr(value)}{where}") from error


def check_count(name: str, value: Any, least: int | None = 1) -> int:
    """A setting as a whole number; raises ConfigError where it is none, or less than the least that it may be."""
    bound = "" if least is None else f", at least {least}"
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or (least is not None and value < least):
        raise ConfigError(f"{name} must be a whole number{bound}, got {_short_repr(value)}")
    return int(value)


def check_positive(name: str, value: Any, *, finite: bool = True) -> None:
    """Raise ConfigError unless a setting is a number above 0."""
    if not (0 < check_number(name, value) < torch.inf or (value == torch.inf and not finite)):
        raise ConfigError(f"{name} must be above 0{' and finite' * finite}, got {value}")


def check_not_negative(name: str, value: Any) -> None:
    """Raise ConfigError unless a setting is a number, 0 or above, and finite."""
    if not 0 <= check_number(name, value) < torch.inf:
        raise ConfigError(f"{name} must be at least 0 and finite, got {value}")


def check_choices(choices: Mapping[str, tuple[Any, tuple[Any, ...]]]) -> None:
    """Raise ConfigError where a setting's value is none of its choices."""
    for name, (value, known) in choices.items():
        if not any(value is each or (isinstance(value, str) and value == each) for each in known):
            raise ConfigError(
                f"{name} must be {' or '.join(map(repr, known))}, got {_short_repr(value)}"
            )


def schedule_value(name: str, value: Schedule, n: int) -> float:
    """A parameter at step n, such as alpha; raises ConfigError where it is below 0 or infinite, or is no share."""
    if callable(value):
        value = value(n)
    if type(value) is not float:
        value = check_number(f"`{name}`", value, f" at step {n}")
    if name == "beta":
        consensus.validate_beta(value)
    elif not 0 <= value < torch.inf:
        raise ConfigError(f"`{name}` must be at least 0 and finite, got {value} at step {n}")
    return value


def reject_point(name: str, value: Any) -> None:
    """Raise ConfigError where a point is given in place of a function."""
    try:
        numbers = np.asarray(value).dtype.kind in "iuf"
    except (TypeError, ValueError, RuntimeError):
        numbers = False
    if numbers:
        raise ConfigError(
            f"{name} is G, a function, and got a point: a point to start about is `x0`, as in"
            " minimize(lower, x0=[0.0, 0.0], spread=3.0)"
        )


def check_functions(name: str, value: Any, *, or_none: bool = False) -> None:
    """Raise ConfigError unless a setting is a function, or a sequence of them."""
    several = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    for each in value if several else [value]:
        if not (callable(each) or (or_none and each is None)):
            raise ConfigError(
                f"{name} must be a function, or a list with one for each cluster, got {_short_repr(each)}"
            )


def check_function(name: str, value: Any) -> Callable[..., Any]:
    """A setting that is a function; raises ConfigError where it is none."""
    if not callable(value):
        raise ConfigError(f"{name} must be a function, got {_short_repr(value)}")
    return value  # type: ignore[no-any-return]


def check_device(name: Any) -> torch.device:
    """The device of a name; raises ConfigError where PyTorch finds none here."""
    try:
        device = torch.device("cpu" if name is None else name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ConfigError(
            f"`device` = {name!r} is none that PyTorch {torch.__version__} finds here; leave it out for the CPU"
        ) from error
    return device


def check_memory(runs: int, num_particles: int, dim: int) -> None:
    """Raise ConfigError where ensembles need more memory than this machine has."""
    # A control group may allow less; what is far too much for the machine is what is meant.
    needed = 8 * _ENSEMBLE_COPIES * runs * num_particles * dim
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        several = f"{runs:,} runs of " if runs > 1 else ""
        raise ConfigError(
            f"{several}{num_particles:,} particles of {dim:,} coordinates need about {needed / 2**30:,.0f} GiB of"
            f" memory, and this machine has {there / 2**30:,.0f}: take fewer"
        )


def _short_repr(value: Any) -> str:
    """A value in a message: itself where it is short, else what it is."""
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"a {type(value).__name__}"
