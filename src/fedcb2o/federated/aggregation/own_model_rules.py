"""Robust rules by the Gram matrix about the agent's own model.

As in `gram_rules`, a rule is a function `(gram, ...) -> weights [m]`. The agent's own model is the
last row. If a rule compares updates with the agent's own update, the last two rows are its own
model after and before LocalUpdate.

Example:
    >>> import torch
    >>> from fedcb2o.federated.aggregation import gram
    >>> monna(gram(torch.tensor([[0.0], [100.0], [1.0]])), f=1).tolist()
    [0.5, 0.0, 0.5]
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedcb2o.errors import ConfigError, require
from fedcb2o.federated.aggregation.base import GramEntries, rule_signature, validate_byzantine_count
from fedcb2o.federated.aggregation.coordinatewise import half_minus_one
from fedcb2o.federated.aggregation.gram_rules import (
    one_hot,
    recentre,
    row_mask,
    squared_distances,
    squared_distances_to,
    uniform_weights,
)

__all__ = [
    "balance",
    "centred_clipping",
    "clipped_gossip",
    "cs_plus",
    "fltrust",
    "monna",
    "norm_clipping",
    "ubar",
]


def _clipping_entries(parameters: dict[str, Any]) -> GramEntries:
    # The first iteration reads the distances to the agent's own model alone.
    return "last" if parameters.get("iterations", 1) == 1 else "all"


@rule_signature("gram", gram_entries=_clipping_entries, own_rows=("own",), by_distances=True)
def centred_clipping(
    gram: Float[Tensor, "m m"], *, radius: float = 10.0, iterations: int = 1
) -> Float[Tensor, " m"]:
    """Add the mean of clipped differences to the agent's own model.

    One iteration computes v + mean_j min(1, radius / ||x_j - v||) (x_j - v) over the other models,
    where v is the agent's own model. Each further iteration starts at the last result. Karimireddy,
    He and Jaggi, "Learning from history for Byzantine robust optimization" (ICML 2021), use radius
    10 and one iteration.

    Args:
        iterations: Number of iterations.
    """
    require("radius", radius, radius > 0, "above 0")
    m = len(gram) - 1
    weights = one_hot(m, m + 1)
    if m == 0:
        return weights

    centred = recentre(gram, m) if iterations > 1 else None
    for i in range(iterations):
        if i == 0 or centred is None:
            squared = squared_distances(gram)[m]
        else:
            squared = squared_distances_to(centred, weights)
        factor = clip_factors(squared[:m], radius)
        weights = weights * (1 - factor.mean())
        weights[:m] += factor / m
    return weights


@rule_signature("gram", gram_entries="last", own_rows=("before",), by_distances=True)
def norm_clipping(
    gram: Float[Tensor, "m m"], *, radius: float | None = None
) -> Float[Tensor, " m"]:
    """Average clipped updates since the agent's model before the round.

    The result is b + (1/m) sum_j min(1, radius / ||x_j - b||) (x_j - b), where b is the model
    before the round. Sun, Kairouz, Suresh and McMahan, "Can you really backdoor federated
    learning?" (2019); the median norm as radius is from Nguyen et al., "FLAME" (USENIX Security
    2022). In both, all clients start the round at the server's model. Here other agents started at
    models of their own, and that distance counts as update.

    Args:
        radius: Largest norm of an update, above 0; by default the median of the norms.
    """
    m = len(gram) - 1
    if m == 0:
        return one_hot(0, 1)
    squared = squared_distances(gram)[m, :m]
    if radius is None:
        radius = float(squared.sqrt().quantile(0.5))
    else:
        require("radius", radius, radius > 0, "above 0")
    return _with_remainder(clip_factors(squared, radius) / m)


def _max_byzantine(m: int) -> int:
    """Return the limit if the agent's own model is among m models."""
    return m - 2


