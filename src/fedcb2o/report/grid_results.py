"""Results of a grid, one row per run.

A baseline is a run without attack. Its malicious agents train on true labels ("clean"), or do not
exist ("removed"). The row of a baseline has no attack; the row of an attacked cell names its
baselines in the column `floor`. Both have the metrics of the attack's goal.
"""

import gzip
import io
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedcb2o.errors import ConfigError, RunError
from fedcb2o.plugins import did_you_mean
from fedcb2o.records import (
    MATRIX_METRICS,
    METRICS,
    OPTIONAL_METRICS,
    STANDARD_METRICS,
    Metric,
    Run,
    chosen_metrics,
    last_fifth,
    one_line,
    read_cells,
    read_json_with_checksum,
    read_toml,
)
from fedcb2o.report._grid_metrics import GridMetric, chosen_infos, metric_info
from fedcb2o.safe_files import read_regular

KEY_COLUMNS = ["setting", "defence", "attack", "role", "floor", "seed"]
_SUMMARY_SUFFIXES = ("", "_worst", "_worst_tenth")
RUN_METRICS = [
    *(metric + suffix for metric in STANDARD_METRICS for suffix in _SUMMARY_SUFFIXES),
    *(name for name in MATRIX_METRICS if name not in STANDARD_METRICS),
    "malicious_received",
    "malicious_most",
    "f_exceeded",
    "other_cluster_weight",
    "other_cluster_received",
    "own_weight",
    "seconds",
    "megabytes",
]
"""Metrics of every run. Those of the key `metrics`, the test loss, and columns such as
accuracy_cluster_1 follow, one per metric and cluster.
"""

# Digits of a metric: more than a table shows, and small files for version control.
_SIGNIFICANT_DIGITS = 5

BASELINES = {"clean": "Attackers clean", "removed": "Attackers removed"}
"""Columns without attack, by the role of malicious agents."""

_MAX_CSV_BYTES = 2**28
_SUMMARY_FILES = ("summary.csv", "summary.csv.gz")

UNTIMED_PHASES = ("evaluate", "checkpoint")
"""Phases of a round that its seconds leave out."""

_BYTES_PER_PARAMETER = 4


@dataclass(frozen=True)
class GridResults:
    """The results of a grid.

    A run is one seed of a cell or of a baseline, finished or failed. Other runs have no row.

    Attributes:
        folder: Folder of the grid.
        table: Content of grid.toml.
        tuning: Hyperparameters chosen by tuning, by defence.
        rows: One row per run with `KEY_COLUMNS`, metrics and `error`.
        curves: One row per run and evaluated round with `KEY_COLUMNS`, `round`, the round T_G as
            `criterion_from_round` (0 for none) and metrics; empty where only summary.csv was read.
    """

    folder: Path
    table: dict[str, Any]
    tuning: dict[str, Any]
    rows: pd.DataFrame
    curves: pd.DataFrame = field(default_factory=pd.DataFrame)

    @property
    def title(self) -> str:
        """The title of the grid, else its name, else the name of the folder."""
        title = one_line(str(self.table.get("title", "")))
        return title or str(self.table.get("name") or self.folder.name)

    @property
    def settings(self) -> list[str]:
        """The settings in the order of the grid; [""] without any."""
        return [*self.table.get("settings", {})] or [""]

    @property
    def defences(self) -> list[str]:
        """The defences in the order of the grid, also those without a finished run."""
        return [*self.table["defences"]]

    @property
    def attacks(self) -> list[str]:
        """The attacks in the order of the grid, without the baselines."""
        return [*self.table["attacks"]]

    @property
    def seeds(self) -> list[int]:
        """The seeds of every cell; a defence may have its own, see `defence_seeds`."""
        return [*self.table["seeds"]]

    def defence_seeds(self, defence: str) -> list[int]:
        """Return the seeds of one defence, by default those of the grid."""
        return [*self.table["defences"][defence].get("seeds", self.seeds)]

    @property
    def set_aside(self) -> list[str]:
        """The attacks that a second worst column leaves out, if any."""
        return [*self.table.get("set_aside", [])]

    @property
    def reference(self) -> str:
        """The defence that the others are compared with, by default the first one."""
        return str(self.table.get("reference") or self.defences[0])

    @cached_property
    def chosen(self) -> dict[str, Metric]:
        """The metrics of the key `metrics` in the grid or its entries, and the test loss."""
        axes = [self.table, *self.table["defences"].values(), *self.table["attacks"].values()]
        axes += self.table.get("settings", {}).values()
        entries = [entry for axis in axes for entry in axis.get("metrics", [])]
        return {**chosen_metrics(entries), "test_loss": METRICS["test_loss"]}

    def info(self, value: str) -> GridMetric:
        """Return the description of a metric, a column of `rows`."""
        infos = chosen_infos(self.chosen)
        if value == "lost" and self.main != "accuracy":
            main = metric_info(self.main, infos)
            caption = f"{main.title}, the distance to that of the better of the two baselines."
            return GridMetric(f"{main.title} lost", caption, "high", main.is_percent)
        return metric_info(value, infos)

    @cached_property
    def main(self) -> str:
        """The metric that effects of attacks are measured by: `rank_by`, or else the accuracy.

        Where runs have none, it is the first one that they have of the others.
        """
        names = [self.table.get("rank_by"), "accuracy", "test_loss", *self.chosen]
        measured = [name for name in names if name in self.rows and self.rows[name].notna().any()]
        return str(measured[0]) if measured else "accuracy"

    def summary_csv(self) -> str:
        """Return the rows as CSV, the input of a report, with five significant digits."""
        return self.rows.to_csv(index=False, float_format=f"%.{_SIGNIFICANT_DIGITS}g")


