"""What a run or a grid is asked for in Python, checked before anything begins."""

import os
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

from fedcb2o.errors import ConfigError


def check_count(name: str, value: Any) -> None:
    """Raise ConfigError unless an argument is None or a whole number, 1 or more."""
    if value is not None and (not _is_integer(value) or value < 1):
        raise ConfigError(f"`{name}` must be a whole number, at least 1, got {value!r}")


def check_path(name: str, value: Any) -> None:
    """Raise ConfigError unless an argument is None or a path."""
    if not isinstance(value, str | os.PathLike | None):
        raise ConfigError(f"`{name}` must be a folder's path, got a {type(value).__name__}")


def check_callback(value: Any) -> None:
    """Raise ConfigError unless an argument is None or a function."""
    if not (value is None or callable(value)):
        raise ConfigError(
            f"`watch` must be a function of (experiment, seed, line), got a {type(value).__name__}"
        )


def check_address(value: Any) -> None:
    """Raise ConfigError unless an argument is None or the address of a cluster."""
    if value is None or value in ("local", "auto"):
        return
    if not isinstance(value, str):
        raise ConfigError(f"`cluster` must be an address, got a {type(value).__name__}")
    if value.startswith("ray://"):
        raise ConfigError(
            f"{value!r} is for programs outside of a cluster: give this command to one of its machines, with the "
            "address auto, or HOST:PORT of its head"
        )
    host, _, port = value.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16) or any(
        c.isspace() or c in "/?#@" for c in host
    ):
        raise ConfigError(
            f"{value!r} is no address of a cluster: these are local (Ray is started on this machine), auto (the "
            "cluster that it is in) and HOST:PORT of a head; --cluster alone, at the end, is local"
        )


def parse_seeds(value: Any) -> tuple[int, ...]:
    """Seeds as whole numbers; raises ConfigError where they are none."""
    several = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    listed: list[Any] = list(value) if several else []
    if not several or not all(_is_integer(seed) for seed in listed):
        raise ConfigError(f"`seeds` must be whole numbers, such as [0, 1, 2], got {value!r}")
    return tuple(int(seed) for seed in listed)


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
