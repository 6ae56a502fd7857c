"""The criterion `last_layer_excess` against triggers, and attackers that know it.

    .venv/bin/python -m paper.last_layer            # measure missing runs
    .venv/bin/python -m paper.last_layer --time     # the time of a run, as a ratio
    .venv/bin/python -m paper.last_layer --again "last layer"

Digits: three of ten agents attack, with a fifth or four fifths of their samples poisoned. Wine: a
table of three classes. The values are in docs/benchmark/last-layer/values.csv: percent over benign
agents after the last round. The criterion and its scale were chosen on seeds from 1000 and tuning
images.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from paper import cells
from paper.adaptive import sample_losses
from paper.cells import Cell
from paper.distil import DIGITS, skewed
from sklearn.datasets import load_wine
from torch import Tensor

import fedcb2o
from fedcb2o.data import features
from fedcb2o.federated.adversary import AttackView, knows
from fedcb2o.federated.attacks import backdoor
from fedcb2o.federated.attacks.data_poisoning import triggered_by

VALUES = Path(__file__).parents[1] / "docs" / "benchmark" / "last-layer" / "values.csv"
SEEDS = (0, 1, 2)
HEAD = 64 * 10 + 10
"""Parameters of the last layer of the digits network."""

METHODS: dict[str, dict[str, Any]] = {
    "FedAssay": {"name": "fedassay"},
    "last layer": {
        "name": "fedassay",
        "criterion": {
            "name": "largest",
            "of": ["class_loss_excess", {"name": "last_layer_excess", "scale": 50.0}],
        },
    },
}


def wine() -> fedcb2o.Dataset:
    """Return scikit-learn's table of wines, standardised."""
    x, y = load_wine(return_X_y=True)
    return fedcb2o.dataset(x, y, test_share=0.3, standardise=True)


def mark_features(x: Float[Tensor, "n f"], *, value: float = 3.0) -> Float[Tensor, "n f"]:
    """Set the last three features of a standardised table."""
    return torch.cat([x[:, :-3], torch.full_like(x[:, -3:], value)], 1)


@triggered_by(mark_features)
def table_backdoor(
    shard: fedcb2o.Shard, draw: np.random.Generator, *, target: int, share: float
) -> fedcb2o.Shard:
    """Mark random samples of a table and label them as class `target`."""
    is_marked = torch.from_numpy(draw.random(len(shard)) < share)
    x = torch.where(is_marked[:, None], mark_features(shard.x), shard.x)
    return fedcb2o.Shard(x, torch.where(is_marked, target, shard.y))


@knows("benign", on_poisoned_data=True)
def benign_head(
    view: AttackView,
    draw: np.random.Generator,
    *,
    share: float = 0.5,
    steps: int = 60,
    rate: float = 0.02,
) -> Float[Tensor, " d"]:
    """Publish a model with a backdoor whose last layer is the mean of the benign ones.

    Adam starts at the benign mean and changes the layers before it, on poisoned samples.
    """
    poisoned = backdoor(view.data, draw, 0, target=7, share=share)
    x = features(poisoned.x)
    theta = view.benign().mean(0).requires_grad_()
    optimiser = torch.optim.Adam([theta], lr=rate)
    with torch.enable_grad():
        for _ in range(steps):
            optimiser.zero_grad()
            torch.autograd.backward(sample_losses(theta, x, poisoned.y).mean())
            assert theta.grad is not None
            theta.grad[-HEAD:] = 0
            optimiser.step()
    return theta.detach()


