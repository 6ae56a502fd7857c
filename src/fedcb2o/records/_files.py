r"""Files that are replaced as a whole, and their errors."""

import errno
import fcntl
import json
import math
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import tomli_w
from safetensors import SafetensorError

from fedcb2o.errors import RunError
from fedcb2o.safe_files import (
    create_exclusive,
    describe_kind,
    open_append,
    open_folder,
    owner_of_new_files,
    read_regular,
)

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
"""Modes of everything that holds models, keys or records of data."""
_DESCRIPTOR_SECONDS = 30.0  # time to wait for a free descriptor
_TEMPORARY_SUFFIX = ".tmp"
_MAX_JSON_BYTES = 2**28
_HARD_LINK_REMEDY = (
    "which would change with it: copy it to a new file (`cp`), and rename the copy to this name"
)
FILE_SUFFIXES = (".json", ".jsonl", ".parquet", ".safetensors", ".toml")
"""Suffixes of the files of a run."""


@contextmanager
def exclusive_lock(
    folder: Path, cure: str = "wait for it, or choose another --out"
) -> Iterator[None]:
    """Create a folder and lock it against other processes; `cure` ends the message."""
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is not a folder: choose another --out")
    make_folder(folder)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(f"another process is writing to {folder}: {cure}") from error
        yield
    finally:
        os.close(descriptor)  # releases the lock


def make_folder(folder: Path) -> None:
    """Create a folder and its parents."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"cannot create the folder {folder}: {error.strerror}; choose another --out"
        ) from error


def atomic_write(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Replace a file as a whole, readable for its owner only.

    At any time, also after a power failure, the file has either the old or the new content. A link
    of this name is replaced, not followed. `content` may write to the open file that it receives.
    """
    temporary = path.with_name(path.name + _TEMPORARY_SUFFIX)
    try:
        temporary.unlink(missing_ok=True)  # of a killed process
        descriptor = _wait_for_descriptor(lambda: create_exclusive(temporary, PRIVATE_FILE))
        with os.fdopen(descriptor, "wb") as file:
            if stat.S_IMODE(os.fstat(descriptor).st_mode) != PRIVATE_FILE:  # by the umask
                os.fchmod(descriptor, PRIVATE_FILE)
            if isinstance(content, bytes):
                file.write(content)
            else:
                content(file)
            file.flush()
            # The content must be on disk before its name, or a power failure could leave an empty
            # file.
            os.fsync(descriptor)
        temporary.replace(path)
        # The list of names is a file of its own.
        fsync(path.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError | SafetensorError):
            raise write_error(path, error) from error
        raise


def open_private(path: Path | str, _flags: int = 0) -> int:
    """Open a file for appending that only its owner may read, whatever mode it had."""
    file = open_append(path, PRIVATE_FILE)
    try:
        if stat.S_IMODE(os.fstat(file).st_mode) != PRIVATE_FILE:
            os.fchmod(file, PRIVATE_FILE)
    except BaseException:
        os.close(file)
        raise
    return file


def make_private(folder: Path) -> None:
    """Let only its owner look into a folder, whatever mode it had."""
    try:
        descriptor = open_folder(folder, follow_links=True)
        try:
            if stat.S_IMODE(os.fstat(descriptor).st_mode) != PRIVATE_FOLDER:
                os.fchmod(descriptor, PRIVATE_FOLDER)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise RunError(
            f"cannot keep others out of {folder}: {error.strerror or error}; models reveal "
            "information about the data: choose another --out, in a folder of your own"
        ) from error


def _wait_for_descriptor(function: Callable[[], int]) -> int:
    """Open a file; wait a while if the process has too many open files."""
    end = time.monotonic() + _DESCRIPTOR_SECONDS
    while True:
        try:
            return function()
        except OSError as error:
            # Other threads or processes may return descriptors soon.
            if error.errno not in (errno.EMFILE, errno.ENFILE) or time.monotonic() > end:
                raise
        time.sleep(_DESCRIPTOR_SECONDS / 100)


def remove_temporaries(folder: Path) -> None:
    """Remove the files of killed processes in a folder, to which no other one may write."""
    for suffix in FILE_SUFFIXES:
        for path in folder.glob(f"*{suffix}{_TEMPORARY_SUFFIX}"):
            with suppress(OSError):  # a folder of this name: the next write of the file reports it
                path.unlink()


def check_parts(folder: Path, subfolders: Iterable[Path]) -> None:
    """Refuse a folder of a run in which somebody else could redirect the run's files.

    Records must be regular files of the user who writes in the folder; the superuser may continue
    the runs of others. `subfolders` has outer ones first; missing ones are skipped.
    """
    try:
        owner = owner_of_new_files(folder)
        places = [folder]
        for path in subfolders:
            if os.path.lexists(path):
                _check_part(path, owner)
                places.append(path)
        for place in filter(Path.is_dir, places):
            for path in place.iterdir():
                name = path.name.removesuffix(_TEMPORARY_SUFFIX)
                if name.endswith(FILE_SUFFIXES):
                    with suppress(FileNotFoundError):  # a killed process's worker may still end
                        _check_part(path, owner)
    except OSError as error:
        raise read_error(folder, error) from error


