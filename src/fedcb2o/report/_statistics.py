"""Statistics over the seeds of a grid, by defence and attack.

Runs of one seed are paired: their agents have the same samples under every defence and attack. The
unit of every interval is the seed: the scores of all its agents on one picture, in the rotation of
each cluster, are one value of its mean. Values are fractions of 1, seconds or megabytes. A
deviation is that of a sample (ddof = 1). An interval is Student's for the mean; that of a rate is
computed on the logit scale, so that it stays in [0, 1].
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import expit, logit, stdtr, stdtrit

from fedcb2o.report.grid_results import BASELINES, RUN_METRICS, GridResults, metric_names

CONFIDENCE = 0.95
MIN_SEEDS = 5
"""Least number of seeds of an interval and of a p-value."""
TOO_FEW_SEEDS = "too few seeds for an interval"
_UNBOUNDED_METRICS = ("malicious_most", "seconds", "megabytes")  # others of every run are rates

_BASELINE_KEYS = ["defence", "floor", "seed"]
_STATISTICS_COLUMNS = ["seeds", "mean", "deviation", "low", "high", "p"]
_ROUNDING_ERROR = 1e-9  # an end of an interval that is nearer to 0 counts as 0


def add_attack_effects(results: GridResults, setting: str) -> pd.DataFrame:
    """Select the rows of one setting and add the effects of attacks.

    `lost` is the main metric of the better baseline, by its mean over seeds, minus that of the
    attacked run with the same seed, or the reverse where low is better; `success` is the net attack
    success rate. All baselines of a
    defence with one role are the same training, so any of them serves. Rows without attack come
    under the names in `BASELINES`.
    """
    rows = results.rows[results.rows.setting == setting]
    baselines = rows[rows.attack == ""]
    attacked = rows[(rows.attack != "") & rows.attack.isin(results.attacks)]
    main = results.main
    highest = results.info(main).worse_direction == "low"
    score = _better_baseline(baselines, main, highest=highest)
    success_rate = _better_baseline(baselines, "attack_success_rate", highest=False)
    attacked = attacked.join(score, on=_BASELINE_KEYS).join(success_rate, on=_BASELINE_KEYS)
    attacked["lost"] = (attacked[f"{main}_floor"] - attacked[main]) * (1 if highest else -1)
    attacked["success"] = attacked.attack_success_rate - attacked.attack_success_rate_floor
    attacked = attacked.drop(columns=[f"{main}_floor", "attack_success_rate_floor"])

    clean = baselines.dropna(subset=main).drop_duplicates(["defence", "role", "seed"])
    clean = clean.assign(attack=clean.role.map(BASELINES))
    clean = clean[~clean.attack.isin(results.attacks)]
    # Without an attack the rates of an attack are those of chance.
    attack_metrics = ("source_accuracy", "attack_success_rate")
    clean = clean.drop(
        columns=[name for name in metric_names(clean) if name.startswith(attack_metrics)]
    )

    table = pd.concat([attacked, clean], ignore_index=True)
    return table[table.defence.isin(results.defences) & table.seed.isin(results.seeds)]


def _better_baseline(baselines: pd.DataFrame, value: str, *, highest: bool) -> "pd.Series[Any]":
    """Select a metric of the baseline with the better mean."""
    keys = _BASELINE_KEYS[:2]
    means = baselines.groupby([*keys, "role"])[value].mean().dropna().reset_index()
    means = means.sort_values(value, ascending=not highest, kind="stable").drop_duplicates(keys)
    chosen = baselines.merge(means[[*keys, "role"]], on=[*keys, "role"])
    return chosen.set_index(_BASELINE_KEYS)[value].rename(f"{value}_floor")


def seed_statistics(rows: pd.DataFrame, value: str, *keys: str) -> pd.DataFrame:
    """Compute `group_statistics` of one column by defence, attack and `keys`."""
    groups = rows.dropna(subset=value).groupby(["defence", "attack", *keys])
    table = group_statistics(groups[value])
    is_rate: Any = _is_rate(value)
    if "metric" in keys:
        is_rate = table.index.get_level_values("metric").map(_is_rate).astype(bool)
    return bound_rates(table, is_rate)


def _is_rate(value: str) -> bool:
    """Return whether a metric is known to be in [0, 1]."""
    name = value.partition("_cluster_")[0]
    return name in RUN_METRICS and name not in _UNBOUNDED_METRICS


def paired_differences(rows: pd.DataFrame, value: str, reference: str, *keys: str) -> pd.DataFrame:
    """Compute statistics of differences to a reference with the same attack and seed."""
    pair_keys = ["attack", *keys, "seed"]
    base = rows[rows.defence == reference].set_index(pair_keys)[value].rename("base")
    both = rows[rows.defence != reference].join(base, on=pair_keys)
    both = both.assign(difference=both[value] - both.base).dropna(subset="difference")
    return group_statistics(both.groupby(["defence", "attack", *keys]).difference)


def attack_mean_statistics(rows: pd.DataFrame, value: str, attacks: Sequence[str]) -> pd.DataFrame:
    """Compute statistics of means over attacks, without seeds that lack an attack."""
    selected = rows[rows.attack.isin(attacks)]
    table = selected.pivot(index=["defence", "seed"], columns="attack", values=value)
    # A mean over fewer attacks would not compare with the others.
    means = table.reindex(columns=list(attacks)).mean(axis="columns", skipna=False).dropna()
    return bound_rates(group_statistics(means.groupby("defence")), _is_rate(value))


def worst_attack(
    statistics: pd.DataFrame, attacks: Sequence[str], *, highest: bool
) -> dict[str, str]:
    """Find the attack with the worst mean, `highest` or lowest, for each defence."""
    means = statistics["mean"].unstack("attack").reindex(columns=list(attacks)).dropna()
    choose = max if highest else min
    found = {}
    for defence, row in zip(means.index, means.to_numpy().tolist(), strict=True):
        if row:
            found[str(defence)] = attacks[row.index(choose(row))]
    return found


def format_interval(mean: float, low: float, high: float, digits: int = 1, sign: str = "") -> str:
    """Format a mean with its interval, if `low` is not NaN.

    Decimals are added if 0 is in the interval and rounding would hide that: "0.44 [-0.01, 0.89]".
    """
    if low < -_ROUNDING_ERROR and high > _ROUNDING_ERROR:
        # "0.0" as an end would look like an interval without 0.
        while 0 in (round(low, digits), round(high, digits)):
            digits += 1
    spec = f"{sign}z.{digits}f"
    text = f"{mean:{spec}}"
    if math.isfinite(low):
        text += f" [{low:{spec}}, {high:{spec}}]"
    return text


def interval_half_width(count: Any, deviation: Any, confidence: Any = CONFIDENCE) -> Any:
    """Compute half of Student's interval for a mean; NaN for fewer than `MIN_SEEDS` values."""
    half = stdtrit(count - 1, (1 + confidence) / 2) * deviation / np.sqrt(count)
    return half * np.where(np.asarray(count) >= MIN_SEEDS, 1.0, np.nan)


