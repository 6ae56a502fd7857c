"""Measurements on tuning images: run the cells that a table lacks, and add them one by one."""

import argparse
import csv
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

import fedcb2o

Cell = tuple[str, str, str, int]
"""Setting, method, attack and seed."""

MEASURES = ("accuracy", "success")


def measure(preset: str, changes: Mapping[str, Any], seed: int) -> tuple[float, float]:
    """Run an experiment on tuning images.

    Args:
        preset: Preset of the experiment.
        changes: Changes of it, by dotted key.

    Returns:
        Accuracy and attack success in percent, means over benign agents after the last round.
    """
    experiment = fedcb2o.load(preset, {"evaluate_on": "tuning", **changes, "seeds": [seed]})
    with tempfile.TemporaryDirectory() as folder:
        run = fedcb2o.run(experiment, out=folder, workers=1)
        last = run.records.query("round == round.max() and not malicious")
    return 100 * float(last.accuracy.mean()), 100 * float(last.attack_success_rate.mean())


def measure_missing(
    path: Path,
    setting: str,
    cells: Iterable[Cell],
    run: Callable[[Cell], Sequence[float]],
    measures: Sequence[str] = MEASURES,
    decimals: int = 2,
) -> None:
    """Measure the cells that a table lacks, and add each to it as it ends.

    Args:
        path: CSV file of the table, which may be missing.
        setting: Name of the first column.
        cells: The cells, in the order of their measurement.
        run: Returns the values of a cell.
        measures: Names of these values.
        decimals: Decimals of these values in the table.
    """
    columns = (setting, "method", "attack", "seed")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(",".join((*columns, *measures)) + "\n", encoding="utf-8")
    done = set(pd.read_csv(path)[list(columns)].itertuples(index=False, name=None))
    for cell in cells:
        if cell in done:
            continue
        values = [f"{value:.{decimals}f}" for value in run(cell)]
        with path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow([*cell, *values])


def remove_requested(path: Path, methods: Iterable[str], description: str | None) -> None:
    """Read the command line of a measurement, and remove the rows of the method of `--again`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--again", choices=methods, help="method whose runs are measured anew")
    again = parser.parse_args().again
    if again:
        table = pd.read_csv(path, dtype=str)
        table[table.method != again].to_csv(path, index=False, lineterminator="\n")
