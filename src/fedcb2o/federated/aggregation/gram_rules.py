"""Robust aggregation rules that compute weights from the Gram matrix of m models.

A rule is a function `(gram, ...) -> weights [m]` that sum to 1. `base` describes the forms and
applies the rules; `coordinatewise` has the rules that work on columns.

`f` is the number of attackers to assume. Each rule admits a largest f for m models, and larger
values are clipped to it, because fewer models than requested may arrive
(`base.clip_byzantine_count`). If a rule works about the agent's own model, this model is the last
row. If a rule compares updates with the agent's own update, the last two rows are its own model
after and before LocalUpdate. Ties go to the first row.

Example:
    >>> import torch
    >>> from fedcb2o.federated.aggregation import gram
    >>> models = torch.tensor([[0.0], [1.0], [2.0], [100.0], [1.5]])
    >>> krum(gram(models), f=1).tolist()
    [0.0, 0.0, 0.0, 0.0, 1.0]
"""

import functools
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.federated.aggregation.base import (
    GramEntries,
    clip_byzantine_count,
    rule_signature,
)
from fedcb2o.federated.aggregation.coordinatewise import half_minus_one, mean_around_median
from fedcb2o.federated.types import Reduction

__all__ = [
    "balance",
    "bulyan",
    "centred_clipping",
    "clipped_gossip",
    "cs_plus",
    "fltrust",
    "geometric_median",
    "krum",
    "mean",
    "monna",
    "multi_krum",
    "norm_clipping",
    "sageflow",
    "ubar",
]


def squared_distances(gram: Float[Tensor, "m m"]) -> Float[Tensor, "m m"]:
    """Compute the squared distances between all models.

    Args:
        gram: Gram matrix, shape [m, m].

    Returns:
        Squared distances, shape [m, m]; NaN where the Gram matrix has no entry.
    """
    norms = gram.diagonal()
    squared = norms.unsqueeze(0) + norms.unsqueeze(1) - (gram + gram.T)
    return squared.clamp_(min=0.0).fill_diagonal_(0.0)


def _recentre(gram: Float[Tensor, "m m"], origin: int) -> Float[Tensor, "m m"]:
    """Return the Gram matrix about the model c = `origin`."""
    column = gram[:, origin]
    return gram - column.unsqueeze(0) - column.unsqueeze(1) + gram[origin, origin]


def _squared_distances_to(
    centred: Float[Tensor, "m m"], point: Float[Tensor, " m"]
) -> Float[Tensor, " m"]:
    """Return squared distances to the average under the weights `point`."""
    along = centred @ point
    return (centred.diagonal() - 2 * along + point @ along).clamp(min=0.0)


def uniform_weights(selected: Bool[Tensor, " m"]) -> Float[Tensor, " m"]:
    """Return the weights of the mean of the selected models.

    Args:
        selected: Models to average, shape [m].

    Returns:
        Weights, shape [m]; all 0 if no model is selected.
    """
    return selected.double() / selected.sum().clamp(min=1)


def _row_mask(rows: Int[Tensor, " s"], m: int) -> Bool[Tensor, " m"]:
    mask = torch.zeros(m, dtype=torch.bool)
    mask[rows] = True
    return mask


def _one_hot(i: int, m: int) -> Float[Tensor, " m"]:
    weights = torch.zeros(m, dtype=torch.float64)
    weights[i] = 1.0
    return weights


def _require_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"`{name}` must be above 0, got {value}")


# Rules that treat all models alike.


@rule_signature("gram", gram_entries="none")
def mean(gram: Float[Tensor, "m m"]) -> Float[Tensor, " m"]:
    """Average all models with equal weights.

    McMahan et al., "Communication-efficient learning of deep networks from decentralized data"
    (2017).

    Args:
        gram: Gram matrix, shape [m, m]; only its size is used.

    Returns:
        Weights, shape [m].
    """
    return torch.full((len(gram),), 1.0, dtype=torch.float64) / max(1, len(gram))


