"""Matrices over a grid's rows: defences by attacks, over seeds; and what they come to for each defence.

Runs of one seed are paired: their agents hold the same samples, whatever the defence and the attack. Values are
fractions of 1, seconds or megabytes; a deviation is a sample's (ddof = 1), an interval Student's for the mean.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from fedcb2o.report.grid import GridResults, measured

CALM = "No attack"
STATISTICS = ["seeds", "mean", "deviation", "low", "high"]
CONFIDENCE = 0.95


def scored(results: GridResults, setting: str) -> pd.DataFrame:
    """The rows of a setting, those of attacked cells with `success`, and each defence's without attack under `CALM`.

    The success of an attack is its rate minus the rate of the floor with the same seed; where it has no rate, the
    accuracy that the floor has beyond it. A defence's floors are one and the same training, so any of them will do.
    """
    rows = results.rows[results.rows.setting == setting]
    keys = ["defence", "floor", "seed"]
    floors = rows[rows.attack == ""]
    attacked = rows[(rows.attack != "") & rows.attack.isin(results.attacks)]
    attacked = attacked.merge(floors[[*keys, "accuracy", "attack_success_rate"]], "left", keys, suffixes=("", "_floor"))
    net = attacked.attack_success_rate - attacked.attack_success_rate_floor
    lost = attacked.accuracy_floor - attacked.accuracy
    attacked["success"] = net.where(attacked.attack_success_rate.notna(), lost)
    calm = floors.dropna(subset="accuracy").drop_duplicates(["defence", "seed"]).assign(attack=CALM)
    aimed = [name for name in measured(calm) if name.startswith(("source_accuracy", "attack_success_rate"))]
    both = [attacked.drop(columns=["accuracy_floor", "attack_success_rate_floor"]), calm.drop(columns=aimed)]
    table = pd.concat(both[: 1 if CALM in results.attacks else 2], ignore_index=True)
    return table[table.defence.isin(results.defences) & table.seed.isin(results.seeds)]


def untargeted(rows: pd.DataFrame) -> set[str]:
    """The attacks whose success is the accuracy lost, as far as there are results."""
    known = rows[(rows.attack != CALM) & rows.accuracy.notna()].groupby("attack").attack_success_rate.count()
    return set(known[known == 0].index)


def statistics(rows: pd.DataFrame, value: str, *also: str) -> pd.DataFrame:
    """Over the seeds of each defence, attack and what else tells rows apart (the index): `STATISTICS` of a column."""
    return _statistics(rows.dropna(subset=value).groupby(["defence", "attack", *also])[value])


def paired(rows: pd.DataFrame, value: str, reference: str, *also: str) -> pd.DataFrame:
    """The same of the differences to a defence's value with the same attack and seed."""
    same = ["attack", *also, "seed"]
    base = rows[rows.defence == reference].set_index(same)[value].rename("base")
    both = rows[rows.defence != reference].join(base, on=same)
    both = both.assign(difference=both[value] - both.base).dropna(subset="difference")
    return _statistics(both.groupby(["defence", "attack", *also]).difference)


def mean_over(rows: pd.DataFrame, value: str, attacks: Sequence[str]) -> pd.DataFrame:
    """The same, by defence, of the mean over attacks of each seed that has them all."""
    table = rows[rows.attack.isin(attacks)].pivot(index=["defence", "seed"], columns="attack", values=value)
    means = table.reindex(columns=list(attacks)).mean(axis="columns", skipna=False).dropna()
    return _statistics(means.groupby("defence"))


def worst(found: pd.DataFrame, attacks: Sequence[str], *, highest: bool) -> dict[str, str]:
    """The attack with the worst mean for each defence, of `statistics`; none for a defence that lacks an attack."""
    means = found["mean"].unstack("attack").reindex(columns=list(attacks)).dropna()
    rows = {str(name): list(row) for name, row in zip(means.index, means.to_numpy(), strict=True)}
    return {name: attacks[row.index(max(row) if highest else min(row))] for name, row in rows.items()}


def half_width(count: Any, deviation: Any) -> Any:
    """Half of Student's interval for the mean of so many values with this sample deviation; NaN for a single one."""
    return stdtrit(count - 1, (1 + CONFIDENCE) / 2) * deviation / np.sqrt(count)


def _statistics(groups: Any) -> pd.DataFrame:
    table = pd.DataFrame({"seeds": groups.count(), "mean": groups.mean(), "deviation": groups.std(ddof=1)})
    half = half_width(table.seeds, table.deviation)
    return table.assign(low=table["mean"] - half, high=table["mean"] + half)
