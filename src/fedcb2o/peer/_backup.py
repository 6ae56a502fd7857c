"""Backup of a node: its keys and its run directory in one file, also while it runs.

A backup may be older than the last signature. A restored node therefore signs nothing before more
than half of the other members have said which of its models they hold (`_recovery`).
"""

import contextlib
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Self

from fedcb2o import records
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.peer.membership.federation import read_federation
from fedcb2o.peer.membership.identity import RUNS_FILE
from fedcb2o.peer.wire.equivocation import JOURNAL_FILE, RESTORED_FILE
from fedcb2o.safe_files import create_exclusive, open_regular

_KEYS, _RUN, _PROOFS = "keys", "run", "proofs"
_FIRST_FILES = ("checkpoint.safetensors", "rounds.jsonl", JOURNAL_FILE)
"""Order in which files are read: each one is at least as new as the file before it."""
_SKIPPED_FILES = ("model.safetensors", "report.html")
_MAX_FILES = 100_000
_MAX_KEY_BYTES = 2**20
_MAX_HEADER_BYTES = 2**16  # of a long name or another extension of the format
_STAGING_PREFIX = ".restore-"
_BLOCK = 2**20


def back_up(keys: Path, run: Path, out: Path) -> None:
    """Write keys and run directory to a file that only its owner may read.

    Links in the folder of the keys are followed, as secrets of a container are links. The run
    directory has no links. The node may run. An existing file is not overwritten, which is a
    ConfigError.
    """
    if os.path.lexists(out):
        raise ConfigError(f"{out} exists, and backups are never overwritten: choose another --out")
    if not list(keys.glob("*.member.toml")) or not (run / "federation.toml").exists():
        raise ConfigError(f"{keys} must hold keys, and {run} a peer's run")
    names = sorted(path.name for path in run.iterdir() if not path.is_dir() or path.is_symlink())
    ordered = [name for name in _FIRST_FILES if name in names]
    ordered += [
        name
        for name in names
        if name not in (*ordered, *_SKIPPED_FILES) and not name.endswith(".tmp")
    ]
    proofs = run / _PROOFS
    if proofs.is_symlink():
        raise RunError(f"{proofs} is a link: put in its place what it refers to, or move it away")
    ordered += [f"{_PROOFS}/{path.name}" for path in sorted(proofs.glob("*"))]

    def write(file: BinaryIO) -> None:
        with tarfile.open(fileobj=file, mode="w:gz") as tar:
            for path in sorted(keys.iterdir()):
                # That file names a folder of this machine.
                if path.is_file() and path.name != RUNS_FILE:
                    _add(tar, path, f"{_KEYS}/{path.name}", follow_links=True)
            for name in ordered:
                _add(tar, run / name, f"{_RUN}/{name}")

    # A file that cannot be read is reported before anything is written.
    for name in ordered:
        _open(run / name).close()
    records.atomic_write(out, write)


def _open(path: Path, *, follow_links: bool = False) -> BinaryIO:
    try:
        return open_regular(path, follow_links=follow_links)
    except OSError as error:
        raise RunError(
            f"cannot back up {path}: {error.strerror or error}; put a regular file in its place, "
            "or move it away"
        ) from error


def _add(tar: tarfile.TarFile, path: Path, name: str, *, follow_links: bool = False) -> None:
    """Add a file as long as it is now; it may grow meanwhile."""
    with _open(path, follow_links=follow_links) as file:
        status = os.fstat(file.fileno())
        entry = tarfile.TarInfo(name)
        entry.size = status.st_size
        entry.mtime = int(status.st_mtime)
        entry.mode = records.PRIVATE_FILE
        tar.addfile(entry, file)


