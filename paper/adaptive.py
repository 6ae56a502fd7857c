"""Attackers that know FedAssay's criterion and descend against it, on digits.

    .venv/bin/python -m paper.adaptive            # measure missing runs
    .venv/bin/python -m paper.adaptive --again FedAssay

Three of ten agents attack. They know all benign models and the defence, and publish one model that
they find by gradient descent: averaged with the benign models, it takes one class for another. On
their own clean samples its loss, and its worst class in the class-loss excess (`excess`) or the
class-loss gap (`gap`), are at most a factor times those of the typical benign model. The values are
in docs/benchmark/adaptive/values.csv: percent over benign agents after the last round.
"""

import math
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from paper import cells
from paper.cells import Cell
from paper.distil import DIGITS
from paper.long_training import METHODS
from torch import Tensor, nn
from torch.func import functional_call

from fedcb2o.data import features
from fedcb2o.federated.adversary import AttackView, knows

VALUES = Path(__file__).parents[1] / "docs" / "benchmark" / "adaptive" / "values.csv"
SEEDS = (0, 1, 2, 3, 4)
COMPARED = ("FedAssay", "FedCBO", "Multi-Krum with guards", "Local training")
SOURCE, TARGET = 9, 4
INTERPOLATION = 0.5
NETWORK = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
"""The network of the preset `digits-fedassay`."""
_FOUND: dict[tuple[int, str, float], tuple[Tensor, Tensor]] = {}
"""By cluster and settings, the mean benign model and the model found: attackers share one."""


def sample_losses(
    theta: Float[Tensor, " d"], x: Float[Tensor, "n *features"], y: Tensor
) -> Float[Tensor, " n"]:
    """Return the loss of each sample."""
    parameters = dict(NETWORK.named_parameters())
    pieces = torch.split(theta, [p.numel() for p in parameters.values()])
    values = {
        name: piece.view_as(p) for (name, p), piece in zip(parameters.items(), pieces, strict=True)
    }
    outputs: Tensor = functional_call(NETWORK, values, (x,))
    return nn.functional.cross_entropy(outputs, y, reduction="none")


@knows("benign", on_poisoned_data=True)
def descent(
    view: AttackView,
    draw: np.random.Generator,
    *,
    against: str = "excess",
    factor: float = 1.0,
    steps: int = 60,
    rate: float = 0.02,
) -> Float[Tensor, " d"]:
    """Publish the model that fools receivers most within `factor` times the typical benign values.

    Args:
        view: The attacker's view.
        draw: Source of randomness (not used).
        against: "excess" for the scores of the class-loss excess, "gap" for class-loss gaps.
        factor: Bound, in units of the median over the benign models.
        steps: Steps of Adam.
        rate: Its step size.

    Returns:
        The published model, shape [d].
    """
    models = view.benign()
    mean = models.mean(0)
    key = view.cluster, against, factor
    if key in _FOUND and torch.equal(_FOUND[key][0], mean):
        return _FOUND[key][1].clone()
    x, y = features(view.data.x), view.data.y
    members = nn.functional.one_hot(y, 10).T.float()
    counts = members.sum(1)
    members, counts = members[counts > 0], counts[counts > 0]
    own = sample_losses(mean, x, y)

    def differences(theta: Float[Tensor, " d"]) -> Float[Tensor, " n"]:
        return sample_losses(torch.lerp(mean, theta, INTERPOLATION), x, y) - own

    def sigma() -> float:
        found = []
        for theta in models:
            d = differences(theta)
            centre = members.T @ (members @ d / counts)
            found.append(float((d - centre).square().sum() / (len(y) - len(counts))))
        return max(1e-3, math.sqrt(float(np.median(found))))

    noise = sigma() / counts.sqrt() if against == "excess" else torch.ones_like(counts)

    def shared_and_spread(d: Float[Tensor, " n"]) -> Float[Tensor, "2"]:
        gaps = members @ d / counts
        median = gaps.median()
        return torch.stack([median.clamp(min=0), 1.4826 * (gaps - median).abs().median()])

    benign = [differences(theta) for theta in models]
    # What the other classes of a model can excuse.
    most = torch.stack([shared_and_spread(d) for d in benign]).median(0).values
    most = most.clamp(noise.amax() / 2, noise.amax())

    def worst_class(d: Float[Tensor, " n"]) -> Float[Tensor, ""]:
        gaps = members @ d / counts
        if against == "gap":
            return gaps.amax()
        shared, spread = shared_and_spread(d).minimum(most)
        return ((gaps - shared) / noise.hypot(spread)).amax()

    bound = factor * max(0.0, float(torch.stack([worst_class(d) for d in benign]).median()))
    loss_bound = factor * max(0.0, float(torch.stack([d.mean() for d in benign]).median()))
    length = float(mean.norm())
    # A receiver refuses what is nearer or farther than honest models are.
    near = float((models - mean).norm(dim=1).median())

    share = view.num_colluders / (view.num_colluders + view.num_benign)
    is_source = y == SOURCE
    theta = mean.clone().requires_grad_()
    optimiser = torch.optim.Adam([theta], lr=rate)
    targets = torch.full_like(y[is_source], TARGET)
    with torch.enable_grad():
        for _ in range(steps):
            optimiser.zero_grad()
            d = differences(theta)
            distance = (theta - mean).norm() + 1e-12
            penalty = (
                (worst_class(d) - bound).clamp(min=0)
                + 10 * (d.mean() - loss_bound).clamp(min=0)
                + 10 * (distance / length - 1.2).clamp(min=0)
                + 10 * (1 - distance / near).clamp(min=0)
            )
            aggregate = torch.lerp(mean, theta, share)
            (sample_losses(aggregate, x[is_source], targets).mean() + 10 * penalty).backward()
            optimiser.step()
    _FOUND[key] = mean.clone(), theta.detach().clone()
    return theta.detach()


ATTACKS: dict[str, dict[str, Any]] = {
    "none": {"agents.malicious_role": "clean"},
    **{
        f"within {factor} times the {against}": {
            "attack": {
                "name": "paper.adaptive:descent",
                "against": against,
                "factor": factor,
                "data": {"name": "label_flip", "source": SOURCE, "target": TARGET},
            }
        }
        for against, factor in (("excess", 1), ("excess", 4), ("excess", 16), ("gap", 4))
    },
}


def run_cell(cell: Cell) -> tuple[float, float]:
    """Return accuracy and attack success of a cell."""
    _, method, attack, seed = cell
    changes = {
        **DIGITS,
        **ATTACKS[attack],
        "algorithm": METHODS[method],
        "evaluate_on": "redrawn",
        "evaluate_every": 25,
    }
    return cells.measure("digits-fedassay", changes, seed)


def adaptive_table() -> pd.DataFrame:
    """Return accuracy and, under attack, success by attack and method, as text."""
    means = pd.read_csv(VALUES).groupby(["attack", "method"])[["accuracy", "success"]].mean()
    accuracy, success = (
        means[measure].map("{:.1f}".format).unstack().loc[list(ATTACKS), list(COMPARED)]
        for measure in cells.MEASURES
    )
    table = accuracy + " / " + success
    table.loc["none"] = accuracy.loc["none"]
    return table.rename_axis("Attack").rename_axis(columns=None)


def main() -> None:
    """Measure the missing runs."""
    cells.remove_requested(VALUES, METHODS, __doc__)
    missing = [
        ("digits", method, attack, seed)
        for seed in SEEDS
        for attack in ATTACKS
        for method in COMPARED
    ]
    cells.measure_missing(VALUES, "setting", missing, run_cell)


if __name__ == "__main__":
    main()
