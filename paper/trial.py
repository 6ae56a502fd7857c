"""The guard `exit_test`: FedAssay with it and without, next to training alone.

    .venv/bin/python -m paper.trial      # measure missing runs
    .venv/bin/python -m paper.results    # the table of docs/results.md

The values are in docs/benchmark/trial/values.csv, one row per setting, method, attack and seed:
percent after the last round, over benign agents, of the worst one, and of the worst tenth; and the
share of agents that gave their own model the weight 1 there. Digits are scored on tuning images,
data of owners on their test samples. HAPT and Fashion-MNIST need what docs/owners.md says.
"""

import math
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pandas as pd
from paper import cells
from paper.cells import Cell
from paper.distil import DIGITS, skewed

import fedcb2o

VALUES = Path(__file__).parents[1] / "docs" / "benchmark" / "trial" / "values.csv"
MEASURES = ("accuracy", "worst_accuracy", "tenth_accuracy", "success", "alone")
SEEDS = (5000, 5001, 5002, 5003, 5004)
METHODS: dict[str, dict[str, Any]] = {
    "alone": {"algorithm": {"name": "local_training"}},
    "FedAssay": {},
    "exit_test 0.2": {"algorithm.guards.exit_test": 0.2},
}
ATTACKS: dict[str, dict[str, Any]] = {"none": {"agents.malicious_role": "clean"}, "label flip": {}}
FLIP = {"attack": {"name": "label_flip", "source": 5, "target": 6}}
TUNING = {"evaluate_on": "tuning"}
SETTINGS: dict[str, tuple[str, dict[str, Any], int]] = {
    "digits": ("digits-fedassay", {**DIGITS, **FLIP, **TUNING}, 5),
    "Dirichlet 0.5": ("digits-fedassay", {**skewed(0.5), **FLIP, **TUNING}, 5),
    "HAPT": ("har-fedassay", {}, 4),
    "shops": ("fashion-shops-fedassay", {}, 2),
}
"""Preset, changes of it, and number of seeds."""


def run_cell(cell: Cell) -> list[float]:
    """Run a method for one seed.

    Args:
        cell: Setting, method, attack and seed.

    Returns:
        The values of `MEASURES`, in percent.
    """
    name, method, attack, seed = cell
    preset, changes, _ = SETTINGS[name]
    changes = {"evaluate_every": 1000, **changes, **METHODS[method], **ATTACKS[attack]}
    experiment = fedcb2o.load(preset, {**changes, "seeds": [seed]})
    with tempfile.TemporaryDirectory() as folder:
        run = fedcb2o.run(experiment, out=folder, workers=1)
        last = run.records.query("round == round.max() and not malicious")
        pairs = run.pairs.query("round == round.max() and agent == peer and weight == 1")
    accuracy = last.accuracy.sort_values()
    tenth = accuracy.head(math.ceil(len(accuracy) / 10)).mean()
    alone = last.agent.isin(pairs.agent).mean()
    success = last.attack_success_rate.mean()
    return [100 * float(v) for v in (accuracy.mean(), accuracy.min(), tenth, success, alone)]


def trial_table() -> pd.DataFrame:
    """Return accuracy, that of the worst agent and tenth, and success, as text."""
    table = pd.read_csv(VALUES)
    # A seed that a method lacks would set the means apart.
    known = table.groupby(["attack", "setting", "seed"]).method.transform("nunique")
    table = table[known == len(METHODS)]
    runs = table.groupby(["attack", "setting", "method"])
    means = runs[list(MEASURES[:-1])].mean()
    text = means.map("{:.1f}".format).agg(" / ".join, axis="columns")
    columns = text.unstack("method")[[*METHODS]].dropna()
    seeds = table.groupby(["attack", "setting"]).seed.nunique()
    columns.insert(0, "seeds", seeds.astype(str))
    named = {"attack": "Attack", "setting": "Setting"}
    return columns.reset_index().rename(columns=named).set_index("Setting")


def main() -> None:
    """Measure missing runs."""
    missing = (
        (name, method, attack, seed)
        for name, (_, _, count) in SETTINGS.items()
        for seed in SEEDS[:count]
        for attack in ATTACKS
        for method in METHODS
    )
    cells.measure_missing(VALUES, "setting", missing, run_cell, MEASURES)


if __name__ == "__main__":
    main()
