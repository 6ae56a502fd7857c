"""The folder of a run: one process writes to it, and only to continue the run that it holds."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedcb2o import records
from fedcb2o.errors import RunError
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.experiments.config.short_calls import GIVEN
from fedcb2o.experiments.runs._sources import changed_sources
from fedcb2o.records import DamagedError, Manifest

_MAX_DIFFERENCES = 3  # that a line names
_LABELS = ("name", "title", "description")


def open_run(
    folder: Path, experiment: Experiment, *, resume: bool = False, overwrite: bool = False
) -> None:
    """Write the run's config.toml, or check that the locked folder holds this run.

    Temporary files of a killed process are removed. Without `resume`, seeds that have begun are a
    RunError. With `overwrite` the seeds of any run are removed first; other files stay. A folder of
    something else, or with a part that is a link or another user's, is a RunError.
    """
    path = folder / "config.toml"
    records.check_parts(folder, _parts(folder))
    settings = experiment.settings()
    seeds = list(experiment.seeds)
    if path.exists() and overwrite:
        records.read_config(path)  # only what is known to be a run is removed
        for directory in records.find_seeds(folder).values():
            shutil.rmtree(directory)
    elif path.exists():
        existing = records.read_config(path)
        _check_existing(folder, existing, experiment, resume)
        # Seeds of an earlier call stay in the run, although this call does not run them.
        seeds = sorted({*seeds, *existing.get("seeds", ())})
    elif records.find_seeds(folder):
        raise RunError(f"{path} is gone: restore it, or choose another --out")
    elif any(file.name != f"{path.name}.tmp" for file in folder.iterdir()):
        raise RunError(f"{folder} is not empty and holds no run: choose another --out")
    records.make_private(folder)
    records.write_toml(path, {**settings, "seeds": seeds})
    records.remove_temporaries(folder)
    for directory in filter(Path.is_dir, _parts(folder)):
        records.make_private(directory)
        records.remove_temporaries(directory)


def _parts(folder: Path) -> list[Path]:
    """Return the folders of seeds, and of their records in Parquet."""
    return [*folder.glob("seed-*"), *folder.glob("seed-*/*.parquet")]


def _check_existing(
    folder: Path, existing: Mapping[str, Any], experiment: Experiment, resume: bool
) -> None:
    """Raise RunError unless the run in the folder can be continued by the experiment."""
    settings = experiment.settings()
    difference = describe_difference(existing, settings)
    if difference is not None:
        raise RunError(f"{folder} holds another run ({difference}): choose another --out")
    begun = records.find_seeds(folder)
    common = [seed for seed in experiment.seeds if seed in begun]
    with_rounds = [seed for seed in common if _has_rounds(begun[seed])]
    # The call must say it: hours of work would be continued or lost.
    if with_rounds and not resume:
        seed = with_rounds[0]
        changed = changed_sources(begun[seed], settings)
        raise RunError(
            f"{folder} already holds seed {seed} of this run"
            f"{f', with another source of {changed}' if changed else ''}: --resume continues it, "
            "--overwrite begins anew, or choose another --out"
        )
    # A shorter run would leave records of rounds that its settings do not have.
    rounds = existing.get("rounds", 0)
    if rounds > experiment.rounds:
        raise RunError(
            f"{folder} holds this run with `rounds` = {rounds}: it can only be made longer; "
            f"continue with --set rounds={rounds}"
        )
    for seed in common:
        _check_seed_folder(begun[seed], settings)


def _has_rounds(folder: Path) -> bool:
    """Return whether a seed has recorded a round; one that failed in its first round has not."""
    paths = (folder / records.CHECKPOINT_FILE, folder / "summary.json")
    return any(path.exists() for path in (*paths, records.log_path(folder, "metrics")))


def _check_seed_folder(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raise RunError where the manifest of a seed belongs to other settings."""
    try:
        manifest = Manifest.read(folder)
    except DamagedError:  # the seed's own verification reports it
        return
    if manifest is None:
        return
    seed = int(folder.name.removeprefix("seed-"))
    if manifest.seed != seed or not manifest.matches(settings):
        raise RunError(
            f"{folder} holds another seed or another run, by its sums.json: "
            f"{records.rerun_advice(folder)}; or choose another --out"
        )


def describe_difference(existing: Mapping[str, Any], requested: Mapping[str, Any]) -> str | None:
    """Describe the first difference that results depend on; None without one."""
    was = records.result_settings(existing)
    now = records.result_settings(requested)
    return next(_differences(was, now), None)


def describe_all_differences(existing: Mapping[str, Any], requested: Mapping[str, Any]) -> str:
    """Describe up to three differences between the settings of two runs."""
    old, new = ({k: v for k, v in s.items() if k not in _LABELS} for s in (existing, requested))
    found = list(_differences(old, new))
    more = [f"and {len(found) - _MAX_DIFFERENCES} more"] if len(found) > _MAX_DIFFERENCES else []
    return "; ".join([*found[:_MAX_DIFFERENCES], *more]) or "with the same settings"


def _differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield a description of each key with different values.

    Of another function only the name is described, and not its parameters.
    """
    old = records.flatten(records.canonical_settings(was))
    new = records.flatten(records.canonical_settings(now))
    # By repr, since True equals 1.
    changed = [key for key in {**old, **new} if repr(old.get(key)) != repr(new.get(key))]
    functions = {key.removesuffix("name") for key in changed if key.endswith(".name")}
    for key in changed:
        texts = _value_text(was, key), _value_text(now, key)
        if all(GIVEN in text for text in texts):
            yield f"`{key.removesuffix('.name')}` is another object"
        elif key.endswith(".name") or not key.startswith(tuple(functions)):
            yield f"`{key}` is {texts[0]} there and {texts[1]} here"


def _value_text(settings: Mapping[str, Any], key: str) -> str:
    value = records.flatten(settings).get(key)
    return "not set" if value is None else repr(value)
