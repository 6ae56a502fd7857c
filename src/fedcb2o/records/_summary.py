"""Summaries of records: final scores per seed, and selected rounds."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from fedcb2o.records.metrics import METRICS, OPTIONAL_METRICS, STANDARD_METRICS, Metric

_LOSSES = ("test_loss", "global_loss")
"""Metrics that all benign agents have, or none."""


def summary(table: pd.DataFrame, custom: Mapping[str, Metric] | None = None) -> pd.DataFrame:
    """Summarise the records of each seed over benign agents at its last evaluated round.

    The worst agent has the lowest accuracy, or the highest attack success rate or loss; the worst
    tenth is the mean of the ceil(n / 10) worst. `malicious_weight` is averaged over the last fifth
    of the rounds, because an agent meets few peers in a single one. Agents without a value of a
    metric of `custom` are counted in the column "..._missing".
    """
    custom = custom or {}
    names = [*STANDARD_METRICS, *(name for name in OPTIONAL_METRICS if name in table)]
    metrics = {**{name: METRICS[name] for name in names}, **custom}
    rows = []
    for seed, last in last_round(table).groupby("seed"):
        records = table[table.seed == seed]
        row: dict[str, Any] = {"seed": seed, "round": last["round"].iloc[0]}
        row["rounds"] = records["round"].max()

        for name, metric in metrics.items():
            values = last[name].dropna().to_numpy()
            for statistic, value in agent_statistics(metric, values).items():
                row[name if statistic == "mean" else f"{name}_{statistic}"] = value
            row[f"{name}_missing"] = len(last) - len(values)

        row["malicious_weight"] = last_fifth(records[~records.malicious]).malicious_weight.mean()
        rows.append(row)

    columns = [name + suffix for name in metrics for suffix in ("", "_worst", "_worst_tenth")]
    columns += [f"{name}_missing" for name in custom]
    return pd.DataFrame(rows, columns=["seed", "round", "rounds", *columns, "malicious_weight"])


def agent_statistics(metric: Metric, values: Float[np.ndarray, " n"]) -> dict[str, float]:
    """Compute "mean", "worst" and "worst_tenth" over agents; NaN without agents."""
    if not len(values):
        return dict.fromkeys(("mean", "worst", "worst_tenth"), math.nan)
    ordered = np.sort(values)
    worst_first = ordered if metric.worse_direction == "low" else ordered[::-1]
    tenth = worst_first[: math.ceil(len(ordered) / 10)]
    return {
        "mean": float(ordered.mean()),
        "worst": float(worst_first[0]),
        "worst_tenth": float(tenth.mean()),
    }


def last_round(table: pd.DataFrame) -> pd.DataFrame:
    """Select benign agents at the last evaluated round of each seed, if any."""
    metrics = [name for name in (*STANDARD_METRICS, *OPTIONAL_METRICS) if name in table]
    benign = table[~table.malicious.astype(bool)]
    measured = benign[benign[metrics].notna().any(axis=1)]
    last = measured.groupby("seed")["round"].max()
    # Agents whose results are not finite have none.
    return benign[benign["round"] == benign.seed.map(last)]


def left_out(table: pd.DataFrame, custom_metrics: Iterable[str] = ()) -> list[str]:
    """Describe the agents that means leave out, because they have no finite value."""
    notes = []
    for seed, last in last_round(table).groupby("seed"):
        for name in (*_LOSSES, *custom_metrics):
            count = last[name].isna().sum() if name in last else 0
            # Of a metric that the configuration chose, all results may be missing.
            if 0 < count < len(last) + (name not in _LOSSES):
                notes.append(
                    f"seed {seed}: the mean of `{name}` leaves out {count} of {len(last)} agents"
                    " without a finite value"
                )
    return notes


def last_fifth(table: pd.DataFrame) -> pd.DataFrame:
    """Select the last fifth of the rounds of each seed."""
    last: pd.Series[Any] = table.groupby("seed")["round"].transform("max")
    selected: pd.DataFrame = table[table["round"] > last - np.ceil(last / 5)]
    return selected
