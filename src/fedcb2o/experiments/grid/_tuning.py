"""The choice among the candidates of a defence, on tuning images and seeds of its own.

Every tuned defence has the same number of candidates, over the same attacks and seeds; none is
tuned to one attack. Where the best candidate is at an end of its range, candidates are added until
it is inside. The choice is then frozen in tuning.json.
"""

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

from fedcb2o import plugins, records
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.experiments.config import tables
from fedcb2o.experiments.grid._baseline import Changes
from fedcb2o.experiments.grid._definition import Grid

# Per candidate the scores of the seeds by attack; None for one that could not run.
_Scores = list[dict[str, list[float]] | None]


def read_choices(folder: Path, plan: Grid) -> dict[str, Any]:
    """Read the choices in tuning.json; one over other candidates or seeds is a RunError."""
    path = folder / "tuning.json"
    recorded = records.read_json_with_checksum(path) if path.exists() else {}
    found = {}
    for defence, given in plan.candidates.items():
        if defence not in recorded:
            continue
        asked = recorded[defence]["asked"]
        # Candidates that the grid added itself are no part of the question.
        first = {**asked, "candidates": asked["candidates"][: len(given)]}
        question = _question(plan, defence)
        if records.original_changes(first) != records.original_changes(question):
            raise RunError(
                f"{path} holds the choice for `{defence}` over other candidates, attacks or seeds: "
                "choose another --out"
            )
        found[defence] = recorded[defence]
    return found


