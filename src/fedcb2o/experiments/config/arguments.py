"""The validation of the arguments of `run` and `bench`."""

import os
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

from fedcb2o.errors import ConfigError
from fedcb2o.plugins import to_python


def check_count(name: str, value: Any) -> None:
    """Check that an argument is None or a positive whole number."""
    value = to_python(value)
    if value is not None and (not _is_integer(value) or value < 1):
        raise ConfigError(f"`{name}` must be a whole number, at least 1, got {value!r}")


def check_path(name: str, value: Any) -> None:
    """Check that an argument is None or a path."""
    if not isinstance(value, str | os.PathLike | None):
        raise ConfigError(f"`{name}` must be a folder's path, got a {type(value).__name__}")


def check_callback(value: Any) -> None:
    """Check that the argument `watch` is None or a function."""
    if not (value is None or callable(value)):
        kind = type(value).__name__
        raise ConfigError(f"`watch` must be a function of (experiment, seed, line), got a {kind}")


def check_address(value: Any) -> None:
    """Check that an argument is None, or the address of a Ray cluster."""
    if value is None or value in ("local", "auto"):
        return
    if not isinstance(value, str):
        raise ConfigError(f"`cluster` must be an address, got a {type(value).__name__}")
    if value.startswith("ray://"):
        raise ConfigError(
            f"{value!r} is for programs outside of a cluster: run this command on one of its "
            "machines, with the address auto, or HOST:PORT of its head"
        )
    host, _, port = value.rpartition(":")
    has_port = bool(host) and port.isdecimal() and 0 < int(port) < 2**16
    if not has_port or any(c.isspace() or c in "/?#@" for c in host):
        raise ConfigError(
            f"{value!r} is no address of a cluster. Addresses are local (starts Ray on this "
            "machine), auto (the cluster of this machine) and HOST:PORT of a head; --cluster "
            "alone, at the end, means local"
        )


def parse_seeds(value: Any) -> tuple[int, ...]:
    """Convert an iterable of whole numbers to seeds."""
    value = to_python(value)
    is_listed = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    seeds: list[Any] = list(value) if is_listed else []
    if not is_listed or not all(_is_integer(seed) for seed in seeds):
        raise ConfigError(f"`seeds` must be whole numbers, such as [0, 1, 2], got {value!r}")
    return tuple(int(seed) for seed in seeds)


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