def _krum_limit(m: int) -> int:
    return (m - 3) // 2


@rule_signature("gram", max_byzantine=_krum_limit)
def krum(
    gram: Float[Tensor, "m m"], *, f: int, neighbours: int | None = None
) -> Float[Tensor, " m"]:
    """Select the model nearest to its nearest models (Krum).

    The score is the sum of squared distances. Blanchard et al., "Machine learning with adversaries"
    (NeurIPS 2017). Needs m >= 2 f + 3. Among models of equal score, the one nearest to all models
    wins.

    Args:
        gram: Gram matrix, shape [m, m].
        f: Number of attackers to assume.
        neighbours: Number of nearest models in the score; by default m - f - 2.

    Returns:
        Weights, shape [m]: 1 for one model.
    """
    m = len(gram)
    order = _krum_order(squared_distances(gram), clip_byzantine_count(krum, f, m), neighbours)
    return uniform_weights(_row_mask(order[:1], m))


@rule_signature("gram", max_byzantine=_krum_limit)
def multi_krum(
    gram: Float[Tensor, "m m"],
    *,
    f: int,
    neighbours: int | None = None,
    selected: int | None = None,
) -> Float[Tensor, " m"]:
    """Average the models with the least Krum scores (Multi-Krum).

    Blanchard et al. (2017).

    Args:
        gram: Gram matrix, shape [m, m].
        f: Number of attackers to assume.
        neighbours: Number of nearest models in the score; by default m - f - 2.
        selected: Number of models to average; by default m - f.

    Returns:
        Weights, shape [m].

    Raises:
        ConfigError: `selected` or `neighbours` is below 1.
    """
    m = len(gram)
    f = clip_byzantine_count(multi_krum, f, m)
    if selected is not None and selected < 1:
        raise ConfigError(f"`selected` must be 1 or more, got {selected}")
    count = m - f if selected is None else selected
    order = _krum_order(squared_distances(gram), f, neighbours)
    return uniform_weights(_row_mask(order[:count], m))


def _krum_order(
    squared: Float[Tensor, "m m"], f: int, neighbours: int | None = None
) -> Int[Tensor, " m"]:
    """Sort by the Krum score; ties by the distances to all models."""
    m = len(squared)
    if neighbours is not None and neighbours < 1:
        raise ConfigError(f"`neighbours` must be 1 or more, got {neighbours}")
    count = max(1, m - f - 2) if neighbours is None else neighbours

    to_others = squared.masked_fill(torch.eye(m, dtype=torch.bool), torch.inf)
    ascending = to_others.sort(dim=1).values[:, : max(0, m - 1)]
    order = ascending.sum(1).sort(stable=True).indices
    scores = ascending[:, :count].sum(1)
    return order[scores[order].sort(stable=True).indices]


@rule_signature("gram")
def geometric_median(
    gram: Float[Tensor, "m m"],
    *,
    smoothing: float = 1e-6,
    iterations: int = 100,
    start: Float[Tensor, " m"] | None = None,
) -> Float[Tensor, " m"]:
    """Compute the geometric median by the smoothed Weiszfeld algorithm (RFA).

    The geometric median is the point of least summed distance to the models. Pillutla, Kakade and
    Harchaoui, "Robust aggregation for federated learning" (2022), use 3 iterations, because each of
    theirs needs a pass over the models. With the Gram matrix, iterations are cheap.

    Args:
        gram: Gram matrix, shape [m, m].
        smoothing: Least distance that counts, above 0.
        iterations: Largest number of iterations.
        start: Weights of the first point, shape [m], that sum to 1; by default the mean.

    Returns:
        Weights, shape [m].

    Raises:
        ConfigError: `smoothing` is not above 0.
    """
    _require_positive("smoothing", smoothing)
    m = len(gram)
    weights = mean(gram) if start is None else start.double()
    if m == 0:
        return weights

    # The origin is a central model, so that far outliers do not drown the distances in rounding.
    central = int(squared_distances(gram).median(dim=1).values.argmin())
    centred = _recentre(gram, central)
    for _ in range(iterations):
        previous = weights
        weights = 1 / _squared_distances_to(centred, weights).sqrt().clamp(min=smoothing)
        weights = weights / weights.sum()
        # The change is relative, because the weight of a huge model must vanish.
        if (weights / previous - 1).abs().max() < 1e-12:
            break
    return weights