@rule_signature(
    "gram", gram_entries="last", own_rows=("own",), max_byzantine=_max_byzantine, by_distances=True
)
def clipped_gossip(
    gram: Float[Tensor, "m m"], *, f: int, radius: float | None = None
) -> Float[Tensor, " m"]:
    """Add the clipped differences to the agent's own model (ClippedGossip).

    The result is x + sum_j W_j min(1, radius / ||x_j - x||) (x_j - x), where x is the agent's own
    model and all W_j = 1/m for m models, its own among them. He, Karimireddy and Jaggi,
    "Byzantine-robust decentralized learning via ClippedGossip" (2022). The paper's radius is
    radius^2 = 1/delta sum_j W_j ||x_j - x||^2 over the benign j, with delta = f W. The nearest
    m - 1 - f models stand for the benign ones. With f = 0 nothing is clipped.

    Args:
        radius: Largest norm of a difference, above 0; by default the paper's.
    """
    m = len(gram) - 1
    if m == 0:
        return one_hot(0, 1)
    squared = squared_distances(gram)[m, :m]
    f = validate_byzantine_count(clipped_gossip, f, m + 1)
    if radius is not None:
        require("radius", radius, radius > 0, "above 0")
    elif f == 0:
        radius = torch.inf
    else:
        radius = float(squared.sort().values[: m - f].sum() / f) ** 0.5
    return _with_remainder(clip_factors(squared, radius) / (m + 1))


@rule_signature(
    "gram", gram_entries="last", own_rows=("own",), max_byzantine=_max_byzantine, by_distances=True
)
def cs_plus(gram: Float[Tensor, "m m"], *, f: int) -> Float[Tensor, " m"]:
    """Add differences clipped at the 2 f + 1 farthest model (CS+-RG).

    The result is x + sum_j W_j clip(x_j - x, radius) with all W_j = 1/m for m models, the agent's
    own x among them. The radius is the distance of the farthest model after the 2 f farthest; it is
    0 if there are at most 2 f other models. Gaucher, Dieuleveut and Hendrikx, "Unified breakdown
    analysis for Byzantine robust gossip" (ICML 2025), after the authors' released code. The
    weights, theirs times their step size, are those of a complete graph of m agents.
    """
    m = len(gram) - 1
    squared = squared_distances(gram)[m, :m]
    f = validate_byzantine_count(cs_plus, f, m + 1)
    radius = 0.0
    if f == 0:
        radius = torch.inf
    elif m > 2 * f:
        radius = float(squared.sort().values[m - 2 * f - 1]) ** 0.5
    return _with_remainder(clip_factors(squared, radius) / (m + 1))


@rule_signature("gram", gram_entries="last", own_rows=("own",))
def balance(
    gram: Float[Tensor, "m m"],
    progress: float,
    *,
    gamma: float = 0.3,
    kappa: float = 1.0,
    alpha: float = 0.5,
) -> Float[Tensor, " m"]:
    """Mix the agent's own model with the mean of near models (BALANCE).

    A model x_j is near if ||x_j - x|| <= gamma exp(-kappa t/T) ||x||, where x is the agent's own
    model. The result is alpha x + (1 - alpha) times the mean of the near models, or x without one.
    Fang et al., "Byzantine-robust decentralized federated learning" (CCS 2024); the defaults are
    theirs. Tune gamma: a suitable value depends on the distance that local training covers.

    Args:
        progress: Finished part t/T of the run, from 0 to 1.
        gamma: Largest relative distance at the start, above 0.
        kappa: Decay rate of the largest relative distance.
    """
    require("gamma", gamma, gamma > 0, "above 0")
    m = len(gram) - 1
    max_distance = gamma * float(np.exp(-kappa * progress)) * gram[m, m].sqrt()
    return _mix_with_own(squared_distances(gram)[m, :m].sqrt() <= max_distance, alpha)


@rule_signature(
    "gram", gram_entries="last", own_rows=("own",), max_byzantine=half_minus_one, by_distances=True
)
def monna(gram: Float[Tensor, "m m"], *, f: int) -> Float[Tensor, " m"]:
    """Average the m - f models nearest to the agent's own (MoNNA).

    The agent's own model is among them. Farhadkhani, Guerraoui, Gupta, Hoang, Pinot and Stephan,
    "Robust collaborative learning with linear gradient overhead" (ICML 2023). Needs m >= 2 f + 1.
    """
    m = len(gram)
    squared = squared_distances(gram)[m - 1].clone()
    squared[-1] = -1.0  # even a copy of the agent's own model is not nearer
    count = m - validate_byzantine_count(monna, f, m)
    return uniform_weights(row_mask(squared.sort(stable=True).indices[:count], m))


