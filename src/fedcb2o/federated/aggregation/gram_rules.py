"""Robust rules by the Gram matrix of m models, which treat all models alike.

A rule is a function `(gram, ...) -> weights [m]` that sum to 1. `base` describes the forms and
applies the rules. `own_model_rules` has the rules about the agent's own model, and `coordinatewise`
those that work on columns.

`f` is the number of attackers to assume. Each rule admits a largest f for m models; a larger one is
an error. Runs clip it first, because fewer models than requested may arrive
(`base.clip_byzantine_count`). Ties go to the first row.

Example:
    >>> import torch
    >>> from fedcb2o.federated.aggregation import gram
    >>> models = torch.tensor([[0.0], [1.0], [2.0], [100.0], [1.5]])
    >>> krum(gram(models), f=1).tolist()
    [0.0, 0.0, 0.0, 0.0, 1.0]
"""

import functools
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fedcb2o.errors import ConfigError, require
from fedcb2o.federated.aggregation.base import rule_signature, validate_byzantine_count
from fedcb2o.federated.aggregation.coordinatewise import mean_around_median
from fedcb2o.federated.types import Reduction

__all__ = ["bulyan", "geometric_median", "krum", "mean", "multi_krum", "sageflow"]


def squared_distances(gram: Float[Tensor, "m m"]) -> Float[Tensor, "m m"]:
    """Compute the squared distances between all models; NaN without an entry of the matrix."""
    norms = gram.diagonal()
    squared = norms.unsqueeze(0) + norms.unsqueeze(1) - (gram + gram.T)
    return squared.clamp_(min=0.0).fill_diagonal_(0.0)


def recentre(gram: Float[Tensor, "m m"], origin: int) -> Float[Tensor, "m m"]:
    """Move the origin of a Gram matrix to the model in row `origin`."""
    column = gram[:, origin]
    return gram - column.unsqueeze(0) - column.unsqueeze(1) + gram[origin, origin]


def squared_distances_to(
    centred: Float[Tensor, "m m"], point: Float[Tensor, " m"]
) -> Float[Tensor, " m"]:
    """Compute the squared distances to an average of the models with weights `point`."""
    along = centred @ point
    return (centred.diagonal() - 2 * along + point @ along).clamp(min=0.0)


def uniform_weights(selected: Bool[Tensor, " m"]) -> Float[Tensor, " m"]:
    """Return the weights of the mean of the selected models; all 0 without any."""
    return selected.double() / selected.sum().clamp(min=1)


def row_mask(rows: Int[Tensor, " s"], m: int) -> Bool[Tensor, " m"]:
    """Return the mask of some of m rows."""
    mask = torch.zeros(m, dtype=torch.bool)
    mask[rows] = True
    return mask


def one_hot(i: int, m: int) -> Float[Tensor, " m"]:
    """Return weights that select one of m models."""
    weights = torch.zeros(m, dtype=torch.float64)
    weights[i] = 1.0
    return weights


@rule_signature("gram", gram_entries="none")
def mean(gram: Float[Tensor, "m m"]) -> Float[Tensor, " m"]:
    """Average all models with equal weights.

    (x_1 + ... + x_m) / m. McMahan et al., "Communication-efficient learning of deep networks from
    decentralized data" (AISTATS 2017). One attacker can move it anywhere.

    Args:
        gram: Gram matrix, shape [m, m]; only its size is used.
    """
    return torch.full((len(gram),), 1.0, dtype=torch.float64) / max(1, len(gram))


def _krum_limit(m: int) -> int:
    return (m - 3) // 2


@rule_signature("gram", max_byzantine=_krum_limit, by_distances=True)
def krum(
    gram: Float[Tensor, "m m"], *, f: int, neighbours: int | None = None
) -> Float[Tensor, " m"]:
    """Select the model nearest to its nearest models (Krum).

    The score is the sum of squared distances to the m - f - 2 nearest models. Blanchard, El Mhamdi,
    Guerraoui and Stainer, "Machine learning with adversaries" (NeurIPS 2017). Needs m >= 2 f + 3.
    Among models of equal score, the one nearest to all models wins.

    Returns:
        Weights, shape [m]: 1 for one model.
    """
    m = len(gram)
    order = krum_order(squared_distances(gram), validate_byzantine_count(krum, f, m), neighbours)
    return uniform_weights(row_mask(order[:1], m))