def best_candidates(choices: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of the chosen candidates, from 0."""
    return {defence: choice["best"] for defence, choice in choices.items()}


def with_added_candidates(plan: Grid, choices: Mapping[str, Any]) -> Grid:
    """Return the grid with the candidates that were added for the choices."""
    added = {
        defence: choice["asked"]["candidates"][len(plan.candidates[defence]) :]
        for defence, choice in choices.items()
    }
    return plan.model_copy(update={"added_candidates": added})


def extend(folder: Path, plan: Grid, choices: Mapping[str, Any], errors: Mapping[str, str]) -> Grid:
    """Add a candidate for each defence whose best one is at an end; the same grid without one."""
    if plan.tuning is None:
        return plan
    limit = plan.tuning.widen
    extended = plan
    best = _best_means(folder, plan, errors)
    for defence in plan.candidates.keys() - choices.keys():
        if len(plan.added_candidates.get(defence, [])) < limit:
            scores, _ = _trial_scores(folder, plan, defence, errors)
            means = _candidate_scores(scores, best)
            extended = _extended_grid(extended, defence, means) or extended
    return extended


def extrapolate(candidates: Sequence[Changes], scores: Sequence[float | None]) -> Changes | None:
    """Return the candidate beyond the best one; None where the best has two neighbours.

    It is as far from the best as that is from its neighbour, as a ratio where both are above 0.
    None is also for candidates that differ in more than one number. A failed one has the score
    None.
    """
    known = [score for score in scores if score is not None]
    if not known:
        return None
    # The first of equal scores wins, as in `choose`.
    best = scores.index(max(known))
    flat = [records.flatten(candidate) for candidate in candidates]
    # Candidates with other keys differ in kind, and lie on no common scale.
    similar = [keys for keys in flat if keys.keys() == flat[best].keys()]
    varied = [
        key for key, value in flat[best].items() if any(keys[key] != value for keys in similar)
    ]
    if len(varied) != 1:
        return None
    key = varied[0]
    values = [keys[key] for keys in similar]
    if not all(type(value) in (int, float) for value in values):
        return None

    value = flat[best][key]
    ordered = sorted(set(values))
    if value not in (ordered[0], ordered[-1]):
        return None
    neighbour = ordered[-2]
    if value == ordered[0]:
        neighbour = ordered[1]
    # A ratio keeps positive numbers positive and fits learning rates. A difference fits all others.
    smallest = -inf
    following = 2 * value - neighbour
    if value > 0 and neighbour > 0:
        smallest = 1
        following = value * value / neighbour
    following = float(f"{following:.4g}")
    if all(isinstance(number, int) for number in values):
        following = max(round(following), smallest)
    # Rounding has led back to a known candidate.
    if following in values:
        return None
    return tables.with_value(candidates[best], key.split("."), following)


def choose(
    folder: Path, plan: Grid, choices: dict[str, Any], errors: Mapping[str, str]
) -> dict[str, str]:
    """Choose the first of the best candidates of each defence, and write tuning.json.

    The score of a run is that of `Grid.score`; `tuning.score` combines runs. New choices are added
    to `choices`. `errors` has messages by folder. Returns the reasons for defences all of whose
    candidates failed.
    """
    unfit: dict[str, str] = {}
    pending = [defence for defence in plan.candidates if defence not in choices]
    best = _best_means(folder, plan, errors) if pending else None
    for defence in pending:
        scores, error = _trial_scores(folder, plan, defence, errors)
        means = _candidate_scores(scores, best)
        known = [mean for mean in means if mean is not None]
        if not known:
            unfit[defence] = error
            continue
        choices[defence] = {
            "best": means.index(max(known)),
            "at_end": _extended_grid(plan, defence, means) is not None,
            "scores": means,
            "by_attack": scores,
            "asked": _question(plan, defence),
        }
    if pending:
        records.write_json_with_checksum(folder / "tuning.json", choices)
    return unfit


def _candidate_scores(
    scores: _Scores, best: Mapping[str, float] | None = None
) -> list[float | None]:
    """Return mean scores over attacks and seeds; with `best` means, minus the worst regrets."""
    found: list[float | None] = []
    for by_attack in scores:
        if by_attack is None:
            found.append(None)
        elif best is None:
            found.append(fmean(score for seeds in by_attack.values() for score in seeds))
        else:
            found.append(min(fmean(seeds) - best[name] for name, seeds in by_attack.items()))
    return found


def _best_means(folder: Path, plan: Grid, errors: Mapping[str, str]) -> dict[str, float] | None:
    """Return the best mean score of any candidate by attack; None if regrets are not needed."""
    if plan.tuning is None or plan.tuning.score == "mean":
        return None
    best: dict[str, float] = {}
    for defence in plan.candidates:
        scores, _ = _trial_scores(folder, plan, defence, errors)
        for by_attack in scores:
            for name, seeds in (by_attack or {}).items():
                best[name] = max(best.get(name, -inf), fmean(seeds))
    return best


def _trial_scores(
    folder: Path, plan: Grid, defence: str, errors: Mapping[str, str]
) -> tuple[_Scores, str]:
    """Return the scores of a defence's candidates, and the last error of those that failed."""
    scores: _Scores = [{} for _ in plan.candidates[defence]]
    message = ""
    for cell in plan.trials():
        if cell.key.defence != defence:
            continue
        number = cell.key.candidate or 0
        by_attack = scores[number]
        if cell.folder in errors:
            # A candidate that failed once is unfit, whatever its other runs achieved.
            scores[number] = None
            error = errors[cell.folder]
            message = f"none of its candidates could run; {cell.key.title}: {error}"
        elif by_attack is not None:
            seeds = cell.experiment.seeds
            by_attack[cell.key.attack or ""] = [
                plan.score(summary) for summary in seed_summaries(folder / cell.folder, seeds)
            ]
    return scores, message


def _extended_grid(plan: Grid, defence: str, scores: Sequence[float | None]) -> Grid | None:
    """Return the grid with one more candidate; None without one, or if it is not valid."""
    candidates = plan.candidates[defence]
    following = extrapolate(candidates, scores)
    if following is None:
        return None
    added = [*plan.added_candidates.get(defence, []), following]
    extended = plan.model_copy(
        update={"added_candidates": {**plan.added_candidates, defence: added}}
    )
    try:  # a number may have reached the end of its range
        for setting in plan.settings or [""]:
            for attack in plan.attacks:
                extended.experiment(setting, defence, attack, len(candidates))
    except ConfigError:
        return None
    return extended


def _question(plan: Grid, defence: str) -> dict[str, Any]:
    """Return the candidates, attacks and seeds of a choice, as JSON has them."""
    assert plan.tuning is not None
    question = {
        "seeds": plan.tuning.seeds,
        "setting": plan.tuning_setting,
        "attacks": plan.tuning_attacks,
        "candidates": plan.candidates[defence],
    }
    if plan.tuning.score != "mean":
        question["score"] = plan.tuning.score
    if plan.rank_by is not None:
        question["rank_by"] = plan.rank_by
    return plugins.to_plain(question)  # type: ignore[no-any-return]


def seed_summaries(folder: Path, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Read the summaries of a run that has ended."""
    run = records.Run(folder)
    summaries = []
    for seed in seeds:
        summary = run.summary_of(seed)
        if summary is None:
            raise records.damaged_error(folder / f"seed-{seed}" / "summary.json", "it is gone")
        summaries.append(summary)
    return summaries
