"""Attacks with no significant effect on any defence."""

from collections.abc import Iterator, Sequence

import pandas as pd

from fedcb2o.report._statistics import CONFIDENCE, interval_half_width, seed_statistics

_HARM_METRICS = ("lost", "success")  # effects of an attack; 0 or less means no harm


def harm_bounds(rows: pd.DataFrame, attacks: Sequence[str]) -> pd.DataFrame:
    """Compute simultaneous bounds of the harm of each attack over all defences.

    Student's intervals hold at once with probability `CONFIDENCE` (Bonferroni), over defences and
    measures of harm with 5 seeds. Columns are low and high, the largest ends over the intervals,
    and their number, intervals.
    """
    statistics = pd.concat([seed_statistics(rows, name) for name in _HARM_METRICS if name in rows])
    is_wanted = statistics.index.get_level_values("attack").isin(attacks)
    statistics = statistics[is_wanted].dropna(subset="p")
    count = statistics.groupby("attack")["mean"].transform("size")
    confidence = 1 - (1 - CONFIDENCE) / count
    half = interval_half_width(statistics.seeds, statistics.deviation, confidence)
    ends = pd.DataFrame({"low": statistics["mean"] - half, "high": statistics["mean"] + half})
    groups = ends.groupby("attack")
    known = [name for name in attacks if name in groups.groups]
    return groups.max().assign(intervals=groups.size()).reindex(known)


def ineffective_attack_notes(rows: pd.DataFrame, attacks: Sequence[str]) -> Iterator[str]:
    """Describe attacks without a significant effect, in sentences without a full stop."""
    for name, row in harm_bounds(rows, attacks).iterrows():
        if row.low <= 0:
            yield (
                f"{name} has no significant effect on any defence: of {row.intervals:.0f} "
                f"intervals, which hold {100 * CONFIDENCE:.0f}% all at once, none is above 0, and "
                f"none reaches beyond {100 * row.high:.1f} points"
            )
