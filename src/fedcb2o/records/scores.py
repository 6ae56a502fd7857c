"""A table of records summed up."""

import math
from typing import Any

import numpy as np
import pandas as pd

from fedcb2o.records.run import EVALUATED, SOMETIMES


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """One row a seed of `Run.records` at its last evaluated round: each metric over benign agents.

    The worst agent has the lowest accuracy, or the highest attack success rate or loss; the worst tenth is the mean of
    the ceil(n / 10) worst agents. `malicious_weight` is the weight that benign agents gave to malicious peers, averaged
    over the last fifth of the rounds, since in a single one few peers are met. Columns: seed, round, rounds (those
    done), accuracy, accuracy_worst, accuracy_worst_tenth, and so on, those of `SOMETIMES` where they were
    measured.
    """
    rows, metrics = [], [*EVALUATED, *(metric for metric in SOMETIMES if metric in table)]
    for seed, last in last_round(table).groupby("seed"):
        mine = table[table.seed == seed]
        row: dict[str, Any] = {"seed": seed, "round": last["round"].iloc[0], "rounds": mine["round"].max()}
        for metric in metrics:
            values = np.sort(last[metric].dropna().to_numpy())
            worst_first = values if metric.endswith("accuracy") else values[::-1]
            tenth = worst_first[: math.ceil(len(values) / 10)]
            row[metric] = values.mean() if len(values) else math.nan
            row[f"{metric}_worst"] = worst_first[0] if len(values) else math.nan
            row[f"{metric}_worst_tenth"] = tenth.mean() if len(values) else math.nan
        row["malicious_weight"] = last_fifth(mine[~mine.malicious]).malicious_weight.mean()
        rows.append(row)
    columns = ["seed", "round", "rounds", *(m + end for m in metrics for end in ("", "_worst", "_worst_tenth"))]
    return pd.DataFrame(rows, columns=[*columns, "malicious_weight"])


def last_round(table: pd.DataFrame) -> pd.DataFrame:
    """The records of benign agents at each seed's last evaluated round; empty if there is none yet."""
    measured = table[[metric for metric in (*EVALUATED, *SOMETIMES) if metric in table]].notna().any(axis=1)
    evaluated = table[~table.malicious.astype(bool) & measured]
    return evaluated[evaluated["round"] == evaluated.groupby("seed")["round"].transform("max")]


def last_fifth(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the last fifth of each seed's rounds, of at least one round."""
    last: pd.Series[Any] = table.groupby("seed")["round"].transform("max")
    late: pd.DataFrame = table[table["round"] > last - np.ceil(last / 5)]
    return late
