"""The run of an experiment: one folder per run, one subfolder per seed."""

import contextlib
import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcb2o import records, tracking
from fedcb2o.data import Dataset
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.experiments.config import arguments, short_calls
from fedcb2o.experiments.config.datasets import build_population, load_dataset, load_for_data
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.experiments.runs import _remote_runs
from fedcb2o.experiments.runs._cluster_backend import (
    ClusterBackend,
    check_process_memory,
    pluralize,
)
from fedcb2o.experiments.runs._local_backend import LocalBackend
from fedcb2o.experiments.runs._memory_plan import clip_workers, parse_size
from fedcb2o.experiments.runs._progress import Progress, RoundCallback
from fedcb2o.experiments.runs._recovery import has_ended
from fedcb2o.experiments.runs._run_directory import describe_all_differences, open_run
from fedcb2o.experiments.runs._seed_run import (
    Backend,
    run_seed,
    run_seed_with_retries,
    validate_seed,
)
from fedcb2o.federated.shortfall import beta_note
from fedcb2o.kernels import devices
from fedcb2o.python_words import python_words
from fedcb2o.records import Run
from fedcb2o.safe_stdio import safe_streams

_LOG = logging.getLogger(__name__)


@safe_streams()
@python_words()
def run(
    experiment: str | Path | Mapping[str, Any] | Experiment | None = None,
    *,
    out: str | Path | None = None,
    seeds: Sequence[int] | None = None,
    data_dir: str | Path | None = None,
    workers: int | None = None,
    memory: str | int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    watch: RoundCallback | None = None,
    cluster: str | None = None,
    blocks: int | None = None,
    track: str | Sequence[str] | None = None,
    **settings: Any,
) -> Run:
    """Run an experiment for each of its seeds and return its records.

    Neither `workers` nor `cluster` nor `blocks` changes a bit of the results.

    Args:
        experiment: A preset's name, a TOML file, a mapping or an `Experiment`. Without it, `data`
            and further settings are the experiment.
        out: The run's folder, by default runs/NAME, or the first of runs/run, runs/run-2 and so on
            without an experiment.
        seeds: Seeds in place of the experiment's.
        data_dir: Folder of downloaded data sets.
        workers: Number of processes, at most the numbers of processors and of agents. The default
            depends on the work, the processors and the memory. On another device than the CPU one
            process works.
        memory: Memory that the run may take, such as "24GiB" or "24GB"; by default the free memory.
            Models that need more are in a file in the run's folder. On a cluster it is the memory
            of each seed or, with `blocks`, of each node.
        resume: Whether a stopped run continues from its last checkpoint. A finished one is read.
        overwrite: Whether a run that the folder holds is removed first, so that a notebook's cell
            can run again.
        watch: Called after every round with the experiment, the seed and the metrics record, in
            place of a progress display.
        cluster: Address of a Ray cluster: "HOST:PORT", "auto" for the one of this machine, or
            "local" for one on this machine alone. Each seed runs on a node, and its files come back
            about once a minute. A seed that fails does not stop the others.
        blocks: Number of groups of agents, which are spread over the nodes of the cluster. Work
            that is lost with a part of the cluster is done again.
        track: Trackers that receive the records: "tensorboard", "tensorboard=DIR", "mlflow" or
            "mlflow=URI", one or several.
        **settings: Keys of an experiment, of its sections `agents` and `training`, or sections as
            tables, which replace those of `experiment`. `seed` is the only seed. `data` may also be
            samples and labels (x, y), a table, the path of a CSV file or owners' data by name, and
            `model` a network, with whose parameters all agents begin. `owners` and the arguments of
            `fedcb2o.dataset` describe such data. By default the owners are the agents, or ten
            agents share the samples; with an attack a fifth of them is malicious. There are 20
            rounds, one seed, an MLP or for images a CNN, and the recommended method.

    Returns:
        The records of the run.

    Raises:
        ConfigError: If an argument or a setting is not valid.
        DataError: If the data set is missing or damaged.
        RunError: If the run cannot be started, continued or finished.

    Example:
        >>> import tempfile
        >>> from sklearn.datasets import load_iris
        >>> x, y = load_iris(return_X_y=True)
        >>> attack = {"name": "label_flip", "source": 0, "target": 1}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     finished = run(data=(x, y), rounds=2, attack=attack, seed=1, out=folder)
        ...     finished.agents.malicious.sum()
        np.int64(2)
    """
    arguments.check_path("data_dir", data_dir)
    data_folder = None if data_dir is None else Path(data_dir)
    source: Any = experiment
    changes: dict[str, Any] = {}
    # Keywords describe an experiment, or change the one that is named.
    if settings or source is None:
        source, changes = short_calls.settings_of(source, settings, data_folder)
    if seeds is not None:
        changes["seeds"] = arguments.parse_seeds(seeds)
    loaded, dataset = load_for_data(source, changes or None, data_folder)
    # A cell of a notebook that runs again would find its own run; a name is a choice of the user.
    if experiment is None and out is None and not (resume or overwrite or "name" in settings):
        out = _unused_folder(loaded)
    if experiment is None and not settings.keys() & {"malicious", "agents"}:
        dataset = dataset or load_dataset(loaded, data_folder)
        _name_attackers(loaded, dataset)
    return run_loaded(
        loaded,
        dataset,
        out=out,
        data_dir=data_folder,
        workers=workers,
        memory=memory,
        resume=resume,
        overwrite=overwrite,
        watch=watch,
        cluster=cluster,
        blocks=blocks,
        track=track,
    )


