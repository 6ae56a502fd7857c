"""Long training under a label flip: small data, memorised long before the last round.

    .venv/bin/python -m paper.long_training                     # measure missing runs, half an hour
    .venv/bin/python -m paper.long_training --again FedAssay    # measure the runs of a method anew
    .venv/bin/python -m paper.results                           # the table of docs/results.md

The values are in docs/benchmark/long-training/values.csv, one row per setting, method and seed:
percent over benign agents after the rounds in ROUNDS, and of the worst of them after the last. All
methods train on and validate with all samples.
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
PRESET = "digits-fedassay"
ATTACK = "label flip"
SEEDS = (0, 1, 2)
ROUNDS = (50, 300, 1000)
MEASURES = (
    *(f"{measure}_{n}" for n in ROUNDS for measure in cells.MEASURES),
    "worst_accuracy",
    "worst_success",
)
FEW: dict[str, Any] = {"agents.benign": 7, "agents.malicious": 3, "evaluate_on": "redrawn"}
SETTINGS: dict[str, dict[str, Any]] = {
    "wine, 16 samples": {},
    "digits, 16 samples": {
        **FEW,
        "agents.benign_samples": 16,
        "agents.malicious_samples": 16,
        "attack": {"name": "label_flip", "source": 9, "target": 4},
    },
    "breast_cancer, 30 samples": {
        **FEW,
        "agents.num_clusters": 1,
        "data": {"name": "breast_cancer"},
        "model": {"name": "mlp", "hidden": [16]},
        "agents.benign_samples": 30,
        "agents.malicious_samples": 30,
        "attack": {"name": "label_flip", "source": 0, "target": 1},
    },
}
"""Changes of the experiment that `fedcb2o new` writes, or of the preset `digits-fedassay`."""
CLEAN = "FedAssay, attackers clean"
"""Name of the rows in which attackers train on true labels."""
METHODS: dict[str, dict[str, Any]] = {
    "FedAssay": {"name": "fedassay"},
    "FedAssay, class_loss_gap": {
        "name": "fedassay",
        "criterion": "class_loss_gap",
        "rank_tolerance": False,  # as the method was with this criterion
    },
    "FedCBO": {"name": "fedcbo", "own_model": "judged", "mixing_factor": 1.0},
    "Multi-Krum with guards": {
        "name": "by_rule",
        "rule": "multi_krum",
        "selection": "prob_sampling",
        "guards": True,
    },
    "Local training": {"name": "local_training"},
}

ROWS = {CLEAN: METHODS["FedAssay"], **METHODS}


def run_cell(cell: Cell, template: Path) -> list[float]:
    """Run a method for one seed.

    Args:
        cell: Setting, method, attack and seed.
        template: The file mine.toml.

    Returns:
        The values of `MEASURES`, in percent.
    """
    name, method, _, seed = cell
    changes = {"algorithm": ROWS[method], "rounds": ROUNDS[-1], "seeds": [seed]}
    if method == CLEAN:
        changes["agents.malicious_role"] = "clean"
    changes |= {"evaluate_every": ROUNDS[0], **SETTINGS[name]}
    with tempfile.TemporaryDirectory() as folder:
        experiment = fedcb2o.load(template if name.startswith("wine") else PRESET, changes)
        run = fedcb2o.run(experiment, out=folder, workers=1)
        records = run.records.query("not malicious")
    means = records.groupby("round")[["accuracy", "attack_success_rate"]].mean().loc[list(ROUNDS)]
    last = records.query("round == round.max()")
    values = [*means.to_numpy().ravel(), last.accuracy.min(), last.attack_success_rate.max()]
    return [100 * float(value) for value in values]


def long_training_table() -> pd.DataFrame:
    """Return accuracy and attack success after each of `ROUNDS`, means over seeds, as text.

    In brackets are those of the worst agent after the last round.
    """
    means = pd.read_csv(VALUES).groupby(["setting", "method"])[list(MEASURES)].mean()
    means = means.loc[[(setting, method) for setting in SETTINGS for method in ROWS]]
    table = pd.DataFrame(index=means.index)
    worst = {"accuracy": "worst_accuracy", "success": "worst_success"}
    for n in ROUNDS:
        text = {name: means[f"{name}_{n}"].map("{:.1f}".format) for name in worst}
        if n == ROUNDS[-1]:
            text = {name: text[name] + means[worst[name]].map(" ({:.0f})".format) for name in worst}
        table[f"round {n:,}"] = text["accuracy"] + " / " + text["success"]
    named = {"setting": "Setting", "method": "Method"}
    return table.reset_index().rename(columns=named).set_index("Setting")


def main() -> None:
    """Measure the missing runs."""
    cells.remove_requested(VALUES, ROWS, __doc__)
    missing = [
        (name, method, ATTACK, seed) for name in SETTINGS for seed in SEEDS for method in ROWS
    ]
    with tempfile.TemporaryDirectory() as folder:
        template = new(Path(folder) / "lab") / "mine.toml"
        sys.path.insert(0, str(template.parent))
        cells.measure_missing(
            VALUES, "setting", missing, lambda cell: run_cell(cell, template), MEASURES
        )


if __name__ == "__main__":
    main()
