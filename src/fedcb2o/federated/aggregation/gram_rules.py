"""Robust aggregation rules by weights: what to make of m models of which some may be anything.

A rule is a function (gram, ...) -> weights [m] that sum to 1, of the Gram matrix of the models; see `aggregate` for
the forms and for what applies them, and `robust_columns` for the rules that work on columns.

`f` is the number of attackers to assume. Each rule admits at most so many of m; more are clipped to that, since fewer
models than asked may come, and `aggregate.assumed` says to what, for the record. Where a rule works about the agent's
own model, this is the last row; where it judges updates by the own one, the last two rows are the own model after and
before LocalUpdate. Ties go to the first row.
"""

import functools
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.federated.aggregation.base import GramEntries, clip_byzantine_count, rule_signature
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
    """Squared distances between all models; NaN where the Gram matrix has no entry."""
    norms = gram.diagonal()
    return (
        (norms.unsqueeze(0) + norms.unsqueeze(1) - (gram + gram.T))
        .clamp_(min=0.0)
        .fill_diagonal_(0.0)
    )


def _recentre(gram: Float[Tensor, "m m"], origin: int) -> Float[Tensor, "m m"]:
    """The Gram matrix with a model as the origin: <x_i - c, x_j - c>."""
    column = gram[:, origin]
    return gram - column.unsqueeze(0) - column.unsqueeze(1) + gram[origin, origin]


def _squared_distances_to(
    centred: Float[Tensor, "m m"], point: Float[Tensor, " m"]
) -> Float[Tensor, " m"]:
    """Of each model to the average of the models under `point`, weights that sum to 1."""
    along = centred @ point
    return (centred.diagonal() - 2 * along + point @ along).clamp(min=0.0)


def uniform_weights(selected: Bool[Tensor, " m"]) -> Float[Tensor, " m"]:
    """The weights of the mean of the chosen models; all 0 where none is."""
    return selected.double() / selected.sum().clamp(min=1)


def _row_mask(rows: Int[Tensor, " s"], m: int) -> Bool[Tensor, " m"]:
    mask = torch.zeros(m, dtype=torch.bool)
    mask[rows] = True
    return mask


def _require_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"`{name}` must be above 0, got {value}")


# By weights, all models alike


@rule_signature("gram", gram_entries="none")
def mean(gram: Float[Tensor, "m m"]) -> Float[Tensor, " m"]:
    """The mean (McMahan et al., "Communication-efficient learning of deep networks from decentralized data", 2017)."""
    return torch.full((len(gram),), 1.0, dtype=torch.float64) / max(1, len(gram))


def _krum_limit(m: int) -> int:
    return (m - 3) // 2


@rule_signature("gram", max_byzantine=_krum_limit)
def krum(
    gram: Float[Tensor, "m m"], *, f: int, neighbours: int | None = None
) -> Float[Tensor, " m"]:
    """Krum: the one model with the least sum of squared distances to its m - f - 2 nearest (Blanchard et al., "Machine
    learning with adversaries", NeurIPS 2017).

    `neighbours` is that number where another is wanted. Needs m >= 2 f + 3; of equals, the one nearest to all wins.
    """
    m = len(gram)
    best = _krum_order(squared_distances(gram), clip_byzantine_count(krum, f, m), neighbours)[:1]
    return uniform_weights(_row_mask(best, m))


@rule_signature("gram", max_byzantine=_krum_limit)
def multi_krum(
    gram: Float[Tensor, "m m"],
    *,
    f: int,
    neighbours: int | None = None,
    selected: int | None = None,
) -> Float[Tensor, " m"]:
    """Multi-Krum: the mean of the m - f models with the least Krum scores, or of `selected` (Blanchard et al. 2017)."""
    m = len(gram)
    f = clip_byzantine_count(multi_krum, f, m)
    if selected is not None and selected < 1:
        raise ConfigError(f"`selected` must be 1 or more, got {selected}")
    best = _krum_order(squared_distances(gram), f, neighbours)[
        : m - f if selected is None else selected
    ]
    return uniform_weights(_row_mask(best, m))


