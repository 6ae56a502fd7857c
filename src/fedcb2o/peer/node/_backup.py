"""Backup of a node: its keys and its run directory in one file, also while it runs.

A backup may be older than the last signature. A restored node therefore signs nothing before more
than half of the other members have said which of its models they hold (`_recovery`).
"""

import os
import tarfile
from pathlib import Path

from fedcb2o import records
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.peer.membership.federation import read_federation
from fedcb2o.peer.node._run_directory import RUNS_FILE
from fedcb2o.peer.wire._equivocation import JOURNAL_FILE, RESTORED_FILE

_KEYS, _RUN = "keys", "run"
_FIRST_FILES = ("checkpoint.safetensors", "rounds.jsonl", JOURNAL_FILE)
"""Order in which files are read: each one is at least as new as the file before it."""
_SKIPPED_FILES = ("model.safetensors", "report.html")
_MAX_BYTES = 2**40


def back_up(keys: Path, run: Path, out: Path) -> None:
    """Write keys and run directory to a file that only its owner may read.

    Args:
        keys: Folder of the identity.
        run: The run directory, whose node may run.
        out: The new file.

    Raises:
        ConfigError: There is such a file, or there are no keys or no run.
        RunError: The file cannot be written.
    """
    if out.exists():
        raise ConfigError(f"{out} exists, and backups are never overwritten: choose another --out")
    if not list(keys.glob("*.member.toml")) or not (run / "federation.toml").exists():
        raise ConfigError(f"{keys} must hold keys, and {run} a peer's run")
    names = sorted(path.name for path in run.iterdir() if path.is_file())
    ordered = [name for name in _FIRST_FILES if name in names]
    ordered += [
        name
        for name in names
        if name not in (*ordered, *_SKIPPED_FILES) and not name.endswith(".tmp")
    ]
    partial = out.with_name(f"{out.name}.tmp")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as tar:
            for path in sorted(keys.iterdir()):
                if path.is_file() and path.name != RUNS_FILE:  # it names a folder of this machine
                    tar.add(path, f"{_KEYS}/{path.name}")
            for name in ordered:
                tar.add(run / name, f"{_RUN}/{name}")
            for path in sorted(run.glob("proofs/*")):
                tar.add(path, f"{_RUN}/proofs/{path.name}")
        partial.rename(out)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise RunError(f"cannot write {out}: {error.strerror or error}") from error


def restore(backup: Path, keys: Path, run: Path) -> int:
    """Restore keys and run directory from a file that `back_up` wrote.

    Args:
        backup: The file.
        keys: New folder of the identity.
        run: New run directory.

    Returns:
        Version of the federation in the backup, which may be older than the one in force.

    Raises:
        ConfigError: A folder is not empty, or the file is no backup.
        RunError: A folder cannot be written.
    """
    for folder in (keys, run):
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty: give new folders, and remove nothing there")
    folders = {_KEYS: keys, _RUN: run}
    try:
        with tarfile.open(backup, "r:gz") as tar:
            for entry in tar:
                kind, _, name = entry.name.partition("/")
                parts = Path(name).parts
                is_plain = entry.isfile() and 1 <= len(parts) <= 2 and ".." not in parts
                if kind not in folders or not is_plain or entry.size > _MAX_BYTES:
                    raise ConfigError(f"{backup} is no backup: it holds {entry.name[:100]!r}")
                entry.name = name
                folders[kind].mkdir(parents=True, exist_ok=True, mode=0o700)
                tar.extract(entry, folders[kind], filter="data")
        if not (run / "federation.toml").exists():
            raise ConfigError(f"{backup} is no backup: it holds no run")
        records.make_private(run)
        (run / RESTORED_FILE).touch(mode=0o600)
        for path in keys.iterdir():
            path.chmod(0o600)
        (keys / RUNS_FILE).unlink(missing_ok=True)  # of a backup by an earlier release
        return read_federation(run / "federation.toml", allow_unsigned=True).version
    except tarfile.TarError as error:
        raise ConfigError(f"{backup} is no backup, or damaged: {error}") from error
    except OSError as error:
        raise RunError(f"cannot restore {backup}: {error.strerror or error}") from error
