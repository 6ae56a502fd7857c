"""What a grid has come to: a row for each run, read from its runs or from the `summary.csv` that a report leaves.

A floor is a run without attack: its malicious agents train on true labels ("clean"), or are not there ("removed"). A
row of a floor has no attack; that of an attacked cell names its floors, and both say what the attack achieves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedcb2o.errors import ConfigError, RunError
from fedcb2o.plugins import did_you_mean
from fedcb2o.records import (
    EVALUATED_METRICS,
    Run,
    last_fifth,
    read_cells,
    read_json_with_checksum,
    read_toml,
)

KEY_COLUMNS = ["setting", "defence", "attack", "role", "floor", "seed"]
_SUMMARY_SUFFIXES = ("", "_worst", "_worst_tenth")
RUN_METRICS = [
    *(metric + end for metric in EVALUATED_METRICS for end in _SUMMARY_SUFFIXES),
    "malicious_weight", "malicious_received", "malicious_most", "f_exceeded",
    "other_cluster_weight", "other_cluster_received", "own_weight", "seconds", "megabytes",
]  # fmt: skip
"""What is measured in every run; beside these, `EVALUATED` in each cluster, such as accuracy_cluster_1."""

_SIGNIFICANT_DIGITS = 5
"""Of a measure, which is a mean over agents and samples: more than any table shows, and few enough to keep the rows of
large grids under version control."""

BASELINES = {"clean": "Attackers clean", "removed": "Attackers removed"}
"""The columns of what a defence reaches without attack, by what malicious agents do."""

UNTIMED_PHASES = ("evaluate", "checkpoint")
"""The phases of a round that its seconds leave out."""


@dataclass(frozen=True)
class GridResults:
    """A grid's folder, its grid.toml, what tuning chose, and a row for each run: `KEYS`, measures and `error`.

    A run is one seed of a cell or of a floor, done or failed; of other runs there is no row.
    """

    folder: Path
    table: dict[str, Any]
    tuning: dict[str, Any]
    rows: pd.DataFrame

    @property
    def title(self) -> str:
        """What the page calls the grid."""
        return str(self.table.get("title") or self.table.get("name") or self.folder.name)

    @property
    def settings(self) -> list[str]:
        """The settings in the grid's order; one without a name where it has none."""
        return [*self.table.get("settings", {})] or [""]

    @property
    def defences(self) -> list[str]:
        """The defences in the grid's order."""
        return [*self.table["defences"]]

    @property
    def attacks(self) -> list[str]:
        """The attacks in the grid's order."""
        return [*self.table["attacks"]]

    @property
    def seeds(self) -> list[int]:
        """The seeds of every cell."""
        return [*self.table["seeds"]]

    def defence_seeds(self, defence: str) -> list[int]:
        """Those that a defence is run with, which may be fewer."""
        return [*self.table["defences"][defence].get("seeds", self.seeds)]

    @property
    def set_aside(self) -> list[str]:
        """The attacks without which the worst is told a second time."""
        return [*self.table.get("set_aside", [])]

    @property
    def reference(self) -> str:
        """The defence that the others are compared with: the grid's, else the first."""
        return str(self.table.get("reference") or self.defences[0])

    def algorithm_name(self, defence: str) -> str:
        """The name of a defence's algorithm."""
        table = {
            **self.table.get("algorithm", {}),
            **self.table["defences"][defence].get("algorithm", {}),
        }
        return str(table.get("name"))

    def summary_csv(self) -> str:
        """The rows as CSV: with grid.toml, all that a report needs."""
        return self.rows.to_csv(index=False, float_format=f"%.{_SIGNIFICANT_DIGITS}g")


def is_grid(folder: Path) -> bool:
    """Whether a folder is that of a grid, or holds the summary of one."""
    return (folder / "grid.toml").is_file()


def read_grid(folder: Path, reference: str | None = None) -> GridResults:
    """What a grid's folder holds so far: its runs or, where there are none, its summary.csv.

    `reference` is the defence that the others are compared with, if not the grid's own. Raises RunError where the
    folder holds neither, or cannot be read, and ConfigError where the grid has no such defence.
    """
    table = _read_definition(folder / "grid.toml")
    if reference is not None:
        if reference not in table["defences"]:
            like = did_you_mean(reference, table["defences"])
            known = ", ".join(table["defences"])
            raise ConfigError(f"{folder} has no defence `{reference}`.{like} It has: {known}")
        table["reference"] = reference
    tuned = (
        read_json_with_checksum(folder / "tuning.json")
        if (folder / "tuning.json").is_file()
        else {}
    )
    chosen = {defence: choice for defence, choice in tuned.items() if defence in table["defences"]}
    if (folder / "cells.json").is_file():
        rows = _rows_from_runs(folder, read_cells(folder / "cells.json"), table["seeds"])
    elif (folder / "summary.csv").is_file():
        rows = _rows_from_csv(folder / "summary.csv")
    else:
        raise RunError(
            f"{folder} holds a grid.toml, but no run and no summary.csv: fedcb2o bench runs the grid"
        )
    return GridResults(folder, table, chosen, rows)


def _read_definition(path: Path) -> dict[str, Any]:
    try:
        table = read_toml(path)
        for key, kind in (("defences", dict), ("attacks", dict), ("seeds", list)):
            if not isinstance(table.get(key), kind):
                raise ValueError(f"its `{key}` is missing, or another kind of value")
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path} cannot be read ({error}): restore it, or run the grid again"
        ) from error
    return table


