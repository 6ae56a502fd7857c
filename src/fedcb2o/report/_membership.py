"""Tables from the trained models of runs: membership inference, and gain by class."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from fedcb2o.records import Run
from fedcb2o.report.tables import ResultTable, find_local_baseline, format_mean_interval, run_labels


def membership_table(runs: Sequence[Run], data_dir: Any = None) -> pd.DataFrame:
    """Tabulate membership inference against the models of runs with a checkpoint.

    Cells are texts in percent: the mean over seeds of the means over benign agents, with its
    interval.
    """
    columns: dict[str, dict[str, str]] = {}
    for label, run in zip(run_labels(runs), runs, strict=True):
        tables = [run.membership(seed=seed, data_dir=data_dir) for seed in run.seeds]
        means = [table.groupby("model")[["auc", "tpr"]].mean() for table in tables]
        for model in ("sent", "kept"):
            columns[f"{label}, {model}"] = {
                heading: format_mean_interval(pd.Series([mean.loc[model, key] for mean in means]))
                for key, heading in (("auc", "AUC"), ("tpr", "TPR at 1% FPR"))
            }
    return ResultTable(columns)


def class_gain_table(runs: Sequence[Run], data_dir: Any = None) -> pd.DataFrame:
    """Tabulate the gain over training alone by class, for runs with a local baseline.

    Cells are texts in percent over the test samples of all benign agents: mean over seeds with its
    interval.
    """
    columns: dict[str, pd.Series[str]] = {}
    for label, run in zip(run_labels(runs), runs, strict=True):
        baseline = find_local_baseline(run, runs)
        if baseline is None:
            continue
        seeds = sorted(set(run.seeds) & set(baseline.seeds))
        own = _class_accuracies(run, seeds, data_dir)
        alone = _class_accuracies(baseline, seeds, data_dir)
        columns[f"{label}, accuracy"] = own.apply(format_mean_interval, axis=1)
        columns[f"{label}, local baseline"] = alone.apply(format_mean_interval, axis=1)
        gain = own - alone
        columns[f"{label}, gain"] = gain.apply(format_mean_interval, axis=1, is_difference=True)
    return ResultTable(columns)


def _class_accuracies(run: Run, seeds: Sequence[int], data_dir: Any) -> pd.DataFrame:
    """Return the accuracy over the samples of each class (rows), by seed."""
    accuracies = {}
    for seed in seeds:
        matrix = run.confusion(seed=seed, data_dir=data_dir)
        right = pd.Series(matrix.to_numpy().diagonal(), matrix.index)
        accuracies[seed] = right / matrix.sum(axis=1)
    return pd.DataFrame(accuracies).rename_axis("class")
