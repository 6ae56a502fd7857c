"""Table of membership inference against the models of runs."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from fedcb2o.records import Run
from fedcb2o.report.tables import ResultTable, format_mean_interval, run_labels


def membership_table(runs: Sequence[Run], data_dir: Any = None) -> pd.DataFrame:
    """Tabulate membership inference against the models of runs.

    Args:
        runs: Runs with a checkpoint.
        data_dir: Folder of the data sets.

    Returns:
        Text in percent, mean over seeds of the means over benign agents, with its interval: AUC and
        true positive rate at 1% false positives (rows), by run and by model, sent or kept.
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
