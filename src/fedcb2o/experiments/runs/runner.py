"""Run an experiment: one folder, a subfolder a seed, resumable at any moment (alg:FedCB2O, whole)."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcb2o import tracking
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.experiments.config import arguments
from fedcb2o.experiments.config.datasets import load_dataset
from fedcb2o.experiments.config.settings import Experiment, load
from fedcb2o.experiments.runs import remote_runs
from fedcb2o.experiments.runs.cluster_backend import ClusterBackend, check_process_memory, pluralize
from fedcb2o.experiments.runs.local_backend import LocalBackend
from fedcb2o.experiments.runs.memory_plan import clip_workers, parse_size, plan_memory
from fedcb2o.experiments.runs.progress import Progress, RoundCallback
from fedcb2o.experiments.runs.recovery import has_ended
from fedcb2o.experiments.runs.run_directory import exclusive_lock, open_run
from fedcb2o.experiments.runs.seed_run import run_seed_with_retries, validate_seed
from fedcb2o.kernels import devices
from fedcb2o.records import Run
from fedcb2o.safe_stdio import safe_streams


@safe_streams()
def run(
    experiment: str | Path | Mapping[str, Any] | Experiment,
    *,
    out: str | Path | None = None,
    seeds: Sequence[int] | None = None,
    data_dir: str | Path | None = None,
    workers: int | None = None,
    memory: str | int | None = None,
    resume: bool = False,
    watch: RoundCallback | None = None,
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
        raise ConfigError(
            "`workers` are processes of one machine: on a cluster give `blocks`, or nothing"
        )
    if blocks is not None and cluster is None:
        raise ConfigError(
            "`blocks` are those of a cluster: give it by --cluster, or leave `blocks` out"
        )
    arguments.check_callback(watch)
    targets = tracking.validate_targets(track)
    for name, path in (("out", out), ("data_dir", data_dir)):
        arguments.check_path(name, path)
    experiment = load(experiment)
    if seeds is not None:
        chosen = arguments.parse_seeds(seeds)
        experiment = load({**experiment.model_dump(exclude_unset=True), "seeds": chosen})
    folder = Path(out) if out is not None else Path("runs") / experiment.name
    limit = None
    if memory is not None:
        limit = parse_size(memory)
    dataset = load_dataset(experiment, None if data_dir is None else Path(data_dir))
    if devices.resolve_device(experiment.device).type != "cpu" and (workers or 1) > 1:
        raise ConfigError(
            f"one process works on `device` = {experiment.device!r}, and `workers` is {workers}: leave it out"
        )
    if workers is not None:
        workers = clip_workers(workers, experiment.agents.num_agents, "agents")
    prepared = {
        seed: validate_seed(experiment, seed, dataset) for seed in experiment.seeds
    }  # before anything is written
    lacking = [
        seed
        for seed in experiment.seeds
        if not has_ended(folder / f"seed-{seed}", experiment.rounds)
    ]
    where: LocalBackend | ClusterBackend = (
        LocalBackend(workers, limit)
        if blocks is None
        else ClusterBackend(str(cluster), blocks, limit)
    )
    if cluster is None:
        for seed in lacking:
            plan_memory(
                experiment,
                dataset,
                prepared[seed].spec.dim,
                workers,
                limit,
                folder / f"seed-{seed}",
            )
    elif lacking:
        check_process_memory(limit, prepared[lacking[0]])
    elsewhere = cluster if blocks is None and lacking else None
    what = f"{experiment.name}: {pluralize(len(lacking), 'seed')}"
    with (
        where.connect([prepared[seed] for seed in lacking]),
        remote_runs.connect_executor(
            elsewhere, what, [experiment], [(experiment.data, dataset)], limit
        ) as there,
        exclusive_lock(folder),
        Progress() if watch is None else contextlib.nullcontext(watch) as watch,
    ):
        open_run(folder, experiment, resume)
        with tracking.follow(folder, targets):
            for seed in experiment.seeds:
                if there is None or seed not in lacking:  # what has ended is looked at here
                    run_seed_with_retries(prepared.pop(seed), folder / f"seed-{seed}", where, watch)
            if there is not None:
                _run_remotely(there, experiment, folder, lacking, watch)
    return Run(folder)


def _run_remotely(
    remote: remote_runs.RemoteExecutor,
    experiment: Experiment,
    folder: Path,
    seeds: Sequence[int],
    watch: RoundCallback,
) -> None:
    """Run seeds on a cluster, each by itself; raises RunError in the end where some failed."""
    errors: dict[int, str] = {}

    def heard(seed: int, result: tuple[float, str | None]) -> None:
        if result[1] is not None:
            errors[seed] = result[1]

    runs = [(seed, (experiment.model_copy(update={"seeds": (seed,)}), folder)) for seed in seeds]
    remote.map(
        min(remote.processors, len(runs)),
        runs,
        heard,
        on_round=lambda _, seed, line: watch(experiment, seed, line),
        is_locked=True,
    )
    if errors:
        why = "; ".join(f"seed {seed}: {error}" for seed, error in sorted(errors.items()))
        raise RunError(
            f"{len(errors)} of {len(experiment.seeds)} seeds failed, which --resume tries again: {why}"
        )
