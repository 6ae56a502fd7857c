"""Targets of tracking: "tensorboard", "tensorboard=DIR", "mlflow" or "mlflow=URI"."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, runtime_checkable

from fedcb2o.errors import ConfigError
from fedcb2o.plugins import did_you_mean
from fedcb2o.tracking.scalars import Scalar, SeedRun

REQUIRED_MODULES = {"tensorboard": ("tensorboard",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
"""Modules of each extra."""


@runtime_checkable
class TrackerWriter(Protocol):
    """A writer of scalars to one tracker."""

    def begin(self, seed_run: SeedRun) -> int:
        """Prepare the tracker for a seed and return the last round that it already has."""

    def write(self, seed_run: SeedRun, scalars: Sequence[Scalar]) -> None:
        """Add scalars of whole rounds of one seed, in order."""

    def end(self, seed_run: SeedRun, complete: bool) -> None:
        """End the copy of a seed for now, or for good if all its rounds are finished."""


def validate_targets(targets: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the targets of tracking without repetition, if their extras are installed."""
    if targets is None:
        return ()
    names = (targets,) if isinstance(targets, str) else tuple(dict.fromkeys(targets))
    for name in names:
        _validate_target(name)
    return names


def _validate_target(name: str) -> None:
    kind, equals, location = name.partition("=") if isinstance(name, str) else (name, "", "")
    if kind not in REQUIRED_MODULES:
        raise ConfigError(
            f"there is no tracker {kind!r}.{did_you_mean(str(kind), REQUIRED_MODULES)} "
            "The trackers are tensorboard[=DIR] and mlflow[=URI]"
        )
    if equals and not location:
        raise ConfigError(f"{name!r} needs a location after the sign =, or neither")
    for module in REQUIRED_MODULES[kind]:
        if find_spec(module) is None:
            raise ConfigError(
                f"{kind} needs an extra, and its module {module} is missing: "
                f"pip install 'fedcb2o[{kind}]'"
            )


def open_writer(target: str, root: Path) -> TrackerWriter:
    """Open the writer of a target."""
    kind, _, location = target.partition("=")
    if kind == "tensorboard":
        from fedcb2o.tracking.tensorboard import TensorBoardWriter

        folder = root / "tensorboard"
        if location:
            folder = Path(location) / root.resolve().name
        return TensorBoardWriter(folder)
    from fedcb2o.tracking.mlflow import MlflowWriter

    return MlflowWriter(root, location or None)
