"""Long training: the experiment that `fedcb2o new` writes, for 600 rounds under its label flip.

    .venv/bin/python -m paper.long_training                     # measure missing runs
    .venv/bin/python -m paper.long_training --again FedAssay    # measure the runs of a method anew
    .venv/bin/python -m paper.results                           # the table of docs/results.md

The values are in docs/benchmark/long-training/values.csv, one row per method and seed: percent over
benign agents after the rounds in ROUNDS. All methods train on and validate with all samples.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pandas as pd
from paper import cells
from paper.cells import Cell

import fedcb2o
from fedcb2o.cli.new import new

VALUES = Path(__file__).parents[1] / "docs" / "benchmark" / "long-training" / "values.csv"
SETTING = "wine"
ATTACK = "label flip"
SEEDS = (0, 1, 2)
ROUNDS = (15, 100, 600)
MEASURES = tuple(f"{measure}_{n}" for n in ROUNDS for measure in cells.MEASURES)
METHODS: dict[str, dict[str, Any]] = {
    "FedAssay": {"name": "fedassay"},
    "FedAssay, class_loss_gap": {"name": "fedassay", "criterion": "class_loss_gap"},
    "FedCBO": {"name": "fedcbo", "own_model": "judged", "mixing_factor": 1.0},
    "Multi-Krum with guards": {
        "name": "by_rule",
        "rule": "multi_krum",
        "selection": "prob_sampling",
        "guards": True,
    },
    "Local training": {"name": "local_training"},
}


def run_cell(cell: Cell, template: Path) -> list[float]:
    """Run a method for one seed.

    Args:
        cell: Setting, method, attack and seed.
        template: The file mine.toml.

    Returns:
        Accuracy and attack success in percent after each of `ROUNDS`, means over benign agents.
    """
    _, method, _, seed = cell
    changes = {"algorithm": METHODS[method], "rounds": ROUNDS[-1], "seeds": [seed]}
    with tempfile.TemporaryDirectory() as folder:
        run = fedcb2o.run(fedcb2o.load(template, changes), out=folder, workers=1)
        means = run.records.query("not malicious").groupby("round")
        table = 100 * means[["accuracy", "attack_success_rate"]].mean().loc[list(ROUNDS)]
    return [float(value) for value in table.to_numpy().ravel()]


def long_training_table() -> pd.DataFrame:
    """Return accuracy and attack success after each of `ROUNDS`, means over seeds, as text."""
    means = pd.read_csv(VALUES).groupby("method")[list(MEASURES)].mean()
    means = means.loc[[name for name in METHODS if name in means.index]]
    table = pd.DataFrame(index=means.index.rename("Method"))
    for n in ROUNDS:
        accuracy = means[f"accuracy_{n}"].map("{:.1f}".format)
        table[f"round {n}"] = accuracy + " / " + means[f"success_{n}"].map("{:.1f}".format)
    return table


def main() -> None:
    """Measure the missing runs."""
    cells.remove_requested(VALUES, METHODS, __doc__)
    missing = [(SETTING, method, ATTACK, seed) for method in METHODS for seed in SEEDS]
    with tempfile.TemporaryDirectory() as folder:
        template = new(Path(folder) / "lab") / "mine.toml"
        sys.path.insert(0, str(template.parent))
        cells.measure_missing(
            VALUES, SETTING, missing, lambda cell: run_cell(cell, template), MEASURES
        )


if __name__ == "__main__":
    main()
