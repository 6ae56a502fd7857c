"""Regret: by how much a defence falls short of the best one in each column, and in the worst of the columns.

In accuracy a column is an attack, or nobody's attack with attackers that train cleanly or are removed; in success rate
it is an attack with a target. A defence for every column is one whose worst regret is small: minimax regret (Savage,
"The theory of statistical decision", 1951).
"""

from collections.abc import Sequence

import pandas as pd

from fedcb2o.report.statistics import group_statistics, worst_attack


def shortfalls(rows: pd.DataFrame, value: str, *, highest: bool) -> pd.DataFrame:
    """For each row with a value, `regret`: how far it is behind the best defence of its column, with the same seed.

    The best defence is the one with the best mean over seeds among those that have most of them; `best` names it.
    `highest` says whether a high value is the worse one.
    """
    known = rows.dropna(subset=value)
    found = known.groupby(["attack", "defence"])[value].agg(["count", "mean"]).reset_index()
    found = found[found["count"] == found.groupby("attack")["count"].transform("max")]
    found = found.sort_values("mean", ascending=highest, kind="stable").drop_duplicates("attack")
    best = found.set_index("attack").defence.rename("best")
    base = known.set_index(["attack", "defence", "seed"])[value].rename("base")
    both = known.join(best, on="attack").join(base, on=["attack", "best", "seed"])
    behind = both[value] - both.base if highest else both.base - both[value]
    return both.assign(regret=behind).dropna(subset="regret")[
        ["defence", "attack", "seed", "best", "regret"]
    ]


def regrets(short: pd.DataFrame) -> pd.DataFrame:
    """Statistics over seeds of each defence's regret in each column (the index)."""
    return group_statistics(short.groupby(["defence", "attack"]).regret)


def worst_regret(short: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """For each defence (the index) that has them all, the worst of the columns, `attack`, and the regret in it.

    The interval is that of the paired differences in this column: it takes the column, and which defence is best in it,
    as given.
    """
    rows = _rows_at_worst(short, columns)
    return group_statistics(rows.groupby("defence").regret).join(
        rows.groupby("defence").attack.first()
    )


def worst_regret_differences(
    short: pd.DataFrame, columns: Sequence[str], reference: str
) -> pd.DataFrame:
    """For each other defence, its worst regret less that of the reference, paired by seeds, each in its own column."""
    rows = _rows_at_worst(short, columns)
    base = rows[rows.defence == reference].set_index("seed").regret
    others = rows[rows.defence != reference]
    others = others.assign(difference=others.regret - others.seed.map(base)).dropna(
        subset="difference"
    )
    return group_statistics(others.groupby("defence").difference)


def _rows_at_worst(short: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """The rows of each defence in the column where its mean regret is worst."""
    at = worst_attack(regrets(short), columns, highest=True)
    return short[short.attack == short.defence.map(at)]
