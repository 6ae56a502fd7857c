"""Conversion of names: the table of a grid, and lists of missing and different parts."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedcb2o.errors import ConfigError
from fedcb2o.experiments.config import tables

PARTS = "fedcb2o.experiments.foreign.parts"
POOLS = {"mnist": 60_000, "fashion_mnist": 60_000, "cifar10": 50_000}
"""Training samples of the data sets."""

Names = Mapping[str, tuple[dict[str, Any], dict[str, str]]]
"""The table here of each name there, and keys here by parameters there; "" for one without use."""

NO_ATTACK = {"agents": {"malicious_role": "clean"}}


@dataclass
class Conversion:
    """A grid's table, the parts that are not here, and differences of the others."""

    table: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    def require(self, is_left: object) -> None:
        """Raise ConfigError where nothing is left to run."""
        if not is_left:
            raise ConfigError(f"nothing is left to run. Not here: {'; '.join(self.missing)}")

    def check(self, kind: str, name: object, known: Collection[Any]) -> bool:
        """Return whether a part is known here; list it as missing otherwise."""
        if name not in known and f"{kind} {name}" not in self.missing:
            self.missing.append(f"{kind} {name}")
        return name in known

    def differ(self, difference: str, applies: object = True) -> None:
        """List a difference once, if it applies."""
        if applies and difference not in self.differences:
            self.differences.append(difference)

    def translate(
        self, kind: str, name: str, given: Mapping[str, Any] | None, names: Names
    ) -> dict[str, Any] | None:
        """Return the table here of a part with parameters; None for an unknown part."""
        if not self.check(kind, name, names):
            return None
        table, keys = names[name]
        for key, value in (given or {}).items():
            if self.check(f"parameter of {name}:", key, keys) and keys[key]:
                table = tables.with_value(table, keys[key].split("."), value)
        return dict(table)
