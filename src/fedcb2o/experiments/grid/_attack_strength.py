"""The strength of an attack against a defence: the one that harms it most.

It is chosen on tuning images and seeds of its own, and then frozen in strengths.json. The adversary
knows the defence with its hyperparameters, and may try the same strengths against all defences.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fedcb2o import plugins, records
from fedcb2o.errors import RunError
from fedcb2o.experiments.grid._definition import Grid, StrengthKey
from fedcb2o.experiments.grid._tuning import seed_summaries

_FILE = "strengths.json"
_Choices = dict[StrengthKey, dict[str, Any]]


def read_choices(folder: Path, plan: Grid) -> _Choices:
    """Read the choices in strengths.json; one over other strengths or seeds is a RunError."""
    path = folder / _FILE
    recorded: _Choices = {}
    if path.exists():
        for line in records.read_json_with_checksum(path)["choices"]:
            recorded[line["setting"], line["defence"], line["attack"]] = line
    found: _Choices = {}
    for probe in plan.probes():
        key = plan.strength_key(probe.key)
        if key not in recorded or key in found:
            continue
        asked = records.original_changes(recorded[key]["asked"])
        if asked != records.original_changes(_question(plan, key)):
            raise RunError(
                f"{path} holds the choice for `{key[2]}` against `{key[1]}` over other strengths "
                "or seeds: choose another --out"
            )
        found[key] = recorded[key]
    return found


def worst_strengths(choices: Mapping[StrengthKey, Mapping[str, Any]]) -> dict[StrengthKey, int]:
    """Return the numbers of the chosen strengths, from 0."""
    return {key: choice["worst"] for key, choice in choices.items()}


def choose(
    folder: Path, plan: Grid, choices: _Choices, errors: Mapping[str, str]
) -> dict[StrengthKey, str]:
    """Choose the first strength of the largest harm, and write strengths.json.

    The harm is the attack success rate, else one minus the accuracy, as a mean over seeds. With
    `rank_by`, and for data without classes, it is minus the score of `Grid.score`. New
    choices are added to `choices`. `errors` has messages by folder. Returns the reasons for attacks
    that failed at all strengths.
    """
    tried: dict[StrengthKey, list[dict[str, Any]]] = {}
    failed: dict[StrengthKey, str] = {}
    for probe in plan.probes():
        key = plan.strength_key(probe.key)
        if key in choices:
            continue
        outcomes = tried.setdefault(key, [])
        if probe.folder in errors:
            error = errors[probe.folder]
            failed[key] = f"it could be run at no strength; {probe.key.title}: {error}"
            outcomes.append({"harm": None})
        else:
            summaries = seed_summaries(folder / probe.folder, probe.experiment.seeds)
            outcomes.append(_measure_harm(plan, summaries))

    for key, outcomes in tried.items():
        harms = [outcome["harm"] for outcome in outcomes]
        known = [harm for harm in harms if harm is not None]
        if not known:
            continue
        # One strength that ran is enough for a choice.
        failed.pop(key, None)
        setting, defence, attack = key
        choices[key] = {
            "setting": setting,
            "defence": defence,
            "attack": attack,
            "worst": harms.index(max(known)),
            "tried": outcomes,
            "asked": _question(plan, key),
        }
    if tried:
        lines = [choices[key] for key in sorted(choices)]
        records.write_json_with_checksum(folder / _FILE, {"choices": lines})
    return failed


def _question(plan: Grid, key: StrengthKey) -> dict[str, Any]:
    """Return the strengths and seeds of a choice, as JSON has them."""
    assert plan.adversary is not None
    question = {"seeds": plan.adversary.seeds, "strengths": plan.strengths[key[2]]}
    if plan.rank_by is not None:
        question["rank_by"] = plan.rank_by
    return plugins.to_plain(question)  # type: ignore[no-any-return]


def _measure_harm(plan: Grid, summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the harm of a strength, with accuracy and attack success rate of each seed."""
    accuracy = [summary["accuracy"] for summary in summaries]
    rate = [summary["attack_success_rate"] for summary in summaries]
    if plan.rank_by is not None or None in accuracy:
        harm = -fmean(map(plan.score, summaries))
        known = {"accuracy": accuracy, "attack_success_rate": rate}
        return {"harm": harm, **{name: None if None in v else v for name, v in known.items()}}
    # An attack without a goal has no success rate: it harms by the loss of accuracy.
    if None in rate:
        harm = 1 - fmean(accuracy)
        return {"harm": harm, "accuracy": accuracy, "attack_success_rate": None}
    return {"harm": fmean(rate), "accuracy": accuracy, "attack_success_rate": rate}
