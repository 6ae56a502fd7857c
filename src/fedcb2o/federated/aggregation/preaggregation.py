"""Pre-aggregation steps: matrices P that mix models before a robust rule.

The rule works on the rows of P X, where P is [j, m]. A step is a function of the Gram matrix, or of
the number m of models and a generator. Clipping needs an origin: a step whose signature has the own
row "own" gets the agent's own model as the last of the m models.

Example:
    >>> import torch
    >>> from fedcb2o.federated.aggregation import gram
    >>> nnm(gram(torch.tensor([[0.0], [1.0], [9.0]])), f=1).tolist()
    [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.errors import ConfigError, require
from fedcb2o.federated.aggregation.base import rule_signature, validate_byzantine_count
from fedcb2o.federated.aggregation.coordinatewise import half_minus_one
from fedcb2o.federated.aggregation.gram_rules import squared_distances
from fedcb2o.federated.aggregation.own_model_rules import clip_factors

__all__ = ["arc", "bucketing", "clipping", "nnm"]


@rule_signature("gram", max_byzantine=half_minus_one, by_distances=True)
def nnm(gram: Float[Tensor, "m m"], *, f: int) -> Float[Tensor, "m m"]:
    """Replace each model by the mean of its nearest models (nearest-neighbour mixing).

    Each model has m - f nearest models, and is among them. Needs m >= 2 f + 1. Allouah,
    Farhadkhani, Guerraoui, Gupta, Pinot and Stephan, "Fixing by mixing" (AISTATS 2023).
    """
    m = len(gram)
    count = m - validate_byzantine_count(nnm, f, m)
    # Each model is the nearest to itself, even next to copies of it.
    squared = squared_distances(gram).fill_diagonal_(-1.0)
    nearest = squared.sort(dim=1, stable=True).indices[:, :count]
    matrix = torch.zeros(m, m, dtype=torch.float64)
    return matrix.scatter_(1, nearest, 1 / max(1, count))


def bucketing(m: int, draw: np.random.Generator, *, size: int = 2) -> Float[Tensor, "j m"]:
    """Average random groups of models (bucketing).

    Karimireddy, He and Jaggi, "Byzantine-robust learning on heterogeneous datasets via bucketing"
    (ICLR 2022), recommend groups of 2.

    Args:
        m: Number of models.
        size: Number of models per group, 1 or more; the last group may be smaller.

    Returns:
        The mixing matrix, shape [j, m].
    """
    if size < 1:
        raise ConfigError(
            f"`size`, the number of models in a bucket, must be 1 or more, got {size}"
        )
    order = torch.from_numpy(draw.permutation(m))
    matrix = torch.zeros(-(-m // size), m, dtype=torch.float64)
    matrix[torch.arange(m) // size, order] = 1.0
    return matrix / matrix.sum(1, keepdim=True)


@rule_signature("gram", own_rows=("own",), by_distances=True)
def clipping(gram: Float[Tensor, "m m"], *, radius: float = 2.0) -> Float[Tensor, "m m"]:
    """Clip each model's difference to the agent's own model to a fixed norm.

    Replaces x_j by x + min(1, radius / ||x_j - x||) (x_j - x), where x is the agent's own model.
    """
    require("radius", radius, radius > 0, "above 0")
    return _clipping_matrix(squared_distances(gram)[-1, :-1], radius)


@rule_signature("gram", own_rows=("own",), max_byzantine=half_minus_one, by_distances=True)
def arc(gram: Float[Tensor, "m m"], *, f: int) -> Float[Tensor, "m m"]:
    """Clip the largest differences to the agent's own model (adaptive robust clipping).

    Of n = m - 1 other models, the floor(2 f (n - f) / n) farthest are clipped to the distance of
    the next one. Allouah, Guerraoui, Gupta, Jellouli, Rizk and Stephan, "Adaptive gradient clipping
    for robust federated learning" (ICLR 2025), who clip gradients about 0. Needs m >= 2 f + 1.
    """
    n = len(gram) - 1
    f = validate_byzantine_count(arc, f, n + 1)
    squared = squared_distances(gram)[-1, :-1]
    if n == 0:
        return torch.ones(1, 1, dtype=torch.float64)
    return _clipping_matrix(squared, arc_radius(squared.tolist(), f))


def arc_radius(squared: Sequence[float], f: int) -> float:
    """Return the norm to which `arc` clips, from the squared norms of n >= 1 differences."""
    n = len(squared)
    num_clipped = 2 * f * (n - f) // n
    return math.sqrt(sorted(squared)[n - num_clipped - 1])


def _clipping_matrix(squared: Float[Tensor, " n"], radius: float) -> Float[Tensor, "m m"]:
    """Return the matrix that clips differences to the last model, from their squared norms."""
    factors = clip_factors(squared, radius)
    matrix = torch.eye(len(squared) + 1, dtype=torch.float64)
    matrix.diagonal()[:-1] = factors
    matrix[:-1, -1] = 1 - factors
    return matrix
