"""Runs on the nodes of a cluster, each by one process: a run's files go there, and come back while it goes on.

Nodes share no disk with this machine. A run that is lost with its node goes on elsewhere from what had come back.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fedcb2o import records
from fedcb2o.data._dataset import Dataset
from fedcb2o.errors import FedCB2OError, RunError
from fedcb2o.experiments.config.build import imported_names
from fedcb2o.experiments.config.datasets import dataset_tensors
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.experiments.runs.cluster_backend import (
    MIN_STORE_BYTES,
    check_device,
    log_other_processors,
    pluralize,
    processor_unit,
    require_ray,
)
from fedcb2o.experiments.runs.progress import RoundCallback
from fedcb2o.experiments.runs.recovery import has_ended
from fedcb2o.experiments.runs.remote_job import (
    JobUpdate,
    RemoteJob,
    dataset_bytes,
    dataset_dtypes,
    execute,
    file_stamps,
    format_error,
    read_bytes,
    write_files,
)
from fedcb2o.experiments.runs.run_directory import exclusive_lock, open_run
from fedcb2o.kernels.devices import is_cpu
from fedcb2o.parallel import resources
from fedcb2o.simulation.rounds import WorkerLostError

if TYPE_CHECKING:
    from fedcb2o.ray_backend.tasks import Task, TaskPool

_JobId = TypeVar("_JobId")
_DataSets = Sequence[tuple[Any, Dataset]]
"""Data sets, each with the settings that name it."""

MAX_RETRIES = (
    5  # times that a run goes on by itself from one checkpoint after its process or node was lost
)
CHECKPOINT_INTERVAL = (
    60.0  # seconds after which a run's files come back, if there is a new checkpoint
)


@dataclass
class _Run(Generic[_JobId]):
    """A run that is away, and what keeps its folder for it."""

    job_id: _JobId
    experiment: Experiment
    folder: Path
    lock: contextlib.ExitStack
    losses: int = 0
    ended: bool = False

    def __str__(self) -> str:
        seeds = self.experiment.seeds
        return str(self.folder / f"seed-{seeds[0]}" if len(seeds) == 1 else self.folder)


class RemoteExecutor:
    """Nodes of a cluster, with so many `processors` or GPUs, which have some data sets; a run there may take so much
    `memory`, by default what is free."""

    def __init__(
        self, tasks: "TaskPool", processors: int, sets: _DataSets, memory: int | None
    ) -> None:
        self.tasks = tasks
        self.processors = processors
        self.memory = memory
        self._datasets = [
            (settings, dataset, tasks.put(dataset_bytes(dataset))) for settings, dataset in sets
        ]

    def map(
        self,
        count: int,
        runs: Iterable[tuple[_JobId, tuple[Experiment, Path]]],
        on_result: Callable[[_JobId, tuple[float, str | None]], object],
        on_idle: Callable[[], object] = lambda: None,
        on_round: RoundCallback | None = None,
        *,
        is_locked: bool = False,
    ) -> None:
        """Go on with runs, each (ticket, (experiment, its folder here)), at most `count` at once; `heard` gets each
        ticket with the seconds that its run took, and why it failed if it did, `watch` the rounds as they are done, and
        `meanwhile` is called each second. No other process writes to a folder while its run is away; or it is `held` by
        the caller, as one of several runs is."""
        from fedcb2o.ray_backend.code_shipping import localize_paths

        folders = contextlib.ExitStack()

        def begun() -> Iterator[_Run[_JobId]]:
            for ticket, (experiment, folder) in runs:
                run = _Run(
                    ticket, experiment, folder, folders.enter_context(contextlib.ExitStack())
                )
                try:
                    if not is_locked:
                        run.lock.enter_context(exclusive_lock(folder))
                    open_run(folder, experiment, resume=True)
                except FedCB2OError as error:
                    end(run, (0.0, format_error(error)))
                else:
                    yield run

        def end(run: _Run[_JobId], result: tuple[float, str | None]) -> None:
            run.ended = True
            run.lock.close()
            on_result(run.job_id, result)

        def listen(run: _Run[_JobId], word: JobUpdate) -> None:
            write_files(run.folder, word.files)
            if any(Path(name).name == records.CHECKPOINT_FILE for name in word.files):
                run.losses = 0
            if word.stderr:
                print(localize_paths(word.stderr), end="", file=sys.stderr)
            if on_round is not None:
                for seed, line in word.rounds:
                    on_round(run.experiment, seed, line)
            if word.result is not None:
                seconds, error = word.result
                end(run, (seconds, error and localize_paths(error)))

        def failed(run: _Run[_JobId], error: RunError) -> bool:
            if run.ended:
                return False
            run.losses += 1
            if isinstance(error, WorkerLostError) and run.losses <= MAX_RETRIES:
                print(f"Note: {error}. {run} goes on from what had come back.", file=sys.stderr)
                return True
            tried = (
                f". It has gone on {MAX_RETRIES} times, and gives up"
                if isinstance(error, WorkerLostError)
                else ""
            )
            end(run, (0.0, f"{format_error(error)}{tried}"))
            return False

        def task(run: _Run[_JobId]) -> "Task":
            return self._build_task(run.experiment, run.folder, on_round is not None)

        with folders:
            self.tasks.map_unordered(count, begun(), task, listen, failed, on_idle)

    def _build_task(self, experiment: Experiment, folder: Path, watched: bool) -> "Task":
        """To go on with those seeds of a run that have not ended, from their files here."""
        from fedcb2o.ray_backend.tasks import Task

        paths = [folder / "config.toml"]
        rounds = experiment.rounds
        seeds = [
            seed
            for seed in experiment.seeds
            if not has_ended(folder / f"seed-{seed}", rounds, whole=True)
        ]
        paths += [path for seed in seeds for path in file_stamps(folder / f"seed-{seed}")]
        files = {str(path.relative_to(folder)): read_bytes(path) for path in paths}
        dataset, arrays = next(
            (dataset, ref)
            for settings, dataset, ref in self._datasets
            if settings == experiment.data
        )
        errand = RemoteJob(
            experiment=experiment.model_copy(update={"seeds": tuple(seeds)}),
            names=dataset.names,
            dtypes=dataset_dtypes(dataset),
            memory=self.memory,
            checkpoint_interval=CHECKPOINT_INTERVAL,
            sends_rounds=watched,
            local_folder=str(folder),
        )
        return Task(execute, (errand,), (files, arrays), gpus=0 if is_cpu(experiment.device) else 1)


@contextlib.contextmanager
def connect_executor(
    address: str | None,
    description: str,
    experiments: Sequence[Experiment],
    datasets: _DataSets,
    memory: int | None = None,
) -> Iterator[RemoteExecutor | None]:
    """Within it, this process is in the cluster at an address, whose nodes have what some experiments need, and it is
    told on how many processors of it `what` is done; None without an address."""
    if address is None:
        yield None
        return
    require_ray()
    from fedcb2o.ray_backend import connect, placement, tasks

    own = {name for each in experiments for name in imported_names(each)}
    kinds = {each.device for each in experiments}
    for device in kinds:
        check_device(device)
    data = sum(
        tensor.nbytes for _, dataset in datasets for tensor in dataset_tensors(dataset).values()
    )
    with connect.connected(
        address,
        min(MIN_STORE_BYTES + 2 * data, resources.free_memory() // 2),
        resources.available_processors(),
    ):
        device = kinds.pop() if len(kinds) == 1 else None
        nodes = placement.list_nodes(sorted(own), device)
        if not nodes:
            raise RunError(
                "no node of the cluster has what is needed to run this: see `ray status` there"
            )
        log_other_processors(nodes)
        count = sum(node.processors for node in nodes)
        print(
            f"{description} on {pluralize(count, processor_unit(device))} of {pluralize(len(nodes), 'node')}",
            file=sys.stderr,
            flush=True,
        )
        yield RemoteExecutor(tasks.TaskPool(sorted(own)), count, datasets, memory)
