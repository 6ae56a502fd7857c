"""Aggregators of models alone. x_1, ..., x_m are the models, and f is the number of attackers.

>>> Median()([[0.0, 1.0], [1.0, 1.0], [9.0, 3.0]])
[1.0, 1.0]
"""

import math
from dataclasses import field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedcb2o.aggregators._base import (
    Aggregator,
    about_centre,
    aggregator,
    finite_gram,
    fit_f,
    of_rule,
    with_origin,
    with_own,
)
from fedcb2o.aggregators._conversion import Models, stack
from fedcb2o.errors import ConfigError, require
from fedcb2o.federated import aggregation
from fedcb2o.federated.aggregation.gram_rules import (
    krum_order,
    row_mask,
    squared_distances,
    uniform_weights,
)

Definition = Literal["paper", "byzfl"]

_COMPUTED = (torch.float32, torch.float64)
_NUMPY_TYPES = (np.dtype(np.float32), np.dtype(np.float64))
_ONE_PRODUCT = 2**18  # columns whose sums stay in the cache of a core

Median = of_rule(
    "Median",
    aggregation.coordinate_median,
    "()([[0.0, 5.0], [1.0, 1.0], [9.0, 3.0]])",
    "[1.0, 3.0]",
)
TrMean = of_rule(
    "TrMean", aggregation.trimmed_mean, "(f=1)([[0.0], [1.0], [3.0], [100.0]])", "[2.0]"
)
Meamed = of_rule("Meamed", aggregation.meamed, "(f=1)([[0.0], [1.0], [2.0], [100.0]])", "[1.0]")
Bulyan = of_rule(
    "Bulyan",
    aggregation.bulyan,
    "(f=1)([[0.0], [1.0], [2.0], [1.0], [1.0], [2.0], [100.0]])",
    "[1.0]",
)
MDA = of_rule("MDA", aggregation.mda, "(f=2)([[0.0], [1.0], [2.0], [100.0], [5.0]])", "[1.0]")
SMEA = of_rule(
    "SMEA",
    aggregation.smea,
    "(f=1)([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [50.0, 50.0]])",
    "[0.3333333333333333, 0.3333333333333333]",
)
CAF = of_rule("CAF", aggregation.caf, "(f=1)([[1.0], [1.0], [1.0], [100.0]])", "[1.0]")
DnC = of_rule("DnC", aggregation.dnc, "(f=1)([[0.0], [1.0], [2.0], [100.0]])", "[1.0]")


@aggregator(aggregation.mean)
class Average(Aggregator):
    """Mean of all models, with equal weights.

    Example:
        >>> Average()([[0.0, 1.0], [2.0, 3.0]])
        [1.0, 2.0]
    """

    def __call__(self, models: Models) -> Any:
        """Aggregate models; the result has their type."""
        means = _plain_mean(models)
        if means is not None:
            return means
        stacked = stack(models)
        means = _plain_mean(stacked.rows)
        if means is not None:
            return stacked.restore(means)
        m = len(stacked.rows)
        return stacked.weighted(torch.ones(m, dtype=torch.float64) / m)


def _plain_mean(models: Models) -> Any:
    """Return the mean of a matrix in few calls; None for other models, and if it is not finite.

    BLAS adds groups of models, with less rounding than one after the other.
    """
    is_tensor = type(models) is Tensor
    try:
        x = models.numpy() if is_tensor and models.dtype in _COMPUTED else models
    except (RuntimeError, TypeError):  # not in the memory of NumPy, or with a gradient
        return None
    if type(x) is not np.ndarray or x.dtype not in _NUMPY_TYPES or x.ndim != 2 or not x.size:
        return None
    m, d = x.shape
    if d > _ONE_PRODUCT:
        return None

    # A sum may overflow; then every number is tested elsewhere.
    with np.errstate(over="ignore", invalid="ignore"):
        means = np.ones(m, x.dtype) @ np.ascontiguousarray(x)
        means /= m
    if not math.isfinite(np.vdot(means, means)):
        return None
    return torch.from_numpy(means) if is_tensor else means


@aggregator(aggregation.geometric_median, nu="smoothing", T="iterations")
class GeometricMedian(Aggregator):
    """Point of least summed distance, by the smoothed Weiszfeld algorithm.

    Starts at z = 0 and repeats T times z = (b_1 x_1 + ... + b_m x_m) / (b_1 + ... + b_m) with
    b_i = 1 / max(nu, ||x_i - z||). Pillutla, Kakade and Harchaoui, "Robust aggregation for
    federated learning" (IEEE TSP 2022). Defaults as in ByzFL; nu = 1e-6 and T = 100 come close to
    the exact point.

    Args:
        nu: Least distance that counts, above 0.
        T: Number of iterations.

    Example:
        >>> import numpy as np
        >>> GeometricMedian(nu=1e-6, T=100)(np.array([[1.0, 0.0], [2.0, 0.0], [9.0, 0.0]])).round(3)
        array([2., 0.])
    """

    nu: float = 0.1
    T: int = 3

    def __call__(self, models: Models) -> Any:
        """Aggregate models; the result has their type."""
        require("nu", self.nu, self.nu > 0, "above 0")
        stacked = stack(models)
        if self.T == 0:
            return stacked.restore(torch.zeros_like(stacked.rows[0]))
        stacked, g = finite_gram(stacked, last=0 if self.T == 1 else None)
        # The first iteration begins at 0, where distances are norms.
        start = 1 / g.diagonal().sqrt().clamp(min=self.nu)
        g = about_centre(stacked, torch.arange(len(g)), g)
        weights = aggregation.geometric_median(
            g, smoothing=self.nu, iterations=self.T - 1, start=start / start.sum()
        )
        return stacked.weighted(weights)


