"""Gain of cooperation over training alone, on data with natural owners.

    python benchmarks/owners.py [NAME ...]

Needs the packages of docs/owners.md. Each data set runs with its preset: FedAssay without attack
and under its flip, averaging (DFedAvgM) under the flip, and local training. A stopped command
continues. Values: docs/benchmark/owners/values.csv, and the table of docs/owners.md. The name
`pooled` trains the network of `movielens` on the ratings of all users, next to published figures.
"""

import csv
import sys
from pathlib import Path

import pandas as pd
import torch
from page_table import replace_table
from torch.nn import functional as F

import fedcb2o
from fedcb2o.data import movielens
from fedcb2o.nn.architectures import factorisation

ROOT = Path(__file__).parents[1]
VALUES = ROOT / "docs/benchmark/owners/values.csv"
RUNS = ROOT / "runs/owners"
MARKS = ("<!-- owners -->", "<!-- /owners -->")
SEEDS = [0, 1]
UNITS = {
    "har": "%",
    "stops": "%",
    "loans": "%",
    "shakespeare": "%",
    "movielens": "stars",
    "flights": "hours",
    "chem97": "points",
}
LOCAL = {"algorithm": {"name": "local_training"}, "agents.malicious_role": "clean"}
CELLS = {
    "alone": LOCAL,
    "clean": {"agents.malicious_role": "clean"},
    "flip": {},
    "averaging": {"algorithm": {"name": "dfedavgm"}},
}


def owner_values(name: str, cell: str) -> pd.DataFrame:
    """Run a cell, or read it; return one value per benign owner and seed, high is good."""
    preset = f"{name}-fedassay"
    changes = CELLS[cell] | {"evaluate_every": 100, "checkpoint_every": 100}
    experiment = fedcb2o.load(preset, changes)
    run = fedcb2o.run(experiment, seeds=SEEDS, out=RUNS / name / cell, workers=1, resume=True)
    records = run.records
    last = records[(records["round"] == experiment.rounds) & ~records["malicious"]]
    values = 100 * last["accuracy"]
    if UNITS[name] != "%":
        values = -(last["test_loss"] ** 0.5)  # the root of the mean squared error
    return last[["seed", "agent"]].assign(value=values)


def row(name: str) -> dict[str, str]:
    """Return the table's row of a data set: mean and worst owner, by the mean over seeds."""
    cells = {cell: owner_values(name, cell) for cell in CELLS}
    is_error = UNITS[name] != "%"
    digits = 2 if is_error else 1
    values = {"data": name, "unit": UNITS[name]}
    for cell, table in cells.items():
        by_seed = table.groupby("seed")["value"]
        for statistic in ("mean", "min"):
            value = abs(by_seed.agg(statistic).mean())
            values[f"{cell} {statistic}"] = f"{value:.{digits}f}"

    keys = ["seed", "agent"]
    for cell in ("clean", "flip"):
        paired = cells[cell].merge(cells["alone"], on=keys, suffixes=("", " alone"))
        difference = paired["value"] - paired["value alone"]
        by_seed = difference.groupby(paired["seed"]).mean()
        values[f"{cell} gain"] = f"{by_seed.mean():+.{digits}f}"
        values[f"{cell} owners"] = f"{100 * (difference > 0).mean():.0f}"
        values[f"{cell} gains"] = "yes" if (by_seed > 0).all() else "no"
    return values


def print_pooled() -> None:
    """Print the error on random 30% of the ratings: of the mean, and after epochs of Adam."""
    torch.manual_seed(0)
    data = movielens(by_time=False, test_share=0.3)
    pool, test = data.pool, data.test
    print("mean", float((test.y - pool.y.mean()).square().mean().sqrt()))
    network = factorisation([2], 1, sizes=[671, 9066], dim=20)
    optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)
    for epoch in range(6):
        for rows in torch.randperm(len(pool)).split(512):
            optimiser.zero_grad()
            F.mse_loss(network(pool.x[rows])[:, 0], pool.y[rows]).backward()
            optimiser.step()
        with torch.no_grad():
            error = (network(test.x)[:, 0] - test.y).square().mean().sqrt()
        print("epoch", epoch + 1, float(error))


def main() -> None:
    """Measure the named data sets, and write all values and the table."""
    if sys.argv[1:] == ["pooled"]:
        print_pooled()
        return
    rows = {}
    if VALUES.exists():
        with VALUES.open(encoding="utf-8") as file:
            rows = {values["data"]: values for values in csv.DictReader(file)}
    for name in sys.argv[1:] or UNITS:
        rows[name] = row(name)
        print(rows[name], flush=True)
        VALUES.parent.mkdir(parents=True, exist_ok=True)
        with VALUES.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[name]))
            writer.writeheader()
            writer.writerows(rows[known] for known in UNITS if known in rows)
    write_page([rows[name] for name in UNITS if name in rows])


def write_page(rows: list[dict[str, str]]) -> None:
    """Write the table of docs/owners.md."""
    header = ["data", "unit", "alone", "FedAssay", "under the flip", "averaging under it"]
    table = [[*header, "gain", "gain under the flip", "owners that gain"]]
    for values in rows:
        cells = [f"{values[f'{cell} mean']} / {values[f'{cell} min']}" for cell in CELLS]
        gains = [
            values[f"{cell} gain"] if values[f"{cell} gains"] == "yes" else "nothing"
            for cell in ("clean", "flip")
        ]
        shares = f"{values['clean owners']}% / {values['flip owners']}%"
        unit = values["unit"] if values["unit"] == "%" else f"error in {values['unit']}"
        table.append([f"`{values['data']}`", unit, *cells, *gains, shares])
    replace_table(ROOT / "docs/owners.md", MARKS, table, 2)


if __name__ == "__main__":
    main()
