"""Robust rules that look for the models of least spread: MDA, SMEA, CAF and DnC.

As in `gram_rules`, a rule is a function `(gram, ...) -> weights [m]` that treats all models alike.

Example:
    >>> import torch
    >>> from fedcb2o.federated.aggregation import gram
    >>> models = torch.tensor([[0.0], [1.0], [2.5], [100.0]])
    >>> mda(gram(models), f=1).tolist() == [1 / 3, 1 / 3, 1 / 3, 0.0]
    True
"""

import itertools
import math
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fedcb2o.errors import ConfigError, require
from fedcb2o.federated.aggregation.base import rule_signature, validate_byzantine_count
from fedcb2o.federated.aggregation.coordinatewise import half_minus_one
from fedcb2o.federated.aggregation.gram_rules import (
    mean,
    recentre,
    row_mask,
    squared_distances,
    uniform_weights,
)

__all__ = ["caf", "dnc", "mda", "smea"]

MAX_SUBSETS = 1_000_000  # `smea` tries all subsets: half a minute for this number
_SUBSETS_PER_BATCH = 4096


@rule_signature("gram", max_byzantine=half_minus_one, by_distances=True)
def mda(gram: Float[Tensor, "m m"], *, f: int) -> Float[Tensor, " m"]:
    """Average the m - f models of least diameter (minimum diameter averaging).

    The diameter is the largest distance between two models. Rousseeuw, "Multivariate estimation
    with high breakdown point" (1985); El Mhamdi, Guerraoui, Guirguis, Hoang and Rouault, "Genuinely
    distributed Byzantine machine learning" (PODC 2020). Needs m >= 2 f + 1. Of subsets of equal
    diameter, the first in lexicographic order counts.

    The search does not try all subsets. It bisects the diameter, and for each value tests if at
    most f models can be removed so that no two others are farther apart.
    """
    m = len(gram)
    f = validate_byzantine_count(mda, f, m)
    squared = squared_distances(gram)
    diameters = torch.unique(squared)
    low = 0
    high = len(diameters) - 1
    while low < high:
        middle = (low + high) // 2
        if _is_resolvable(_conflicts(squared > diameters[middle]), (1 << m) - 1, f):
            high = middle
        else:
            low = middle + 1
    if not m:
        return mean(gram)
    return uniform_weights(row_mask(_first_subset(squared > diameters[low], f), m))


def _conflicts(is_conflict: Bool[Tensor, "m m"]) -> list[int]:
    """Return the conflicts of each model as a bit set."""
    return [sum(1 << j for j in row.nonzero().flatten().tolist()) for row in is_conflict]


def _is_resolvable(conflicts: list[int], remaining: int, budget: int) -> bool:
    """Test if removing at most `budget` of the remaining models leaves no conflict."""
    degrees = [
        (conflicts[i] & remaining).bit_count() * (remaining >> i & 1) for i in range(len(conflicts))
    ]
    largest = max(degrees, default=0)
    if largest == 0:
        return True
    # Each removal ends at most `largest` conflicts, which count at both ends.
    if sum(degrees) > 2 * budget * largest:
        return False
    i = degrees.index(largest)
    if _is_resolvable(conflicts, remaining & ~(1 << i), budget - 1):
        return True
    others = remaining & ~conflicts[i]
    return largest <= budget and _is_resolvable(conflicts, others, budget - largest)


def _first_subset(is_conflict: Bool[Tensor, "m m"], f: int) -> Int[Tensor, " s"]:
    """Return the first m - f models in lexicographic order that have no conflict."""
    m = len(is_conflict)
    conflicts = _conflicts(is_conflict)
    remaining = (1 << m) - 1
    budget = f
    selected: list[int] = []
    for i in range(m):
        if not remaining >> i & 1:
            continue
        # Model i is selected if the others can still be freed of conflicts within the budget.
        others = remaining & ~conflicts[i]
        left = budget - (remaining & conflicts[i]).bit_count()
        if left >= 0 and _is_resolvable(conflicts, others, left):
            selected.append(i)
            remaining = others
            budget = left
        else:
            remaining &= ~(1 << i)
            budget -= 1
    return torch.tensor(selected[: m - f])