# Rules about the agent's own model, which is the last row.


def _clipping_entries(parameters: dict[str, Any]) -> GramEntries:
    return "last" if parameters.get("iterations", 1) == 1 else "all"


@rule_signature("gram", gram_entries=_clipping_entries, own_rows=("own",))
def centred_clipping(
    gram: Float[Tensor, "m m"], *, radius: float = 10.0, iterations: int = 1
) -> Float[Tensor, " m"]:
    """Add the mean of clipped differences to the agent's own model.

    One iteration computes v + mean_j min(1, radius / ||x_j - v||) (x_j - v) over the other models,
    where v is the agent's own model. Each further iteration starts at the last result. Karimireddy,
    He and Jaggi, "Learning from history for Byzantine robust optimization" (ICML 2021), use radius
    10 and one iteration.

    Args:
        gram: Gram matrix, shape [m, m]; the agent's own model is last.
        radius: Largest norm of a difference, above 0.
        iterations: Number of iterations.

    Returns:
        Weights, shape [m].

    Raises:
        ConfigError: `radius` is not above 0.
    """
    _require_positive("radius", radius)
    m = len(gram) - 1
    weights = _one_hot(m, m + 1)
    if m == 0:
        return weights

    centred = _recentre(gram, m) if iterations > 1 else None
    for i in range(iterations):
        if i == 0 or centred is None:
            squared = squared_distances(gram)[m]
        else:
            squared = _squared_distances_to(centred, weights)
        factor = clip_factors(squared[:m], radius)
        weights = weights * (1 - factor.mean())
        weights[:m] += factor / m
    return weights


@rule_signature("gram", gram_entries="last", own_rows=("before",))
def norm_clipping(
    gram: Float[Tensor, "m m"], *, radius: float | None = None
) -> Float[Tensor, " m"]:
    """Average clipped updates since the agent's model before the round.

    Sun et al., "Can you really backdoor federated learning?" (2019); the median norm as radius is
    from Nguyen et al., "FLAME" (USENIX Security 2022). In both, all clients start the round at the
    server's model. Here other agents started at models of their own, and that distance counts as
    update.

    Args:
        gram: Gram matrix, shape [m, m]; the model before the round is last.
        radius: Largest norm of an update, above 0; by default the median of the norms.

    Returns:
        Weights, shape [m].

    Raises:
        ConfigError: `radius` is not above 0.
    """
    m = len(gram) - 1
    if m == 0:
        return _one_hot(0, 1)
    squared = squared_distances(gram)[m, :m]
    if radius is None:
        radius = float(squared.sqrt().quantile(0.5))
    else:
        _require_positive("radius", radius)
    factor = clip_factors(squared, radius) / m
    return torch.cat([factor, 1 - factor.sum().unsqueeze(0)])


def _max_byzantine(m: int) -> int:
    """Return the limit if the agent's own model is among m models."""
    return m - 2


