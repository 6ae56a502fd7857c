"""What a node does for a run: it goes on with it in a folder there, and tells meanwhile how far it is and what it has
written."""

import contextlib
import io
import queue
import shutil
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
from fedcb2o.data._dataset import Dataset, DatasetNames
from fedcb2o.errors import FedCB2OError, RunError
from fedcb2o.experiments.config.datasets import (
    check_attack_goal,
    dataset_from_tensors,
    dataset_tensors,
)
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.experiments.runs.run_directory import exclusive_lock

REPORT_INTERVAL = 1.0  # seconds after which it is told what rounds were done
_WRITTEN_LAST = (
    records.CHECKPOINT_FILE,
    "sums.json",
)  # what says how far the other files go is written after them
FOLDER_PREFIX = "fedcb2o-run-"  # what the folder of a run is called there, among the temporary ones
_STALE_AFTER = (
    60.0  # seconds after which such a folder that no process holds was left by a killed one
)

Bytes = UInt8[np.ndarray, "..."]
_Files = Mapping[str, Bytes]
"""What files hold, by their paths in a folder."""


@dataclass(frozen=True)
class RemoteJob:
    """To run the seeds of an experiment, on data of these `names` and `types`, in so much `memory`. Files go back
    after `every` so many seconds, rounds are told if it is `watched`, and `home` is the name of the folder that they go
    back to."""

    experiment: Experiment
    names: DatasetNames
    dtypes: Mapping[str, torch.dtype]
    memory: int | None
    checkpoint_interval: float
    sends_rounds: bool
    local_folder: str


@dataclass(frozen=True)
class JobUpdate:
    """What is heard of an errand: the rounds that were done, each with its seed, the files that changed, what was said
    on standard error and, at last, how many seconds it took, and why it failed if it did."""

    rounds: Sequence[tuple[int, Mapping[str, Any]]] = ()
    files: _Files = field(default_factory=dict)
    stderr: str = ""
    result: tuple[float, str | None] | None = None


def execute(job: RemoteJob, files: _Files, arrays: Mapping[str, Bytes]) -> Iterator[JobUpdate]:
    """Do an errand, of which these files are there, on data as bytes."""
    with _temporary_folder() as folder:
        write_files(folder, files)
        work = _JobThread(job, _restore_dataset(job, arrays), folder)
        threading.Thread(target=work.run, daemon=True).start()
        while True:
            yield (word := work.updates.get())
            if word.result is not None:
                return


class _JobThread:
    """What runs the seeds, in a thread; another one gives away each of its words, which may take its time."""

    def __init__(self, errand: RemoteJob, dataset: Dataset, folder: Path) -> None:
        self.job = errand
        self.dataset = dataset
        self.folder = folder
        self.updates, self.rounds, self.stderr = (
            queue.Queue[JobUpdate](1),
            list[tuple[int, Mapping[str, Any]]](),
            io.StringIO(),
        )
        self._started = self._last_report = self._last_files = time.monotonic()
        self._stamps = file_stamps(folder)

    def run(self) -> None:
        """Run the seeds, and say how that went."""
        from fedcb2o.experiments.runs.seed_run import run_seeds_locally

        torch.set_num_threads(1)  # each thread has a number of its own
        experiment = self.job.experiment
        files = dict[str, Bytes]()
        errors = list[BaseException]()
        try:
            with contextlib.redirect_stderr(self.stderr):
                check_attack_goal(experiment, self.dataset)
                run_seeds_locally(
                    experiment, self.dataset, self.folder, self.job.memory, self.on_round
                )
        except BaseException as failure:  # a fault of ours costs this run, not the night
            errors.append(failure)
        try:
            files = self._changed_files()
        except OSError as failure:
            errors.append(failure)
        error = self._localize(format_error(errors[0])) if errors else None
        self._report(files, (time.monotonic() - self._started, error))

    def on_round(self, experiment: Experiment, seed: int, line: Mapping[str, Any]) -> None:
        """A round is done, which is told when some time has passed and the last word was taken."""
        if self.job.sends_rounds:
            self.rounds.append((seed, line))
        now = time.monotonic()
        if now - self._last_report < REPORT_INTERVAL or not self.updates.empty():
            return
        files: _Files = {}
        if now - self._last_files >= self.job.checkpoint_interval and self._has_new_checkpoint():
            files = self._changed_files()
            self._last_files = now
        if files or self.rounds:
            self._report(files)
            self._last_report = now

    def _report(self, files: _Files, ended: tuple[float, str | None] | None = None) -> None:
        self.updates.put(
            JobUpdate(self.rounds, files, self._localize(self.stderr.getvalue()), ended)
        )
        self.rounds = []
        self.stderr.seek(0)
        self.stderr.truncate()

    def _localize(self, text: str) -> str:
        return text.replace(str(self.folder), self.job.local_folder)

    def _has_new_checkpoint(self) -> bool:
        now = file_stamps(self.folder)
        return any(
            now[path] != self._stamps.get(path)
            for path in now
            if path.name == records.CHECKPOINT_FILE
        )

    def _changed_files(self) -> dict[str, Bytes]:
        """The files that changed since they last went back."""
        before = self._stamps
        self._stamps = file_stamps(self.folder)
        changed = [path for path, stamp in self._stamps.items() if stamp != before.get(path)]
        return {str(path.relative_to(self.folder)): read_bytes(path) for path in changed}


