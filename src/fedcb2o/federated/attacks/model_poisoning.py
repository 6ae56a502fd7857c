"""Attacks on the models that malicious agents publish.

An attack on models is a function `(view, draw) -> model [d]` that the agent publishes, or one model
per receiver [r, d]. Its further arguments are keywords, and `knows` declares whose models it reads.

Where the literature speaks of gradients sent to a server, read the update of this round, `view.own`
- `view.previous`. The agents started the round at models of their own, and `view.previous` is
always the attacker's.

Example:
    >>> round(alie_z(n=50, f=10), 3)
    0.253
"""

import math
from statistics import NormalDist
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.errors import require
from fedcb2o.federated.adversary import AttackView, knows
from fedcb2o.federated.aggregation.gram_matrix import gram

__all__ = [
    "alie",
    "boosting",
    "free_rider",
    "gaussian_noise",
    "hybrid_sparse",
    "ipm",
    "mimic",
    "min_max",
    "min_sum",
    "not_finite",
    "random_model",
    "sign_flip",
]

Direction = Literal["std", "unit", "sign"]

# Attacks of a single agent.


@knows()
def sign_flip(
    view: AttackView, draw: np.random.Generator, *, scale: float = 1.0
) -> Float[Tensor, " d"]:
    """Reverse the update.

    Li, Xu, Chen, Giannakis and Ling, "RSA: Byzantine-Robust Stochastic Aggregation Methods" (AAAI
    2019).

    Args:
        scale: Factor of the reversed update.
    """
    return view.previous - scale * (view.own - view.previous)


@knows()
def gaussian_noise(
    view: AttackView, draw: np.random.Generator, *, scale: float = 1.0
) -> Float[Tensor, " d"]:
    """Add Gaussian noise to the trained model.

    Li et al., "RSA" (AAAI 2019), who add it to the gradient.

    Args:
        scale: Standard deviation of the noise, in units of the model's root mean square.
    """
    return view.own + scale * _scaled_noise(view, draw)


@knows()
def random_model(
    view: AttackView, draw: np.random.Generator, *, scale: float = 1.0
) -> Float[Tensor, " d"]:
    """Draw a random model of Gaussian numbers.

    Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine Learning with Adversaries" (NeurIPS 2017).

    Args:
        scale: Root mean square of the model, in units of that of the trained model.
    """
    return scale * _scaled_noise(view, draw)


@knows()
def boosting(
    view: AttackView, draw: np.random.Generator, *, factor: float = 5.0
) -> Float[Tensor, " d"]:
    """Multiply the update, so that it outweighs others in an average (model replacement).

    Bagdasaryan et al., "How To Backdoor Federated Learning" (AISTATS 2020), who poison the data,
    too.

    Args:
        factor: Factor of the update.
    """
    return view.previous + factor * (view.own - view.previous)


@knows()
def free_rider(
    view: AttackView, draw: np.random.Generator, *, noise: float = 0.0
) -> Float[Tensor, " d"]:
    """Publish the model before the round, disguised by noise.

    Fraboni, Vidal and Lorenzi, "Free-rider Attacks on Model Aggregation in Federated Learning"
    (AISTATS 2021).

    Args:
        noise: Standard deviation of the noise, in units of the model's root mean square.
    """
    return view.previous + noise * _scaled_noise(view, draw) if noise else view.previous


@knows()
def not_finite(
    view: AttackView,
    draw: np.random.Generator,
    *,
    value: Literal["nan", "inf", "-inf", "huge"] = "nan",
) -> Float[Tensor, " d"]:
    """Publish a model of one extreme number, which breaks an average.

    Args:
        value: NaN, an infinity, or "huge" for the largest finite number.
    """
    number = torch.finfo(view.own.dtype).max if value == "huge" else float(value)
    return torch.full_like(view.own, number)


# Attacks of agents that collude, or that know the models of benign agents.