def rate_interval(count: Any, mean: Any, deviation: Any) -> tuple[Any, Any]:
    """Compute the interval for a mean of rates on the logit scale; NaN for few seeds.

    The half width on that scale is Student's, divided by the derivative of the mean, mean * (1 -
    mean). A mean of values that are all equal has an interval of width 0.
    """
    half = interval_half_width(count, deviation)
    slope = np.asarray(mean * (1 - mean), dtype=float)
    # The slope is 0 for rates of 0 and 1, where a division would be undefined.
    is_constant = np.asarray(deviation) <= _ROUNDING_ERROR
    scaled = np.where(is_constant, 0.0 * half, half / np.where(slope > 0, slope, 1.0))
    return expit(logit(mean) - scaled), expit(logit(mean) + scaled)


def bound_rates(table: pd.DataFrame, is_rate: Any = True) -> pd.DataFrame:
    """Replace the intervals of rates by those on the logit scale, in all or some rows."""
    low, high = rate_interval(table.seeds, table["mean"].clip(0.0, 1.0), table.deviation)
    keep = np.broadcast_to(~np.asarray(is_rate, dtype=bool), len(table))
    return table.assign(low=table.low.where(keep, low), high=table.high.where(keep, high))


def group_statistics(groups: Any) -> pd.DataFrame:
    """Compute statistics of each group of values.

    Columns are seeds (number of values), mean, deviation, and low, high (95% interval) and p
    (two-sided, Student's, for a mean of 0), which are NaN for fewer than `MIN_SEEDS` values.
    """
    table = pd.DataFrame(
        {"seeds": groups.count(), "mean": groups.mean(), "deviation": groups.std(ddof=1)}
    )
    half = interval_half_width(table.seeds, table.deviation)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = (table["mean"] / (table.deviation / np.sqrt(table.seeds))).abs()
    # A mean of 0 with a deviation of 0 is no difference, and not an undefined one.
    t = t.where(table["mean"] != 0, 0.0)
    p = 2 * stdtr(table.seeds - 1, -t.where(half.notna()))
    low = table["mean"] - half
    high = table["mean"] + half
    return table.assign(low=low, high=high, p=p)[_STATISTICS_COLUMNS]


def holm_correction(p: "pd.Series[float]") -> "pd.Series[float]":
    """Correct p-values for their number by Holm's method; NaN does not count.

    A corrected value bounds the probability of a single false finding among all (Holm, "A simple
    sequentially rejective multiple test procedure", 1979).
    """
    known = p.dropna().sort_values(kind="stable")
    corrected = (known * np.arange(len(known), 0, -1)).cummax().clip(upper=1.0)
    return corrected.reindex(p.index)
