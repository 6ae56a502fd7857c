"""Regret of defences: distance to the best one in each column.

In accuracy a column is an attack or a baseline without attack; in attack success rate it is an
attack with a target. A defence with a small worst regret suits every column: minimax regret
(Savage, "The theory of statistical decision", 1951).
"""

from collections.abc import Sequence

import pandas as pd

from fedcb2o.report._statistics import group_statistics, worst_attack


def shortfalls(rows: pd.DataFrame, value: str, *, highest: bool) -> pd.DataFrame:
    """Compute the regret of each run against the best defence.

    The best defence of a column has the best mean over seeds among the defences with the most
    seeds. `highest` means that a high value is worse.
    """
    known = rows.dropna(subset=value)
    means = known.groupby(["attack", "defence"])[value].agg(["count", "mean"]).reset_index()
    means = means[means["count"] == means.groupby("attack")["count"].transform("max")]
    means = means.sort_values("mean", ascending=highest, kind="stable").drop_duplicates("attack")
    best = means.set_index("attack").defence.rename("best")

    base = known.set_index(["attack", "defence", "seed"])[value].rename("base")
    both = known.join(best, on="attack").join(base, on=["attack", "best", "seed"])
    regret = both.base - both[value]
    if highest:
        regret = both[value] - both.base
    columns = ["defence", "attack", "seed", "best", "regret"]
    return both.assign(regret=regret).dropna(subset="regret")[columns]


def regrets(short: pd.DataFrame) -> pd.DataFrame:
    """Compute `group_statistics` of the regrets of each defence in each column (`attack`)."""
    return group_statistics(short.groupby(["defence", "attack"]).regret)


def worst_regret(short: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Find the worst column (`attack`) of each defence with all columns, and the regret there.

    The interval takes this column, and the best defence in it, as given.
    """
    groups = _rows_at_worst(short, columns).groupby("defence")
    return group_statistics(groups.regret).join(groups.attack.first())


def worst_regret_differences(
    short: pd.DataFrame, columns: Sequence[str], reference: str
) -> pd.DataFrame:
    """Compare worst regrets with a reference's; each defence has its own worst column."""
    rows = _rows_at_worst(short, columns)
    base = rows[rows.defence == reference].set_index("seed").regret
    others = rows[rows.defence != reference]
    others = others.assign(difference=others.regret - others.seed.map(base))
    return group_statistics(others.dropna(subset="difference").groupby("defence").difference)


def _rows_at_worst(short: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Select the rows of each defence in its worst column."""
    worst = worst_attack(regrets(short), columns, highest=True)
    return short[short.attack == short.defence.map(worst)]
