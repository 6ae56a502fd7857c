"""FedAssay and its rivals in the settings in which its former criterion, class_loss_gap, failed.

    .venv/bin/python -m paper.weak_places                     # measure missing runs
    .venv/bin/python -m paper.weak_places --again FedAssay    # measure a method anew
    .venv/bin/python -m paper.results                         # the table of docs/results.md

The values are in docs/benchmark/weak-places/values.csv, one row per setting, method, attack and
seed: percent over benign agents after the last round, on test images. All methods train on and
validate with all samples. EMNIST is read from the folder that FEDCB2O_DATA names, or from the
user's.
"""

import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pandas as pd
from paper import cells
from paper.cells import Cell
from paper.distil import DIGITS, EMNIST, SMALL, TWO_CLASSES, skewed
from paper.long_training import METHODS

import fedcb2o

VALUES = Path(__file__).parents[1] / "docs" / "benchmark" / "weak-places" / "values.csv"
MEASURES = ("accuracy", "success", "worst_accuracy", "worst_success")
ATTACKS: dict[str, dict[str, Any]] = {
    "none": {"agents.malicious_role": "clean"},
    "label flip": {"attack": {"name": "label_flip", "source": 9, "target": 4}},
}
BOTH = tuple(ATTACKS)
FEDCBO_ALPHA = {"EMNIST": 0.5}
"""alpha of FedCBO that the grid `emnist-all-data` chose; the grid `rivals` chose the default."""


class Setting(NamedTuple):
    """Data and agents of one setting, the attacks that are measured, and the seeds."""

    preset: str
    changes: dict[str, Any]
    attacks: tuple[str, ...] = BOTH
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


SETTINGS = {
    "digits": Setting("digits-fedassay", DIGITS),
    "half of the agents flip": Setting("digits-fedassay", {}, ("label flip",)),
    "the same, 150 rounds": Setting("digits-fedassay", {"rounds": 150}, ("label flip",), (0, 1, 2)),
    "torus": Setting("digits-fedassay", {**DIGITS, "agents.graph": "torus"}),
    "Dirichlet 0.5": Setting("digits-fedassay", skewed(0.5)),
    "two classes": Setting("digits-fedassay", TWO_CLASSES),
    "EMNIST": Setting(SMALL, EMNIST, seeds=(0, 1)),
}


def run_cell(cell: Cell) -> list[float]:
    """Run a method for one seed.

    Args:
        cell: Setting, method, attack and seed.

    Returns:
        Accuracy and attack success in percent after the last round: means over benign agents, and
        those of the worst benign agent.
    """
    name, method, attack, seed = cell
    setting = SETTINGS[name]
    changes = {"evaluate_on": "redrawn", **setting.changes, **ATTACKS[attack]}
    changes |= {"algorithm": METHODS[method], "seeds": [seed]}
    if method == "FedCBO" and name in FEDCBO_ALPHA:
        changes["algorithm.alpha"] = FEDCBO_ALPHA[name]
    experiment = fedcb2o.load(setting.preset, changes)
    experiment = fedcb2o.load(experiment, {"evaluate_every": experiment.rounds})
    with tempfile.TemporaryDirectory() as folder:
        run = fedcb2o.run(experiment, out=folder, workers=1)
        last = run.records.query("round == round.max() and not malicious")
    accuracy, success = 100 * last.accuracy, 100 * last.attack_success_rate
    return [accuracy.mean(), success.mean(), accuracy.min(), success.max()]


def weak_places_table() -> pd.DataFrame:
    """Return accuracy and, under attack, success by setting and method, as text.

    Numbers in brackets are those of the worst agent.
    """
    means = pd.read_csv(VALUES).groupby(["setting", "attack", "method"])[list(MEASURES)].mean()
    rows = {}
    for name, setting in SETTINGS.items():
        for attack in setting.attacks:
            part = means.loc[(name, attack)].loc[list(METHODS)]
            text = (
                part.accuracy.map("{:.1f}".format)
                + " ("
                + part.worst_accuracy.map("{:.0f})".format)
            )
            if attack != "none":
                worst = part.worst_success.map(" ({:.0f})".format)
                text += part.success.map(" / {:.1f}".format) + worst
            rows[f"{name}, {attack}"] = text
    return pd.DataFrame(rows).T.rename_axis("Setting, attack")


def main() -> None:
    """Measure the missing runs."""
    cells.remove_requested(VALUES, METHODS, __doc__)
    missing = [
        (name, method, attack, seed)
        for name, setting in SETTINGS.items()
        for seed in setting.seeds
        for attack in setting.attacks
        for method in METHODS
    ]
    cells.measure_missing(VALUES, "setting", missing, run_cell, MEASURES)


if __name__ == "__main__":
    main()
