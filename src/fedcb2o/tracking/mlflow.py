"""MLflow, a run of it for each seed, in a database in its folder or where a URI says; the extra `mlflow`."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from fedcb2o import records
from fedcb2o.tracking.scalars import Scalar, SeedRun

# Nothing is sent but to whom the user named, and a server that is away does not hold up a run for minutes. Whoever
# wants it otherwise sets these.
for _key, _value in (
    ("MLFLOW_DISABLE_TELEMETRY", "true"),
    ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2"),
    ("MLFLOW_LOGGING_LEVEL", "WARNING"),
):
    os.environ.setdefault(_key, _value)

from mlflow import MlflowClient  # noqa: E402
from mlflow.entities import Metric, Param, RunTag  # noqa: E402

_DATABASE = "mlflow.db"
_IDENTITY_TAG, _ROUND_TAG = (
    "fedcb2o.of",
    "fedcb2o.round",
)  # tags: which seed of which settings, and up to which round it is there
_MAX_METRICS, _MAX_PARAMS = 1000, 100  # that MLflow takes at once


class MlflowWriter:
    """Writes to the experiment of MLflow that is named as a run or a grid is, in the one of its runs that has the
    settings and the seed, which is made where there is none yet. Rounds that are there are not sent again."""

    def __init__(self, root: Path, uri: str | None) -> None:
        self.root, self.ids = root.resolve(), dict[SeedRun, str]()
        self.client = MlflowClient(uri or f"sqlite:///{self.root / _DATABASE}")
        name = _name(self.root)
        found = self.client.get_experiment_by_name(name)
        artifacts = None if uri else (self.root / "mlartifacts").as_uri()
        self.experiment = (
            found.experiment_id if found else self.client.create_experiment(name, artifacts)
        )

    def begin(self, place: SeedRun) -> int:
        """Find the run of MLflow that is this seed's, or make it; up to which round it is there."""
        settings = records.result_settings(place.settings())
        of = f"{records.settings_digest(settings)} seed {place.seed}"
        found = self.client.search_runs(
            [self.experiment], f"tags.`{_IDENTITY_TAG}` = '{of}'", max_results=1
        )
        if found:
            self.ids[place] = found[0].info.run_id
            self.client.update_run(self.ids[place], status="RUNNING")
            return int(found[0].data.tags.get(_ROUND_TAG, 0))
        title = f"{place.name or self.root.name} seed {place.seed}"
        run_id = self.client.create_run(
            self.experiment, run_name=title, tags={_IDENTITY_TAG: of}
        ).info.run_id
        params = [
            Param(key, str(value))
            for key, value in records.flatten({**settings, "seed": place.seed}).items()
        ]
        for some in range(0, len(params), _MAX_PARAMS):
            self.client.log_batch(run_id, params=params[some : some + _MAX_PARAMS])
        self.ids[place] = run_id
        return 0

    def write(self, place: SeedRun, points: Sequence[Scalar]) -> None:
        """Add metrics, and then that they are there."""
        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, n) for n, name, value in points]
        for some in range(0, len(metrics), _MAX_METRICS):
            self.client.log_batch(self.ids[place], metrics=metrics[some : some + _MAX_METRICS])
        self.client.log_batch(
            self.ids[place], tags=[RunTag(_ROUND_TAG, str(max(n for n, _, _ in points)))]
        )

    def end(self, place: SeedRun, complete: bool) -> None:
        """Say how the run of MLflow ended."""
        self.client.set_terminated(self.ids[place], status="FINISHED" if complete else "KILLED")


def _name(root: Path) -> str:
    """What the run or the grid in a folder is called."""
    grid = root / "grid.toml"
    table = records.read_toml(grid) if grid.exists() else records.read_config(root / "config.toml")
    return str(table.get("name") or root.name)
