"""Gain of cooperation over training alone, on data with natural owners.

    python benchmarks/owners.py [NAME ...]

Needs the packages of docs/owners.md. Each data set runs with its preset: FedAssay without attack
and under its flip, averaging (DFedAvgM) under the flip, and local training. A stopped command
continues. Values: docs/benchmark/owners/values.csv, and the table of docs/owners.md. The name
`published` trains the networks of `movielens` and `shakespeare` on the data of all owners, in the
settings of published figures, which the page has (10 minutes of a core).
"""

import csv
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from page_table import replace_table
from torch import Tensor, nn
from torch.nn import functional as F

import fedcb2o
from fedcb2o.data import movielens, shakespeare
from fedcb2o.nn.architectures import characters, factorisation

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


def print_published() -> None:
    """Print errors of all users' ratings, and accuracies of all roles' text, trained centrally."""
    data = movielens(by_time=False)
    x, y = (torch.cat([getattr(part, name) for part in (data.pool, data.test)]) for name in "xy")
    x = x.long()
    splits = [torch.randperm(len(x), generator=torch.Generator().manual_seed(s)) for s in range(60)]
    for penalty in (0.0, 3.75):
        errors = [effect_errors(x, y, rows, penalty) for rows in splits]
        means, spreads = (getattr(np, name)(errors, axis=0) for name in ("mean", "std"))
        print("mean, films, films and users; penalty", penalty, means.round(3), spreads.round(3))
    folds = splits[0].chunk(5)
    for name, train in {"Surprise's SVD": train_svd_, "weight decay": train_decayed_}.items():
        errors = []
        for k, test in enumerate(folds):
            torch.manual_seed(k)
            rows = torch.cat([*folds[:k], *folds[k + 1 :]])
            predict = train(x[rows], y[rows])
            with torch.no_grad():
                predicted = predict(x[test])[:, 0].clamp(-3, 1.5)  # stars minus 3.5
            errors.append(float((predicted - y[test]).square().mean().sqrt()))
        print(name, np.mean(errors).round(4), np.std(errors).round(4), np.round(errors, 4))
    print_characters()


def effect_errors(x: Tensor, y: Tensor, order: Tensor, penalty: float) -> list[float]:
    """Return the errors of the mean, of effects of films, and of films and users.

    As in Irizarry's course: a fifth of `order` tests, on films with ratings to train on. An effect
    is the sum of residuals divided by their number plus the penalty.
    """
    test, train = order[: len(x) // 5], order[len(x) // 5 :]
    residual, rest = y[train] - y[train].mean(), y[test] - y[train].mean()
    rated = torch.bincount(x[train, 1], minlength=9066) > 0
    errors = []
    for column, size in ((None, 0), (1, 9066), (0, 671)):
        if column is not None:
            keys = x[train, column]
            sums = torch.zeros(size).index_add_(0, keys, residual)
            effect = sums / (torch.bincount(keys, minlength=size) + penalty).clamp(min=1e-9)
            residual, rest = residual - effect[keys], rest - effect[x[test, column]]
        errors.append(float(rest[rated[x[test, 1]]].square().mean().sqrt()))
    return errors


def train_svd_(x: Tensor, y: Tensor) -> nn.Module:
    """Train by the defaults of Surprise's SVD, in batches of 16."""
    network = factorisation([2], 1, sizes=[671, 9066], dim=100)
    tables = [network.users, network.items]
    for table in tables:
        table.sparse = True
        table.weight.data[:, -1] = 0.0  # the bias
    network.bias.data.fill_(y.mean())
    optimiser = torch.optim.SGD([table.weight for table in tables], lr=0.005)
    for _ in range(20):
        for rows in torch.randperm(len(x)).split(16):
            optimiser.zero_grad()
            penalty = sum(table(x[rows, k]).square().sum() for k, table in enumerate(tables))
            error = (network(x[rows])[:, 0] - y[rows]).square().sum()
            (0.5 * (error + 0.02 * penalty)).backward()
            optimiser.step()
    return network


def train_decayed_(x: Tensor, y: Tensor) -> nn.Module:
    """Train by Adam with weight decay."""
    network = factorisation([2], 1, sizes=[671, 9066], dim=20)
    optimiser = torch.optim.Adam(network.parameters(), lr=3e-3, weight_decay=3e-4)
    for _ in range(12):
        for rows in torch.randperm(len(x)).split(512):
            optimiser.zero_grad()
            F.mse_loss(network(x[rows])[:, 0], y[rows]).backward()
            optimiser.step()
    return network


class Characters(nn.Module):
    """The preset's network of `shakespeare`, in plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Embedding(80, 8)
        self.lstm = nn.LSTM(8, 64, batch_first=True)
        self.dense = nn.Linear(64, 80)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the next character."""
        return self.dense(self.lstm(self.vectors(x.long()))[0][:, -1])


def print_characters() -> None:
    """Print the speed of LEAF's network, and accuracies of a plain loop and of `fedcb2o.run`."""
    network = characters([80], 80)
    x, y = torch.zeros(64, 80), torch.zeros(64, dtype=torch.long)
    start = time.process_time()
    for _ in range(10):
        F.cross_entropy(network(x), y).backward()
    print("LEAF's network, samples a second", 640 / (time.process_time() - start))

    data = shakespeare(length=20)
    pool, test = data.pool, data.test
    torch.manual_seed(int(fedcb2o.stream(0, "model").integers(2**63)))
    plain = Characters()
    for n in range(2):
        optimiser = torch.optim.SGD(plain.parameters(), lr=1.0, momentum=0.9, fused=True)
        order = torch.from_numpy(fedcb2o.stream(0, "batches", n, 0).permutation(len(pool)))
        for rows in order.split(32):
            optimiser.zero_grad()
            F.cross_entropy(plain(pool.x[rows]), pool.y[rows]).backward()
            optimiser.step()
    with torch.no_grad():
        right = torch.cat([plain(x).argmax(1) for x in test.x.split(4096)]) == test.y
    print("plain loop", float(right.double().mean()))

    section = fedcb2o.load("shakespeare-fedassay").settings()
    run = fedcb2o.run(
        data=(pool.x.numpy(), pool.y.numpy()),
        x_test=test.x.numpy(),
        y_test=test.y.numpy(),
        owners=["all"] * len(pool),
        owner_test=["all"] * len(test),
        class_names=list(data.class_names),
        model=section["model"],
        algorithm="local_training",
        hold_out=False,
        validation=1.0,
        gamma=1.0,
        batch_size=32,
        local_epochs=1,
        rounds=2,
        together=1,
        seeds=[0],
        out=RUNS / "central",
        overwrite=True,
    )
    print("fedcb2o.run", float(run.records["accuracy"].iloc[-1]))


def main() -> None:
    """Measure the named data sets, and write all values and the table."""
    if sys.argv[1:] == ["published"]:
        print_published()
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
