"""What malicious agents publish instead of the model that they trained.

An attack on models is a function (view, draw) -> the model [d] that the agent publishes, or one for each receiver
[r, d]; its further arguments are keywords, and `knows` declares whose models it looks at. Where the literature speaks
of gradients sent to a server, read the update of this round, `own - before`; the agents began the round with models of
their own, and `before` is always the attacker's.
"""

import math
from statistics import NormalDist
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.federated.aggregation.gram_matrix import gram
from fedcb2o.federated.types import AttackView, knows

__all__ = [
    "alie",
    "boosting",
    "free_rider",
    "gap_aware",
    "gaussian_noise",
    "hybrid_sparse",
    "ipm",
    "mimic",
    "min_max",
    "min_sum",
    "not_finite",
    "random_model",
    "sign_flip",
    "slow_drift",
]

Direction = Literal["std", "unit", "sign"]

# What an agent alone can do.


@knows()
def sign_flip(
    view: AttackView, draw: np.random.Generator, *, scale: float = 1.0
) -> Float[Tensor, " d"]:
    """Its update backwards, `scale` times.

    Li, Xu, Chen, Giannakis and Ling, "RSA: Byzantine-Robust Stochastic Aggregation Methods" (AAAI 2019).
    """
    return view.previous - scale * (view.own - view.previous)


@knows()
def gaussian_noise(
    view: AttackView, draw: np.random.Generator, *, scale: float = 1.0
) -> Float[Tensor, " d"]:
    """Its model and Gaussian noise, whose standard deviation is `scale` times the model's root mean square.

    Li et al., "RSA" (AAAI 2019), who add it to the gradient.
    """
    return view.own + scale * _scaled_noise(view, draw)


@knows()
def random_model(
    view: AttackView, draw: np.random.Generator, *, scale: float = 1.0
) -> Float[Tensor, " d"]:
    """A random model: Gaussian numbers, `scale` times as large as those of its own model.

    Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine Learning with Adversaries" (NeurIPS 2017).
    """
    return scale * _scaled_noise(view, draw)


@knows()
def boosting(
    view: AttackView, draw: np.random.Generator, *, factor: float = 5.0
) -> Float[Tensor, " d"]:
    """Its update `factor` times, so that it outweighs the others in an average: model replacement.

    Bagdasaryan et al., "How To Backdoor Federated Learning" (AISTATS 2020), where the data are poisoned too.
    """
    return view.previous + factor * (view.own - view.previous)


@knows()
def free_rider(
    view: AttackView, draw: np.random.Generator, *, noise: float = 0.0
) -> Float[Tensor, " d"]:
    """The model that it began the round with; with `noise`, disguised by so many times the model's root mean square.

    Fraboni, Vidal and Lorenzi, "Free-rider Attacks on Model Aggregation in Federated Learning" (AISTATS 2021).
    """
    return view.previous + noise * _scaled_noise(view, draw) if noise else view.previous


@knows()
def not_finite(
    view: AttackView,
    draw: np.random.Generator,
    *,
    value: Literal["nan", "inf", "-inf", "huge"] = "nan",
) -> Float[Tensor, " d"]:
    """What breaks an average: nothing but NaN, an infinity, or the largest finite number."""
    return torch.full_like(
        view.own, torch.finfo(view.own.dtype).max if value == "huge" else float(value)
    )


# Attackers who work together, or see what the benign agents have.


@knows("fellows", "benign")
def alie(
    view: AttackView,
    draw: np.random.Generator,
    *,
    z: float | None = None,
    estimated_from: Literal["fellows", "benign"] = "fellows",
) -> Float[Tensor, " d"]:
    """A little is enough: the mean and `z` standard deviations of each parameter, inside the spread of the benign.

    By default z is the largest that leaves enough benign agents farther from the mean, see `alie_z`. As published, mean
    and deviation are estimated from the attackers' own clean models; "benign" is the omniscient variant.
    Baruch, Baruch and Goldberg, "A Little Is Enough" (NeurIPS 2019).
    """
    models = view.colluders() if estimated_from == "fellows" else view.benign()
    z = alie_z(view.num_colluders + view.num_benign, view.num_colluders) if z is None else z
    return models.mean(0) + z * models.std(0, correction=0)


