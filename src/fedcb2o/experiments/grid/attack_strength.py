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
from fedcb2o.experiments.grid.definition import Grid, StrengthKey
from fedcb2o.experiments.grid.tuning import seed_summaries

_FILE = "strengths.json"
_Choices = dict[StrengthKey, dict[str, Any]]


def read_choices(folder: Path, plan: Grid) -> _Choices:
    """What strengths.json holds for the grid; raises RunError where that was asked over something else."""
    path = folder / _FILE
    lines = records.read_json_with_checksum(path)["choices"] if path.exists() else []
    there = {(line["setting"], line["defence"], line["attack"]): line for line in lines}
    found = {
        key: there[key]
        for key in (plan.strength_key(probe.key) for probe in plan.probes())
        if key in there
    }
    for key, choice in found.items():
        if choice["asked"] != _question(plan, key):
            raise RunError(
                f"{path} holds what was chosen for `{key[2]}` against `{key[1]}` over other strengths or seeds: "
                "choose another --out"
            )
    return found


def worst_strengths(choices: Mapping[StrengthKey, Mapping[str, Any]]) -> dict[StrengthKey, int]:
    """The number of the strength chosen for each setting, defence and attack, from 0."""
    return {key: choice["worst"] for key, choice in choices.items()}


def choose(
    folder: Path, plan: Grid, choices: _Choices, errors: Mapping[str, str]
) -> dict[StrengthKey, str]:
    """Choose a strength for all that is not in `frozen` yet, and write it down; why there is none where all failed.

    What counts is the attack success rate where an attack has a target, else the accuracy, as a mean over seeds. Of
    equal ones the first is taken. `errors` are the messages of runs that failed.
    """
    tried: dict[StrengthKey, list[dict[str, Any]]] = {}
    failed: dict[StrengthKey, str] = {}
    for probe in plan.probes():
        if (key := plan.strength_key(probe.key)) in choices:
            continue
        tried.setdefault(key, [])
        if probe.folder in errors:
            failed[key] = (
                f"it could be run at no strength; {probe.key.title}: {errors[probe.folder]}"
            )
            tried[key].append({"harm": None})
        else:
            tried[key].append(_measure_harm(folder / probe.folder, probe.experiment.seeds))
    for key, found in tried.items():
        if known := [each["harm"] for each in found if each["harm"] is not None]:
            failed.pop(key, None)
            first = [each["harm"] for each in found].index(max(known))
            where = dict(zip(("setting", "defence", "attack"), key, strict=True))
            choices[key] = {**where, "worst": first, "tried": found, "asked": _question(plan, key)}
    if tried:
        records.write_json_with_checksum(
            folder / _FILE, {"choices": [choices[key] for key in sorted(choices)]}
        )
    return failed


def _question(plan: Grid, key: StrengthKey) -> dict[str, Any]:
    """What a choice is made over, as JSON has it."""
    assert plan.adversary is not None
    return tables.to_plain(  # type: ignore[no-any-return]
        {"seeds": plan.adversary.seeds, "strengths": plan.strengths[key[2]]}
    )


def _measure_harm(folder: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """The harm that a strength does, and what it is by: accuracy and attack success rate of each seed."""
    found = seed_summaries(folder, seeds)
    accuracy, rate = (
        [each[name] for each in found] for name in ("accuracy", "attack_success_rate")
    )
    harm = 1 - fmean(accuracy) if None in rate else fmean(rate)
    return {
        "harm": harm,
        "accuracy": accuracy,
        "attack_success_rate": None if None in rate else rate,
    }