def is_grid(folder: Path) -> bool:
    """Return True if a folder has a grid or its summary."""
    return (folder / "grid.toml").is_file()


def read_grid(folder: Path, reference: str | None = None) -> GridResults:
    """Read the results of a grid from its runs or summary.csv.

    Args:
        folder: Folder of the grid.
        reference: Defence that the others are compared with; by default that of the grid.

    Returns:
        The results so far.

    Raises:
        ConfigError: The grid has no defence `reference`.
        RunError: The folder has neither runs nor a summary, or cannot be read.
    """
    table = _read_definition(folder / "grid.toml")
    if reference is not None:
        if reference not in table["defences"]:
            hint = did_you_mean(reference, table["defences"])
            names = ", ".join(table["defences"])
            raise ConfigError(f"{folder} has no defence `{reference}`.{hint} It has: {names}")
        table["reference"] = reference

    tuning = {}
    if (folder / "tuning.json").is_file():
        choices = read_json_with_checksum(folder / "tuning.json")
        tuning = {name: choice for name, choice in choices.items() if name in table["defences"]}

    # Runs are the source, and the summary stands for them where only it was published.
    curves = pd.DataFrame()
    if (folder / "cells.json").is_file():
        rows, curves = _rows_from_runs(folder, read_cells(folder / "cells.json"), table["seeds"])
    elif summaries := [path for name in _SUMMARY_FILES if (path := folder / name).is_file()]:
        rows = _rows_from_csv(summaries[0])
    else:
        raise RunError(
            f"{folder} holds a grid.toml, but no run and no summary.csv: "
            "fedcb2o bench runs the grid"
        )
    return GridResults(folder, table, tuning, rows, curves)


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