@rule_signature("gram", max_byzantine=_krum_limit, by_distances=True)
def multi_krum(
    gram: Float[Tensor, "m m"],
    *,
    f: int,
    neighbours: int | None = None,
    selected: int | None = None,
) -> Float[Tensor, " m"]:
    """Average the models with the least Krum scores (Multi-Krum).

    The score is the sum of squared distances to the m - f - 2 nearest models. Needs m >= 2 f + 3.
    Blanchard, El Mhamdi, Guerraoui and Stainer (NeurIPS 2017).

    Args:
        selected: Number of models to average; by default m - f.
    """
    m = len(gram)
    f = validate_byzantine_count(multi_krum, f, m)
    if selected is not None and selected < 1:
        raise ConfigError(f"`selected` must be 1 or more, got {selected}")
    count = m - f if selected is None else selected
    order = krum_order(squared_distances(gram), f, neighbours)
    return uniform_weights(row_mask(order[:count], m))


def krum_order(
    squared: Float[Tensor, "m m"],
    f: int,
    neighbours: int | None = None,
    *,
    ties: Literal["distance", "index"] = "distance",
) -> Int[Tensor, " m"]:
    """Sort by the Krum score; ties by the distances to all models, or by index."""
    m = len(squared)
    if neighbours is not None and neighbours < 1:
        raise ConfigError(f"`neighbours` must be 1 or more, got {neighbours}")
    count = max(1, m - f - 2) if neighbours is None else neighbours

    to_others = squared.masked_fill(torch.eye(m, dtype=torch.bool), torch.inf)
    ascending = to_others.sort(dim=1).values[:, : max(0, m - 1)]
    # Both sorts are stable: the second one keeps the order of the first among equal scores.
    order = torch.arange(m)
    if ties == "distance":
        order = ascending.sum(1).sort(stable=True).indices
    scores = ascending[:, :count].sum(1)
    return order[scores[order].sort(stable=True).indices]


@rule_signature("gram", by_distances=True)
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
        smoothing: Least distance that counts, above 0.
        iterations: Largest number of iterations.
        start: Weights of the first point, shape [m], that sum to 1; by default the mean.
    """
    require("smoothing", smoothing, smoothing > 0, "above 0")
    m = len(gram)
    weights = mean(gram) if start is None else start.double()
    if m == 0:
        return weights

    # The origin is a central model, so that far outliers do not drown the distances in rounding.
    central = int(squared_distances(gram).median(dim=1).values.argmin())
    centred = recentre(gram, central)
    for _ in range(iterations):
        previous = weights
        weights = 1 / squared_distances_to(centred, weights).sqrt().clamp(min=smoothing)
        weights = weights / weights.sum()
        # The change is relative, because the weight of a huge model must vanish.
        if (weights / previous - 1).abs().max() < 1e-12:
            break
    return weights


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

    Park, Han, Choi and Moon, "Sageflow: robust federated learning against both stragglers and
    adversaries" (NeurIPS 2021), after the authors' released code, whose agents hold equally many
    samples. The agent's validation data replace the server's public data.

    Args:
        losses: Losses on the agent's validation data, shape [m].
        entropies: Mean entropy of each model's predictions, in nats, shape [m].
        num_samples: Number of training samples that each peer claims, shape [m].
        threshold: Entropy in nats from which a model does not count.
        delta: Exponent of the loss.
        by_samples: Multiply each weight by the number of samples.

    Returns:
        Weights, shape [m]; all 0 if no model counts.
    """
    is_confident = (entropies < threshold) & losses.isfinite()
    # The softmax of -delta log(loss) is 1 / loss^delta, normalised.
    scores = -delta * losses.double().clamp(min=1e-12).log()
    if by_samples:
        scores = scores + num_samples.double().log()
    scores = scores.where(is_confident, -torch.inf)
    if not (scores > -torch.inf).any():
        return torch.zeros_like(scores)
    return torch.softmax(scores, 0)


# A rule that selects by the Gram matrix and reduces columns.


@rule_signature("gram", max_byzantine=lambda m: (m - 3) // 4, by_distances=True)
def bulyan(gram: Float[Tensor, "m m"], *, f: int) -> Reduction:
    """Select by Krum, then average around each coordinate's median (Bulyan).

    Krum selects m - 2 f models, one after the other. Of the selected models, each coordinate is the
    mean of the m - 4 f values nearest to the median. El Mhamdi, Guerraoui and Rouault, "The hidden
    vulnerability of distributed learning in Byzantium" (ICML 2018). Needs m >= 4 f + 3.

    Returns:
        A reduction of the selected models.
    """
    m = len(gram)
    f = validate_byzantine_count(bulyan, f, m)
    squared = squared_distances(gram)
    remaining = torch.arange(m)
    if f == 0:
        return Reduction(remaining, functools.partial(mean_around_median, count=m))

    # Krum selects one model after the other; the others remain.
    for _ in range(m - 2 * f):
        best = krum_order(squared[remaining][:, remaining], f)[0]
        remaining = torch.cat([remaining[:best], remaining[best + 1 :]])
    rows = (~row_mask(remaining, m)).nonzero().flatten()
    return Reduction(rows, functools.partial(mean_around_median, count=m - 4 * f))