def restore(backup: Path, keys: Path, run: Path) -> int:
    """Restore keys and run directory from a file that `back_up` wrote, all or nothing.

    The folders must be new or empty. The version of the federation in the backup is returned; it
    may be older than the one in force.
    """
    for folder in (keys, run):
        if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} is not empty: give new folders, and remove nothing there")
    try:
        with contextlib.ExitStack() as stack:
            staged = {
                kind: stack.enter_context(_staging(folder))
                for kind, folder in ((_RUN, run), (_KEYS, keys))
            }
            (staged[_RUN] / _PROOFS).mkdir(mode=records.PRIVATE_FOLDER)
            with open_regular(backup, follow_links=True) as file:
                _extract(backup, file, staged)
            if not (staged[_RUN] / "federation.toml").exists():
                raise ConfigError(f"{backup} is no backup: it holds no run")
            version = read_federation(
                staged[_RUN] / "federation.toml", allow_unsigned=True, check_experiment=False
            ).version

            # The mark comes first: without it a node would sign rounds a second time.
            (staged[_RUN] / RESTORED_FILE).touch(mode=records.PRIVATE_FILE)
            (staged[_RUN] / RESTORED_FILE).rename(run / RESTORED_FILE)
            for kind, folder in ((_RUN, run), (_KEYS, keys)):
                for path in sorted(staged[kind].iterdir()):
                    path.rename(folder / path.name)
                records.fsync(folder)
        records.make_private(run)
        return version
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise ConfigError(f"{backup} is no backup, or damaged: {error}") from error
    except OSError as error:
        raise RunError(f"cannot restore {backup}: {error.strerror or error}") from error


@contextlib.contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """Create a private folder in a folder, and remove whatever is left in the end."""
    existed = folder.is_dir()
    folder.mkdir(parents=True, exist_ok=True, mode=records.PRIVATE_FOLDER)
    staging = Path(tempfile.mkdtemp(prefix=_STAGING_PREFIX, dir=folder))
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if not existed:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()


class _Entry(tarfile.TarInfo):
    """Entry of a backup, whose header is bounded."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Parse a header; a long one would be read into memory as a whole."""
        entry = super().frombuf(buf, encoding, errors)
        is_file = entry.type in (tarfile.REGTYPE, tarfile.AREGTYPE)
        if not is_file and not 0 <= entry.size <= _MAX_HEADER_BYTES:
            raise tarfile.TarError(f"a header of {entry.size} bytes")
        return entry


def _extract(backup: Path, file: BinaryIO, folders: dict[str, Path]) -> None:
    """Write the files of a backup into new folders."""
    count = 0
    with tarfile.open(fileobj=file, mode="r:gz", tarinfo=_Entry) as tar:
        for entry in tar:
            kind, _, name = entry.name.partition("/")
            parts = name.split("/")
            is_file = entry.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not entry.issparse()
            is_known = len(parts) == 1 or (kind == _RUN and len(parts) == 2 and parts[0] == _PROOFS)
            is_name = name.isprintable() and parts[-1] not in ("", ".", "..", _PROOFS)
            is_bounded = kind != _KEYS or entry.size <= _MAX_KEY_BYTES
            if kind not in folders or not (is_file and is_known and is_name and is_bounded):
                raise ConfigError(f"{backup} is no backup: it holds {entry.name[:100]!r}")
            count += 1
            if count > _MAX_FILES:
                raise ConfigError(f"{backup} is no backup: it holds more than {_MAX_FILES} files")
            # A small compressed file can hold a huge one.
            free = shutil.disk_usage(folders[kind]).free
            if entry.size > free:
                raise RunError(
                    f"cannot restore {backup}: {entry.name} has {entry.size} bytes, and "
                    f"{free} are free: make room"
                )
            # Backups of an earlier release contain this file.
            if (kind, name) == (_KEYS, RUNS_FILE):
                continue
            try:
                descriptor = create_exclusive(folders[kind] / name)
            except FileExistsError as error:
                raise ConfigError(f"{backup} is no backup: it holds {name!r} twice") from error
            with os.fdopen(descriptor, "wb") as target:
                packed = tar.extractfile(entry)
                if packed is not None:  # a file always has content
                    shutil.copyfileobj(packed, target, _BLOCK)
                os.fsync(descriptor)
        end = tar.fileobj
        # Reading to the end verifies the checksum, too.
        if end is not None and len(end.read(_BLOCK)) == _BLOCK:
            raise ConfigError(f"{backup} is no backup: it goes on after its end")