def _unused_folder(experiment: Experiment) -> Path:
    """Return the first of runs/NAME, runs/NAME-2 and so on that does not exist.

    A line names the folder, the one before it, and the difference between their settings.
    """
    name = experiment.name
    former = None
    for k in itertools.count(1):
        folder = Path("runs") / (f"{name}-{k}" if k > 1 else name)
        if not folder.exists():
            break
        former = folder
    if former is not None and (former / "config.toml").exists():
        difference = describe_all_differences(
            records.read_config(former / "config.toml"), experiment.settings()
        )
        _LOG.warning(
            "%s holds an earlier run (%s): this one is written to %s.", former, difference, folder
        )
    return folder


def _name_attackers(experiment: Experiment, dataset: Dataset) -> None:
    """Print the agents that attack although the call does not say how many do."""
    # Most short calls have no attackers to name.
    if not experiment.attacked:
        return
    chosen: dict[str, list[str]] = {}
    for seed in experiment.seeds:
        population = build_population(experiment, seed, dataset)
        agents = population.malicious.nonzero().ravel().tolist()
        names = ", ".join(population.names[i] if population.names else f"{i}" for i in agents)
        # Each seed draws the attackers anew, and one line for all of them is shorter.
        chosen.setdefault(names, []).append(str(seed))
    kind = "owners" if dataset.owners is not None else "agents"
    groups = [f"{names} (seed {', '.join(seeds)})" for names, seeds in chosen.items()]
    _LOG.warning(
        "%d of %d %s act maliciously, because `malicious` is not given: %s. malicious=0 is a run "
        "without attack.",
        *(experiment.agents.num_malicious, experiment.agents.num_agents, kind, "; ".join(groups)),
    )