@rule_signature("gram", max_byzantine=half_minus_one, by_distances=True)
def smea(gram: Float[Tensor, "m m"], *, f: int) -> Float[Tensor, " m"]:
    """Average the m - f models of least maximum variance (SMEA).

    The maximum variance of a subset is the largest eigenvalue of its covariance matrix, computed
    from the Gram matrix. Allouah, Guerraoui, Gupta, Pinot and Stephan, "On the
    privacy-robustness-utility trilemma in distributed learning" (ICML 2023). Needs m >= 2 f + 1.
    All subsets are tried, at most `MAX_SUBSETS`. The first one counts if several are equal.

    Raises:
        ConfigError: There are too many subsets.
    """
    m = len(gram)
    f = validate_byzantine_count(smea, f, m)
    if f == 0:
        return mean(gram)
    if math.comb(m, f) > MAX_SUBSETS:
        raise ConfigError(
            f"smea tries each subset of m - f models, and {math.comb(m, f)} subsets of {m} models"
            f" with `f` = {f} are too many: take `mda` or `caf`"
        )
    centred = recentre(gram, _central_model(gram))
    least = math.inf
    best = torch.arange(m - f)
    for subsets in _subsets(m, m - f):
        within = centred[subsets.unsqueeze(2), subsets.unsqueeze(1)]
        # The centred Gram matrix of a subset has the eigenvalues of its covariance matrix, up to a
        # factor.
        means = within.mean(2, keepdim=True)
        within = within - means - means.mT + within.mean((1, 2), keepdim=True)
        largest = torch.linalg.eigvalsh(within)[:, -1]
        k = int(largest.argmin())
        if largest[k] < least:
            least = float(largest[k])
            best = subsets[k]
    return uniform_weights(row_mask(best, m))


def _subsets(m: int, size: int) -> Iterator[Int[Tensor, "s size"]]:
    """Iterate over all subsets of m rows in lexicographic order, a batch at a time."""
    combinations = itertools.combinations(range(m), size)
    while batch := list(itertools.islice(combinations, _SUBSETS_PER_BATCH)):
        yield torch.tensor(batch)


@rule_signature("gram", max_byzantine=half_minus_one, by_distances=True)
def caf(gram: Float[Tensor, "m m"], *, f: int) -> Float[Tensor, " m"]:
    """Average models weighted by a filter that lowers their maximum variance (CAF).

    All weights c_i begin at 1. While they sum to more than m - 2 f, each is multiplied by
    1 - t_i / max_j t_j, where t_i = <x_i - mu_c, v>^2. mu_c is the weighted mean, and v the
    direction of the largest variance, exact from the Gram matrix. The maximum is over models of
    positive weight, so that each step sets a weight to 0. The mean with the least maximum variance
    counts. Allouah, Guerraoui and Stephan, "Towards trustworthy federated learning with untrusted
    participants" (ICML 2025), covariance bound-agnostic filter. Needs m >= 2 f + 1.
    """
    m = len(gram)
    f = validate_byzantine_count(caf, f, m)
    best = mean(gram)
    if f == 0:
        return best
    centred = recentre(gram, _central_model(gram))
    least = math.inf
    weights = torch.ones(m, dtype=torch.float64)
    while weights.sum() > m - 2 * f:
        share = weights / weights.sum()
        along = centred @ share
        about_mean = centred - along.unsqueeze(0) - along.unsqueeze(1) + share @ along
        # This matrix has the eigenvalues of the weighted covariance matrix.
        root = share.sqrt()
        values, vectors = torch.linalg.eigh(root.unsqueeze(0) * about_mean * root.unsqueeze(1))
        if values[-1] < least:
            least = float(values[-1])
            best = share

        # The t_i, up to a factor; models without weight do not count.
        squares = (about_mean @ (root * vectors[:, -1])).square() * (weights > 0)
        if not squares.max() > 0:
            break
        weights = weights * (1 - squares / squares.max())
    return best


def _central_model(gram: Float[Tensor, "m m"]) -> int:
    """Return a central model, a good origin: far outliers must not drown the others in rounding."""
    return int(squared_distances(gram).median(dim=1).values.argmin())


# One model remains.
@rule_signature("gram", max_byzantine=lambda m: m - 1, by_distances=True)
def dnc(gram: Float[Tensor, "m m"], *, f: int, removed: float = 1.0) -> Float[Tensor, " m"]:
    """Average the models without those of the largest outlier scores (DnC).

    A score is the squared projection of the centred model onto the first right singular vector of
    all centred models. The largest ceil(`removed` * f) scores are removed, at most m - 1.
    Shejwalkar and Houmansadr, "Manipulating the Byzantine" (NDSS 2021), with all coordinates and
    one iteration.

    Args:
        removed: Models to remove for each assumed attacker, above 0 (c in the paper).
    """
    require("removed", removed, removed > 0, "above 0")
    m = len(gram)
    # A product that is whole except for rounding is not rounded up.
    count = math.ceil(removed * validate_byzantine_count(dnc, f, m) - 1e-9)
    g = gram.double()
    centred = g - g.mean(0) - g.mean(1, keepdim=True) + g.mean()
    # The first right singular vector's projections of the centred models are, up to a factor, the
    # leading eigenvector of their Gram matrix.
    scores = torch.linalg.eigh(centred).eigenvectors[:, -1].square()
    kept = scores.sort(stable=True).indices[: max(1, m - count)]
    return uniform_weights(row_mask(kept, m))