def alie_z(n: int, f: int) -> float:
    """The z of `alie` for f attackers among n agents: Phi(z) = (n - f - s) / (n - f), s = floor(n / 2 + 1) - f being
    the benign agents that the attackers need on their side, at least one; 0 where no z is that small."""
    s = max(1, n // 2 + 1 - f)
    share = (n - f - s) / (n - f)
    return max(0.0, NormalDist().inv_cdf(share)) if share > 0 else 0.0


@knows("benign")
def ipm(view: AttackView, draw: np.random.Generator, *, eps: float = 0.5) -> Float[Tensor, " d"]:
    """Inner-product manipulation: -`eps` times the mean update of the benign agents of its cluster.

    Xie, Koyejo and Gupta, "Fall of Empires: Breaking Byzantine-tolerant SGD by Inner Product Manipulation" (UAI 2020).
    """
    return view.previous - eps * (view.benign().mean(0) - view.previous)


@knows("benign")
def min_max(
    view: AttackView, draw: np.random.Generator, *, direction: Direction = "std"
) -> Float[Tensor, " d"]:
    """As far from the mean of the benign models in a `direction` as it is no farther from any of them than the two
    farthest are from each other.

    Directions: "std", their standard deviation, "unit", their mean update, "sign", its signs; all backwards.
    Shejwalkar and Houmansadr, "Manipulating the Byzantine" (NDSS 2021), by a formula instead of a search.
    """
    return _max_perturbation(view, direction, total=False)


@knows("benign")
def min_sum(
    view: AttackView, draw: np.random.Generator, *, direction: Direction = "std"
) -> Float[Tensor, " d"]:
    """As far in a `direction`, see `min_max`, as the sum of its squared distances to the benign models is at most that
    of the benign model that is farthest from the others (Shejwalkar and Houmansadr, NDSS 2021)."""
    return _max_perturbation(view, direction, total=True)


@knows("benign")
def mimic(
    view: AttackView,
    draw: np.random.Generator,
    *,
    agent: int | Literal["outermost"] = 0,
    cluster_offset: int = 0,
) -> Float[Tensor, " d"]:
    """A copy of the model of benign agent number `whom` of its cluster, which then counts too much; "outermost" is that
    which lies farthest out in the direction in which the benign models differ most.

    Karimireddy, He and Jaggi, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing" (ICLR 2022), whose
    code learns that direction in its first rounds and then stays with one agent; here both are found anew in each
    round. With `clusters_on` = 1 it is an agent of the next cluster.
    """
    models = view.benign((view.cluster + cluster_offset) % view.num_clusters)
    if agent == "outermost":
        mean = models.mean(0)
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
    """The mean of the benign models less `scale` standard deviations of the few parameters that the network is most
    sensitive to, a share `kept`, and `z` of all others: a blow where it is felt, and a drift that adds up over rounds.

    By default z is the largest at which the squared distances to the benign models sum to no more than those of the
    benign model nearest to the others; 0 where the blow alone goes beyond that. Ozfatura, Ozfatura, Kupcu and Gunduz,
    "Aggressive or Imperceptible, or Both: Network Pruning Assisted Hybrid Byzantines in Federated Learning" (arXiv
    2404.06230), after the attacks `sparse` (with z) and `sparse_optimized` of their library, whose defaults these are.
    There the parameters are those that pruning by FORCE would keep of each layer of the initial network, for all
    rounds; here those of the whole network with the largest |theta * update| of this round, the mean update of the
    benign agents standing for the gradient.
    """
    if not 0 <= kept_share <= 1:
        raise ConfigError(f"`kept` must be between 0 and 1, got {kept_share}")
    models = view.benign()
    mean = models.mean(0)
    std = models.std(0, correction=0)
    felt = (
        (view.previous * (mean - view.previous)).abs().topk(round(kept_share * len(mean))).indices
    )
    blow = torch.zeros_like(std).index_copy_(0, felt, scale * std[felt])
    drift = std.index_fill(0, felt, 0.0)
    if z is None:
        centred, _, square = inner_products(models, mean, blow)
        room = float(centred.diagonal().min()) - square
        wide = float(drift.double().square().sum())
        z = math.sqrt(room / wide) if room > 0 and wide > 0 else 0.0
    return mean - blow - z * drift


# Attacks on FedCB2O itself, by agents that know L and G. They need poisoned data.


@knows("benign", on_poisoned_data=True)
def gap_aware(
    view: AttackView, draw: np.random.Generator, *, bound: float = 0.1, halvings: int = 8
) -> Float[Tensor, " d"]:
    """As much of its poisoned model as keeps G under a `bound`: the largest t, by bisection, at which the class-loss
    gap of m + t (own - m) to m, the mean of the benign models, is at most that on its own true samples
    (eq:robust_criterion_G_LF)."""
    if not bound >= 0:
        raise ConfigError(f"`bound` must be 0 or more, got {bound}")
    mean = view.benign().mean(0)
    reference = view.losses(mean[None])

    def gap(t: float) -> float:
        found = view.losses(torch.lerp(mean, view.own, t)[None])
        gaps = (found.by_class - reference.by_class)[:, reference.present]
        return float(gaps.nan_to_num(nan=torch.inf, posinf=torch.inf).amax())

    low, high = (1.0, 1.0) if gap(1.0) <= bound else (0.0, 1.0)
    for _ in range(halvings if low < high else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if gap(middle) <= bound else (low, middle)
    return torch.lerp(mean, view.own, low)


@knows("benign", on_poisoned_data=True)
def slow_drift(
    view: AttackView, draw: np.random.Generator, *, step: float = 1.0
) -> Float[Tensor, " d"]:
    """A small step a round, which moves the own models that G is relative to: from the mean of the benign models
    towards its poisoned one, at most `step` times as far as the benign are from their mean (root mean square).

    The projection is that of Wang et al., "Attack of the Tails" (NeurIPS 2020).
    """
    models = view.benign()
    mean = models.mean(0)
    centred, _, square = inner_products(models, mean, view.own - mean)
    spread = math.sqrt(float(centred.diagonal().mean()))
    far = math.sqrt(square)
    return torch.lerp(mean, view.own, min(1.0, step * spread / far) if far else 1.0)


def _scaled_noise(view: AttackView, draw: np.random.Generator) -> Float[Tensor, " d"]:
    """Gaussian numbers whose standard deviation is the root mean square of the agent's own model."""
    size = float(view.own.square().mean().sqrt())
    return size * torch.from_numpy(draw.standard_normal(len(view.own), dtype=np.float32)).to(
        view.own.device
    )


def _max_perturbation(
    view: AttackView, direction: Direction, *, total: bool
) -> Float[Tensor, " d"]:
    """Mean + gamma p with the largest gamma at which |mean + gamma p - x_i|^2 is at most the largest squared distance
    between two benign models x_i, for all i; or its sum over i at most the largest sum from one to the others."""
    models = view.benign()
    mean = models.mean(0)
    if direction == "std":
        p = -models.std(0, correction=0)
    else:
        update = mean - view.previous
        p = (
            -update.sign()
            if direction == "sign"
            else -update / update.norm().clamp(min=torch.finfo(update.dtype).tiny)
        )
    centred, along, square = inner_products(models, mean, p)
    if not square > 0:
        return mean
    norms = centred.diagonal()
    distances = norms[:, None] + norms[None] - 2 * centred
    k = float(len(models))
    # gamma^2 c - 2 gamma b + a <= bound, for each model or in sum; b sums to 0, as the x_i - mean do
    if total:
        a = norms.sum()[None]
        b = along.sum()[None]
        c = k * square
        bound = distances.sum(1).max()
    else:
        a = norms
        b = along
        c = square
        bound = distances.max()
    gamma = (b + (b.square() + c * (bound - a)).clamp(min=0).sqrt()) / c
    return mean + float(gamma.min()) * p


def inner_products(
    models: Float[Tensor, "m d"], mean: Float[Tensor, " d"], p: Float[Tensor, " d"]
) -> tuple[Float[Tensor, "m m"], Float[Tensor, " m"], float]:
    """In float64, with x_i the models less their mean: all x_i . x_j, all x_i . p, and p . p."""
    m = len(models)
    products = gram(models, extra=torch.stack([mean, p]))
    to_mean = products[:m, m]
    to_p = products[:m, m + 1]
    centred = products[:m, :m] - to_mean[:, None] - to_mean[None] + products[m, m]
    return centred, to_p - products[m, m + 1], float(products[m + 1, m + 1])
