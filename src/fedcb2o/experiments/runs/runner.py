"""Run an experiment: one folder, a subfolder a seed, resumable at any moment (alg:FedCB2O, whole)."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcb2o import tracking
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.experiments.config import arguments
from fedcb2o.experiments.config.datasets import dataset_of
from fedcb2o.experiments.config.settings import Experiment, load
from fedcb2o.experiments.runs import remote_runs
from fedcb2o.experiments.runs.cluster_backend import Spread, check_memory, several
from fedcb2o.experiments.runs.local_backend import OneMachine
from fedcb2o.experiments.runs.memory_plan import bounded, plan, size
from fedcb2o.experiments.runs.progress import Progress, Watch
from fedcb2o.experiments.runs.recovery import has_ended
from fedcb2o.experiments.runs.run_directory import alone, begin
from fedcb2o.experiments.runs.seed_run import _ready, _run_on
from fedcb2o.kernels import devices
from fedcb2o.records import Run
from fedcb2o.safe_stdio import kept


@kept()
def run(
    experiment: str | Path | Mapping[str, Any] | Experiment,
    *,
    out: str | Path | None = None,
    seeds: Sequence[int] | None = None,
    data_dir: str | Path | None = None,
    workers: int | None = None,
    memory: str | int | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    cluster: str | None = None,
    blocks: int | None = None,
    track: str | Sequence[str] | None = None,
) -> Run:
    """Run an experiment for each of its seeds and return its records.

    `experiment` is a preset's name, a TOML file, a mapping or an `Experiment`; `out` the run's folder (by default
    runs/NAME); `workers` the number of processes (by default chosen from the work, the processors and the memory, and
    never more than processors or agents; it changes no bit of the result; on another device than the CPU one). `memory`
    is what it may take, such as "24GiB" or "24GB" (by default what is free): models that need more lie in a file in the
    run's folder. With `resume` a stopped run goes on from its last checkpoint, and a finished one is read.

    With a `cluster`, the address of one of Ray's, "auto" for the one that this machine is in or "local" for one of this
    machine alone, seeds are run on its nodes, each by itself, and their files come back here about once a minute; one
    that fails does not stop the others, and `memory` is what each of them may take. With `blocks` the agents of each
    seed are spread over the nodes, which changes no bit either; `memory` is then what each node gives. What is lost
    with a part of the cluster is done again.

    With `track` the records are copied to trackers as they are written: "tensorboard", "tensorboard=DIR", "mlflow" or
    "mlflow=URI", one or several of them.

    Raises ConfigError, DataError or RunError, each with one line that says what to do.
    """
    arguments.check_count("workers", workers)
    arguments.check_count("blocks", blocks)
    arguments.check_address(cluster)
    if workers is not None and cluster is not None:
        raise ConfigError("`workers` are processes of one machine: on a cluster give `blocks`, or nothing")
    if blocks is not None and cluster is None:
        raise ConfigError("`blocks` are those of a cluster: give it by --cluster, or leave `blocks` out")
    arguments.check_watch(watch)
    targets = tracking.check(track)
    for name, path in (("out", out), ("data_dir", data_dir)):
        arguments.check_path(name, path)
    experiment = load(experiment)
    if seeds is not None:
        chosen = arguments.seeds_of(seeds)
        experiment = load({**experiment.model_dump(exclude_unset=True), "seeds": chosen})
    folder, limit = Path(out) if out is not None else Path("runs") / experiment.name, None
    if memory is not None:
        limit = size(memory)
    dataset = dataset_of(experiment, None if data_dir is None else Path(data_dir))
    if devices.device_of(experiment.device).type != "cpu" and (workers or 1) > 1:
        raise ConfigError(
            f"one process works on `device` = {experiment.device!r}, and `workers` is {workers}: leave it out"
        )
    if workers is not None:
        workers = bounded(workers, experiment.agents.num_agents, "agents")
    prepared = {seed: _ready(experiment, seed, dataset) for seed in experiment.seeds}  # before anything is written
    lacking = [seed for seed in experiment.seeds if not has_ended(folder / f"seed-{seed}", experiment.rounds)]
    where: OneMachine | Spread = OneMachine(workers, limit) if blocks is None else Spread(str(cluster), blocks, limit)
    if cluster is None:
        for seed in lacking:
            plan(experiment, dataset, prepared[seed].terms.dim, workers, limit, folder / f"seed-{seed}")
    elif lacking:
        check_memory(limit, prepared[lacking[0]])
    elsewhere = cluster if blocks is None and lacking else None
    what = f"{experiment.name}: {several(len(lacking), 'seed')}"
    with (
        where.joined([prepared[seed] for seed in lacking]),
        remote_runs.joined(elsewhere, what, [experiment], [(experiment.data, dataset)], limit) as there,
        alone(folder),
        Progress() if watch is None else contextlib.nullcontext(watch) as watch,
    ):
        begin(folder, experiment, resume)
        with tracking.following(folder, targets):
            for seed in experiment.seeds:
                if there is None or seed not in lacking:  # what has ended is looked at here
                    _run_on(prepared.pop(seed), folder / f"seed-{seed}", where, watch)
            if there is not None:
                _run_away(there, experiment, folder, lacking, watch)
    return Run(folder)


def _run_away(
    there: remote_runs.Away, experiment: Experiment, folder: Path, seeds: Sequence[int], watch: Watch
) -> None:
    """Run seeds on a cluster, each by itself; raises RunError in the end where some failed."""
    errors: dict[int, str] = {}

    def heard(seed: int, result: tuple[float, str | None]) -> None:
        if result[1] is not None:
            errors[seed] = result[1]

    runs = [(seed, (experiment.model_copy(update={"seeds": (seed,)}), folder)) for seed in seeds]
    there.work(
        min(there.processors, len(runs)),
        runs,
        heard,
        watch=lambda _, seed, line: watch(experiment, seed, line),
        held=True,
    )
    if errors:
        why = "; ".join(f"seed {seed}: {error}" for seed, error in sorted(errors.items()))
        raise RunError(f"{len(errors)} of {len(experiment.seeds)} seeds failed, which --resume tries again: {why}")
