"""MLflow writer, one MLflow run per seed; the extra `mlflow`."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from fedcb2o import records
from fedcb2o.tracking.scalars import Scalar, SeedRun

# Data go only to the named location, and an unreachable server does not delay a run for minutes.
# Users may set other values.
for _key, _value in (
    ("MLFLOW_DISABLE_TELEMETRY", "true"),
    ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2"),
    ("MLFLOW_LOGGING_LEVEL", "WARNING"),
):
    os.environ.setdefault(_key, _value)

from mlflow import MlflowClient  # noqa: E402
from mlflow.entities import Metric, Param, RunTag  # noqa: E402

_DATABASE = "mlflow.db"
_IDENTITY_TAG = "fedcb2o.of"  # settings and seed
_ROUND_TAG = "fedcb2o.round"  # last copied round
_MAX_METRICS = 1000  # of one request to MLflow
_MAX_PARAMS = 100  # of one request to MLflow


class MlflowWriter:
    """A writer to the MLflow experiment of a run or grid.

    Each seed is the MLflow run with its settings and seed. Copied rounds are not sent again. By
    default `uri` is a database in `root`.
    """

    def __init__(self, root: Path, uri: str | None) -> None:
        self.root = root.resolve()
        self.ids: dict[SeedRun, str] = {}
        self.client = MlflowClient(uri or f"sqlite:///{self.root / _DATABASE}")
        name = _experiment_name(self.root)
        experiment = self.client.get_experiment_by_name(name)
        if experiment:
            self.experiment = experiment.experiment_id
            return
        artifacts = (self.root / "mlartifacts").as_uri() if uri is None else None
        self.experiment = self.client.create_experiment(name, artifacts)

    def begin(self, seed_run: SeedRun) -> int:
        """Find or make the MLflow run of a seed."""
        settings = records.result_settings(seed_run.settings())
        # By settings and not by folder, so that a moved run continues its copy.
        identity = f"{records.settings_digest(settings)} seed {seed_run.seed}"
        query = f"tags.`{_IDENTITY_TAG}` = '{identity}'"
        matches = self.client.search_runs([self.experiment], query, max_results=1)
        if matches:
            self.ids[seed_run] = matches[0].info.run_id
            self.client.update_run(self.ids[seed_run], status="RUNNING")
            return int(matches[0].data.tags.get(_ROUND_TAG, 0))

        title = f"{seed_run.name or self.root.name} seed {seed_run.seed}"
        tags = {_IDENTITY_TAG: identity}
        run = self.client.create_run(self.experiment, run_name=title, tags=tags)
        flat = records.flatten({**settings, "seed": seed_run.seed})
        params = [Param(key, str(value)) for key, value in flat.items()]
        for start in range(0, len(params), _MAX_PARAMS):
            batch = params[start : start + _MAX_PARAMS]
            self.client.log_batch(run.info.run_id, params=batch)
        self.ids[seed_run] = run.info.run_id
        return 0

    def write(self, seed_run: SeedRun, scalars: Sequence[Scalar]) -> None:
        """Add metrics, then the last round: an interrupted copy is repeated, not shortened."""
        run_id = self.ids[seed_run]
        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, n) for n, name, value in scalars]
        for start in range(0, len(metrics), _MAX_METRICS):
            self.client.log_batch(run_id, metrics=metrics[start : start + _MAX_METRICS])
        last = max(n for n, _, _ in scalars)
        self.client.log_batch(run_id, tags=[RunTag(_ROUND_TAG, str(last))])

    def end(self, seed_run: SeedRun, complete: bool) -> None:
        """Set the status of the MLflow run."""
        status = "FINISHED" if complete else "KILLED"
        self.client.set_terminated(self.ids[seed_run], status=status)


def _experiment_name(root: Path) -> str:
    """Return the name of the run or the grid in a folder."""
    path = root / "grid.toml"
    table = records.read_toml(path) if path.exists() else records.read_config(root / "config.toml")
    return str(table.get("name") or root.name)
