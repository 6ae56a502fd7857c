"""Matrices over a grid's rows: defences by attacks, over seeds; and what they come to for each defence.

Runs of one seed are paired: their agents hold the same samples, whatever the defence and the attack. The unit of every
interval is the seed: what its agents score on one picture, turned as each cluster sees it, is one value of its mean.
Values are fractions of 1, seconds or megabytes; a deviation is a sample's (ddof = 1), an interval Student's for the
mean.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtr, stdtrit

from fedcb2o.report.grid_results import BASELINES, GridResults, metric_names

_BASELINE_KEYS = ["defence", "floor", "seed"]
_STATISTICS_COLUMNS = ["seeds", "mean", "deviation", "low", "high", "p"]
CONFIDENCE = 0.95
_ROUNDING_ERROR = 1e-9
"""What floats err by: an end of an interval that is nearer to 0 is 0."""


def add_attack_effects(results: GridResults, setting: str) -> pd.DataFrame:
    """The rows of a setting, those of attacked cells with `lost` and `success`, and each defence's without attack under
    the names in `FLOORS`.

    `lost` is the accuracy of the better floor less that of the attacked run with the same seed, `success` the rate of
    an attack that has one less that of the better floor. The better floor is that of the two with the better mean over
    seeds. A defence's floors of one role are one and the same training, so any of them will do.
    """
    rows = results.rows[results.rows.setting == setting]
    floors = rows[rows.attack == ""]
    attacked = rows[(rows.attack != "") & rows.attack.isin(results.attacks)]
    lost = _better_baseline(floors, "accuracy", highest=True)
    success = _better_baseline(floors, "attack_success_rate", highest=False)
    attacked = attacked.join(lost, on=_BASELINE_KEYS).join(success, on=_BASELINE_KEYS)
    attacked["lost"] = attacked.accuracy_floor - attacked.accuracy
    attacked["success"] = attacked.attack_success_rate - attacked.attack_success_rate_floor
    calm = floors.dropna(subset="accuracy").drop_duplicates(["defence", "role", "seed"])
    calm = calm.assign(attack=calm.role.map(BASELINES))
    calm = calm[~calm.attack.isin(results.attacks)]
    aimed = [
        name
        for name in metric_names(calm)
        if name.startswith(("source_accuracy", "attack_success_rate"))
    ]
    both = [
        attacked.drop(columns=["accuracy_floor", "attack_success_rate_floor"]),
        calm.drop(columns=aimed),
    ]
    table = pd.concat(both, ignore_index=True)
    return table[table.defence.isin(results.defences) & table.seed.isin(results.seeds)]


def _better_baseline(floors: pd.DataFrame, value: str, *, highest: bool) -> "pd.Series[Any]":
    """A value of the floor with the better mean of it, for each defence, aim and seed."""
    means = floors.groupby([*_BASELINE_KEYS[:2], "role"])[value].mean().dropna().reset_index()
    means = means.sort_values(value, ascending=not highest, kind="stable").drop_duplicates(
        _BASELINE_KEYS[:2]
    )
    chosen = floors.merge(means[[*_BASELINE_KEYS[:2], "role"]], on=[*_BASELINE_KEYS[:2], "role"])
    return chosen.set_index(_BASELINE_KEYS)[value].rename(f"{value}_floor")


def seed_statistics(rows: pd.DataFrame, value: str, *also: str) -> pd.DataFrame:
    """Over the seeds of each defence, attack and what else tells rows apart (the index): `STATISTICS` of a column."""
    return group_statistics(rows.dropna(subset=value).groupby(["defence", "attack", *also])[value])


def paired_differences(rows: pd.DataFrame, value: str, reference: str, *also: str) -> pd.DataFrame:
    """The same of the differences to a defence's value with the same attack and seed."""
    same = ["attack", *also, "seed"]
    base = rows[rows.defence == reference].set_index(same)[value].rename("base")
    both = rows[rows.defence != reference].join(base, on=same)
    both = both.assign(difference=both[value] - both.base).dropna(subset="difference")
    return group_statistics(both.groupby(["defence", "attack", *also]).difference)


def attack_mean_statistics(rows: pd.DataFrame, value: str, attacks: Sequence[str]) -> pd.DataFrame:
    """The same, by defence, of the mean over attacks of each seed that has them all."""
    table = rows[rows.attack.isin(attacks)].pivot(
        index=["defence", "seed"], columns="attack", values=value
    )
    means = table.reindex(columns=list(attacks)).mean(axis="columns", skipna=False).dropna()
    return group_statistics(means.groupby("defence"))


def worst_attack(found: pd.DataFrame, attacks: Sequence[str], *, highest: bool) -> dict[str, str]:
    """The attack with the worst mean for each defence, of `statistics`; none for a defence that lacks an attack."""
    means = found["mean"].unstack("attack").reindex(columns=list(attacks)).dropna()
    rows = {str(name): list(row) for name, row in zip(means.index, means.to_numpy(), strict=True)}
    return {
        name: attacks[row.index(max(row) if highest else min(row))]
        for name, row in rows.items()
        if row
    }


def format_interval(mean: float, low: float, high: float, digits: int = 1, sign: str = "") -> str:
    """A mean with its interval, if there is one: "84.3 [83.9, 84.6]"; with more decimals where 0 lies in the interval,
    and that would not be seen: "0.44 [-0.01, 0.89]"."""
    if low < -_ROUNDING_ERROR and high > _ROUNDING_ERROR:
        while 0 in (round(low, digits), round(high, digits)):
            digits += 1
    form = f"{sign}z.{digits}f"
    return f"{mean:{form}}" + (f" [{low:{form}}, {high:{form}}]" if math.isfinite(low) else "")


def interval_half_width(count: Any, deviation: Any, confidence: Any = CONFIDENCE) -> Any:
    """Half of Student's interval for the mean of so many values with this sample deviation; NaN for a single one."""
    return stdtrit(count - 1, (1 + confidence) / 2) * deviation / np.sqrt(count)


def group_statistics(groups: Any) -> pd.DataFrame:
    """`STATISTICS` of each group of values; `p` is Student's, two-sided, for a mean that is 0."""
    table = pd.DataFrame(
        {"seeds": groups.count(), "mean": groups.mean(), "deviation": groups.std(ddof=1)}
    )
    half = interval_half_width(table.seeds, table.deviation)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = (
            (table["mean"] / (table.deviation / np.sqrt(table.seeds)))
            .abs()
            .where(table["mean"] != 0, 0.0)
        )
    p = 2 * stdtr(table.seeds - 1, -t.where(table.deviation.notna()))
    return table.assign(low=table["mean"] - half, high=table["mean"] + half, p=p)[
        _STATISTICS_COLUMNS
    ]


def holm_correction(p: "pd.Series[float]") -> "pd.Series[float]":
    """p-values corrected for how many they are, so that they say the chance of a single false finding among them (Holm,
    "A simple sequentially rejective multiple test procedure", 1979). NaN stay out."""
    known = p.dropna().sort_values(kind="stable")
    corrected = (known * np.arange(len(known), 0, -1)).cummax().clip(upper=1.0)
    return corrected.reindex(p.index)
