"""A job on a node of a cluster: it runs seeds in a temporary folder and reports updates."""

import contextlib
import io
import logging
import queue
import shutil
import stat
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8

from fedcb2o import records
from fedcb2o.data import Dataset, DatasetNames
from fedcb2o.errors import FedCB2OError, RunError
from fedcb2o.experiments.config.datasets import (
    check_attack_goal,
    dataset_from_tensors,
    dataset_tensors,
)
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.experiments.runs._seed_run import run_seeds_locally
from fedcb2o.printable import PrintableFormatter, one_line
from fedcb2o.safe_files import is_own_folder, open_regular

REPORT_INTERVAL = 1.0  # seconds between two updates
FOLDER_PREFIX = "fedcb2o-run-"  # of the temporary folders of jobs
_STALE_AFTER = 60.0  # seconds after which an unlocked folder was left by a killed job
# These files say how far the others are, so they are written after them.
_WRITTEN_LAST = (records.CHECKPOINT_FILE, "sums.json")

Bytes = UInt8[np.ndarray, "..."]
_Files = Mapping[str, Bytes]  # the contents of files, by their paths in a folder


@dataclass(frozen=True)
class RemoteJob:
    """The seeds of an experiment to run on a node."""

    # The experiment, with the seeds of this job.
    experiment: Experiment
    # Names of the classes and owners of the data set.
    names: DatasetNames
    dtypes: Mapping[str, torch.dtype]
    # Bytes that the job may take; None for the free memory.
    memory: int | None
    # Seconds between two transfers of files.
    checkpoint_interval: float
    # Whether updates contain the records of rounds.
    sends_rounds: bool
    # The folder that receives the files, as messages name it.
    local_folder: str


@dataclass(frozen=True)
class JobUpdate:
    """One progress update of a remote job."""

    # The finished rounds: seed and metrics record.
    rounds: Sequence[tuple[int, Mapping[str, Any]]] = ()
    # The changed files.
    files: _Files = field(default_factory=dict)
    # Text on standard error, and log messages.
    stderr: str = ""
    # In the last update, elapsed seconds and the error, if any.
    result: tuple[float, str | None] | None = None


def execute(job: RemoteJob, files: _Files, arrays: Mapping[str, Bytes]) -> Iterator[JobUpdate]:
    """Run a job from the files of its run; `arrays` are the tensors of the data set."""
    with _temporary_folder() as folder:
        write_files(folder, files)
        thread = _JobThread(job, _restore_dataset(job, arrays), folder)
        threading.Thread(target=thread.run, daemon=True).start()
        while True:
            update = thread.updates.get()
            yield update
            if update.result is not None:
                return


class _JobThread:
    """The thread that runs the seeds. Another thread sends its updates, which may take long."""

    def __init__(self, job: RemoteJob, dataset: Dataset, folder: Path) -> None:
        self.job = job
        self.dataset = dataset
        self.folder = folder
        self.updates: queue.Queue[JobUpdate] = queue.Queue(1)
        self.rounds: list[tuple[int, Mapping[str, Any]]] = []
        self.stderr = io.StringIO()
        self._started = time.monotonic()
        self._last_report = self._started
        self._last_files = self._started
        self._stamps = file_stamps(folder)

    def run(self) -> None:
        """Run the seeds, and report the end."""
        torch.set_num_threads(1)  # each thread has a setting of its own
        experiment = self.job.experiment
        files: dict[str, Bytes] = {}
        errors: list[BaseException] = []
        try:
            with contextlib.redirect_stderr(self.stderr), _log_to(self.stderr):
                check_attack_goal(experiment, self.dataset)
                run_seeds_locally(
                    experiment, self.dataset, self.folder, self.job.memory, self.on_round
                )
        except BaseException as error:  # an internal error fails this run, not the others
            errors.append(error)
        try:
            files = self._changed_files()
        except OSError as error:
            errors.append(error)
        message = self._localize(format_error(errors[0])) if errors else None
        self._report(files, (time.monotonic() - self._started, message))

    def on_round(self, experiment: Experiment, seed: int, line: Mapping[str, Any]) -> None:
        """Report a round after some time, if the last update was sent."""
        if self.job.sends_rounds:
            self.rounds.append((seed, line))
        now = time.monotonic()
        # Waiting for the receiver here would delay the rounds.
        if now - self._last_report < REPORT_INTERVAL or not self.updates.empty():
            return
        files: _Files = {}
        is_due = now - self._last_files >= self.job.checkpoint_interval
        # Files between two checkpoints would not help a resume.
        if is_due and self._has_new_checkpoint():
            files = self._changed_files()
            self._last_files = now
        if files or self.rounds:
            self._report(files)
            self._last_report = now

    def _report(self, files: _Files, result: tuple[float, str | None] | None = None) -> None:
        text = self._localize(self.stderr.getvalue())
        self.updates.put(JobUpdate(self.rounds, files, text, result))
        self.rounds = []
        self.stderr.seek(0)
        self.stderr.truncate()

    def _localize(self, text: str) -> str:
        return text.replace(str(self.folder), self.job.local_folder)

    def _has_new_checkpoint(self) -> bool:
        current = file_stamps(self.folder)
        checkpoints = [path for path in current if path.name == records.CHECKPOINT_FILE]
        return any(current[path] != self._stamps.get(path) for path in checkpoints)

    def _changed_files(self) -> dict[str, Bytes]:
        """Return the files that changed since the last call."""
        previous = self._stamps
        self._stamps = file_stamps(self.folder)
        changed = [path for path, stamp in self._stamps.items() if stamp != previous.get(path)]
        return {str(path.relative_to(self.folder)): read_bytes(path) for path in changed}


