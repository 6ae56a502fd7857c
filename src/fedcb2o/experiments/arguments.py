"""What a run or a grid is asked for in Python, checked before anything begins."""

import os
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

from fedcb2o.errors import ConfigError


def check_count(name: str, value: Any) -> None:
    """Raise ConfigError unless an argument is None or a whole number, 1 or more."""
    if value is not None and (not _whole(value) or value < 1):
        raise ConfigError(f"`{name}` must be a whole number, at least 1, got {value!r}")


def check_path(name: str, value: Any) -> None:
    """Raise ConfigError unless an argument is None or a path."""
    if not isinstance(value, str | os.PathLike | None):
        raise ConfigError(f"`{name}` must be a folder's path, got a {type(value).__name__}")


def check_watch(value: Any) -> None:
    """Raise ConfigError unless an argument is None or a function."""
    if not (value is None or callable(value)):
        raise ConfigError(f"`watch` must be a function of (experiment, seed, line), got a {type(value).__name__}")


def seeds_of(value: Any) -> tuple[int, ...]:
    """Seeds as whole numbers; raises ConfigError where they are none."""
    several = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    listed: list[Any] = list(value) if several else []
    if not several or not all(_whole(seed) for seed in listed):
        raise ConfigError(f"`seeds` must be whole numbers, such as [0, 1, 2], got {value!r}")
    return tuple(int(seed) for seed in listed)


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