TRIGGERS: dict[str, dict[str, Any]] = {
    "backdoor": {"name": "backdoor", "target": 7},
    "black square": {"name": "backdoor", "target": 5, "size": 4, "margin": 2, "value": 0.0},
    "checkerboard": {
        **{"name": "backdoor", "target": 0, "size": 3, "margin": 2},
        **{"corner": "top right", "pattern": "checkerboard"},
    },
    "waves": {"name": "signal", "target": 3, "clean": False},
    "blended": {"name": "blended", "target": 2},
    "distributed": {
        **{"name": "backdoor", "target": 8, "size": 3, "corner": "bottom left", "parts": 3}
    },
    "clean label": {"name": "clean_label", "target": 7},
    "edge case": {"name": "edge_case", "target": 4},
}
CLEAN = {"agents.malicious_role": "clean"}
ATTACKS: dict[str, dict[str, Any]] = {
    "none": CLEAN,
    **{
        f"{name}, {share:.0%}": {"attack": {**attack, "share": share}}
        for name, attack in TRIGGERS.items()
        for share in (0.2, 0.8)
    },
    "backdoor, 5%": {"attack": {**TRIGGERS["backdoor"], "share": 0.05}},
    "backdoor, 80%, from round 20": {
        "attack": {**TRIGGERS["backdoor"], "share": 0.8, "from_round": 20}
    },
    "benign head": {
        "attack": {"name": "paper.last_layer:benign_head", "data": TRIGGERS["backdoor"]}
    },
}
WINE: dict[str, Any] = {
    "data": {"name": "paper.last_layer:wine"},
    "model": {"name": "mlp", "hidden": [16]},
    **{"agents.num_clusters": 1, "agents.benign": 7, "agents.malicious": 3},
    **{"agents.benign_samples": 12, "agents.malicious_samples": 12, "agents.budget": 6},
}
TABLE = {
    f"features, {share:.0%}": {
        "attack": {"name": "paper.last_layer:table_backdoor", "target": 1, "share": share}
    }
    for share in (0.2, 0.8)
}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "digits": (DIGITS, ATTACKS),
    "Dirichlet 0.5": (
        skewed(0.5),
        {name: ATTACKS[name] for name in ("none", "backdoor, 20%", "backdoor, 80%")},
    ),
    "wine": (WINE, {"none": {**CLEAN, **TABLE["features, 20%"]}, **TABLE}),
}


def run_cell(cell: Cell) -> tuple[float, float]:
    """Return accuracy and attack success of a cell."""
    name, method, attack, seed = cell
    setting, attacks = SETTINGS[name]
    changes = {**setting, **attacks[attack], "algorithm": METHODS[method]}
    return cells.measure(
        "digits-fedassay", {**changes, "evaluate_on": "redrawn", "evaluate_every": 25}, seed
    )


def last_layer_table() -> pd.DataFrame:
    """Return accuracy and, under attack, success by setting and attack, as text."""
    by_cell = pd.read_csv(VALUES).groupby(["setting", "attack", "method"])
    means = by_cell[list(cells.MEASURES)].mean().map("{:.1f}".format)
    text = means.accuracy + " / " + means.success
    is_clean = text.index.get_level_values("attack") == "none"
    table = text.where(~is_clean, means.accuracy).unstack()
    rows = [(name, attack) for name, (_, attacks) in SETTINGS.items() for attack in attacks]
    table = table.loc[rows, list(METHODS)]
    table.index = pd.Index([f"{name}: {attack}" for name, attack in rows])
    return table.rename_axis("Setting: attack").rename_axis(columns=None)


def time_ratio(repetitions: int = 5) -> float:
    """Return the time of a run without attack as a multiple of FedAssay's; runs are interleaved."""
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    for _ in range(repetitions):
        for method in METHODS:
            start = time.process_time()
            run_cell(("digits", method, "none", 0))
            seconds[method].append(time.process_time() - start)
    return statistics.median(seconds["last layer"]) / statistics.median(seconds["FedAssay"])


def main() -> None:
    """Measure the missing runs."""
    if sys.argv[1:] == ["--time"]:
        print(f"{time_ratio():.2f}")
        return
    cells.remove_requested(VALUES, METHODS, __doc__)
    missing = [
        (name, method, attack, seed)
        for name, (_, attacks) in SETTINGS.items()
        for seed in SEEDS
        for attack in attacks
        for method in METHODS
    ]
    cells.measure_missing(VALUES, "setting", missing, run_cell)


if __name__ == "__main__":
    main()