@aggregator(aggregation.krum)
class Krum(Aggregator):
    """Model nearest to its nearest models.

    Args:
        definition: "byzfl" sums over m - f - 1 models and needs m >= 2 f + 1, as ByzFL does.

    Example:
        >>> Krum(f=1)([[0.0], [1.0], [2.0], [1.5], [100.0]])
        [1.5]
    """

    f: int = 0
    definition: Definition = "paper"
    clip_f: bool = field(default=False, kw_only=True)

    def __call__(self, models: Models) -> Any:
        """Aggregate models; the result has their type."""
        return _by_krum_scores(self, models, selected=1)


@aggregator(aggregation.multi_krum)
class MultiKrum(Aggregator):
    """Mean of the m - f models with the least Krum scores.

    Args:
        definition: "byzfl" sums over m - f - 1 models and needs m >= 2 f + 1, as ByzFL does.

    Example:
        >>> MultiKrum(f=1)([[0.0], [1.0], [2.0], [1.0], [100.0]])
        [1.0]
    """

    f: int = 0
    selected: int | None = None
    definition: Definition = "paper"
    clip_f: bool = field(default=False, kw_only=True)

    def __call__(self, models: Models) -> Any:
        """Aggregate models; the result has their type."""
        return _by_krum_scores(self, models, self.selected)


# The rule whose limit of f holds, how many models next to the f are no neighbours, and the order of
# models of equal score.
_DEFINITIONS: dict[str, tuple[Any, int, Literal["distance", "index"]]] = {
    "paper": (aggregation.krum, 2, "distance"),
    "byzfl": (aggregation.mda, 1, "index"),
}


def _by_krum_scores(settings: Krum | MultiKrum, models: Models, selected: int | None) -> Any:
    stacked = stack(models)
    m = len(stacked.rows)
    if settings.definition not in _DEFINITIONS:
        raise ConfigError(f'`definition` must be "paper" or "byzfl", got {settings.definition!r}')
    limit, num_others, ties = _DEFINITIONS[settings.definition]
    f = fit_f(limit, settings.f, m, clip_f=settings.clip_f)
    selected = m - f if selected is None else selected
    require("selected", selected, selected >= 1, "1 or more")
    stacked, g = finite_gram(stacked, by_distances=True)
    # `neighbours` and `selected` contain f already.
    neighbours = max(1, m - f - num_others)
    order = krum_order(squared_distances(g), 0, neighbours, ties=ties)
    return stacked.weighted(uniform_weights(row_mask(order[:selected], m)))


@aggregator(aggregation.centred_clipping, tau="radius", L="iterations")
class CenteredClipping(Aggregator):
    """Start v plus the mean of the clipped differences to it.

    Repeats L times v = v + (1/m) sum_i min(1, tau / ||x_i - v||) (x_i - v). Karimireddy, He and
    Jaggi, "Learning from history for Byzantine robust optimization" (ICML 2021). The object keeps
    no memory: pass the last result as `m`.

    Args:
        m: Start v, a model of the same type; by default 0.

    Example:
        >>> CenteredClipping(tau=4.0)([[2.0, 0.0], [0.0, -8.0]])
        [1.0, -2.0]
    """

    m: Any = None
    L: int = 1
    tau: float = 100.0

    def __call__(self, models: Models) -> Any:
        """Aggregate models; the result has their type."""
        stacked = stack(models)
        is_short = self.L <= 1  # one iteration reads the distances to the start alone
        if self.m is None:
            stacked, g = finite_gram(stacked, last=0 if is_short else None)
            g = with_origin(g)
        else:
            stacked = with_own(stacked, (self.m,))
            last = 1 if is_short else None
            stacked, g = finite_gram(stacked, last=last, by_distances=True)
        weights = aggregation.centred_clipping(g, radius=self.tau, iterations=self.L)
        weights = weights[: len(stacked.rows)]
        # The result is the start, 0, which is no row of the models.
        if not weights.any():
            return stacked.restore(torch.zeros_like(stacked.rows[0]))
        return stacked.weighted(weights)


@aggregator(aggregation.monna)
class MoNNA(Aggregator):
    """Mean of the m - f models nearest to one model, which is among them.

    Args:
        idx: Number of the trusted model, from 0; it counts as the agent's own.

    Example:
        >>> MoNNA(f=1, idx=2)([[0.0], [100.0], [1.0]])
        [0.5]
    """

    f: int = 0
    idx: int = 0
    clip_f: bool = field(default=False, kw_only=True)

    def __call__(self, models: Models) -> Any:
        """Aggregate models; the result has their type."""
        stacked = stack(models)
        m = len(stacked.rows)
        if not 0 <= self.idx < m:
            raise ConfigError(f"`idx` must be from 0 to {m - 1}, got {self.idx}")
        f = fit_f(aggregation.monna, self.f, m, clip_f=self.clip_f)
        others = [i for i in range(m) if i != self.idx]
        # The rule takes its own model in the last row.
        order = torch.tensor([*others, self.idx])
        weights = torch.zeros(m, dtype=torch.float64)
        stacked, g = finite_gram(stacked, order, last=1, by_distances=True)
        weights[order] = aggregation.monna(g, f=f)
        return stacked.weighted(weights)