def _rows_from_runs(
    folder: Path, cells: list[dict[str, Any]], seeds: list[int]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    rows: list[dict[str, Any]] = []
    curves: list[pd.DataFrame] = []
    for cell in cells:
        if cell["kind"] == "tuning":
            continue
        keys = {name: cell[name] or "" for name in ("setting", "defence", "attack")}
        if cell["kind"] in BASELINES:
            keys |= {"role": cell["kind"], "floor": cell["folder"].rpartition("/")[2]}
        else:
            keys |= {"role": "attack", "floor": cell["floor"] or ""}
        results = _results_by_seed(folder / cell["folder"], cell["rounds"])
        for seed in seeds:
            if seed in results:
                metrics, curve = results[seed]
                rows.append({**keys, "seed": seed, **metrics, "error": ""})
                curves.append(curve.assign(**keys, seed=seed))
            elif cell["error"]:
                rows.append({**keys, "seed": seed, "error": cell["error"]})
    if not rows:
        empty = pd.DataFrame(rows, columns=[*KEY_COLUMNS, *RUN_METRICS, "error"])
        return _order_columns(empty), pd.DataFrame()
    table = _order_columns(pd.DataFrame(rows))
    return table, pd.concat(curves, ignore_index=True) if curves else pd.DataFrame()


def metric_names(rows: pd.DataFrame) -> list[str]:
    """Return the names of metrics, single clusters included."""
    return [str(name) for name in rows if name not in (*KEY_COLUMNS, "error")]


def _order_columns(rows: pd.DataFrame) -> pd.DataFrame:
    others = [name for name in metric_names(rows) if name not in RUN_METRICS]
    rows = rows.reindex(columns=[*KEY_COLUMNS, *RUN_METRICS, *others, "error"])
    return rows.astype(dict.fromkeys(metric_names(rows), float))


def _rows_from_csv(path: Path) -> pd.DataFrame:
    try:
        content = read_regular(path, _MAX_CSV_BYTES)
        if path.suffix == ".gz":
            content = _unpacked(content)
        rows = pd.read_csv(io.BytesIO(content), dtype=str, keep_default_na=False)
        numbers = rows.drop(columns=[*KEY_COLUMNS[:-1], "error"]).apply(pd.to_numeric)
        rows = rows.assign(**{str(name): numbers[name] for name in numbers})
        return _order_columns(rows.astype({"seed": int}))
    except (OSError, EOFError, zlib.error, ValueError, KeyError) as error:
        raise RunError(f"{path} cannot be read ({error}): restore it") from error


def _unpacked(content: bytes) -> bytes:
    """Unpack a table; a small file of others could unpack to more than the memory."""
    with gzip.open(io.BytesIO(content)) as file:
        unpacked = file.read(_MAX_CSV_BYTES + 1)
    if len(unpacked) > _MAX_CSV_BYTES:
        raise ValueError(f"it unpacks to more than {_MAX_CSV_BYTES} bytes")
    return unpacked


def _results_by_seed(folder: Path, rounds: int) -> dict[int, tuple[dict[str, float], pd.DataFrame]]:
    """Compute the metrics of each finished seed of a run, and its curve."""
    if not (folder / "config.toml").is_file():
        return {}
    run = Run(folder)
    results = {}
    for seed in run.seeds:
        summary = run.summary_of(seed)
        if summary is not None and summary["rounds"] >= rounds:
            records = run.records_of(seed)
            benign = records[~records.malicious.to_numpy()]
            results[seed] = _seed_metrics(run, seed, summary, benign), _seed_curve(run, benign)
    return results


def _seed_curve(run: Run, benign: pd.DataFrame) -> pd.DataFrame:
    """Compute the mean of each metric over benign agents, by evaluated round."""
    names = [*STANDARD_METRICS, *OPTIONAL_METRICS, *run.custom_metrics]
    names = [name for name in names if name in benign]
    means = benign.groupby("round")[names].mean().dropna(how="all")
    return means.reset_index().assign(criterion_from_round=run.criterion_from_round)


def _seed_metrics(
    run: Run, seed: int, summary: Mapping[str, Any], benign: pd.DataFrame
) -> dict[str, float]:
    """Compute the metrics of one seed: scores of benign agents at the last round, and costs."""
    last = benign[benign["round"].to_numpy() == summary["round"]]
    names = [*RUN_METRICS, *chosen_infos({**run.custom_metrics, "test_loss": METRICS["test_loss"]})]
    metrics = {name: summary[name] for name in names if name in summary}
    metrics |= _received_statistics(run, seed)

    timing = run.timing[run.timing.seed == seed]
    timing = timing.drop(columns=["seed", "round", *UNTIMED_PHASES], errors="ignore")
    metrics["seconds"] = float(timing.sum(axis="columns").mean())
    size = _BYTES_PER_PARAMETER * run.about(seed)["dim"]
    metrics["megabytes"] = float(benign.answered.mean() * size / 1e6)

    clusters = last.cluster.to_numpy()
    for metric in STANDARD_METRICS:
        for cluster in sorted(set(clusters)):
            values = last[metric].to_numpy()[clusters == cluster]
            metrics[f"{metric}_cluster_{cluster + 1}"] = float(values.mean())
    return {
        name: float(f"{value:.{_SIGNIFICANT_DIGITS}g}")
        for name, value in metrics.items()
        if value is not None
    }


def _received_statistics(run: Run, seed: int) -> dict[str, float]:
    """Compute shares of received models, and weights in m_j, of benign agents.

    Weights are means over agents and rounds, NaN for a rule without weights. `f_exceeded` is the
    share of rounds with more malicious models than the rule assumes.
    """
    metadata = run.about(seed)
    cluster = np.array(metadata["cluster"])
    malicious = np.array(metadata["malicious"], dtype=bool)
    pairs = run.pairs[run.pairs.seed.to_numpy() == seed]
    pairs = pairs[~malicious[pairs.agent.to_numpy()]]

    by_agent = pairs.assign(malicious=malicious[pairs.peer.to_numpy()]).groupby(["round", "agent"])
    counts = by_agent.agg(f=("f", "first"), malicious=("malicious", "sum"))
    assumed = counts.dropna(subset="f")

    late = last_fifth(pairs)
    agent = late.agent.to_numpy()
    peer = late.peer.to_numpy()
    weights = late.weight.to_numpy()
    agent_rounds = max(pairs.agent.nunique() * late["round"].nunique(), 1)
    is_other_cluster = cluster[agent] != cluster[peer]
    is_received = agent != peer
    return {
        "malicious_received": _mean(malicious[peer][is_received]),
        "malicious_most": float(counts.malicious.max()) if len(counts) else np.nan,
        "f_exceeded": _mean((assumed.malicious > assumed.f).to_numpy()),
        "other_cluster_weight": float(weights[is_other_cluster].sum() / agent_rounds),
        "other_cluster_received": _mean(is_other_cluster[is_received]),
        "own_weight": float(weights[~is_received].sum() / agent_rounds),
    }


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else np.nan
