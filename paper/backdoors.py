"""Guard `max_sensitivity` against eight triggers, on tuning images.

    .venv/bin/python -m paper.backdoors            # measure missing runs
    .venv/bin/python -m paper.backdoors --table    # print the means

The values are in docs/benchmark/backdoors/values.csv: percent over benign agents after the last
round.
"""

import argparse
import csv
import itertools
import os
import tempfile
import tomllib
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pandas as pd

import fedcb2o

VALUES = Path(__file__).parents[1] / "docs" / "benchmark" / "backdoors" / "values.csv"
COLUMNS = ("data", "method", "attack", "seed", "accuracy", "success")
GRID = Path(fedcb2o.__file__).parent / "experiments" / "grids" / "fashion-all-data.toml"
SEEDS = (1000, 1001)

METHODS: dict[str, dict[str, Any]] = {
    "FedAssay": {},
    "max_sensitivity = 3": {"algorithm.guards.max_sensitivity": 3.0},
}
CORNER = {"name": "backdoor", "size": 3, "share": 0.5}
TRIGGERS: dict[str, dict[str, Any]] = {
    "white square": {"name": "backdoor", "target": 7, "share": 0.5},
    "black square": {**CORNER, "target": 5, "size": 4, "margin": 2, "value": 0.0},
    "checkerboard": {
        **CORNER,
        "target": 0,
        "margin": 2,
        "corner": "top right",
        "pattern": "checkerboard",
    },
    "waves": {"name": "signal", "target": 3, "clean": False, "share": 0.5},
    "blended": {"name": "blended", "target": 2, "share": 0.5},
    "distributed": {**CORNER, "target": 8, "corner": "bottom left", "parts": 3},
    "clean label": {"name": "clean_label", "target": 7, "share": 1.0},
    "clean-label waves": {"name": "signal", "target": 3, "share": 1.0},
}
ATTACKS: dict[str, dict[str, Any]] = {
    "none": {"agents.malicious_role": "clean"},
    **{name: {"attack": trigger} for name, trigger in TRIGGERS.items()},
}
WHITE = {"attack": {"name": "backdoor", "target": 7, "size": 4, "margin": 1, "share": 0.5}}
SETTINGS: dict[str, tuple[dict[str, dict[str, Any]], tuple[int, ...]]] = {
    "digits": (ATTACKS, SEEDS),
    "Fashion-MNIST": ({"none": ATTACKS["none"], "white square": WHITE}, SEEDS[:1]),
}


def settings(data: str) -> dict[str, Any]:
    """Return what differs from the preset `digits-fedassay`.

    Args:
        data: "digits" or "Fashion-MNIST".

    Returns:
        Changes of the configuration.
    """
    if data == "digits":
        return {"agents.benign": 7, "agents.malicious": 3, "evaluate_every": 25}
    grid = tomllib.loads(GRID.read_text(encoding="utf-8"))
    changes = {key: grid[key] for key in ("data", "model", "rounds", "evaluate_every")}
    for section in ("agents", "training"):
        changes |= {f"{section}.{key}": value for key, value in grid[section].items()}
    return changes


def measure(data: str, method: str, attack: str, seed: int) -> tuple[float, float]:
    """Run one cell.

    Args:
        data: Name of the data set.
        method: Name of the method.
        attack: Name of the attack.
        seed: Seed.

    Returns:
        Accuracy and attack success in percent, means over benign agents.
    """
    changes = {
        "evaluate_on": "tuning",
        "seeds": [seed],
        **settings(data),
        **METHODS[method],
        **SETTINGS[data][0][attack],
    }
    with tempfile.TemporaryDirectory() as folder:
        run = fedcb2o.run(fedcb2o.load("digits-fedassay", changes), out=folder, workers=1)
        last = run.records.query("round == round.max() and not malicious")
    return 100 * float(last.accuracy.mean()), 100 * float(last.attack_success_rate.mean())


def main() -> None:
    """Measure missing runs, or print the means."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if arguments.table:
        means = pd.read_csv(VALUES).pivot_table(
            index=["data", "attack"], columns="method", values=["success", "accuracy"], sort=False
        )
        print(means.round(1).to_string())
        return

    if not VALUES.exists():
        VALUES.parent.mkdir(exist_ok=True)
        VALUES.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
    done = set(pd.read_csv(VALUES)[list(COLUMNS[:4])].itertuples(index=False, name=None))
    for data, (attacks, seeds) in SETTINGS.items():
        for seed, method, attack in itertools.product(seeds, METHODS, attacks):
            cell = (data, method, attack, seed)
            if cell in done:
                continue
            values = [f"{value:.2f}" for value in measure(*cell)]
            with VALUES.open("a", encoding="utf-8", newline="") as file:
                csv.writer(file, lineterminator="\n").writerow([*cell, *values])


if __name__ == "__main__":
    main()