@rule_signature("gram", gram_entries="last", own_rows=("own",), max_byzantine=_max_byzantine)
def clipped_gossip(
    gram: Float[Tensor, "m m"], *, f: int, radius: float | None = None
) -> Float[Tensor, " m"]:
    """Add the clipped differences to the agent's own model (ClippedGossip).

    Computes x + sum_j W_j clip(x_j - x, radius), where x is the agent's own model and all W_j =
    1/m. He, Karimireddy and Jaggi, "Byzantine-robust decentralized learning via ClippedGossip"
    (2022). The paper's radius is radius^2 = 1/delta sum_j W_j ||x_j - x||^2 over the benign j, with
    delta = f W. The nearest m - 1 - f models stand for the benign ones. With f = 0 nothing is
    clipped.

    Args:
        gram: Gram matrix, shape [m, m]; the agent's own model is last.
        f: Number of attackers to assume.
        radius: Largest norm of a difference, above 0; by default the paper's.

    Returns:
        Weights, shape [m].

    Raises:
        ConfigError: `radius` is not above 0.
    """
    m = len(gram) - 1
    if m == 0:
        return _one_hot(0, 1)
    squared = squared_distances(gram)[m, :m]
    f = clip_byzantine_count(clipped_gossip, f, m + 1)
    if radius is not None:
        _require_positive("radius", radius)
    elif f == 0:
        radius = torch.inf
    else:
        radius = float(squared.sort().values[: m - f].sum() / f) ** 0.5
    factor = clip_factors(squared, radius) / (m + 1)
    return torch.cat([factor, 1 - factor.sum().unsqueeze(0)])