@contextlib.contextmanager
def _log_to(stream: io.StringIO) -> Iterator[None]:
    """Write the log messages of the library to a stream."""
    logger = logging.getLogger("fedcb2o")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PrintableFormatter())
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextlib.contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Create a temporary folder, and remove those of killed jobs."""
    # A killed process could not remove its folder. Its lock is free, that of a running job is not.
    for path in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError, RunError):
            is_stale = time.time() - path.lstat().st_mtime > _STALE_AFTER
            if is_stale and is_own_folder(path):
                with records.exclusive_lock(path):
                    shutil.rmtree(path)
    with (
        tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as name,
        records.exclusive_lock(Path(name)),
    ):
        yield Path(name)


def format_error(error: BaseException) -> str:
    """Return the message in one line; with type and place, unless the user can correct it."""
    line = one_line(str(error))
    if isinstance(error, FedCB2OError):
        return line
    frames = traceback.extract_tb(error.__traceback__)
    where = f" (line {frames[-1].lineno} of {frames[-1].filename})" if frames else ""
    return f"{type(error).__name__}: {line}{where}"


# Files


def file_stamps(folder: Path) -> dict[Path, tuple[int, ...]]:
    """Return inode, size and time of the files of a run, which change with every write."""
    stamps: dict[Path, tuple[int, ...]] = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and path.suffix in records.FILE_SUFFIXES:
            stamps[path] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return stamps


def read_bytes(path: Path) -> Bytes:
    """Read a file."""
    with open_regular(path) as file:
        content: Bytes = np.fromfile(file, np.uint8)
    return content


def write_files(folder: Path, files: _Files) -> None:
    """Write files into a run's folder, so that a run can resume after a kill at any moment."""
    for name in sorted(files, key=_write_order):
        path = folder / name
        if not records.is_inside(name) or path.suffix not in records.FILE_SUFFIXES:
            raise RunError(
                f"a node of the cluster sent {name[:200]!r}, which is no file of a run in "
                f"{folder}: use a cluster that you trust"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        records.atomic_write(path, files[name].tofile)


def _write_order(name: str) -> tuple[int, str]:
    file = Path(name).name
    return (_WRITTEN_LAST.index(file) if file in _WRITTEN_LAST else -1, name)


# Data


def dataset_bytes(dataset: Dataset) -> dict[str, Bytes]:
    """Return the tensors of a data set as bytes, since NumPy lacks some types of PyTorch."""
    tensors = dataset_tensors(dataset)
    return {name: x.contiguous().view(torch.uint8).numpy() for name, x in tensors.items()}


def dataset_dtypes(dataset: Dataset) -> dict[str, torch.dtype]:
    """Return the types of the tensors of a data set."""
    return {name: tensor.dtype for name, tensor in dataset_tensors(dataset).items()}


def _restore_dataset(job: RemoteJob, arrays: Mapping[str, Bytes]) -> Dataset:
    from fedcb2o.ray_backend._worker import as_tensor

    tensors = {name: as_tensor(array).view(job.dtypes[name]) for name, array in arrays.items()}
    return dataset_from_tensors(job.names, tensors)