def run_loaded(
    experiment: Experiment,
    dataset: Dataset | None,
    *,
    out: str | Path | None = None,
    data_dir: Path | None = None,
    workers: int | None = None,
    memory: str | int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    watch: RoundCallback | None = None,
    cluster: str | None = None,
    blocks: int | None = None,
    track: str | Sequence[str] | None = None,
) -> Run:
    """Run a loaded experiment as `run` does; its data set is read where it is None."""
    _check_arguments(out, workers, watch, cluster, blocks)
    if resume and overwrite:
        raise ConfigError("a run is resumed or overwritten: give one of resume and overwrite")
    targets = tracking.validate_targets(track)
    folder = Path("runs") / experiment.name if out is None else Path(out)
    limit = None if memory is None else parse_size(memory)
    # A data set that was read to count its owners is not read again.
    dataset = dataset or load_dataset(experiment, data_dir)
    workers = _check_workers(experiment, workers)
    note = beta_note(experiment.resolved.algorithm, experiment.agents.malicious_share)
    if note:
        _LOG.warning("%s.", note)

    # All seeds are validated before anything is written.
    prepared = {seed: validate_seed(experiment, seed, dataset) for seed in experiment.seeds}
    unfinished = [
        seed
        for seed in experiment.seeds
        if overwrite or not has_ended(folder / f"seed-{seed}", experiment.rounds)
    ]
    # With `cluster` alone a seed is local to its node, so that only `blocks` needs another engine.
    backend: Backend[Any, Any] = LocalBackend(workers, limit)
    if blocks is not None:
        backend = ClusterBackend(str(cluster), blocks, limit)
    if cluster is None:
        for seed in unfinished:  # raises where the models do not fit
            backend.place(prepared[seed], folder / f"seed-{seed}")
    elif unfinished:
        check_process_memory(limit, prepared[unfinished[0]])

    # A finished run needs no cluster, and may be read without one.
    address = cluster if blocks is None and unfinished else None
    work = f"{experiment.name}: {pluralize(len(unfinished), 'seed')}"
    datasets = [(experiment.data, dataset)]
    with (
        backend.connect([prepared[seed] for seed in unfinished]),
        _remote_runs.connect_executor(address, work, [experiment], datasets, limit) as remote,
        records.exclusive_lock(folder),
        Progress() if watch is None else contextlib.nullcontext(watch) as callback,
    ):
        open_run(folder, experiment, resume=resume, overwrite=overwrite)
        with tracking.follow(folder, targets):
            remote_seeds = [] if remote is None else unfinished
            # One machine loses no worker, so a failure there has a cause that stays.
            run_one = run_seed if blocks is None else run_seed_with_retries
            for seed in experiment.seeds:
                if seed not in remote_seeds:  # a finished seed is verified
                    run_one(prepared.pop(seed), folder / f"seed-{seed}", backend, callback)
            if remote is not None:
                _run_remotely(remote, experiment, folder, unfinished, callback)
    return Run(folder)


def _check_arguments(out: Any, workers: Any, watch: Any, cluster: Any, blocks: Any) -> None:
    """Raise ConfigError for an argument that is not valid."""
    arguments.check_count("workers", workers)
    arguments.check_count("blocks", blocks)
    arguments.check_address(cluster)
    if workers is not None and cluster is not None:
        raise ConfigError(
            "`workers` are processes of one machine: on a cluster give `blocks`, or nothing"
        )
    if blocks is not None and cluster is None:
        raise ConfigError("`blocks` need a cluster: add --cluster, or leave `blocks` out")
    arguments.check_callback(watch)
    arguments.check_path("out", out)


def _check_workers(experiment: Experiment, workers: int | None) -> int | None:
    """Check the device; return the number of processes, limited to processors and agents."""
    device = devices.resolve_device(experiment.device)
    if workers is None:
        return None
    if device.type != "cpu" and workers > 1:
        raise ConfigError(
            f"one process works on `device` = {experiment.device!r}, and `workers` is {workers}: "
            "leave it out"
        )
    return clip_workers(workers, experiment.agents.num_agents, "agents")


def _run_remotely(
    remote: _remote_runs.RemoteExecutor,
    experiment: Experiment,
    folder: Path,
    seeds: Sequence[int],
    watch: RoundCallback,
) -> None:
    """Run seeds on a cluster, each by itself. Raise RunError at the end where some failed."""
    errors: dict[int, str] = {}

    def on_result(seed: int, result: tuple[float, str | None]) -> None:
        _, error = result
        if error is not None:
            errors[seed] = error

    jobs = [(seed, (experiment.model_copy(update={"seeds": (seed,)}), folder)) for seed in seeds]
    remote.map(
        min(remote.processors, len(jobs)),
        jobs,
        on_result,
        on_round=lambda _, seed, line: watch(experiment, seed, line),
        is_locked=True,
    )
    # Seeds that succeeded are complete, and stay so.
    if errors:
        reasons = "; ".join(f"seed {seed}: {error}" for seed, error in sorted(errors.items()))
        raise RunError(
            f"{len(errors)} of {len(experiment.seeds)} seeds failed, which --resume tries again: "
            f"{reasons}"
        )
