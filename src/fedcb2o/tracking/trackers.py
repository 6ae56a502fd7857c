"""Where points go: "tensorboard", "tensorboard=DIR", "mlflow" or "mlflow=URI"."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, runtime_checkable

from fedcb2o.errors import ConfigError
from fedcb2o.plugins import nearest
from fedcb2o.tracking.scalars import Place, Point

NEEDED = {"tensorboard": ("tensorboard",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
"""The extras, and the modules that they bring."""


@runtime_checkable
class Writer(Protocol):
    """What brings points to a tracker."""

    def begin(self, place: Place) -> int:
        """Make room for a seed; up to which round its points are there already."""

    def write(self, place: Place, points: Sequence[Point]) -> None:
        """Add some points of one seed."""

    def end(self, place: Place, complete: bool) -> None:
        """There is no more to add now; `complete` where the seed ran to its end."""


def check(targets: str | Sequence[str] | None) -> tuple[str, ...]:
    """The targets, each once; raises ConfigError for one that there is not, or whose extra is missing."""
    listed = () if targets is None else (targets,) if isinstance(targets, str) else tuple(dict.fromkeys(targets))
    for target in listed:
        kind, equals, where = target.partition("=") if isinstance(target, str) else (target, "", "")
        if kind not in NEEDED:
            raise ConfigError(
                f"there is no tracker {kind!r}.{nearest(str(kind), NEEDED)} "
                "These are tensorboard[=DIR] and mlflow[=URI]"
            )
        if equals and not where:
            raise ConfigError(f"{target!r} needs a place after the sign =, or neither")
        for module in NEEDED[kind]:
            if find_spec(module) is None:
                raise ConfigError(
                    f"{kind} needs the extra, of which {module} is missing: pip install 'fedcb2o[{kind}]'"
                )
    return listed


def opened(target: str, root: Path) -> Writer:
    """The writer of a target for the run or the grid in a folder."""
    kind, _, where = target.partition("=")
    if kind == "tensorboard":
        from fedcb2o.tracking.tensorboard import EventFiles

        return EventFiles(Path(where) / root.resolve().name if where else root / "tensorboard")
    from fedcb2o.tracking.mlflow import Mlflow

    return Mlflow(root, where or None)
