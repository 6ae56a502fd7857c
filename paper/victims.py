"""Attackers of digits with a trigger for each group of victims, or one that moves.

In each round attackers begin with their clean models, and train one for each group of benign
agents, on their own samples with a patch at a place of its own and a class of its own. With
`is_moving`, the place changes in every round. Success is the share of test samples of other classes
that a victim's model gives to its group's class, with its group's patch of the last round; mean
over victims.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from paper.adaptive import sample_losses
from torch import Tensor

import fedcb2o
from fedcb2o.data import features
from fedcb2o.experiments.runs._trained_models import _restore_agents
from fedcb2o.federated.adversary import AttackView, knows
from fedcb2o.federated.evaluation.models import measure_samples, predicted_class

_SIDE, _PATCH = 8, 2  # pixels
_EPOCHS, _BATCH, _RATE = 2, 32, 0.2  # as agents train


def mark_for(
    x: Float[Tensor, "n 1 8 8"], group: int, n: int, *, is_moving: bool
) -> Float[Tensor, "n 1 8 8"]:
    """Paint the white patch of a group in round n."""
    places = _SIDE // _PATCH
    row, column = divmod((5 * group + (5 * n if is_moving else 0)) % places**2, places)
    marked = x.clone()
    top, left = _PATCH * row, _PATCH * column
    marked[:, :, top : top + _PATCH, left : left + _PATCH] = 1.0
    return marked


def target_of(group: int) -> int:
    """Return the class to which the patch of a group leads."""
    return (3 * group + 7) % 10


@knows(each_receiver=True)
def trigger_per_group(
    view: AttackView,
    draw: np.random.Generator,
    *,
    groups: int,
    share: float = 0.5,
    is_moving: bool = False,
) -> Float[Tensor, "r d"]:
    """Publish to each benign agent a model with the trigger of its group, by its id."""
    x, y = features(view.data.x), view.data.y
    xs, ys = [], []
    for group in range(groups):
        is_marked = torch.from_numpy(draw.random(len(y)) < share)
        marked = mark_for(x, group, view.n, is_moving=is_moving)
        xs.append(torch.where(is_marked[:, None, None, None], marked, x))
        ys.append(torch.where(is_marked, target_of(group), y))
    models = _train(view.previous.repeat(groups, 1), torch.stack(xs), torch.stack(ys), draw)
    return models[view.receivers % groups]


def _train(
    models: Float[Tensor, "g d"],
    xs: Float[Tensor, "g n 1 8 8"],
    ys: Int[Tensor, "g n"],
    draw: np.random.Generator,
) -> Float[Tensor, "g d"]:
    """Train each model on its own samples."""
    step = torch.func.vmap(torch.func.grad(lambda *args: sample_losses(*args).mean()))
    for _ in range(_EPOCHS):
        order = torch.from_numpy(draw.permutation(ys.shape[1]))
        for batch in torch.split(order, _BATCH):
            models = models - _RATE * step(models, xs[:, batch], ys[:, batch])
    return models


def measure(preset: str, changes: dict[str, Any], seed: int) -> tuple[float, float]:
    """Return accuracy and attack success in percent, means over benign agents."""
    groups = changes["attack"]["groups"]
    is_moving = changes["attack"].get("is_moving", False)
    rounds = fedcb2o.load(preset, changes).rounds
    experiment = fedcb2o.load(preset, {**changes, "checkpoint_every": rounds, "seeds": [seed]})
    with tempfile.TemporaryDirectory() as folder:
        run = fedcb2o.run(experiment, out=Path(folder), workers=1)
        last = run.records.query("round == round.max() and not malicious")
        agents, _, _ = _restore_agents(run, None, seed, None)
    successes = []
    for k in np.flatnonzero(~agents.data.malicious).tolist():
        group = int(agents.agents[k]) % groups
        _, test = next(agents.data.test_sets(np.array([k])))
        is_other = test.y != target_of(group)
        marked = mark_for(features(test.x[is_other]), group, rounds - 1, is_moving=is_moving)
        others = fedcb2o.Shard(marked, test.y[is_other])
        rows = torch.from_numpy(agents.layout.own[[k]])
        found = measure_samples(agents.spec.module, agents.models, rows, others, predicted_class)
        successes.append(float((found == target_of(group)).double().mean()))
    return 100 * float(last.accuracy.mean()), 100 * float(np.mean(successes))


_NAME = "paper.victims:trigger_per_group"
ATTACKS: dict[str, dict[str, Any]] = {
    "crafted backdoor": {"attack": {"name": _NAME, "groups": 1}},
    "crafted, per half": {"attack": {"name": _NAME, "groups": 2}},
    # More groups than agents: each has a trigger of its own.
    "crafted, per victim": {"attack": {"name": _NAME, "groups": 20}},
    "crafted, moving": {"attack": {"name": _NAME, "groups": 1, "is_moving": True}},
}