@contextlib.contextmanager
def _temporary_folder() -> Iterator[Path]:
    """A folder on this machine that goes with the block. That of a process which was killed goes with the next one."""
    for left in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError, RunError):
            if time.time() - left.stat().st_mtime > _STALE_AFTER:
                with exclusive_lock(left):
                    shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as name, exclusive_lock(Path(name)):
        yield Path(name)


def format_error(error: BaseException) -> str:
    """An error in one line; of one that is a fault of ours, or of a user's function, its kind and place as well."""
    line = " ".join(str(error).split())
    where = ""
    if isinstance(error, FedCB2OError):
        return line
    if places := traceback.extract_tb(error.__traceback__):
        where = f" (line {places[-1].lineno} of {places[-1].filename})"
    return f"{type(error).__name__}: {line}{where}"


# Files


def file_stamps(folder: Path) -> dict[Path, tuple[int, ...]]:
    """The files of a run that lie in a folder, each with what is another when it was written to. What else lies there
    stays: somebody's notes, or models as large as a disk, which a killed process left."""
    paths = [
        path
        for path in folder.rglob("*")
        if path.is_file() and path.suffix in records.FILE_SUFFIXES
    ]
    known = {path: path.stat() for path in paths}
    return {path: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in known.items()}


def read_bytes(path: Path) -> Bytes:
    """What a file holds."""
    found: Bytes = np.fromfile(path, np.uint8)
    return found


def write_files(folder: Path, files: _Files) -> None:
    """Write files into a run's folder, so that a kill at any moment leaves what a resume goes on from."""
    for name in sorted(
        files,
        key=lambda name: (
            _WRITTEN_LAST.index(Path(name).name) if Path(name).name in _WRITTEN_LAST else -1,
            name,
        ),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        records.atomic_write(folder / name, files[name].tofile)


# Data


def dataset_bytes(dataset: Dataset) -> dict[str, Bytes]:
    """The tensors of a data set as bytes, since NumPy has not all of PyTorch's types."""
    return {
        name: each.contiguous().view(torch.uint8).numpy()
        for name, each in dataset_tensors(dataset).items()
    }


def dataset_dtypes(dataset: Dataset) -> dict[str, torch.dtype]:
    """The types of these tensors."""
    return {name: each.dtype for name, each in dataset_tensors(dataset).items()}


def _restore_dataset(job: RemoteJob, arrays: Mapping[str, Bytes]) -> Dataset:
    from fedcb2o.ray_backend.worker import as_tensor

    tensors = {name: as_tensor(array).view(job.dtypes[name]) for name, array in arrays.items()}
    return dataset_from_tensors(job.names, tensors)