def _krum_order(
    squared: Float[Tensor, "m m"], f: int, neighbours: int | None = None
) -> Int[Tensor, " m"]:
    """The models by their Krum score, the least first; of equal ones, that with the least sum of all distances."""
    m = len(squared)
    if neighbours is not None and neighbours < 1:
        raise ConfigError(f"`neighbours` must be 1 or more, got {neighbours}")
    count = max(1, m - f - 2) if neighbours is None else neighbours
    others = (
        squared.masked_fill(torch.eye(m, dtype=torch.bool), torch.inf)
        .sort(dim=1)
        .values[:, : max(0, m - 1)]
    )
    order = others.sum(1).sort(stable=True).indices
    return order[others[:, :count].sum(1)[order].sort(stable=True).indices]


@rule_signature("gram")
def geometric_median(
    gram: Float[Tensor, "m m"],
    *,
    smoothing: float = 1e-6,
    iterations: int = 100,
    start: Float[Tensor, " m"] | None = None,
) -> Float[Tensor, " m"]:
    """RFA: the point of least summed distance to the models, by the smoothed Weiszfeld algorithm (Pillutla, Kakade and
    Harchaoui, "Robust aggregation for federated learning", 2022; there 3 iterations, which each cost a pass).

    Distances count as at least `smoothing`. Iterations cost nothing here; they begin at the mean, or at the average of
    the models under `start`, weights that sum to 1.
    """
    _require_positive("smoothing", smoothing)
    m = len(gram)
    weights = mean(gram) if start is None else start.double()
    if m == 0:
        return weights
    # From a model in the middle, so that far outliers do not drown the distances of the others in rounding.
    centred = _recentre(gram, int(squared_distances(gram).median(dim=1).values.argmin()))
    for _ in range(iterations):
        before = weights
        weights = 1 / _squared_distances_to(centred, weights).sqrt().clamp(min=smoothing)
        weights = weights / weights.sum()
        if (weights / before - 1).abs().max() < 1e-12:  # relative: that of a huge model must vanish
            break
    return weights


# By weights, about the agent's own model: the last row


def _clipping_entries(parameters: dict[str, Any]) -> GramEntries:
    return "last" if parameters.get("iterations", 1) == 1 else "all"


@rule_signature("gram", gram_entries=_clipping_entries, own_rows=("own",))
def centred_clipping(
    gram: Float[Tensor, "m m"], *, radius: float = 10.0, iterations: int = 1
) -> Float[Tensor, " m"]:
    """Centred clipping about the agent's own model v, the last row: v + mean_j min(1, radius / ||x_j - v||) (x_j - v)
    over the other models, repeated about what comes out (Karimireddy, He and Jaggi, "Learning from history for
    Byzantine robust optimization", ICML 2021; radius 10 and one iteration are theirs).
    """
    _require_positive("radius", radius)
    m = len(gram) - 1
    weights = _one_hot(m, m + 1)
    if m == 0:
        return weights
    centred = _recentre(gram, m) if iterations > 1 else None
    for i in range(iterations):
        squared = (
            squared_distances(gram)[m]
            if i == 0 or centred is None
            else _squared_distances_to(centred, weights)
        )
        factor = clip_factors(squared[:m], radius)
        weights = weights * (1 - factor.mean())
        weights[:m] += factor / m
    return weights


@rule_signature("gram", gram_entries="last", own_rows=("before",))
def norm_clipping(
    gram: Float[Tensor, "m m"], *, radius: float | None = None
) -> Float[Tensor, " m"]:
    """The mean of the updates since the agent's model before the round, the last row, each clipped to the norm `radius`
    (Sun et al., "Can you really backdoor federated learning?", 2019).

    Without a radius: the median of the norms (Nguyen et al., "FLAME", USENIX Security 2022). In both a server's model
    is what all began the round with; here others began elsewhere, and how far counts as update.
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
    """Of m models, one the agent's own: not all the others may be attackers."""
    return m - 2


