"""Attacks on models of agents that train on poisoned data.

As in `model_poisoning`, an attack is a function `(view, draw) -> model [d]` and declares its
knowledge. `gap_aware` and `slow_drift` are directed at FedCB2O, by agents that know L and G.
"""

import math
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.errors import require
from fedcb2o.federated.adversary import AttackView, knows
from fedcb2o.federated.attacks.model_poisoning import inner_products

__all__ = ["descent", "gap_aware", "neurotoxin", "slow_drift"]

_PENALTY = 10.0  # weight of a loss beyond its bound, relative to the attack's own loss


@knows("benign", on_poisoned_data=True)
def descent(
    view: AttackView,
    draw: np.random.Generator,
    *,
    source: int,
    target: int,
    hide: Literal["class_losses", "loss", "distance"] = "class_losses",
    factor: float = 1.0,
    steps: int = 20,
) -> Float[Tensor, " d"]:
    """Descend from the poisoned model, within what a defence reads of the benign models.

    The gradient is that of the loss of class `source` with the label `target`, at the average of
    the benign models and of one such model per colluder. It is measured on the attacker's own clean
    samples. The distance to the benign mean m is at most `factor` times its median over the benign
    models. So is the loss above that of m that `hide` names; beyond its bound it is a penalty. A
    grid that searches `hide` and `factor` per defence adapts the attack to the defence.

    Args:
        source: Class that the attack makes the benign agents mistake.
        hide: "class_losses" for the largest class loss, "loss" for the average loss, "distance" for
            the distance alone.
        factor: Bound relative to the median benign model, above 0.
        steps: Number of steps, whose length falls linearly from a fifth of the largest distance.
    """
    require("factor", factor, factor > 0, "above 0")
    benign = view.benign()
    mean = benign.mean(0)
    radius = factor * float((benign - mean).norm(dim=1).median())
    labels = view.data.y
    is_source = labels == source
    labels_of_pair = torch.stack([torch.full_like(labels, target), labels])
    classes = torch.tensor(sorted(set(labels.tolist())))
    group = torch.searchsorted(classes, labels)
    counts = group.bincount()
    reference = view.sample_losses(mean.unsqueeze(0))[0]

    def excess(losses: Float[Tensor, "m n"]) -> Float[Tensor, " m"]:
        difference = losses - reference
        if hide == "loss":
            return difference.mean(1)

        sums: Tensor = difference.new_zeros(len(losses), len(counts)).index_add(
            1, group, difference
        )
        return (sums / counts).amax(1)

    def projected(theta: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        distance = float((theta - mean).norm())
        return torch.lerp(mean, theta, min(1.0, radius / distance) if distance else 1.0)

    theta = projected(view.own)
    # Without a sample of the class there is no gradient to follow.
    if not is_source.any():
        return theta
    bound = max(0.0, factor * float(excess(view.sample_losses(benign)).median()))
    share = view.num_colluders / (view.num_colluders + view.num_benign)
    penalty = 0.0 if hide == "distance" else _PENALTY

    for k in range(steps):
        point = theta.detach().requires_grad_()
        with torch.enable_grad():
            pair = torch.stack([torch.lerp(mean, point, share), point])
            losses = view.sample_losses(pair, labels_of_pair)
            beyond = (excess(losses[1:])[0] - bound).clamp(min=0)
            loss = losses[0, is_source].mean() + penalty * beyond
            (gradient,) = torch.autograd.grad(loss, point)
        length = float(gradient.norm())
        # A gradient that is 0 or not finite ends the search.
        if not 0 < length < math.inf:
            break
        theta = projected(theta - 0.2 * radius * (1 - k / steps) / length * gradient)
    return theta


@knows("benign", on_poisoned_data=True)
def gap_aware(
    view: AttackView, draw: np.random.Generator, *, bound: float = 0.1, halvings: int = 8
) -> Float[Tensor, " d"]:
    """Publish as much of the poisoned model as keeps G below a bound.

    Bisection finds the largest t at which the class-loss gap of m + t (own - m) to m is at most the
    bound (eq:robust_criterion_G_LF). m is the mean of the benign models, and the gap is measured on
    the attacker's own clean samples.

    Args:
        bound: Largest class-loss gap, 0 or more.
        halvings: Number of bisection steps.
    """
    require("bound", bound, bound >= 0, "0 or more")
    mean = view.benign().mean(0)
    reference = view.losses(mean[None])

    def gap(t: float) -> float:
        losses = view.losses(torch.lerp(mean, view.own, t)[None])
        # A loss that is not a number exceeds each bound.
        gaps = (losses.by_class - reference.by_class)[:, reference.present]
        return float(gaps.nan_to_num(nan=torch.inf, posinf=torch.inf).amax())

    if gap(1.0) <= bound:
        return torch.lerp(mean, view.own, 1.0)
    low, high = 0.0, 1.0
    for _ in range(halvings):
        middle = (low + high) / 2
        if gap(middle) <= bound:
            low = middle
        else:
            high = middle
    return torch.lerp(mean, view.own, low)


@knows("benign", on_poisoned_data=True)
def slow_drift(
    view: AttackView, draw: np.random.Generator, *, step: float = 1.0
) -> Float[Tensor, " d"]:
    """Move a small step per round towards the poisoned model.

    The steps start at the benign mean. G is relative to the receivers' own models, and the steps
    move these. The projection is that of Wang et al., "Attack of the Tails" (NeurIPS 2020).

    Args:
        step: Largest step, in units of the root mean square distance of the benign models to their
            mean.
    """
    models = view.benign()
    mean = models.mean(0)
    centred, _, square = inner_products(models, mean, view.own - mean)
    spread = math.sqrt(float(centred.diagonal().mean()))
    distance = math.sqrt(square)
    t = min(1.0, step * spread / distance) if distance else 1.0
    return torch.lerp(mean, view.own, t)


@knows("benign", on_poisoned_data=True)
def neurotoxin(
    view: AttackView, draw: np.random.Generator, *, masked_share: float = 0.05
) -> Float[Tensor, " d"]:
    """Keep the poisoned update out of the coordinates that benign agents change most.

    Later rounds overwrite these coordinates, so that a backdoor in the others lasts longer. Zhang,
    Panda, Song, Yang, Mahoney, Mittal, Ramchandran and Gonzalez, "Neurotoxin: Durable Backdoors in
    Federated Learning" (ICML 2022). Their attackers mask each step of their training by the update
    of the server's model in the previous round. Here the whole update of this round is masked, by
    the benign agents' mean update.

    Args:
        masked_share: Share of the coordinates, those of the largest benign update, from 0 to 1.
    """
    require("masked_share", masked_share, 0 <= masked_share <= 1, "between 0 and 1")
    benign_update = view.benign().mean(0) - view.previous
    masked = benign_update.abs().topk(round(masked_share * len(benign_update))).indices
    update = view.own - view.previous
    return view.previous + update.index_fill(0, masked, 0.0)
