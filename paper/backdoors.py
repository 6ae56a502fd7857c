"""Guard `max_sensitivity` against eight triggers, on tuning images.

    .venv/bin/python -m paper.backdoors            # measure missing runs
    .venv/bin/python -m paper.backdoors --table    # print the means

The values are in docs/benchmark/backdoors/values.csv: percent over benign agents after the last
round.
"""

import argparse
import itertools
import os
import tomllib
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pandas as pd
from paper import cells
from paper.cells import Cell

import fedcb2o

VALUES = Path(__file__).parents[1] / "docs" / "benchmark" / "backdoors" / "values.csv"
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


def measure(cell: Cell) -> tuple[float, float]:
    """Return accuracy and attack success of a cell."""
    data, method, attack, seed = cell
    changes = {**settings(data), **METHODS[method], **SETTINGS[data][0][attack]}
    return cells.measure("digits-fedassay", changes, seed)


def main() -> None:
    """Measure missing runs, or print the means."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true")
    if parser.parse_args().table:
        means = pd.read_csv(VALUES).pivot_table(
            index=["data", "attack"], columns="method", values=["success", "accuracy"], sort=False
        )
        print(means.round(1).to_string())
        return

    for data, (attacks, seeds) in SETTINGS.items():
        cells.measure_missing(
            VALUES, "data", itertools.product([data], METHODS, attacks, seeds), measure
        )


if __name__ == "__main__":
    main()
