"""Checks of algorithm parameters."""

from typing import TypeVar

from fedcb2o.errors import ConfigError

T = TypeVar("T")


def require(name: str, value: T, is_valid: bool, requirement: str) -> T:
    """Return a valid value.

    Args:
        name: Name of the parameter.
        value: Value of the parameter.
        is_valid: The value is valid.
        requirement: Valid values in words, after "must be".

    Returns:
        The value.

    Raises:
        ConfigError: The value is not valid.
    """
    if not is_valid:
        raise ConfigError(f"`{name}` must be {requirement}, got {value}")
    return value


def require_mixing_factor(mixing_factor: float) -> float:
    """Return a valid mixing factor (eq:local_agg_update).

    Args:
        mixing_factor: Share of the consensus point in the new model.

    Returns:
        The mixing factor.

    Raises:
        ConfigError: The mixing factor is not above 0 and at most 1.
    """
    is_valid = 0 < mixing_factor <= 1
    return require("mixing_factor", mixing_factor, is_valid, "above 0 and at most 1")
