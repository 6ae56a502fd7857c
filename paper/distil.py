"""Ablation of FedAssay: the method without one part at a time, on tuning images.

    .venv/bin/python -m paper.distil            # measure missing runs, ten minutes on a quiet core
    .venv/bin/python -m paper.distil --table    # print the means

The values are in docs/benchmark/distil/values.csv, one row per setting, method, attack and seed:
percent over benign agents after the last round. Seeds and images are not those of any result.
"""

import argparse
import csv
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pandas as pd

import fedcb2o

VALUES = Path(__file__).parents[1] / "docs" / "benchmark" / "distil" / "values.csv"
COLUMNS = ("setting", "method", "attack", "seed", "accuracy", "success")
SEEDS = (3000, 3001)
Changes = dict[str, Any]

METHODS: dict[str, Changes] = {
    "FedAssay": {},
    "without newcomer_share": {"algorithm.guards.newcomer_share": False},
    "without max_distance": {"algorithm.guards.max_distance": False},
    "without min_distance": {"algorithm.guards.min_distance": False},
    "without interpolation": {"algorithm.guards.interpolation": 1.0},
    "without loss_tolerance": {"algorithm.guards.loss_tolerance": False},
    "without label_coverage": {"algorithm.label_coverage": 0.0},
    "without the sub-level set": {"algorithm.beta": 1.0},
    "without G": {"algorithm.alpha": 0.0},
    "average loss": {"algorithm.criterion": "average_loss"},
    "average loss, alpha 4": {"algorithm.criterion": "average_loss", "algorithm.alpha": 4.0},
    "alpha 0.25": {"algorithm.alpha": 0.25},
    "alpha 4": {"algorithm.alpha": 4.0},
    "FedCBO": {
        "algorithm": {"name": "fedcbo", "own_model": "judged", "mixing_factor": 1.0, "alpha": 2.0}
    },
}
FLIP = {"name": "label_flip", "source": 9, "target": 4}
ATTACKS: dict[str, Changes] = {
    "none": {"agents.malicious_role": "clean"},
    "label flip": {"attack": {"name": "label_flip", "source": 5, "target": 6}},
    "random models": {"attack": {"name": "random_model"}},
    "ALIE": {"attack": {"name": "alie", "estimated_from": "benign", "z": 1.5}},
    "dissensus": {"attack": {"name": "dissensus", "eps": 0.3}},
    "gossip attack": {"attack": {"name": "spectral", "eps": 0.3}},
    "sybils": {"attack": {**FLIP, "from_round": 12, "sybils": True}},
}
SETTINGS: dict[str, tuple[Changes, tuple[str, ...]]] = {
    "alike": ({}, tuple(ATTACKS)),
    "Dirichlet 0.5": (
        {"agents.skew": {"name": "dirichlet", "concentration": 0.5}},
        ("none", "label flip", "random models"),
    ),
}


def measure(setting: str, method: str, attack: str, seed: int) -> tuple[float, float]:
    """Run one cell.

    Args:
        setting: Name of the setting.
        method: Name of the method.
        attack: Name of the attack.
        seed: Seed.

    Returns:
        Accuracy and attack success in percent, means over benign agents.
    """
    changes = {
        "evaluate_on": "tuning",
        "evaluate_every": 25,
        "seeds": [seed],
        "agents.benign": 7,
        "agents.malicious": 3,
        **SETTINGS[setting][0],
        **METHODS[method],
        **ATTACKS[attack],
    }
    with tempfile.TemporaryDirectory() as folder:
        run = fedcb2o.run(fedcb2o.load("digits-fedassay", changes), out=folder, workers=1)
        last = run.records.query("round == 25 and not malicious")
    return 100 * float(last.accuracy.mean()), 100 * float(last.attack_success_rate.mean())


def main() -> None:
    """Measure missing runs, or print the means."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if not VALUES.exists():
        VALUES.parent.mkdir(exist_ok=True)
        VALUES.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
    if arguments.table:
        table = pd.read_csv(VALUES)
        for measured in ("accuracy", "success"):
            means = table.pivot_table(
                index="method", columns=["setting", "attack"], values=measured, sort=False
            )
            print(f"{measured}\n{means.round(1).to_string()}\n")
        return

    done = set(pd.read_csv(VALUES)[list(COLUMNS[:4])].itertuples(index=False, name=None))
    for seed in SEEDS:
        for setting, (_, attacks) in SETTINGS.items():
            for attack in attacks:
                for method in METHODS:
                    cell = (setting, method, attack, seed)
                    if cell in done:
                        continue
                    values = [f"{value:.2f}" for value in measure(*cell)]
                    with VALUES.open("a", encoding="utf-8", newline="") as file:
                        csv.writer(file, lineterminator="\n").writerow([*cell, *values])


if __name__ == "__main__":
    main()
