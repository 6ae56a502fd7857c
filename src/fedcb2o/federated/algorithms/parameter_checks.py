"""Checks of algorithm parameters."""

from typing import TypeVar

from fedcb2o.errors import ConfigError

T = TypeVar("T")


def require(name: str, value: T, is_valid: bool, requirement: str) -> T:
    """Return a valid value; raise ConfigError for an invalid one.

    `requirement` has the valid values in words, after "must be".
    """
    if not is_valid:
        raise ConfigError(f"`{name}` must be {requirement}, got {value}")
    return value


def require_mixing_factor(mixing_factor: float) -> float:
    """Return a mixing factor above 0 and at most 1 (eq:local_agg_update)."""
    is_valid = 0 < mixing_factor <= 1
    return require("mixing_factor", mixing_factor, is_valid, "above 0 and at most 1")
