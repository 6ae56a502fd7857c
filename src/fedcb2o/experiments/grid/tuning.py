"""Which candidate a defence is run with: chosen once, on tuning images and seeds of its own, and then frozen.

Fair play gives every tuned defence as many candidates, over the same attacks and seeds; none is tuned to one attack.
Where the best candidate lies at an end, the end may have been chosen badly: candidates are added until it lies inside.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fedcb2o import records
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.experiments.config import tables
from fedcb2o.experiments.grid.baseline import Changes
from fedcb2o.experiments.grid.definition import Grid

_Scores = list[dict[str, list[float]] | None]
"""For each candidate, by attack, the score of each seed; None for one that could not run."""


def read_choices(folder: Path, plan: Grid) -> dict[str, Any]:
    """What tuning.json holds for the grid's defences; raises RunError where that was asked over something else."""
    path = folder / "tuning.json"
    there = records.read_json_with_checksum(path) if path.exists() else {}
    for defence, given in plan.candidates.items():
        if defence in there:
            asked = there[defence]["asked"]
            if {**asked, "candidates": asked["candidates"][: len(given)]} != _question(
                plan, defence
            ):
                raise RunError(
                    f"{path} holds what was chosen for `{defence}` over other candidates, attacks or seeds: "
                    "choose another --out"
                )
    return {defence: there[defence] for defence in plan.candidates if defence in there}


def best_candidates(choices: Mapping[str, Any]) -> dict[str, int]:
    """The number of the candidate chosen for each defence, from 0."""
    return {defence: choice["best"] for defence, choice in choices.items()}


def with_added_candidates(plan: Grid, choices: Mapping[str, Any]) -> Grid:
    """The grid with the candidates that were added when the choices were made."""
    given = {defence: len(candidates) for defence, candidates in plan.candidates.items()}
    added = {
        defence: choice["asked"]["candidates"][given[defence] :]
        for defence, choice in choices.items()
    }
    return plan.model_copy(update={"widened": added})


def extend(folder: Path, plan: Grid, choices: Mapping[str, Any], errors: Mapping[str, str]) -> Grid:
    """The grid with one more candidate for each defence whose best so far lies at an end; the same where none does."""
    most = 0 if plan.tuning is None else plan.tuning.widen
    found = plan
    for defence in plan.candidates.keys() - choices.keys():
        if len(plan.added_candidates.get(defence, [])) < most:
            scores, _ = _trial_scores(folder, plan, defence, errors)
            found = _extended_grid(found, defence, _mean_scores(scores)) or found
    return found


def extrapolate(candidates: Sequence[Changes], scores: Sequence[float | None]) -> Changes | None:
    """The candidate after the best one, as far from it as that is from its neighbour, as a ratio where both are above
    0; None where the best has a neighbour on either side, or differs from others in more than one number."""
    known = [score for score in scores if score is not None]
    if not known:
        return None
    best = scores.index(max(known))
    flat = [records.flatten(candidate) for candidate in candidates]
    alike = [each for each in flat if each.keys() == flat[best].keys()]
    varied = [key for key, value in flat[best].items() if any(each[key] != value for each in alike)]
    if len(varied) != 1 or not all(type(each[varied[0]]) in (int, float) for each in alike):
        return None
    values = [each[varied[0]] for each in alike]
    value = flat[best][varied[0]]
    ordered = sorted(set(values))
    if value not in (ordered[0], ordered[-1]):
        return None
    near = ordered[1] if value == ordered[0] else ordered[-2]
    ratio = value > 0 and near > 0
    after = float(f"{value * value / near if ratio else 2 * value - near:.4g}")
    if all(isinstance(each, int) for each in values):
        after = max(round(after), 1) if ratio else round(after)
    return (
        None
        if after in values
        else tables.with_value(candidates[best], varied[0].split("."), after)
    )


def choose(
    folder: Path, plan: Grid, choices: dict[str, Any], errors: Mapping[str, str]
) -> dict[str, str]:
    """Choose for each defence that is not in `frozen` yet, and write it down; why there is none where all failed.

    A candidate's score is the mean over attacks and seeds of accuracy minus attack success rate, the latter being 0
    where an attack has no target. Of equal ones the first counts; `at_end` says that another one might lie beyond it.
    `errors` are the messages of runs that failed.
    """
    unfit: dict[str, str] = {}
    new = [defence for defence in plan.candidates if defence not in choices]
    for defence in new:
        scores, failed = _trial_scores(folder, plan, defence, errors)
        totals = _mean_scores(scores)
        if known := [mean for mean in totals if mean is not None]:
            first = totals.index(max(known))
            choices[defence] = {
                "best": first,
                "at_end": _extended_grid(plan, defence, totals) is not None,
                "scores": totals,
                "by_attack": scores,
                "asked": _question(plan, defence),
            }
        else:
            unfit[defence] = failed
    if new:
        records.write_json_with_checksum(folder / "tuning.json", choices)
    return unfit


def _mean_scores(scores: _Scores) -> list[float | None]:
    """The score of each candidate: the mean over its attacks and seeds."""
    return [
        None if each is None else fmean(x for found in each.values() for x in found)
        for each in scores
    ]


def _trial_scores(
    folder: Path, plan: Grid, defence: str, errors: Mapping[str, str]
) -> tuple[_Scores, str]:
    """The scores of a defence's candidates, and why the last of those that could not run failed."""
    scores: _Scores = [{} for _ in plan.candidates[defence]]
    failed = ""
    for cell in (cell for cell in plan.trials() if cell.key.defence == defence):
        number = cell.key.candidate or 0
        attack = cell.key.attack or ""
        if cell.folder in errors:
            scores[number] = None
            failed = f"none of its candidates could run; {cell.key.title}: {errors[cell.folder]}"
        elif (mine := scores[number]) is not None:
            mine[attack] = _seed_scores(folder / cell.folder, cell.experiment.seeds)
    return scores, failed


def _extended_grid(plan: Grid, defence: str, scores: Sequence[float | None]) -> Grid | None:
    """The grid with the candidate beyond a defence's best one; None where there is none, or it is not valid: a number
    may have reached the end of its range."""
    candidates = plan.candidates[defence]
    if (following := extrapolate(candidates, scores)) is None:
        return None
    added = {**plan.added_candidates, defence: [*plan.added_candidates.get(defence, []), following]}
    more = plan.model_copy(update={"widened": added})
    try:
        for setting in plan.settings or [""]:
            for attack in plan.attacks:
                more.experiment(setting, defence, attack, len(candidates))
    except ConfigError:
        return None
    return more


def _question(plan: Grid, defence: str) -> dict[str, Any]:
    """What a choice is made over, as JSON has it."""
    assert plan.tuning is not None
    asked = {
        "seeds": plan.tuning.seeds,
        "setting": plan.tuning_setting,
        "attacks": plan.tuning_attacks,
    }
    return tables.to_plain({**asked, "candidates": plan.candidates[defence]})  # type: ignore[no-any-return]


def _seed_scores(folder: Path, seeds: Sequence[int]) -> list[float]:
    """Accuracy minus attack success rate, for each seed of a run."""
    found = seed_summaries(folder, seeds)
    return [summary["accuracy"] - (summary["attack_success_rate"] or 0.0) for summary in found]


def seed_summaries(folder: Path, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """What each seed of a run that has ended came to; raises RunError where one does not say."""
    run = records.Run(folder)
    found = []
    for seed in seeds:
        if (summary := run.summary_of(seed)) is None:
            raise records.damaged_error(folder / f"seed-{seed}" / "summary.json", "it is gone")
        found.append(summary)
    return found
