"""Tensors that processes share without a copy: one memory-mapped file, gone when its run is."""

import contextlib
import errno
import fcntl
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from fedcb2o.errors import RunError
from fedcb2o.parallel.resources import format_bytes

PREFIX = "fedcb2o-"
SUFFIX = ".arena"
MAX_ATTEMPTS = 100
TensorSpecs = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class SharedTensors:
    """A file that holds named tensors one after the other; small to send to another process, which then maps it."""

    path: Path
    specs: TensorSpecs

    def tensors(self) -> dict[str, Tensor]:
        """The tensors, shared with every process that maps the file; they live on after the file is unlinked.

        Raises FileNotFoundError where that has happened, as to a worker that starts while its run ends: the file is
        opened here, since `torch.from_file` makes one that is not there.
        """
        size = _offsets(self.specs)[1]
        with self.path.open("rb+") as file:
            storage = torch.from_file(
                f"/dev/fd/{file.fileno()}", shared=True, size=size, dtype=torch.uint8
            )
        found = {}
        for name, start in _offsets(self.specs)[0].items():
            dtype, shape = self.specs[name]
            length = torch.Size(shape).numel() * dtype.itemsize
            found[name] = storage[start : start + length].view(dtype).view(shape)
        return found


def _offsets(specs: TensorSpecs) -> tuple[dict[str, int], int]:
    places = {}
    end = 0
    for name, (dtype, shape) in specs.items():
        places[name] = end
        end += -(-torch.Size(shape).numel() * dtype.itemsize // 64) * 64
    return places, max(end, 64)


def _candidate_folders() -> list[Path]:
    """Where an arena may lie: memory first, where the system has such a file system."""
    return [folder for folder in (Path("/dev/shm"), Path(tempfile.gettempdir())) if folder.is_dir()]


def remove_stale(*more: Path) -> None:
    """Remove the arenas of runs that were killed, in `more` folders too: those that no living process has locked."""
    for folder in {*_candidate_folders(), *more}:
        for path in folder.glob(f"{PREFIX}*{SUFFIX}"):
            with contextlib.suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


@contextlib.contextmanager
def allocate_shared(specs: TensorSpecs, folder: Path | None = None) -> Iterator[SharedTensors]:
    """An arena of zeros with room for `specs`, removed at the end: in memory where there is room, or in a `folder`.

    Raises RunError where neither memory nor disk has room for it.
    """
    folders = _candidate_folders() if folder is None else [folder]
    remove_stale(*folders)
    file = _create_in_first(folders, _offsets(specs)[1])
    path = Path(file.name)
    try:
        yield SharedTensors(path, specs)
    finally:
        path.unlink(missing_ok=True)
        file.close()  # and with it the lock


def _create_in_first(folders: list[Path], size: int) -> BinaryIO:
    """A file of a size in the first folder that has room for it."""
    failures = []
    for folder in folders:
        try:
            return _create(size, folder)
        except OSError as error:
            failures.append(f"{folder}: {error.strerror}")
    raise RunError(
        f"no room to share {format_bytes(size)} of models and data between processes: {', '.join(failures)}; make "
        "room there, or let one process do the work, --workers 1"
    )


def _create(size: int, folder: Path) -> BinaryIO:
    """A new file of a size, locked. Another run's sweep may come between its creation and its lock, and take it; then
    there is a next one."""
    for _ in range(MAX_ATTEMPTS):
        file = (folder / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}").open("xb+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:
                _reserve(file.fileno(), size)
                return file
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            file.close()
            raise
        file.close()
    raise OSError(errno.EAGAIN, "whatever is made there goes again")


def _reserve(descriptor: int, size: int) -> None:
    """Take the room now: writing to a mapped page that the disk has no room for kills the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        block = bytes(2**20)
        for start in range(0, size, len(block)):
            os.pwrite(descriptor, block[: size - start], start)
