"""How strongly an attack is run against a defence: as harms it most, chosen on tuning images and seeds of its own, and
then frozen.

The adversary knows whom it attacks, hyperparameters included, and has the same strengths to try against everybody.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fedcb2o import records
from fedcb2o.errors import RunError
from fedcb2o.experiments.config import tables
from fedcb2o.experiments.grid.definition import Grid, Tried
from fedcb2o.experiments.grid.tuning import summaries

FILE = "strengths.json"
Choices = dict[Tried, dict[str, Any]]


def frozen(folder: Path, plan: Grid) -> Choices:
    """What strengths.json holds for the grid; raises RunError where that was asked over something else."""
    path = folder / FILE
    lines = records.read_sealed(path)["choices"] if path.exists() else []
    there = {(line["setting"], line["defence"], line["attack"]): line for line in lines}
    found = {key: there[key] for key in (plan.tried(probe.place) for probe in plan.probes()) if key in there}
    for key, choice in found.items():
        if choice["asked"] != _asked(plan, key):
            raise RunError(
                f"{path} holds what was chosen for `{key[2]}` against `{key[1]}` over other strengths or seeds: "
                "choose another --out"
            )
    return found


def worst(frozen: Mapping[Tried, Mapping[str, Any]]) -> dict[Tried, int]:
    """The number of the strength chosen for each setting, defence and attack, from 0."""
    return {key: choice["worst"] for key, choice in frozen.items()}


def freeze(folder: Path, plan: Grid, frozen: Choices, errors: Mapping[str, str]) -> dict[Tried, str]:
    """Choose a strength for all that is not in `frozen` yet, and write it down; why there is none where all failed.

    What counts is the attack success rate where an attack has a target, else the accuracy, as a mean over seeds. Of
    equal ones the first is taken. `errors` are the messages of runs that failed.
    """
    tried: dict[Tried, list[dict[str, Any]]] = {}
    failed: dict[Tried, str] = {}
    for probe in plan.probes():
        if (key := plan.tried(probe.place)) in frozen:
            continue
        tried.setdefault(key, [])
        if probe.folder in errors:
            failed[key] = f"it could be run at no strength; {probe.place.title}: {errors[probe.folder]}"
            tried[key].append({"harm": None})
        else:
            tried[key].append(_measured(folder / probe.folder, probe.experiment.seeds))
    for key, found in tried.items():
        if known := [each["harm"] for each in found if each["harm"] is not None]:
            failed.pop(key, None)
            first = [each["harm"] for each in found].index(max(known))
            where = dict(zip(("setting", "defence", "attack"), key, strict=True))
            frozen[key] = {**where, "worst": first, "tried": found, "asked": _asked(plan, key)}
    if tried:
        records.write_sealed(folder / FILE, {"choices": [frozen[key] for key in sorted(frozen)]})
    return failed


def _asked(plan: Grid, key: Tried) -> dict[str, Any]:
    """What a choice is made over, as JSON has it."""
    assert plan.adversary is not None
    return tables.plain(  # type: ignore[no-any-return]
        {"seeds": plan.adversary.seeds, "strengths": plan.strengths[key[2]]}
    )


def _measured(folder: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """The harm that a strength does, and what it is by: accuracy and attack success rate of each seed."""
    found = summaries(folder, seeds)
    accuracy, rate = ([each[name] for each in found] for name in ("accuracy", "attack_success_rate"))
    harm = 1 - fmean(accuracy) if None in rate else fmean(rate)
    return {"harm": harm, "accuracy": accuracy, "attack_success_rate": None if None in rate else rate}