@rule_signature(
    "gram", gram_entries="last", own_rows=("own",), max_byzantine=_max_byzantine, by_distances=True
)
def ubar(
    gram: Float[Tensor, "m m"], losses: Float[Tensor, " m"], *, f: int, alpha: float = 0.5
) -> Float[Tensor, " m"]:
    """Mix the agent's own model with near models of low loss (UBAR).

    Candidates are all models except the f farthest from the agent's own. Those whose loss is at
    most the agent's own loss are averaged; without any, the candidate of least loss is taken. The
    result is alpha times the agent's own model plus (1 - alpha) times that mean. Guo et al.,
    "Byzantine-resilient decentralized stochastic gradient descent" (2021).

    Args:
        losses: Losses on the agent's data, shape [m]; that of its own model is last.

    Raises:
        ConfigError: `alpha` is out of range.
    """
    m = len(gram) - 1
    count = m - validate_byzantine_count(ubar, f, m + 1)
    nearest = squared_distances(gram)[m, :m].sort(stable=True).indices[:count]
    candidates = row_mask(nearest, m) & (losses[:m] < torch.inf)
    selected = candidates & (losses[:m] <= losses[m])
    if candidates.any() and not selected.any():
        best = losses[:m].masked_fill(~candidates, torch.inf).argmin(keepdim=True)
        selected = row_mask(best, m)
    return _mix_with_own(selected, alpha)


@rule_signature("gram", gram_entries="last", own_rows=("own", "before"), by_distances=True)
def fltrust(gram: Float[Tensor, "m m"]) -> Float[Tensor, " m"]:
    """Average scaled updates by their cosine to the agent's own (FLTrust).

    Cao, Fang, Liu and Gong, "FLTrust" (NDSS 2021), with the agent's own data instead of the
    server's: b + sum_j w_j (||g_0|| / ||g_j||) g_j / sum_j w_j with w_j = max(0, cos(g_j, g_0)).
    The updates are g_j = x_j - b since the agent's model b before the round, scaled to the norm of
    the agent's own update g_0. In the paper all clients start the round at b. Here other agents
    started elsewhere, and that distance counts as update: cosines are smaller, and the scaled sum
    moves towards the other models as well as down their losses. If no model is trusted, the agent's
    own model has all the weight.

    Args:
        gram: Gram matrix, shape [m, m]; the last two rows are the agent's own model after
            LocalUpdate, which is only a reference, and b, whose weight may be below 0.
    """
    m = len(gram) - 2
    last = gram[:, m:]  # the only entries that are read, next to the diagonal
    # The norms of the updates x_j - b, and their products with the agent's own update.
    norms = (gram.diagonal() - 2 * last[:, 1] + gram[-1, -1]).clamp(min=0.0).sqrt()
    along = last[:, 0] - last[:, 1] - last[-1, 0] + gram[-1, -1]
    trust = (along / (norms * norms[m])).nan_to_num(0.0, 0.0, 0.0).clamp(0.0, 1.0)[:m]
    if not trust.sum() > 0:
        return one_hot(m, m + 2)
    scale = (norms[m] / norms[:m]).nan_to_num(0.0, 0.0, 0.0)
    scaled = trust / trust.sum() * scale
    return _with_remainder(torch.cat([scaled, scaled.new_zeros(1)]))


def clip_factors(squared: Float[Tensor, " m"], radius: float) -> Float[Tensor, " m"]:
    """Compute the clipping factors min(1, radius / distance) from squared distances."""
    # A model at distance 0 gives an infinite or undefined ratio, and is not clipped.
    return (radius / squared.sqrt()).nan_to_num(1.0, 1.0).clamp(max=1.0)


def _mix_with_own(selected: Bool[Tensor, " m"], alpha: float) -> Float[Tensor, " k"]:
    """Mix the agent's own model, with weight alpha or 1, with the mean of selected models."""
    if not 0 <= alpha <= 1:
        raise ConfigError(
            f"`alpha`, the share of the agent's own model, must be from 0 to 1, got {alpha}"
        )
    return _with_remainder((1 - alpha) * uniform_weights(selected))


def _with_remainder(weights: Float[Tensor, " m"]) -> Float[Tensor, " k"]:
    """Append the weight of the agent's own model, so that all weights sum to 1."""
    return torch.cat([weights, 1 - weights.sum().unsqueeze(0)])