@knows("fellows", "benign")
def alie(
    view: AttackView,
    draw: np.random.Generator,
    *,
    z: float | None = None,
    estimated_from: Literal["fellows", "benign"] = "fellows",
    correction: Literal[0, 1] | None = None,
) -> Float[Tensor, " d"]:
    """Publish the mean plus `z` standard deviations (A little is enough).

    The model is within the spread of the benign models. Baruch, Baruch and Goldberg, "A Little Is
    Enough" (NeurIPS 2019).

    Args:
        z: Number of standard deviations; by default `alie_z`, the largest that leaves enough benign
            agents farther from the mean.
        estimated_from: Models for mean and deviation: the attackers' own clean models, as
            published, or those of the benign agents (the omniscient variant).
        correction: Subtracted from the number of models in the deviation, 0 by default; 1 in ByzFL.
    """
    models = view.colluders() if estimated_from == "fellows" else view.benign()
    if z is None:
        z = alie_z(view.num_colluders + view.num_benign, view.num_colluders)
    return models.mean(0) + z * models.std(0, correction=min(correction or 0, len(models) - 1))


def alie_z(n: int, f: int) -> float:
    """Compute the number z of standard deviations of `alie`, at least 0.

    z solves Phi(z) = (n - f - s) / (n - f), for f attackers among n agents. s = floor(n / 2 + 1) -
    f is the number of benign agents, at least one, that the attackers need on their side.
    """
    supporters = max(1, n // 2 + 1 - f)
    share = (n - f - supporters) / (n - f)
    return max(0.0, NormalDist().inv_cdf(share)) if share > 0 else 0.0


@knows("benign")
def ipm(view: AttackView, draw: np.random.Generator, *, eps: float = 0.5) -> Float[Tensor, " d"]:
    """Reverse the mean update of the cluster's benign agents (inner-product manipulation).

    Xie, Koyejo and Gupta, "Fall of Empires: Breaking Byzantine-tolerant SGD by Inner Product
    Manipulation" (UAI 2020).

    Args:
        eps: Factor of the reversed update.
    """
    return view.previous - eps * (view.benign().mean(0) - view.previous)


@knows("benign")
def min_max(
    view: AttackView, draw: np.random.Generator, *, direction: Direction = "std"
) -> Float[Tensor, " d"]:
    """Move away from the benign mean, up to the largest benign distance (min-max).

    The distance to each benign model is at most that of the two farthest benign models. Shejwalkar
    and Houmansadr, "Manipulating the Byzantine" (NDSS 2021), by a formula instead of a search.

    Args:
        direction: Negative of the benign models' standard deviation ("std"), of their mean update
            ("unit"), or of the signs of the mean update ("sign").
    """
    return _max_perturbation(view, direction, total=False)


@knows("benign")
def min_sum(
    view: AttackView, draw: np.random.Generator, *, direction: Direction = "std"
) -> Float[Tensor, " d"]:
    """Move away from the benign mean, with bounded summed distances (min-sum).

    The sum of squared distances to the benign models is at most that of the benign model farthest
    from the others. Shejwalkar and Houmansadr (NDSS 2021).

    Args:
        direction: See `min_max`.
    """
    return _max_perturbation(view, direction, total=True)


@knows("benign")
def mimic(
    view: AttackView,
    draw: np.random.Generator,
    *,
    agent: int | Literal["outermost"] = 0,
    cluster_offset: int = 0,
) -> Float[Tensor, " d"]:
    """Publish a copy of one benign agent's model, which then counts too much.

    Karimireddy, He and Jaggi, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing"
    (ICLR 2022). Their code learns the direction in its first rounds and then stays with one agent;
    here both are computed in each round.

    Args:
        agent: Number of the agent in its cluster. "outermost" is the agent farthest out in the
            direction in which the benign models differ most.
        cluster_offset: 0 for an agent of the attacker's cluster, 1 for one of the next cluster.
    """
    models = view.benign((view.cluster + cluster_offset) % view.num_clusters)
    if agent == "outermost":
        mean = models.mean(0)
        # The leading eigenvector is the direction in which the benign models differ most.
        centred, _, _ = inner_products(models, mean, mean)
        agent = int(torch.linalg.eigh(centred).eigenvectors[:, -1].abs().argmax())
    return models[agent % len(models)]


@knows("benign")
def hybrid_sparse(
    view: AttackView,
    draw: np.random.Generator,
    *,
    kept_share: float = 0.005,
    scale: float = 1.5,
    z: float | None = None,
) -> Float[Tensor, " d"]:
    """Perturb few sensitive parameters strongly and all others slightly (hybrid sparse).

    The attack subtracts from the mean of the benign models `scale` standard deviations of the most
    sensitive parameters, and `z` of all others. The first part hurts at once; the second is a drift
    that adds up over rounds.

    Ozfatura, Ozfatura, Kupcu and Gunduz, "Aggressive or Imperceptible, or Both: Network Pruning
    Assisted Hybrid Byzantines in Federated Learning" (arXiv 2404.06230), after the attacks `sparse`
    (with z) and `sparse_optimized` of their library, whose defaults these are. There, sensitive
    parameters are those that pruning by FORCE would keep in each layer of the initial network, for
    all rounds. Here they are those of the whole network with the largest |theta * update| of this
    round; the mean update of the benign agents stands for the gradient.

    Args:
        kept_share: Share of the sensitive parameters, from 0 to 1.
        scale: Number of standard deviations for the sensitive parameters.
        z: Number of standard deviations for the others. By default the largest at which the squared
            distances to the benign models sum to no more than those of the benign model nearest to
            the others; 0 if the sensitive parameters alone exceed that.
    """
    require("kept_share", kept_share, 0 <= kept_share <= 1, "between 0 and 1")
    models = view.benign()
    mean = models.mean(0)
    std = models.std(0, correction=0)

    sensitivity = (view.previous * (mean - view.previous)).abs()
    sensitive = sensitivity.topk(round(kept_share * len(mean))).indices
    strong = torch.zeros_like(std).index_copy_(0, sensitive, scale * std[sensitive])
    drift = std.index_fill(0, sensitive, 0.0)

    if z is None:
        # The squared distances to the benign models sum to those of their mean, plus a multiple of
        # |strong|^2 + z^2 |drift|^2. For benign model i, |x_i - mean|^2 takes its place.
        centred, _, square = inner_products(models, mean, strong)
        margin = float(centred.diagonal().min()) - square
        drift_square = float(drift.double().square().sum())
        z = math.sqrt(margin / drift_square) if margin > 0 and drift_square > 0 else 0.0
    return mean - strong - z * drift


def _scaled_noise(view: AttackView, draw: np.random.Generator) -> Float[Tensor, " d"]:
    """Draw Gaussian numbers with the root mean square of the agent's own model."""
    size = float(view.own.square().mean().sqrt())
    noise = torch.from_numpy(draw.standard_normal(len(view.own), dtype=np.float32))
    return size * noise.to(view.own.device)


def _max_perturbation(
    view: AttackView, direction: Direction, *, total: bool
) -> Float[Tensor, " d"]:
    """Return mean + gamma p with the largest admissible gamma.

    |mean + gamma p - x_i|^2 is at most the largest squared distance between two benign models; with
    `total`, the sum over i at most the largest sum from one model to the others.
    """
    models = view.benign()
    mean = models.mean(0)
    p = _perturbation_direction(view, models, mean, direction)
    centred, along, square = inner_products(models, mean, p)
    if not square > 0:
        return mean

    norms = centred.diagonal()
    distances = norms[:, None] + norms[None] - 2 * centred
    # gamma^2 c - 2 gamma b + a <= bound, for each model or in total.
    # b sums to 0, like the x_i - mean.
    if total:
        a = norms.sum()[None]
        b = along.sum()[None]
        c = float(len(models)) * square
        bound = distances.sum(1).max()
    else:
        a = norms
        b = along
        c = square
        bound = distances.max()
    gamma = (b + (b.square() + c * (bound - a)).clamp(min=0).sqrt()) / c
    return mean + float(gamma.min()) * p


def _perturbation_direction(
    view: AttackView, models: Float[Tensor, "m d"], mean: Float[Tensor, " d"], direction: Direction
) -> Float[Tensor, " d"]:
    if direction == "std":
        return -models.std(0, correction=0)
    update = mean - view.previous
    if direction == "sign":
        return -update.sign()
    unit: Tensor = -update / update.norm().clamp(min=torch.finfo(update.dtype).tiny)
    return unit


def inner_products(
    models: Float[Tensor, "m d"], mean: Float[Tensor, " d"], p: Float[Tensor, " d"]
) -> tuple[Float[Tensor, "m m"], Float[Tensor, " m"], float]:
    """Return all x_i . x_j, all x_i . p, and p . p in float64, for models x_i minus `mean`."""
    m = len(models)
    # One pass over the models; the mean and p are two further rows.
    products = gram(models, extra=torch.stack([mean, p]))
    to_mean = products[:m, m]
    to_p = products[:m, m + 1]
    centred = products[:m, :m] - to_mean[:, None] - to_mean[None] + products[m, m]
    return centred, to_p - products[m, m + 1], float(products[m + 1, m + 1])
