"""A run's folder: one process at a time writes to it, and only to go on with the run that it holds."""

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedcb2o import records
from fedcb2o.errors import RunError
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.records import DamagedError, Manifest


@contextlib.contextmanager
def exclusive_lock(
    folder: Path, cure: str = "wait for it, or choose another --out"
) -> Iterator[None]:
    """Make the run's folder and keep other processes from writing to it; raises RunError, with the cure, where one
    does."""
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
        os.close(descriptor)  # and with it the lock


def open_run(folder: Path, experiment: Experiment, resume: bool) -> None:
    """Make the run's folder and its config.toml, or check that what is there is this run, and sweep what a killed
    process left half-written there."""
    path = folder / "config.toml"
    settings = experiment.settings()
    seeds = list(experiment.seeds)
    if (there := _existing_settings(path, settings, resume)) is not None:
        if difference := describe_difference(there, settings):
            raise RunError(f"{folder} holds another run ({difference}): choose another --out")
        begun = records.find_seeds(folder)
        busy = [seed for seed in seeds if seed in begun]
        if busy and not resume:
            raise RunError(
                f"{folder} already holds seed {busy[0]} of this run: --resume goes on with it, or choose another --out"
            )
        if there.get("rounds", 0) > experiment.rounds:
            raise RunError(
                f"{folder} holds this run with `rounds` = {there['rounds']}: it can only be made longer; "
                f"go on with --set rounds={there['rounds']}"
            )
        for seed in busy:
            _check_seed_folder(begun[seed], settings)
        seeds = sorted({*seeds, *there.get("seeds", ())})
    elif records.find_seeds(folder):
        raise RunError(
            f"{path} is gone: restore it, or give the same experiment with --resume, which writes it anew; or choose "
            "another --out"
        )
    elif any(inside.name != f"{path.name}.tmp" for inside in folder.iterdir()):
        raise RunError(f"{folder} is not empty and holds no run: choose another --out")
    records.write_toml(path, {**settings, "seeds": seeds})
    for each in (folder, *folder.glob("seed-*")):
        records.remove_temporaries(each)


def _existing_settings(
    path: Path, settings: Mapping[str, Any], resume: bool
) -> Mapping[str, Any] | None:
    """The settings of the run that is there, if any. Where config.toml is damaged or lost, but the sums of all seeds
    say that they were run with `settings`, a resume takes those. Raises RunError for another damaged one."""
    there = None
    failure = None
    if path.exists():
        try:
            there = records.read_config(path)
        except DamagedError as error:
            failure = error
    if resume and (there is None or describe_difference(there, settings)):
        seeds = records.find_seeds(path.parent)
        known = [_read_manifest(folder) for folder in seeds.values()]
        mine = [sums for sums in known if sums is not None and sums.matches(settings)]
        if mine and len(mine) == len(known):
            log_rewrite(path)
            return {**settings, "seeds": list(seeds), "rounds": max(sums.rounds for sums in mine)}
    if failure is not None:
        raise failure
    return there


def _read_manifest(folder: Path) -> Manifest | None:
    """The sums of a seed, where they are there and whole."""
    with contextlib.suppress(DamagedError):
        return Manifest.read(folder)
    return None


def _check_seed_folder(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raises RunError where a seed is not of a run with these settings, by its sums."""
    sums = _read_manifest(folder)
    if sums is not None and (
        sums.seed != int(folder.name.removeprefix("seed-")) or not sums.matches(settings)
    ):
        raise RunError(
            f"{folder} holds another seed or another run, by its sums.json: {records.rerun_advice(folder)}; or choose "
            "another --out"
        )


def log_rewrite(path: Path) -> None:
    """Tell that a damaged or lost file is made again."""
    print(f"Note: {path} was damaged or lost; it is made again.", file=sys.stderr)


def make_folder(folder: Path) -> None:
    """Make a folder; raises RunError where that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"cannot make the folder {folder}: {error.strerror}; choose another --out"
        ) from error


def describe_difference(existing: Mapping[str, Any], requested: Mapping[str, Any]) -> str | None:
    """The first setting that two runs differ in, or None where they are one."""
    told = [records.flatten(records.result_settings(each)) for each in (existing, requested)]
    old, new = (records.flatten(records.canonical_settings(each)) for each in told)
    changed = [
        key for key in {**old, **new} if repr(old.get(key)) != repr(new.get(key))
    ]  # True is not 1
    if not changed:
        return None
    was, now = (
        "not set" if (value := each.get(changed[0])) is None else repr(value) for each in told
    )
    return f"`{changed[0]}` is {was} there and {now} here"
