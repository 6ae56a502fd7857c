"""Where points go: "tensorboard", "tensorboard=DIR", "mlflow" or "mlflow=URI"."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, runtime_checkable

from fedcb2o.errors import ConfigError
from fedcb2o.plugins import did_you_mean
from fedcb2o.tracking.scalars import Scalar, SeedRun

REQUIRED_MODULES = {"tensorboard": ("tensorboard",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
"""The extras, and the modules that they bring."""


@runtime_checkable
class TrackerWriter(Protocol):
    """What brings points to a tracker."""

    def begin(self, place: SeedRun) -> int:
        """Make room for a seed; up to which round its points are there already."""

    def write(self, place: SeedRun, points: Sequence[Scalar]) -> None:
        """Add some points of one seed."""

    def end(self, place: SeedRun, complete: bool) -> None:
        """There is no more to add now; `complete` where the seed ran to its end."""


def validate_targets(targets: str | Sequence[str] | None) -> tuple[str, ...]:
    """The targets, each once; raises ConfigError for one that there is not, or whose extra is missing."""
    listed = (
        ()
        if targets is None
        else (targets,)
        if isinstance(targets, str)
        else tuple(dict.fromkeys(targets))
    )
    for target in listed:
        kind, equals, where = target.partition("=") if isinstance(target, str) else (target, "", "")
        if kind not in REQUIRED_MODULES:
            raise ConfigError(
                f"there is no tracker {kind!r}.{did_you_mean(str(kind), REQUIRED_MODULES)} "
                "These are tensorboard[=DIR] and mlflow[=URI]"
            )
        if equals and not where:
            raise ConfigError(f"{target!r} needs a place after the sign =, or neither")
        for module in REQUIRED_MODULES[kind]:
            if find_spec(module) is None:
                raise ConfigError(
                    f"{kind} needs the extra, of which {module} is missing: pip install 'fedcb2o[{kind}]'"
                )
    return listed


def open_writer(target: str, root: Path) -> TrackerWriter:
    """The writer of a target for the run or the grid in a folder."""
    kind, _, where = target.partition("=")
    if kind == "tensorboard":
        from fedcb2o.tracking.tensorboard import TensorBoardWriter

        return TensorBoardWriter(
            Path(where) / root.resolve().name if where else root / "tensorboard"
        )
    from fedcb2o.tracking.mlflow import MlflowWriter

    return MlflowWriter(root, where or None)
