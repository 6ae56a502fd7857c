"""Which candidate a defence is run with: chosen once, on tuning images and seeds of its own, and then frozen.

Fair play gives every tuned defence as many candidates, over the same attacks and seeds; none is tuned to one attack.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fedcb2o import records
from fedcb2o.errors import RunError
from fedcb2o.experiments import tables
from fedcb2o.experiments.grid import Grid


def frozen(folder: Path, plan: Grid) -> dict[str, Any]:
    """What tuning.json holds for the grid's defences; raises RunError where that was asked over something else."""
    path = folder / "tuning.json"
    there = records.read_json(path) if path.exists() else {}
    for defence in plan.candidates:
        if defence in there and there[defence]["asked"] != _asked(plan, defence):
            raise RunError(
                f"{path} holds what was chosen for `{defence}` over other candidates, attacks or seeds: "
                "choose another --out"
            )
    return {defence: there[defence] for defence in plan.candidates if defence in there}


def best(frozen: Mapping[str, Any]) -> dict[str, int]:
    """The number of the candidate chosen for each defence, from 0."""
    return {defence: choice["best"] for defence, choice in frozen.items()}


def freeze(folder: Path, plan: Grid, frozen: dict[str, Any], errors: Mapping[str, str]) -> dict[str, str]:
    """Choose for each defence that is not in `frozen` yet, and write it down; why there is none where all failed.

    A candidate's score is the mean over attacks and seeds of accuracy minus attack success rate, the latter being 0
    where an attack has no target. Of equal ones the first counts. `errors` are the messages of runs that failed.
    """
    unfit: dict[str, str] = {}
    new = [defence for defence in plan.candidates if defence not in frozen]
    for defence in new:
        scores: list[dict[str, list[float]] | None] = [{} for _ in plan.candidates[defence]]
        for cell in (cell for cell in plan.trials() if cell.place.defence == defence):
            number, attack = cell.place.candidate or 0, cell.place.attack or ""
            if cell.folder in errors:
                scores[number] = None
                unfit[defence] = f"none of its candidates could run; {cell.place.title}: {errors[cell.folder]}"
            elif (mine := scores[number]) is not None:
                mine[attack] = _scores(folder / cell.folder, cell.experiment.seeds)
        means = [None if each is None else fmean(x for found in each.values() for x in found) for each in scores]
        if known := [mean for mean in means if mean is not None]:
            unfit.pop(defence, None)
            first = means.index(max(known))
            frozen[defence] = {"best": first, "scores": means, "by_attack": scores, "asked": _asked(plan, defence)}
    if new:
        records.write_json(folder / "tuning.json", frozen)
    return unfit


def _asked(plan: Grid, defence: str) -> dict[str, Any]:
    """What a choice is made over, as JSON has it."""
    assert plan.tuning is not None
    asked = {"seeds": plan.tuning.seeds, "setting": plan.tuning_setting, "attacks": plan.tuning_attacks}
    return tables.plain({**asked, "candidates": plan.candidates[defence]})  # type: ignore[no-any-return]


def _scores(folder: Path, seeds: Sequence[int]) -> list[float]:
    """Accuracy minus attack success rate, for each seed of a run."""
    found = (records.read_json(folder / f"seed-{seed}" / "summary.json") for seed in seeds)
    return [summary["accuracy"] - (summary["attack_success_rate"] or 0.0) for summary in found]