def _check_part(path: Path, owner: int | None) -> None:
    status = path.lstat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise RunError(
            f"{path} is {describe_kind(status.st_mode)}, and a run writes to files and folders of "
            "its own only: put in its place what belongs there, or choose another --out"
        )
    if owner is not None and status.st_uid != owner:
        raise RunError(
            f"{path} belongs to another user ({status.st_uid}), who could redirect what is written "
            "there: copy the folder with `cp -r`, and give the copy as --out"
        )
    if path.suffix == ".jsonl" and stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
        raise RunError(f"{path} has another name too (a hard link), {_HARD_LINK_REMEDY}")


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Replace a file by JSON, atomically; NaN and infinities become null."""
    atomic_write(path, to_json(content))


def to_json(content: Mapping[str, object]) -> bytes:
    """Return an object as UTF-8 JSON with a final line end; NaN and infinities become null."""
    return (json.dumps(to_plain(content), indent=1, allow_nan=False) + "\n").encode()


def write_toml(path: Path, content: Mapping[str, object]) -> None:
    """Replace a file by TOML, atomically, without keys of the value None."""
    atomic_write(path, to_toml(content).encode())


def to_toml(content: Mapping[str, object]) -> str:
    """Return a table as TOML, without keys of the value None."""
    return tomli_w.dumps(drop_none(content))


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; DamagedError if it is missing or something else."""
    try:
        content = json.loads(read_regular(path, _MAX_JSON_BYTES))
    except FileNotFoundError as error:
        raise damaged_error(path, "it is gone") from error
    except OSError as error:
        raise read_error(path, error) from error
    except (ValueError, RecursionError) as error:
        raise damaged_error(path, str(error)) from error
    if not isinstance(content, dict):
        raise damaged_error(path, "it holds no object")
    return content


def to_plain(value: object) -> Any:
    """Convert to the types of JSON; a number that is not finite becomes None."""
    kind = type(value)  # most values are numbers in lists, so these types come first
    if kind is float:
        return value if math.isfinite(value) else None  # type: ignore[arg-type]
    if kind is int or kind is str:
        return value
    if kind is list:
        return [to_plain(item) for item in value]  # type: ignore[attr-defined]
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def drop_none(value: Any) -> Any:
    """Return a copy of a table without keys of the value None."""
    if isinstance(value, Mapping):
        return {key: drop_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [drop_none(item) for item in value]
    return value


def fsync(path: Path) -> None:
    """Force a file or a folder's list of files to disk."""
    # Without O_NONBLOCK a FIFO put in the place of the file would stop the run.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_error(path: Path, error: Exception) -> RunError:
    """Return the error of a file that cannot be written."""
    reason = str(error)
    if isinstance(error, OSError) and error.strerror:
        reason = error.strerror
    remedy = "make room (or repair the folder)"
    if isinstance(error, OSError) and error.errno == errno.EMLINK:
        remedy = _HARD_LINK_REMEDY.partition(": ")[2]
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = "raise the limit of open files (ulimit -n)"
    return RunError(
        f"cannot write {path}: {reason}; nothing already written is lost: {remedy} "
        "and give the command again, that of a run with --resume"
    )


_RERUN_ADVICE = "restore it, or move {seed} away: --resume then runs it again, with the same bits"
# Remedy for each damaged file of a seed or a grid that loses nothing else.
_REMEDIES = {
    "cells.json": "`fedcb2o bench` of the grid with this --out and --resume makes it again",
    "checkpoint.safetensors": f"records and figures do without it; {_RERUN_ADVICE}",
    "environment.json": f"figures do without it; {_RERUN_ADVICE}",
    "agents.json": _RERUN_ADVICE,
    "metrics.jsonl": _RERUN_ADVICE,
    "metrics.parquet": _RERUN_ADVICE,
    "pairs.jsonl": f"`compare` does without it; {_RERUN_ADVICE}",
    "pairs.parquet": f"`compare` does without it; {_RERUN_ADVICE}",
    "signed.jsonl": (
        "restore it, since without it this agent could sign two models for one round, which others "
        "take for fraud"
    ),
    "samples.safetensors": "restore it, or remove it to do without pictures",
    "summary.json": _RERUN_ADVICE,
    "sums.json": _RERUN_ADVICE,
    "tuning.json": (
        "restore it, or remove it: `fedcb2o bench` with --resume then chooses again, "
        "by the same runs"
    ),
    "timing.jsonl": "restore it, or remove it to do without its seconds",
}


def rerun_advice(folder: Path) -> str:
    """Return the remedy for a seed that has to be run again, a clause without a full stop."""
    return _RERUN_ADVICE.format(seed=folder.name)


class DamagedError(RunError):
    """A file with another content than was written, or a missing one."""


def damaged_error(path: Path, reason: str) -> DamagedError:
    """Return the error of a file with another content than was written."""
    remedy = _REMEDIES.get(path.name, "restore it").format(seed=path.parent.name)
    return DamagedError(f"{path} is damaged: {reason}; {remedy}")


def read_error(path: Path, error: OSError) -> RunError:
    """Return the error of an existing file that cannot be read."""
    return RunError(f"cannot read {path}: {error.strerror or error}")
