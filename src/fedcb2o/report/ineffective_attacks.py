"""Columns in which nothing happens to anybody: an attack under which no defence is shown to lose anything."""

from collections.abc import Iterator, Sequence

import pandas as pd

from fedcb2o.report.statistics import CONFIDENCE, interval_half_width, seed_statistics

_HARM_METRICS = ("lost", "success")
"""The measures of what an attack does, in the columns of `scored` that there are: 0 or less is nothing."""


def harm_bounds(rows: pd.DataFrame, attacks: Sequence[str]) -> pd.DataFrame:
    """For each attack the interval that no defence's harm leaves: how many there are, the largest `low` and the largest
    `high` of Student's intervals that hold `CONFIDENCE` all at once (Bonferroni), over defences and measures of harm.

    What has a single seed has no interval, and is left out.
    """
    found = pd.concat([seed_statistics(rows, name) for name in _HARM_METRICS if name in rows])
    found = found[found.index.get_level_values("attack").isin(attacks)].dropna(subset="deviation")
    count = found.groupby("attack")["mean"].transform("size")
    half = interval_half_width(found.seeds, found.deviation, 1 - (1 - CONFIDENCE) / count)
    ends = pd.DataFrame({"low": found["mean"] - half, "high": found["mean"] + half}).groupby(
        "attack"
    )
    return (
        ends.max()
        .assign(intervals=ends.size())
        .reindex([name for name in attacks if name in ends.groups])
    )


def ineffective_attack_notes(rows: pd.DataFrame, attacks: Sequence[str]) -> Iterator[str]:
    """A sentence, without its stop, for each attack that is not shown to do anything to anybody."""
    for name, row in harm_bounds(rows, attacks).iterrows():
        if row.low <= 0:
            yield (
                f"Under {name} nothing is shown to happen to anybody: of {row.intervals:.0f} intervals, which hold "
                f"{100 * CONFIDENCE:.0f}% all at once, none lies above 0, and none reaches beyond "
                f"{100 * row.high:.1f} points"
            )
