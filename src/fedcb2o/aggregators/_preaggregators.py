"""Pre-aggregators: they change all models before an aggregator.

>>> Clipping(c=1.0)([[3.0, 4.0], [0.0, 0.5]])
[[0.6000000000000001, 0.8], [0.0, 0.5]]
"""

import math
from collections.abc import Sequence
from dataclasses import field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.aggregators._base import (
    Aggregator,
    aggregator,
    finite_gram,
    finite_squares,
    fit_f,
)
from fedcb2o.aggregators._conversion import Models, Stack, shares_memory, stack
from fedcb2o.errors import ConfigError, require
from fedcb2o.federated.aggregation import base, preaggregation

__all__ = ["ARC", "NNM", "Bucketing", "Clipping"]

_CALL = 2**13  # numbers that are scaled in the time of one call


@aggregator(preaggregation.nnm)
class NNM(Aggregator):
    """Nearest-neighbour mixing: each model becomes the mean of its m - f nearest models.

    Example:
        >>> NNM(f=1)([[0.0], [1.0], [9.0]])
        [[0.5], [0.5], [5.0]]
    """

    f: int = 0
    clip_f: bool = field(default=False, kw_only=True)

    def __call__(self, models: Models) -> Any:
        """Return as many models, of the same type."""
        stacked = stack(models)
        f = fit_f(preaggregation.nnm, self.f, len(stacked.rows), clip_f=self.clip_f)
        stacked, g = finite_gram(stacked, by_distances=True)
        return _mixed(stacked, preaggregation.nnm(g, f=f))


@aggregator(preaggregation.bucketing, s="size")
class Bucketing(Aggregator):
    """Means of random groups of s models.

    The last group may be smaller. Karimireddy, He and Jaggi, "Byzantine-robust learning on
    heterogeneous datasets via bucketing" (ICLR 2022), recommend groups of 2.

    Args:
        s: Number of models per group, 1 or more.

    Example:
        >>> Bucketing(s=2)([[0.0], [4.0]])
        [[2.0]]
    """

    s: int = 1
    rng: np.random.Generator | None = None

    def __call__(self, models: Models) -> Any:
        """Return ceil(m / s) models, of the same type."""
        stacked = stack(models)
        rng = self.rng or np.random.default_rng()
        return _mixed(stacked, preaggregation.bucketing(len(stacked.rows), rng, size=self.s))


@aggregator(preaggregation.clipping, c="radius")
class Clipping(Aggregator):
    """Each vector scaled down to a norm of at most c.

    x_i min(1, c / ||x_i||). For updates or gradients: models are clipped about 0.

    Args:
        c: Largest norm, above 0.

    Example:
        >>> Clipping(c=5.0)([[6.0, 8.0], [1.0, 0.0]])
        [[3.0, 4.0], [1.0, 0.0]]
    """

    c: float = 2.0
    in_place: bool = field(default=False, kw_only=True)

    def __call__(self, models: Models) -> Any:
        """Return as many vectors, of the same type."""
        stacked = stack(models)
        require("radius", self.c, self.c > 0, "above 0")
        stacked, squares = _own_rows(models, stacked, in_place=self.in_place)
        return _clipped(models, stacked, squares, self.c, in_place=self.in_place)


@aggregator(preaggregation.arc)
class ARC(Aggregator):
    """Adaptive robust clipping: the largest vectors scaled down to the norm of the next one.

    The floor(2 f (m - f) / m) largest vectors are clipped. Needs m >= 2 f + 1. Allouah, Guerraoui,
    Gupta, Jellouli, Rizk and Stephan, "Adaptive gradient clipping for robust federated learning"
    (ICLR 2025). For updates or gradients: models are clipped about 0.

    Example:
        >>> ARC(f=1)([[1.0, 0.0], [0.0, 2.0], [6.0, 8.0]])
        [[1.0, 0.0], [0.0, 2.0], [1.2000000000000002, 1.6]]
    """

    f: int = 0
    clip_f: bool = field(default=False, kw_only=True)
    in_place: bool = field(default=False, kw_only=True)

    def __call__(self, models: Models) -> Any:
        """Return as many vectors, of the same type."""
        stacked = stack(models)
        f = fit_f(preaggregation.arc, self.f, len(stacked.rows), clip_f=self.clip_f)
        stacked, squares = _own_rows(models, stacked, in_place=self.in_place)
        radius = preaggregation.arc_radius(squares, f)
        return _clipped(models, stacked, squares, radius, in_place=self.in_place)


def _new_rows(rows: Float[Tensor, "m d"], count: int) -> Float[Tensor, "k d"]:
    """Return new memory: NumPy's on the CPU, because it asks Linux for large pages."""
    if rows.device.type == "cpu":
        return torch.from_numpy(np.empty((count, rows.shape[1]), rows.numpy().dtype))
    return rows.new_empty(count, rows.shape[1])


def _mixed(stacked: Stack, matrix: Float[Tensor, "j m"]) -> Any:
    rows = stacked.rows
    mixed = _new_rows(rows, len(matrix))
    torch.mm(matrix.to(rows), rows, out=mixed)
    # A finite mixture needs finite models, which are read again for the error only.
    if not base.is_finite(mixed):
        base.require_finite(rows, torch.arange(len(rows)))
    return stacked.restore_all(mixed)


def _own_rows(models: Models, stacked: Stack, *, in_place: bool) -> tuple[Stack, list[float]]:
    """Return vectors that may be written to, and their squared norms."""
    rows = stacked.rows
    if in_place and not shares_memory(models, rows):
        raise ConfigError(
            "`in_place` needs the vectors as one contiguous tensor or array of float32 or float64"
        )
    # The rows of a list are a copy already.
    is_own = in_place or stacked.is_list
    return finite_squares(stacked, None if is_own else _new_rows(rows, len(rows)))


def _clipped(
    models: Models, stacked: Stack, squares: Sequence[float], radius: float, *, in_place: bool
) -> Any:
    """Scale the rows, with squared norms `squares`, to a norm of at most `radius`."""
    rows = stacked.rows
    norms = [math.sqrt(square) for square in squares]
    changed = [i for i, norm in enumerate(norms) if norm > radius]
    is_on_cpu = rows.device.type == "cpu"
    x: Any = rows.numpy() if is_on_cpu else rows
    # A call takes the time of `_CALL` numbers.
    if len(changed) * (_CALL + rows.shape[1]) < rows.numel():
        for i in changed:
            x[i] *= radius / norms[i]
    else:
        factors = [radius / norm if norm > radius else 1.0 for norm in norms]
        column = np.array(factors, x.dtype) if is_on_cpu else x.new_tensor(factors)
        x *= column[:, None]
    return models if in_place else stacked.restore_all(rows)
