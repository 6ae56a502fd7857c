"""Checks that the algorithms share."""

from typing import Any

from fedcb2o.errors import ConfigError


def _check(name: str, value: Any, good: bool, cure: str) -> Any:
    if not good:
        raise ConfigError(f"`{name}` must be {cure}, got {value}")
    return value


def _check_factor(mixing_factor: float) -> float:
    good = 0 < mixing_factor <= 1
    return _check("mixing_factor", mixing_factor, good, "above 0 and at most 1")  # type: ignore[no-any-return]