def _rows_from_runs(folder: Path, cells: list[dict[str, Any]], seeds: list[int]) -> pd.DataFrame:
    rows: list[dict[str, Any]] = []
    for cell in cells:
        if cell["kind"] == "tuning":
            continue
        keys = {
            "setting": cell["setting"],
            "defence": cell["defence"],
            "attack": cell["attack"] or "",
        }
        keys["role"] = cell["kind"] if cell["kind"] in BASELINES else "attack"
        keys["floor"] = (
            cell["folder"].rpartition("/")[2] if cell["kind"] in BASELINES else cell["floor"] or ""
        )
        measured = _metrics_by_seed(folder / cell["folder"], cell["rounds"])
        for seed in seeds:
            if seed in measured:
                rows.append({**keys, "seed": seed, **measured[seed], "error": ""})
            elif cell["error"]:
                rows.append({**keys, "seed": seed, "error": cell["error"]})
    return _order_columns(
        pd.DataFrame(rows, columns=None if rows else [*KEY_COLUMNS, *RUN_METRICS, "error"])
    )


def metric_names(rows: pd.DataFrame) -> list[str]:
    """The names of the measures that rows have, of single clusters and others among them."""
    return [str(name) for name in rows if name not in (*KEY_COLUMNS, "error")]


def _order_columns(rows: pd.DataFrame) -> pd.DataFrame:
    clusters = [name for name in metric_names(rows) if name not in RUN_METRICS]
    rows = rows.reindex(columns=[*KEY_COLUMNS, *RUN_METRICS, *clusters, "error"])
    return rows.astype(dict.fromkeys(metric_names(rows), float))


def _rows_from_csv(path: Path) -> pd.DataFrame:
    try:
        rows = pd.read_csv(path, dtype=str, keep_default_na=False)
        numbers = rows.drop(columns=[*KEY_COLUMNS[:-1], "error"]).apply(pd.to_numeric)
        return _order_columns(
            rows.assign(**{str(name): numbers[name] for name in numbers}).astype({"seed": int})
        )
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{path} cannot be read ({error}): restore it") from error


def _metrics_by_seed(folder: Path, rounds: int) -> dict[int, dict[str, float]]:
    """The measures of each seed of a run that has done all of its rounds."""
    if not (folder / "config.toml").is_file():
        return {}
    run = Run(folder)
    ended = {seed: run.summary_of(seed) for seed in run.seeds}
    return {
        seed: _seed_metrics(run, seed, summary)
        for seed, summary in ended.items()
        if summary is not None and summary["rounds"] >= rounds
    }


def _seed_metrics(run: Run, seed: int, summary: Mapping[str, Any]) -> dict[str, float]:
    """One seed's measures, over benign agents: scores at the last round, what is received in the last fifth of the
    rounds, seconds and megabytes over all rounds; to `DIGITS`."""
    known = run.records_of(seed)
    benign = known[~known.malicious.to_numpy()]
    last = benign[benign["round"].to_numpy() == summary["round"]]
    of = last.cluster.to_numpy()
    scores = {name: summary[name] for name in RUN_METRICS if name in summary}
    clusters = {
        f"{metric}_cluster_{k + 1}": float(last[metric].to_numpy()[of == k].mean())
        for metric in EVALUATED_METRICS
        for k in sorted(set(of))
    }
    timing = run.timing[run.timing.seed == seed].drop(
        columns=["seed", "round", *UNTIMED_PHASES], errors="ignore"
    )
    sent = {
        "seconds": float(timing.sum(axis="columns").mean()),
        "megabytes": float(benign.answered.mean() * 4 * run.about(seed)["dim"] / 1e6),
    }
    found = {**scores, **_received_statistics(run, seed), **sent, **clusters}
    return {
        name: float(f"{value:.{_SIGNIFICANT_DIGITS}g}")
        for name, value in found.items()
        if value is not None
    }


def _received_statistics(run: Run, seed: int) -> dict[str, float]:
    """What benign agents receive, and what weight it has: from malicious peers, from other clusters, their own.

    Shares are of received models; weights are in m_j, means over agents and rounds, NaN where a rule gives none.
    `malicious_most` is the most malicious models that one of them ever received in a round, `f_exceeded` how often it
    were more than its rule assumes.
    """
    about = run.about(seed)
    pairs = run.pairs[run.pairs.seed.to_numpy() == seed]
    cluster = np.array(about["cluster"])
    malicious = np.array(about["malicious"], dtype=bool)
    pairs = pairs[~malicious[pairs.agent.to_numpy()]]
    late = last_fifth(pairs)
    often = pairs.assign(malicious=malicious[pairs.peer.to_numpy()]).groupby(["round", "agent"])
    counts = often.agg(f=("f", "first"), malicious=("malicious", "sum"))
    assumed = counts.dropna(subset="f")
    me = late.agent.to_numpy()
    peer = late.peer.to_numpy()
    weights = late.weight.to_numpy()
    times = max(int((~malicious).sum()) * late["round"].nunique(), 1)
    other = cluster[me] != cluster[peer]
    received = me != peer

    def share(chosen: np.ndarray) -> float:
        return float(chosen[received].mean()) if received.any() else np.nan

    return {
        "malicious_received": share(malicious[peer]),
        "malicious_most": float(counts.malicious.max()) if len(counts) else np.nan,
        "f_exceeded": float((assumed.malicious > assumed.f).mean()) if len(assumed) else np.nan,
        "other_cluster_weight": float(weights[other].sum() / times),
        "other_cluster_received": share(other),
        "own_weight": float(weights[~received].sum() / times),
    }
