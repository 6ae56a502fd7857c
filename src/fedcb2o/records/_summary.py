"""A table of records summed up."""

import math
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from fedcb2o.records.run import EVALUATED_METRICS, OPTIONAL_METRICS


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """One row a seed of `Run.records` at its last evaluated round: each metric over benign agents.

    The worst agent has the lowest accuracy, or the highest attack success rate or loss; the worst tenth is the mean of
    the ceil(n / 10) worst agents. `malicious_weight` is the weight that benign agents gave to malicious peers, averaged
    over the last fifth of the rounds, since in a single one few peers are met. Columns: seed, round, rounds (those
    done), accuracy, accuracy_worst, accuracy_worst_tenth, and so on, those of `SOMETIMES` where they were
    measured.
    """
    rows = []
    metrics = [*EVALUATED_METRICS, *(metric for metric in OPTIONAL_METRICS if metric in table)]
    for seed, last in last_round(table).groupby("seed"):
        mine = table[table.seed == seed]
        row: dict[str, Any] = {
            "seed": seed,
            "round": last["round"].iloc[0],
            "rounds": mine["round"].max(),
        }
        for metric in metrics:
            for over, value in agent_statistics(metric, last[metric].dropna().to_numpy()).items():
                row[metric if over == "mean" else f"{metric}_{over}"] = value
        row["malicious_weight"] = last_fifth(mine[~mine.malicious]).malicious_weight.mean()
        rows.append(row)
    columns = [
        "seed",
        "round",
        "rounds",
        *(m + end for m in metrics for end in ("", "_worst", "_worst_tenth")),
    ]
    return pd.DataFrame(rows, columns=[*columns, "malicious_weight"])


def agent_statistics(metric: str, values: Float[np.ndarray, " n"]) -> dict[str, float]:
    """The mean, the worst and the mean of the worst tenth of what n benign agents have; NaN for nobody."""
    ordered = np.sort(values)
    worst_first = ordered if metric.endswith("accuracy") else ordered[::-1]
    tenth = worst_first[: math.ceil(len(ordered) / 10)]
    if not len(ordered):
        return dict.fromkeys(("mean", "worst", "worst_tenth"), math.nan)
    return {
        "mean": float(ordered.mean()),
        "worst": float(worst_first[0]),
        "worst_tenth": float(tenth.mean()),
    }


def last_round(table: pd.DataFrame) -> pd.DataFrame:
    """The records of benign agents at each seed's last evaluated round; empty if there is none yet."""
    measured = (
        table[[metric for metric in (*EVALUATED_METRICS, *OPTIONAL_METRICS) if metric in table]]
        .notna()
        .any(axis=1)
    )
    evaluated = table[~table.malicious.astype(bool) & measured]
    return evaluated[evaluated["round"] == evaluated.groupby("seed")["round"].transform("max")]


def last_fifth(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the last fifth of each seed's rounds, of at least one round."""
    last: pd.Series[Any] = table.groupby("seed")["round"].transform("max")
    late: pd.DataFrame = table[table["round"] > last - np.ceil(last / 5)]
    return late