@rule_signature("gram", gram_entries="last", own_rows=("own",), max_byzantine=_max_byzantine)
def cs_plus(gram: Float[Tensor, "m m"], *, f: int) -> Float[Tensor, " m"]:
    """Add differences clipped at the 2 f + 1 farthest model (CS+-RG).

    Computes x + sum_j W_j clip(x_j - x, radius), where x is the agent's own model and all W_j =
    1/m. The radius is the distance of the farthest model after the 2 f farthest; it is 0 if there
    are at most 2 f other models. Gaucher, Dieuleveut and Hendrikx, "Unified breakdown analysis for
    Byzantine robust gossip" (ICML 2025), after the authors' released code. The weights, theirs
    times their step size, are those of a complete graph of m agents.

    Args:
        gram: Gram matrix, shape [m, m]; the agent's own model is last.
        f: Number of attackers to assume.

    Returns:
        Weights, shape [m].
    """
    m = len(gram) - 1
    squared = squared_distances(gram)[m, :m]
    f = clip_byzantine_count(cs_plus, f, m + 1)
    radius = 0.0
    if f == 0:
        radius = torch.inf
    elif m > 2 * f:
        radius = float(squared.sort().values[m - 2 * f - 1]) ** 0.5
    factor = clip_factors(squared, radius) / (m + 1)
    return torch.cat([factor, 1 - factor.sum().unsqueeze(0)])


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
    model. Fang et al., "Byzantine-robust decentralized federated learning" (CCS 2024); the defaults
    are theirs. Without a near model, the agent's own model stays. Tune gamma: a suitable value
    depends on the distance that local training covers.

    Args:
        gram: Gram matrix, shape [m, m]; the agent's own model is last.
        progress: Finished part t/T of the run, from 0 to 1.
        gamma: Largest relative distance at the start, above 0.
        kappa: Decay rate of the largest relative distance.
        alpha: Weight of the agent's own model, from 0 to 1.

    Returns:
        Weights, shape [m].

    Raises:
        ConfigError: `gamma` or `alpha` is out of range.
    """
    _require_positive("gamma", gamma)
    m = len(gram) - 1
    max_distance = gamma * float(np.exp(-kappa * progress)) * gram[m, m].sqrt()
    return _mix_with_own(squared_distances(gram)[m, :m].sqrt() <= max_distance, alpha)


@rule_signature("gram", gram_entries="last", own_rows=("own",), max_byzantine=half_minus_one)
def monna(gram: Float[Tensor, "m m"], *, f: int) -> Float[Tensor, " m"]:
    """Average the m - f models nearest to the agent's own (MoNNA).

    The agent's own model is among them. Farhadkhani et al., "Robust collaborative learning with
    linear gradient overhead" (ICML 2023). Needs m >= 2 f + 1.

    Args:
        gram: Gram matrix, shape [m, m]; the agent's own model is last.
        f: Number of attackers to assume.

    Returns:
        Weights, shape [m].
    """
    m = len(gram)
    squared = squared_distances(gram)[m - 1].clone()
    squared[-1] = -1.0  # even a copy of the agent's own model is not nearer
    count = m - clip_byzantine_count(monna, f, m)
    return uniform_weights(_row_mask(squared.sort(stable=True).indices[:count], m))


@rule_signature("gram", gram_entries="last", own_rows=("own",), max_byzantine=_max_byzantine)
def ubar(
    gram: Float[Tensor, "m m"], losses: Float[Tensor, " m"], *, f: int, alpha: float = 0.5
) -> Float[Tensor, " m"]:
    """Mix the agent's own model with near models of low loss (UBAR).

    Candidates are all models except the f farthest from the agent's own. Those whose loss is at
    most the agent's own loss are averaged; without any, the candidate of least loss is taken. Guo
    et al., "Byzantine-resilient decentralized stochastic gradient descent" (2021).

    Args:
        gram: Gram matrix, shape [m, m]; the agent's own model is last.
        losses: Losses on the agent's data, shape [m]; that of its own model is last.
        f: Number of attackers to assume.
        alpha: Weight of the agent's own model, from 0 to 1.

    Returns:
        Weights, shape [m].

    Raises:
        ConfigError: `alpha` is out of range.
    """
    m = len(gram) - 1
    count = m - clip_byzantine_count(ubar, f, m + 1)
    nearest = squared_distances(gram)[m, :m].sort(stable=True).indices[:count]
    candidates = _row_mask(nearest, m) & (losses[:m] < torch.inf)
    selected = candidates & (losses[:m] <= losses[m])
    if candidates.any() and not selected.any():
        best = losses[:m].masked_fill(~candidates, torch.inf).argmin(keepdim=True)
        selected = _row_mask(best, m)
    return _mix_with_own(selected, alpha)


@rule_signature("gram", gram_entries="last", own_rows=("own", "before"))
def fltrust(gram: Float[Tensor, "m m"]) -> Float[Tensor, " m"]:
    """Average scaled updates by their cosine to the agent's own (FLTrust).

    Cao et al., "FLTrust" (NDSS 2021), with the agent's own data instead of the server's. The
    trust, and the weight, is max(0, cos(g_j, g_0)). The updates are g_j = x_j - b since the agent's
    model b before the round, scaled to the norm of the agent's own update g_0. In the paper all
    clients start the round at b. Here other agents started elsewhere, and that distance counts as
    update: cosines are smaller, and the scaled sum moves towards the other models as well as down
    their losses. If no model is trusted, the agent's own model has all the weight.

    Args:
        gram: Gram matrix, shape [m, m]; the last two rows are the agent's own model after
            LocalUpdate, which is only a reference, and b, whose weight may be below 0.

    Returns:
        Weights, shape [m].
    """
    m = len(gram) - 2
    last = gram[:, m:]  # the only entries that are read, next to the diagonal
    norms = (gram.diagonal() - 2 * last[:, 1] + gram[-1, -1]).clamp(min=0.0).sqrt()
    along = last[:, 0] - last[:, 1] - last[-1, 0] + gram[-1, -1]
    trust = (along / (norms * norms[m])).nan_to_num(0.0, 0.0, 0.0).clamp(0.0, 1.0)[:m]
    if not trust.sum() > 0:
        return _one_hot(m, m + 2)
    scale = (norms[m] / norms[:m]).nan_to_num(0.0, 0.0, 0.0)
    scaled = trust / trust.sum() * scale
    return torch.cat([scaled, scaled.new_zeros(1), 1 - scaled.sum().unsqueeze(0)])


def clip_factors(squared: Float[Tensor, " m"], radius: float) -> Float[Tensor, " m"]:
    """Compute the clipping factors min(1, radius / distance).

    Args:
        squared: Squared distances, shape [m].
        radius: Largest distance.

    Returns:
        Factors from 0 to 1, shape [m].
    """
    return (radius / squared.sqrt()).nan_to_num(1.0, 1.0).clamp(max=1.0)


def _mix_with_own(selected: Bool[Tensor, " m"], alpha: float) -> Float[Tensor, " k"]:
    """Mix the agent's own model with the mean of the selected models.

    The weights are alpha and 1 - alpha. Without a selected model, the agent's own model has all the
    weight.
    """
    if not 0 <= alpha <= 1:
        raise ConfigError(
            f"`alpha`, the share of the agent's own model, must be from 0 to 1, got {alpha}"
        )
    weights = (1 - alpha) * uniform_weights(selected)
    return torch.cat([weights, 1 - weights.sum().unsqueeze(0)])


# A rule that reads values per model only.


@rule_signature("values", gram_entries="none")
def sageflow(
    losses: Float[Tensor, " m"],
    entropies: Float[Tensor, " m"],
    num_samples: Float[Tensor, " m"],
    *,
    threshold: float = 1.0,
    delta: float = 1.0,
    by_samples: bool = False,
) -> Float[Tensor, " m"]:
    """Weigh the models with confident predictions by 1 / loss^delta (Sageflow).

    Park et al., "Sageflow: robust federated learning against both stragglers and adversaries"
    (NeurIPS 2021), after the authors' released code, whose agents hold equally many samples. The
    agent's validation data replace the server's public data.

    Args:
        losses: Losses on the agent's validation data, shape [m].
        entropies: Mean entropy of each model's predictions, in nats, shape [m].
        num_samples: Number of training samples that each peer claims, shape [m].
        threshold: Models of this entropy or more do not count.
        delta: Exponent of the loss.
        by_samples: Multiply each weight by the number of samples.

    Returns:
        Weights, shape [m]; all 0 if no model counts.
    """
    is_confident = (entropies < threshold) & losses.isfinite()
    scores = -delta * losses.double().clamp(min=1e-12).log()
    if by_samples:
        scores = scores + num_samples.double().log()
    scores = scores.where(is_confident, -torch.inf)
    if not (scores > -torch.inf).any():
        return torch.zeros_like(scores)
    return torch.softmax(scores, 0)


# A rule that selects by the Gram matrix and reduces columns.


def _bulyan_limit(m: int) -> int:
    return (m - 3) // 4


@rule_signature("gram", max_byzantine=_bulyan_limit)
def bulyan(gram: Float[Tensor, "m m"], *, f: int) -> Reduction:
    """Select by Krum, then average around each coordinate's median (Bulyan).

    Krum selects m - 2 f models, one after the other. Of the selected models, each coordinate is the
    mean of the m - 4 f values nearest to the median. El Mhamdi, Guerraoui and Rouault, "The hidden
    vulnerability of distributed learning in Byzantium" (ICML 2018). Needs m >= 4 f + 3.

    Args:
        gram: Gram matrix, shape [m, m].
        f: Number of attackers to assume.

    Returns:
        A reduction of the selected models.
    """
    m = len(gram)
    f = clip_byzantine_count(bulyan, f, m)
    squared = squared_distances(gram)
    remaining = torch.arange(m)
    if f == 0:
        return Reduction(remaining, functools.partial(mean_around_median, count=m))

    for _ in range(m - 2 * f):
        best = _krum_order(squared[remaining][:, remaining], f)[0]
        remaining = torch.cat([remaining[:best], remaining[best + 1 :]])
    rows = (~_row_mask(remaining, m)).nonzero().flatten()
    return Reduction(rows, functools.partial(mean_around_median, count=m - 4 * f))
