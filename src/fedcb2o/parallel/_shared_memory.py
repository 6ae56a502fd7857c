"""Tensors in shared memory: one memory-mapped file, removed at the end of its run."""

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
from fedcb2o.parallel._resources import format_bytes
from fedcb2o.safe_files import open_regular

PREFIX = "fedcb2o-"
SUFFIX = ".tensors"
MAX_ATTEMPTS = 100  # to create a file that another run's `remove_stale` does not remove

TensorSpecs = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""The dtype and shape of each tensor, by name."""

_ALIGNMENT = 64  # bytes, a cache line


@dataclass(frozen=True)
class SharedTensors:
    """A file of named tensors, cheap to send to another process, which then maps it."""

    path: Path
    specs: TensorSpecs

    def tensors(self) -> dict[str, Tensor]:
        """Map the tensors, which outlive the file's name, by name.

        Each process that maps the file shares them. FileNotFoundError is raised if the run has
        ended and removed the file.
        """
        offsets, size = _layout(self.specs)
        # Opened here, because `torch.from_file` would create a missing file.
        with self.path.open("rb+") as file:
            storage = torch.from_file(
                f"/dev/fd/{file.fileno()}", shared=True, size=size, dtype=torch.uint8
            )

        tensors = {}
        for name, start in offsets.items():
            dtype, shape = self.specs[name]
            length = torch.Size(shape).numel() * dtype.itemsize
            tensors[name] = storage[start : start + length].view(dtype).view(shape)
        return tensors


@contextlib.contextmanager
def allocate_shared(specs: TensorSpecs, folder: Path | None = None) -> Iterator[SharedTensors]:
    """Allocate shared tensors of zeros; remove their file at the end.

    By default the file is in memory, or in the temporary folder without room there. RunError is
    raised if neither has room.
    """
    folders = _candidate_folders() if folder is None else [folder]
    remove_stale(*folders)
    _, size = _layout(specs)
    file = _create_in_first(folders, size)
    path = Path(file.name)
    try:
        yield SharedTensors(path, specs)
    finally:
        path.unlink(missing_ok=True)
        file.close()  # which releases the lock


def remove_stale(*folders: Path) -> None:
    """Remove the files of killed runs of this user, which no living process has locked.

    The folders are searched in addition to memory and the temporary folder.
    """
    for folder in {*_candidate_folders(), *folders}:
        for path in folder.glob(f"{PREFIX}*{SUFFIX}"):
            with contextlib.suppress(OSError), open_regular(path) as file:
                if os.fstat(file.fileno()).st_uid == os.geteuid():
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()


def _layout(specs: TensorSpecs) -> tuple[dict[str, int], int]:
    """Return the offset of each tensor and the size of the file, in bytes."""
    offsets = {}
    end = 0
    for name, (dtype, shape) in specs.items():
        offsets[name] = end
        length = torch.Size(shape).numel() * dtype.itemsize
        end += -(-length // _ALIGNMENT) * _ALIGNMENT
    return offsets, max(end, _ALIGNMENT)


def _candidate_folders() -> list[Path]:
    """Return the folders for shared files, memory first where the system has such a folder."""
    folders = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    return [folder for folder in folders if folder.is_dir()]


def _create_in_first(folders: list[Path], size: int) -> BinaryIO:
    """Create a file of `size` bytes in the first folder that has room for it."""
    failures = []
    for folder in folders:
        try:
            return _create(size, folder)
        except OSError as error:
            failures.append(f"{folder}: {error.strerror}")
    raise RunError(
        f"no room to share {format_bytes(size)} of models and data between processes: "
        f"{', '.join(failures)}; make room there, or let one process do the work, --workers 1"
    )


def _create(size: int, folder: Path) -> BinaryIO:
    """Create a locked file; retry if another run's `remove_stale` removes it before its lock."""
    for _ in range(MAX_ATTEMPTS):
        path = folder / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
        file = open(path, "xb+", opener=lambda file, flags: os.open(file, flags, 0o600))  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:
                _reserve(file.fileno(), size)
                return file
        except BaseException:
            path.unlink(missing_ok=True)
            file.close()
            raise
        file.close()
    raise OSError(errno.EAGAIN, "another program removes new files there")


def _reserve(descriptor: int, size: int) -> None:
    """Reserve the room of a file now."""
    # A write to a mapped page without disk space kills the process.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    block = bytes(2**20)
    for start in range(0, size, len(block)):
        os.pwrite(descriptor, block[: size - start], start)
