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
from fedcb2o.data._dataset import Dataset, Names
from fedcb2o.errors import FedCB2OError, RunError
from fedcb2o.experiments.config.datasets import check_aim, dataset_from, shared_data
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.experiments.runs.run_directory import alone

SOON = 1.0  # seconds after which it is told what rounds were done
LAST = (records.CHECKPOINT, "sums.json")  # what says how far the other files go is written after them
FOLDER = "fedcb2o-run-"  # what the folder of a run is called there, among the temporary ones
LEFT = 60.0  # seconds after which such a folder that no process holds was left by a killed one

Bytes = UInt8[np.ndarray, "..."]
Files = Mapping[str, Bytes]
"""What files hold, by their paths in a folder."""


@dataclass(frozen=True)
class Errand:
    """To run the seeds of an experiment, on data of these `names` and `types`, in so much `memory`. Files go back
    after `every` so many seconds, rounds are told if it is `watched`, and `home` is the name of the folder that they go
    back to."""

    experiment: Experiment
    names: Names
    types: Mapping[str, torch.dtype]
    memory: int | None
    every: float
    watched: bool
    home: str


@dataclass(frozen=True)
class Word:
    """What is heard of an errand: the rounds that were done, each with its seed, the files that changed, what was said
    on standard error and, at last, how many seconds it took, and why it failed if it did."""

    lines: Sequence[tuple[int, Mapping[str, Any]]] = ()
    files: Files = field(default_factory=dict)
    said: str = ""
    ended: tuple[float, str | None] | None = None


def do(errand: Errand, files: Files, arrays: Mapping[str, Bytes]) -> Iterator[Word]:
    """Do an errand, of which these files are there, on data as bytes."""
    with _temporary() as folder:
        keep(folder, files)
        work = _Work(errand, _dataset(errand, arrays), folder)
        threading.Thread(target=work.run, daemon=True).start()
        while True:
            yield (word := work.words.get())
            if word.ended is not None:
                return


class _Work:
    """What runs the seeds, in a thread; another one gives away each of its words, which may take its time."""

    def __init__(self, errand: Errand, dataset: Dataset, folder: Path) -> None:
        self.errand, self.dataset, self.folder = errand, dataset, folder
        self.words, self.lines, self.said = queue.Queue[Word](1), list[tuple[int, Mapping[str, Any]]](), io.StringIO()
        self.began = self.last = self.sent = time.monotonic()
        self.known = stamps(folder)

    def run(self) -> None:
        """Run the seeds, and say how that went."""
        from fedcb2o.experiments.runs.seed_run import run_here

        torch.set_num_threads(1)  # each thread has a number of its own
        experiment, files, errors = self.errand.experiment, dict[str, Bytes](), list[BaseException]()
        try:
            with contextlib.redirect_stderr(self.said):
                check_aim(experiment, self.dataset)
                run_here(experiment, self.dataset, self.folder, self.errand.memory, self.watch)
        except BaseException as failure:  # a fault of ours costs this run, not the night
            errors.append(failure)
        try:
            files = self._changed()
        except OSError as failure:
            errors.append(failure)
        error = self._at_home(told(errors[0])) if errors else None
        self._say(files, (time.monotonic() - self.began, error))

    def watch(self, experiment: Experiment, seed: int, line: Mapping[str, Any]) -> None:
        """A round is done, which is told when some time has passed and the last word was taken."""
        if self.errand.watched:
            self.lines.append((seed, line))
        now = time.monotonic()
        if now - self.last < SOON or not self.words.empty():
            return
        files: Files = {}
        if now - self.sent >= self.errand.every and self._changed_checkpoint():
            files, self.sent = self._changed(), now
        if files or self.lines:
            self._say(files)
            self.last = now

    def _say(self, files: Files, ended: tuple[float, str | None] | None = None) -> None:
        self.words.put(Word(self.lines, files, self._at_home(self.said.getvalue()), ended))
        self.lines = []
        self.said.seek(0)
        self.said.truncate()

    def _at_home(self, text: str) -> str:
        return text.replace(str(self.folder), self.errand.home)

    def _changed_checkpoint(self) -> bool:
        now = stamps(self.folder)
        return any(now[path] != self.known.get(path) for path in now if path.name == records.CHECKPOINT)

    def _changed(self) -> dict[str, Bytes]:
        """The files that changed since they last went back."""
        before, self.known = self.known, stamps(self.folder)
        changed = [path for path, stamp in self.known.items() if stamp != before.get(path)]
        return {str(path.relative_to(self.folder)): content(path) for path in changed}


@contextlib.contextmanager
def _temporary() -> Iterator[Path]:
    """A folder on this machine that goes with the block. That of a process which was killed goes with the next one."""
    for left in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        with contextlib.suppress(OSError, RunError):
            if time.time() - left.stat().st_mtime > LEFT:
                with alone(left):
                    shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=FOLDER) as name, alone(Path(name)):
        yield Path(name)


def told(error: BaseException) -> str:
    """An error in one line; of one that is a fault of ours, or of a user's function, its kind and place as well."""
    line, where = " ".join(str(error).split()), ""
    if isinstance(error, FedCB2OError):
        return line
    if places := traceback.extract_tb(error.__traceback__):
        where = f" (line {places[-1].lineno} of {places[-1].filename})"
    return f"{type(error).__name__}: {line}{where}"


# Files


def stamps(folder: Path) -> dict[Path, tuple[int, ...]]:
    """The files of a run that lie in a folder, each with what is another when it was written to. What else lies there
    stays: somebody's notes, or models as large as a disk, which a killed process left."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix in records.KINDS]
    known = {path: path.stat() for path in paths}
    return {path: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in known.items()}


def content(path: Path) -> Bytes:
    """What a file holds."""
    found: Bytes = np.fromfile(path, np.uint8)
    return found


def keep(folder: Path, files: Files) -> None:
    """Write files into a run's folder, so that a kill at any moment leaves what a resume goes on from."""
    for name in sorted(files, key=lambda name: (LAST.index(Path(name).name) if Path(name).name in LAST else -1, name)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        records.atomic_write(folder / name, files[name].tofile)


# Data


def arrays_of(dataset: Dataset) -> dict[str, Bytes]:
    """The tensors of a data set as bytes, since NumPy has not all of PyTorch's types."""
    return {name: each.contiguous().view(torch.uint8).numpy() for name, each in shared_data(dataset).items()}


def types_of(dataset: Dataset) -> dict[str, torch.dtype]:
    """The types of these tensors."""
    return {name: each.dtype for name, each in shared_data(dataset).items()}


def _dataset(errand: Errand, arrays: Mapping[str, Bytes]) -> Dataset:
    from fedcb2o.ray_backend.worker import tensor_of

    tensors = {name: tensor_of(array).view(errand.types[name]) for name, array in arrays.items()}
    return dataset_from(errand.names, tensors)