@rule_signature("gram", gram_entries="last", own_rows=("own",), max_byzantine=_max_byzantine)
def clipped_gossip(
    gram: Float[Tensor, "m m"], *, f: int, radius: float | None = None
) -> Float[Tensor, " m"]:
    """ClippedGossip: x + sum_j W_j clip(x_j - x, radius) about the own model x, the last row, with all W_j = 1/m (He,
    Karimireddy and Jaggi, "Byzantine-robust decentralized learning via ClippedGossip", 2022).

    Without a radius the paper's: radius^2 = 1/delta sum_j W_j ||x_j - x||^2 over the benign j, for which the nearest
    m - 1 - f stand, and delta = f W; so with f = 0 nothing is clipped.
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
    """CS+-RG: x + sum_j W_j clip(x_j - x, radius) about the own model x, the last row, with all W_j = 1/m; the radius
    is the distance to the farthest but 2 f of the others, who are clipped to it, or 0 where there are no more of them
    (Gaucher, Dieuleveut and Hendrikx, "Unified breakdown analysis for Byzantine robust gossip", ICML 2025).

    As in the authors' released code; the weights, theirs times their step, are those of a complete graph of m agents.
    """
    m = len(gram) - 1
    squared = squared_distances(gram)[m, :m]
    f = clip_byzantine_count(cs_plus, f, m + 1)
    radius = (
        torch.inf
        if f == 0
        else float(squared.sort().values[m - 2 * f - 1]) ** 0.5
        if m > 2 * f
        else 0.0
    )
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
    """BALANCE: alpha times the own model x, the last row, and 1 - alpha times the mean of those with
    ||x_j - x|| <= gamma exp(-kappa t/T) ||x||; `progress` is t/T (Fang et al., "Byzantine-robust decentralized
    federated learning", CCS 2024, whose gamma, kappa and alpha are the defaults). Where none is that near, the own
    model stays: which gamma lets anybody in depends on how far local training takes a model, and is to be tuned.
    """
    _require_positive("gamma", gamma)
    m = len(gram) - 1
    level = gamma * float(np.exp(-kappa * progress)) * gram[m, m].sqrt()
    return _mix_with_own(squared_distances(gram)[m, :m].sqrt() <= level, alpha)


@rule_signature("gram", gram_entries="last", own_rows=("own",), max_byzantine=half_minus_one)
def monna(gram: Float[Tensor, "m m"], *, f: int) -> Float[Tensor, " m"]:
    """MoNNA: the mean of the m - f models nearest to the own one, the last row, itself among them (Farhadkhani et al.,
    "Robust collaborative learning with linear gradient overhead", ICML 2023). Needs m >= 2 f + 1.
    """
    m = len(gram)
    squared = squared_distances(gram)[m - 1].clone()
    squared[-1] = -1.0  # even a copy is not nearer
    return uniform_weights(
        _row_mask(squared.sort(stable=True).indices[: m - clip_byzantine_count(monna, f, m)], m)
    )


@rule_signature("gram", gram_entries="last", own_rows=("own",), max_byzantine=_max_byzantine)
def ubar(
    gram: Float[Tensor, "m m"], losses: Float[Tensor, " m"], *, f: int, alpha: float = 0.5
) -> Float[Tensor, " m"]:
    """UBAR: of all but the f farthest from the own model, the last row, those whose loss is at most the own one, or
    else the one of least loss; alpha times the own model and 1 - alpha times their mean (Guo et al.,
    "Byzantine-resilient decentralized stochastic gradient descent", 2021).

    `losses` are on the agent's data, the own model's last.
    """
    m = len(gram) - 1
    near = _row_mask(
        squared_distances(gram)[m, :m]
        .sort(stable=True)
        .indices[: m - clip_byzantine_count(ubar, f, m + 1)],
        m,
    )
    known = near & (losses[:m] < torch.inf)
    good = known & (losses[:m] <= losses[m])
    if known.any() and not good.any():
        good = _row_mask(losses[:m].masked_fill(~known, torch.inf).argmin(keepdim=True), m)
    return _mix_with_own(good, alpha)


@rule_signature("gram", gram_entries="last", own_rows=("own", "before"))
def fltrust(gram: Float[Tensor, "m m"]) -> Float[Tensor, " m"]:
    """FLTrust, the agent's own data for the server's: the updates g_j = x_j - b since the agent's model b before the
    round, scaled to the norm of the own update g_0, averaged with trust max(0, cos(g_j, g_0)) (Cao et al., "FLTrust",
    NDSS 2021). There all began the round with b; here others began elsewhere, and how far counts as update: cosines
    are less, and the scaled sum moves towards the others as well as down their losses.

    The last two rows are the own model after LocalUpdate, which only judges, and b, whose weight may be below 0. Where
    nobody is trusted, the own model has all the weight.
    """
    m = len(gram) - 2
    last = gram[:, m:]  # all that is read, beside the diagonal
    norms = (gram.diagonal() - 2 * last[:, 1] + gram[-1, -1]).clamp(min=0.0).sqrt()
    along = last[:, 0] - last[:, 1] - last[-1, 0] + gram[-1, -1]
    trust = (along / (norms * norms[m])).nan_to_num(0.0, 0.0, 0.0).clamp(0.0, 1.0)[:m]
    if not trust.sum() > 0:
        return _one_hot(m, m + 2)
    scaled = trust / trust.sum() * (norms[m] / norms[:m]).nan_to_num(0.0, 0.0, 0.0)
    return torch.cat([scaled, scaled.new_zeros(1), 1 - scaled.sum().unsqueeze(0)])


def _one_hot(i: int, m: int) -> Float[Tensor, " m"]:
    weights = torch.zeros(m, dtype=torch.float64)
    weights[i] = 1.0
    return weights


def clip_factors(squared: Float[Tensor, " m"], radius: float) -> Float[Tensor, " m"]:
    """min(1, radius / distance)."""
    return (radius / squared.sqrt()).nan_to_num(1.0, 1.0).clamp(max=1.0)


def _mix_with_own(selected: Bool[Tensor, " m"], alpha: float) -> Float[Tensor, " k"]:
    """alpha times the own model and 1 - alpha times the mean of the chosen; the own one alone where none is chosen."""
    if not 0 <= alpha <= 1:
        raise ConfigError(f"`alpha`, the share of the own model, must be from 0 to 1, got {alpha}")
    weights = (1 - alpha) * uniform_weights(selected)
    return torch.cat([weights, 1 - weights.sum().unsqueeze(0)])


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
    """Sageflow: models whose predictions have a mean entropy below `threshold` weigh as 1 / loss^delta, others do not
    count (Park et al., "Sageflow: robust federated learning against both stragglers and adversaries", NeurIPS 2021).
    All weights are 0 where none is left.

    The agent's validation data stand for the server's public ones. As in the authors' released code, whose agents hold
    equally many samples; with `by_samples` a weight also has as factor what each says that it trained on.
    """
    kept = (entropies < threshold) & losses.isfinite()
    scores = -delta * losses.double().clamp(min=1e-12).log()
    if by_samples:
        scores = scores + num_samples.double().log()
    scores = scores.where(kept, -torch.inf)
    return torch.softmax(scores, 0) if (scores > -torch.inf).any() else torch.zeros_like(scores)


def _bulyan_limit(m: int) -> int:
    return (m - 3) // 4


@rule_signature("gram", max_byzantine=_bulyan_limit)
def bulyan(gram: Float[Tensor, "m m"], *, f: int) -> Reduction:
    """Bulyan: Krum selects m - 2 f models, one after the other; of them, each coordinate is the mean of the m - 4 f
    values nearest to the median (El Mhamdi, Guerraoui and Rouault, "The hidden vulnerability of distributed learning
    in Byzantium", ICML 2018). Needs m >= 4 f + 3.
    """
    m = len(gram)
    f = clip_byzantine_count(bulyan, f, m)
    squared = squared_distances(gram)
    left = torch.arange(m)
    for _ in range(m - 2 * f if f else 0):
        best = _krum_order(squared[left][:, left], f)[0]
        left = torch.cat([left[:best], left[best + 1 :]])
    rows = (~_row_mask(left, m)).nonzero().flatten() if f else left
    return Reduction(rows, functools.partial(mean_around_median, count=m - 4 * f))
