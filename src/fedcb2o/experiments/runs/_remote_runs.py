"""Runs on the nodes of a cluster, one process per run.

The files of a run go to a node, and come back while it continues, since nodes share no disk with
this machine. A run that is lost with its node continues elsewhere from the files that came back.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fedcb2o import records
from fedcb2o.data import Dataset
from fedcb2o.errors import FedCB2OError, RunError
from fedcb2o.experiments.config.datasets import dataset_tensors
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.experiments.runs._cluster_backend import (
    MIN_STORE_BYTES,
    check_device,
    log_other_processors,
    pluralize,
    processor_unit,
    require_ray,
)
from fedcb2o.experiments.runs._progress import RoundCallback
from fedcb2o.experiments.runs._recovery import has_ended
from fedcb2o.experiments.runs._remote_job import (
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
from fedcb2o.experiments.runs._run_directory import open_run
from fedcb2o.kernels.devices import is_cpu
from fedcb2o.parallel import _resources
from fedcb2o.simulation.rounds import WorkerLostError

if TYPE_CHECKING:
    from fedcb2o.ray_backend._tasks import Task, TaskPool

_LOG = logging.getLogger(__name__)

_JobId = TypeVar("_JobId")
_Result = tuple[float, str | None]
_DataSets = Sequence[tuple[Any, Dataset]]  # data sets, each with the settings that name it

MAX_RETRIES = 5  # of a run from one checkpoint, after its process or node was lost
CHECKPOINT_INTERVAL = 60.0  # seconds between two transfers of files, if there is a new checkpoint


@dataclass
class _Run(Generic[_JobId]):
    """A run on a node, and the lock of its folder here."""

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
    """The nodes of a cluster, and the data sets that were sent to them."""

    def __init__(
        self, tasks: "TaskPool", processors: int, sets: _DataSets, memory: int | None
    ) -> None:
        """Send the data sets to a cluster of processors or GPUs; `memory` is that of a run."""
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
        on_result: Callable[[_JobId, _Result], object],
        on_idle: Callable[[], object] = lambda: None,
        on_round: RoundCallback | None = None,
        *,
        is_locked: bool = False,
    ) -> None:
        """Run or continue experiments, each with its id and its folder.

        `on_result` gets the id, the seconds and the error of each ended run. `on_idle` is called
        every second. `is_locked` means that the caller holds the locks of the folders.
        """
        with contextlib.ExitStack() as locks:
            batch = _Batch(locks, on_result, on_round, is_locked)
            self.tasks.map_unordered(
                count,
                batch.started(runs),
                lambda run: self._build_task(run.experiment, run.folder, on_round is not None),
                batch.receive,
                batch.on_failure,
                on_idle,
            )

    def _build_task(self, experiment: Experiment, folder: Path, sends_rounds: bool) -> "Task":
        """Return the task that continues the unfinished seeds of a run."""
        from fedcb2o.ray_backend._tasks import Task

        paths = [folder / "config.toml"]
        seeds = []
        for seed in experiment.seeds:
            seed_folder = folder / f"seed-{seed}"
            # Only unfinished seeds travel: a node verifies nothing that is finished here.
            if not has_ended(seed_folder, experiment.rounds, whole=True):
                seeds.append(seed)
                paths += file_stamps(seed_folder)
        files = {str(path.relative_to(folder)): read_bytes(path) for path in paths}
        # One copy of each data set is in the store, whatever number of runs reads it.
        dataset, arrays = next(
            (dataset, reference)
            for settings, dataset, reference in self._datasets
            if settings == experiment.data
        )
        job = RemoteJob(
            experiment=experiment.model_copy(update={"seeds": tuple(seeds)}),
            names=dataset.names,
            dtypes=dataset_dtypes(dataset),
            memory=self.memory,
            checkpoint_interval=CHECKPOINT_INTERVAL,
            sends_rounds=sends_rounds,
            local_folder=str(folder),
        )
        return Task(execute, (job,), (files, arrays), gpus=0 if is_cpu(experiment.device) else 1)


@dataclass(frozen=True)
class _Batch(Generic[_JobId]):
    """The runs of one call of `RemoteExecutor.map`."""

    _locks: contextlib.ExitStack
    _on_result: Callable[[_JobId, _Result], object]
    _on_round: RoundCallback | None
    _is_locked: bool

    def started(
        self, runs: Iterable[tuple[_JobId, tuple[Experiment, Path]]]
    ) -> Iterator[_Run[_JobId]]:
        """Yield runs whose folders can be opened, one at a time; the others end with an error."""
        for job_id, (experiment, folder) in runs:
            lock = self._locks.enter_context(contextlib.ExitStack())
            run = _Run(job_id, experiment, folder, lock)
            try:
                if not self._is_locked:
                    run.lock.enter_context(records.exclusive_lock(folder))
                open_run(folder, experiment, resume=True)
            except FedCB2OError as error:
                self._end(run, (0.0, format_error(error)))
            else:
                yield run

    def receive(self, run: _Run[_JobId], update: JobUpdate) -> None:
        """Write the files of an update, and pass its messages on."""
        write_files(run.folder, update.files)
        # Losses count from the last checkpoint that came back.
        if any(Path(name).name == records.CHECKPOINT_FILE for name in update.files):
            run.losses = 0
        if update.stderr:
            print(update.stderr, end="", file=sys.stderr)
        if self._on_round is not None:
            for seed, line in update.rounds:
                self._on_round(run.experiment, seed, line)
        if update.result is not None:
            seconds, error = update.result
            self._end(run, (seconds, error))

    def on_failure(self, run: _Run[_JobId], error: RunError) -> bool:
        """Return whether a failed run continues: one whose worker was lost, a few times."""
        if run.ended:
            return False
        run.losses += 1
        is_lost = isinstance(error, WorkerLostError)
        if is_lost and run.losses <= MAX_RETRIES:
            _LOG.warning("%s. %s continues from the files that came back.", error, run)
            return True
        retries = f". It was retried {MAX_RETRIES} times, and stops" if is_lost else ""
        self._end(run, (0.0, f"{format_error(error)}{retries}"))
        return False

    def _end(self, run: _Run[_JobId], result: _Result) -> None:
        run.ended = True
        run.lock.close()
        self._on_result(run.job_id, result)


@contextlib.contextmanager
def connect_executor(
    address: str | None,
    description: str,
    experiments: Sequence[Experiment],
    datasets: _DataSets,
    memory: int | None = None,
) -> Iterator[RemoteExecutor | None]:
    """Connect to a cluster and print its size; None without an address.

    Nodes without the functions or devices of the experiments are left out. `description` is the
    work, in the message.
    """
    if address is None:
        yield None
        return
    require_ray()
    from fedcb2o.ray_backend import _connect, _placement, _tasks

    names = sorted({name for one in experiments for name in one.resolved.imported_names()})
    devices = {experiment.device for experiment in experiments}
    for device in devices:
        check_device(device)
    data_bytes = 0
    for _, dataset in datasets:
        data_bytes += sum(tensor.nbytes for tensor in dataset_tensors(dataset).values())
    store = min(MIN_STORE_BYTES + 2 * data_bytes, _resources.free_memory() // 2)
    with _connect.connected(address, store, _resources.available_processors()):
        # Runs on CPUs and GPUs together may use every node.
        device = devices.pop() if len(devices) == 1 else None
        nodes = _placement.list_nodes(names, device)
        if not nodes:
            raise RunError("no node of the cluster can run this: see `ray status` there")
        log_other_processors(nodes)
        count = sum(node.processors for node in nodes)
        processors = pluralize(count, processor_unit(device))
        where = f"{processors} of {pluralize(len(nodes), 'node')}"
        print(f"{description} on {where}", file=sys.stderr, flush=True)
        yield RemoteExecutor(_tasks.TaskPool(names), count, datasets, memory)
