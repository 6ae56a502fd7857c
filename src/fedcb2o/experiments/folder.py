"""A run's folder: one process at a time writes to it, and only to go on with the run that it holds."""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedcb2o import records
from fedcb2o.errors import RunError
from fedcb2o.experiments.config import Experiment, identity


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Make the run's folder and keep other processes from writing to it; raises RunError where one does."""
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is not a folder: choose another --out")
    make(folder)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(f"another process is writing to {folder}: wait for it, or choose another --out") from error
        yield
    finally:
        os.close(descriptor)  # and with it the lock


def begin(folder: Path, experiment: Experiment, resume: bool) -> None:
    """Make the run's folder and its config.toml, or check that what is there is this run."""
    path = folder / "config.toml"
    seeds = list(experiment.seeds)
    if path.exists():
        try:
            there = records.read_toml(path)
        except ValueError as error:
            raise RunError(f"{path} is damaged ({error}): choose another --out") from error
        if difference := difference_of(there, experiment.settings()):
            raise RunError(f"{folder} holds another run ({difference}): choose another --out")
        busy = [seed for seed in seeds if (folder / f"seed-{seed}" / "agents.json").exists()]
        if busy and not resume:
            raise RunError(
                f"{folder} already holds seed {busy[0]} of this run: --resume goes on with it, or choose another --out"
            )
        if there.get("rounds", 0) > experiment.rounds:
            raise RunError(
                f"{folder} holds this run with `rounds` = {there['rounds']}: it can only be made longer; "
                f"go on with --set rounds={there['rounds']}"
            )
        seeds = sorted({*seeds, *there.get("seeds", ())})
    elif any(inside.name != f"{path.name}.tmp" for inside in folder.iterdir()):
        raise RunError(f"{folder} is not empty and holds no run: choose another --out")
    records.write_toml(path, {**experiment.settings(), "seeds": seeds})


def make(folder: Path) -> None:
    """Make a folder; raises RunError where that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make the folder {folder}: {error.strerror}; choose another --out") from error


def difference_of(there: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """The first setting that two runs differ in, or None where they are one."""
    old, new = flat(identity(there)), flat(identity(here))
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    if not changed:
        return None
    was, now = ("not set" if (value := each.get(changed[0])) is None else repr(value) for each in (old, new))
    return f"`{changed[0]}` is {was} there and {now} here"


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A table of tables as one, with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found
