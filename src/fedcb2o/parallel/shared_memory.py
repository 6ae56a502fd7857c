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
from fedcb2o.parallel.resources import gib

PREFIX, SUFFIX = "fedcb2o-", ".arena"
TRIES = 100
Specs = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class Arena:
    """A file that holds named tensors one after the other; small to send to another process, which then maps it."""

    path: Path
    specs: Specs

    def tensors(self) -> dict[str, Tensor]:
        """The tensors, shared with every process that maps the file; they live on after the file is unlinked.

        Raises FileNotFoundError where that has happened, as to a worker that starts while its run ends: the file is
        opened here, since `torch.from_file` makes one that is not there.
        """
        size = _places(self.specs)[1]
        with self.path.open("rb+") as file:
            storage = torch.from_file(f"/dev/fd/{file.fileno()}", shared=True, size=size, dtype=torch.uint8)
        found = {}
        for name, start in _places(self.specs)[0].items():
            dtype, shape = self.specs[name]
            length = torch.Size(shape).numel() * dtype.itemsize
            found[name] = storage[start : start + length].view(dtype).view(shape)
        return found


def _places(specs: Specs) -> tuple[dict[str, int], int]:
    places, end = {}, 0
    for name, (dtype, shape) in specs.items():
        places[name] = end
        end += -(-torch.Size(shape).numel() * dtype.itemsize // 64) * 64
    return places, max(end, 64)


def _folders() -> list[Path]:
    """Where an arena may lie: memory first, where the system has such a file system."""
    return [folder for folder in (Path("/dev/shm"), Path(tempfile.gettempdir())) if folder.is_dir()]


def sweep(*more: Path) -> None:
    """Remove the arenas of runs that were killed, in `more` folders too: those that no living process has locked."""
    for folder in {*_folders(), *more}:
        for path in folder.glob(f"{PREFIX}*{SUFFIX}"):
            with contextlib.suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


@contextlib.contextmanager
def shared(specs: Specs, folder: Path | None = None) -> Iterator[Arena]:
    """An arena of zeros with room for `specs`, removed at the end: in memory where there is room, or in a `folder`.

    Raises RunError where neither memory nor disk has room for it.
    """
    folders = _folders() if folder is None else [folder]
    sweep(*folders)
    file = _first_of(folders, _places(specs)[1])
    path = Path(file.name)
    try:
        yield Arena(path, specs)
    finally:
        path.unlink(missing_ok=True)
        file.close()  # and with it the lock


def _first_of(folders: list[Path], size: int) -> BinaryIO:
    """A file of a size in the first folder that has room for it."""
    failures = []
    for folder in folders:
        try:
            return _create(size, folder)
        except OSError as error:
            failures.append(f"{folder}: {error.strerror}")
    raise RunError(
        f"no room to share {gib(size)} of models and data between processes: {', '.join(failures)}; make "
        "room there, or let one process do the work, --workers 1"
    )


def _create(size: int, folder: Path) -> BinaryIO:
    """A new file of a size, locked. Another run's sweep may come between its creation and its lock, and take it; then
    there is a next one."""
    for _ in range(TRIES):
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
