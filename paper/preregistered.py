"""The answer of the pre-registered test (notes/preregistration.md).

    fedcb2o bench preregistered --out runs/preregistered
    .venv/bin/python -m paper.results --add runs/preregistered
    .venv/bin/python -m paper.preregistered                      # print the answer
    .venv/bin/python -m paper.preregistered --without Letters    # of the other data sets
    .venv/bin/python -m paper.preregistered --rate               # by the success rate itself

A column is a setting with an attack or a baseline, in accuracy or, where an attack has a target, in
net success: the attack success rate minus that of the defence's better baseline. Attacks that the
grid sets aside have no column. The worst regret of a defence is its largest distance to the best
defence of a column. Intervals come from a bootstrap over seeds, in which the best defences and the
worst columns are found anew.
"""

import argparse
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedcb2o.report import GridResults, SettingResults, read_grid, to_markdown
from fedcb2o.rng import stream

FOLDER = Path(__file__).parents[1] / "docs" / "benchmark" / "preregistered"
MARGIN = 1.0
RESAMPLES = 10_000
LEVEL = 0.95
MEASURES = ("accuracy", "success")
"""Accuracy and net success, as registered."""
RATE = "attack_success_rate"


def scores(
    results: GridResults, *, success: str = MEASURES[1], without: Collection[str] = ()
) -> pd.DataFrame:
    """Return the score of every defence in every column, by seed, in percent; more is better.

    Args:
        success: Net success, or the attack success rate.
        without: Settings that are left out.

    Returns:
        One row per column and seed, one column per defence. Success has a minus sign.
    """
    parts = []
    for setting in results.settings:
        if setting in without:
            continue
        rows = SettingResults(results, setting).rows
        rows = rows[~rows.attack.isin(results.table.get("set_aside", []))]
        for value, column, sign in (
            ("accuracy", "accuracy", 100.0),
            (success, MEASURES[1], -100.0),
        ):
            known = rows.dropna(subset=column)  # net success is known under attacks with a target
            known = known.assign(score=sign * known[value], column=setting + ", " + known.attack)
            known["column"] += f", {value}"
            parts.append(known.pivot(index=["column", "seed"], columns="defence", values="score"))
    return pd.concat(parts)


def worst_regrets(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the worst regret of every defence.

    Args:
        values: Mean scores, shape [columns, defences].

    Returns:
        Largest distance to the best defence of a column, shape [defences].
    """
    worst: NDArray[np.float64] = (values.max(1, keepdims=True) - values).max(0)
    return worst


def answer(table: pd.DataFrame, reference: str, *, resamples: int = RESAMPLES) -> pd.DataFrame:
    """Compare the worst regret of the reference with that of every other defence.

    Args:
        table: The table of `scores`.
        reference: Name of a defence.
        resamples: Number of bootstrap samples of the seeds.

    Returns:
        One row per defence, the smallest worst regret first: worst regret and its column, the
        reference's worst regret less this one's with its interval, and the verdict.

    Raises:
        ValueError: A value is missing.
    """
    if table.isna().any(axis=None):
        missing = table.columns[table.isna().any()].tolist()
        raise ValueError(f"values are missing: {', '.join(missing)}")
    columns = table.index.unique("column")
    seeds = table.index.unique("seed")
    values = table.to_numpy().reshape(len(columns), len(seeds), -1)
    position = table.columns.get_loc(reference)

    means = values.mean(1)
    worst = worst_regrets(means)
    draw = stream(0, "preregistered")
    differences = np.empty((resamples, len(worst)))
    for row in differences:
        sample = worst_regrets(values[:, draw.integers(0, len(seeds), len(seeds))].mean(1))
        row[:] = sample[position] - sample
    low, high = np.quantile(differences, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    found = pd.DataFrame(
        {
            "Worst regret": worst,
            "In": columns[(means.max(1, keepdims=True) - means).argmax(0)],
            "Reference less this": worst[position] - worst,
            "Low": low,
            "High": high,
        },
        index=table.columns,
    )
    found["Verdict"] = [verdict(*ends) for ends in zip(low, high, strict=True)]
    found.loc[reference, "Verdict"] = ""
    return found.sort_values("Worst regret")


def verdict(low: float, high: float) -> str:
    """Return what an interval of the difference says about the reference.

    Args:
        low: Lower end, in points of worst regret.
        high: Upper end.
    """
    if high < 0:
        return "better"
    if low > 0:
        return "worse"
    return "not worse" if high < MARGIN else "undecided"


def main() -> None:
    """Print the answer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--without", action="append", default=[], help="data set to leave out")
    parser.add_argument("--rate", action="store_true", help="the success rate, not net success")
    options = parser.parse_args()
    results = read_grid(FOLDER)
    success = RATE if options.rate else MEASURES[1]
    table = scores(results, success=success, without=options.without)
    print(to_markdown(answer(table, str(results.reference)).round(1)))


if __name__ == "__main__":
    main()
