"""Checks that the algorithms share."""

from typing import Any

from fedcb2o.errors import ConfigError


def require(name: str, value: Any, is_valid: bool, requirement: str) -> Any:
    if not is_valid:
        raise ConfigError(f"`{name}` must be {requirement}, got {value}")
    return value


def require_mixing_factor(mixing_factor: float) -> float:
    good = 0 < mixing_factor <= 1
    return require("mixing_factor", mixing_factor, good, "above 0 and at most 1")  # type: ignore[no-any-return]
