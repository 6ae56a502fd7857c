"""Aggregators of models alone. x_1, ..., x_m are the models, and f is the number of attackers.

>>> Median()([[0.0, 1.0], [1.0, 1.0], [9.0, 3.0]])
[1.0, 1.0]
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from fedcb2o.aggregators._base import (
    Aggregator,
    aggregate,
    finite_gram,
    fit_f,
    with_origin,
    with_own,
)
from fedcb2o.aggregators._conversion import Models, stack
from fedcb2o.errors import ConfigError
from fedcb2o.federated import aggregation
from fedcb2o.federated.aggregation import base
from fedcb2o.federated.aggregation.gram_rules import require_positive

__all__ = [
    "CAF",
    "MDA",
    "SMEA",
    "Average",
    "Bulyan",
    "CenteredClipping",
    "DnC",
    "GeometricMedian",
    "Krum",
    "Meamed",
    "Median",
    "MoNNA",
    "MultiKrum",
    "TrMean",
]

Definition = Literal["paper", "byzfl"]


@dataclass(frozen=True)
class Average(Aggregator):
    """Mean of the models.

    (x_1 + ... + x_m) / m. McMahan et al., "Communication-efficient learning of deep networks from
    decentralized data" (AISTATS 2017). One attacker can move it anywhere.

    Example:
        >>> Average()([[0.0, 1.0], [2.0, 3.0]])
        [1.0, 2.0]
    """

    def __call__(self, models: Models) -> Any:
        """Aggregate models; the result has their type."""
        return aggregate(aggregation.mean, models)


@dataclass(frozen=True)
class Median(Aggregator):
    """Median of each coordinate.

    For even m, the mean of the middle two values. Yin, Chen, Ramchandran and Bartlett,
    "Byzantine-robust distributed learning: towards optimal statistical rates" (ICML 2018).

    Example:
        >>> import torch
        >>> Median()(torch.tensor([[0.0, 5.0], [1.0, 1.0], [9.0, 3.0]]))
        tensor([1., 3.])
    """

    def __call__(self, models: Models) -> Any:
        """Aggregate models; the result has their type."""
        return aggregate(aggregation.coordinate_median, models)


@dataclass(frozen=True)
class TrMean(Aggregator):
    """Mean of each coordinate without its f smallest and f largest values.

    With sorted values v_1 <= ... <= v_m of a coordinate: (v_{f+1} + ... + v_{m-f}) / (m - 2 f).
    Needs m >= 2 f + 1. Yin, Chen, Ramchandran and Bartlett (ICML 2018).

    Args:
        f: Number of attackers to assume.
        clip_f: Assume fewer if there are too few models, with a warning, instead of an error.

    Example:
        >>> TrMean(f=1)([[0.0], [1.0], [3.0], [100.0]])
        [2.0]
    """

    f: int = 0
    clip_f: bool = field(default=False, kw_only=True)

    def __call__(self, models: Models) -> Any:
        """Aggregate models; the result has their type."""
        return aggregate(aggregation.trimmed_mean, models, f=self.f, clip_f=self.clip_f)


@dataclass(frozen=True)
class Meamed(Aggregator):
    """Mean of the m - f values of each coordinate that are nearest to its median.

    Needs m >= 2 f + 1. Xie, Koyejo and Gupta, "Generalized Byzantine-tolerant SGD" (2018).

    Args:
        f: Number of attackers to assume.
        clip_f: Assume fewer if there are too few models, with a warning, instead of an error.

    Example:
        >>> Meamed(f=1)([[0.0], [1.0], [2.0], [100.0]])
        [1.0]
    """

    f: int = 0
    clip_f: bool = field(default=False, kw_only=True)

    def __call__(self, models: Models) -> Any:
        """Aggregate models; the result has their type."""
        return aggregate(aggregation.meamed, models, f=self.f, clip_f=self.clip_f)


@dataclass(frozen=True)
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
        require_positive("nu", self.nu)
        stacked = stack(models)
        rows = stacked.rows
        if self.T == 0:
            return stacked.restore(torch.zeros_like(rows[0]))
        g = finite_gram(rows, last=0 if self.T == 1 else None)
        start = 1 / g.diagonal().sqrt().clamp(min=self.nu)
        weights = aggregation.geometric_median(
            g, smoothing=self.nu, iterations=self.T - 1, start=start / start.sum()
        )
        return stacked.restore(base.weighted_sum(rows, torch.arange(len(rows)), weights))


@dataclass(frozen=True)
class Krum(Aggregator):
    """Model nearest to its nearest models.

    The model with the least sum of squared distances to its m - f - 2 nearest models. Needs
    m >= 2 f + 3. Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine learning with adversaries"
    (NeurIPS 2017). Of equal models, the one nearest to all models counts.

    Args:
        f: Number of attackers to assume.
        definition: "byzfl" sums over m - f - 1 models and needs m >= 2 f + 1, as ByzFL does.
        clip_f: Assume fewer if there are too few models, with a warning, instead of an error.

    Example:
        >>> Krum(f=1)([[0.0], [1.0], [2.0], [1.5], [100.0]])
        [1.5]
    """

    f: int = 0
    definition: Definition = "paper"
    clip_f: bool = field(default=False, kw_only=True)

    def __call__(self, models: Models) -> Any:
        """Aggregate models; the result has their type."""
        return _by_krum_scores(self, models, selects_one=True)


@dataclass(frozen=True)
class MultiKrum(Aggregator):
    """Mean of the m - f models with the least Krum scores.

    The score is the sum of squared distances to the m - f - 2 nearest models. Needs m >= 2 f + 3.
    Blanchard, El Mhamdi, Guerraoui and Stainer (NeurIPS 2017).

    Args:
        f: Number of attackers to assume.
        selected: Number of models to average; by default m - f.
        definition: "byzfl" sums over m - f - 1 models and needs m >= 2 f + 1, as ByzFL does.
        clip_f: Assume fewer if there are too few models, with a warning, instead of an error.

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
        return _by_krum_scores(self, models, selects_one=False)


def _by_krum_scores(settings: Krum | MultiKrum, models: Models, *, selects_one: bool) -> Any:
    stacked = stack(models)
    rows = stacked.rows
    m = len(rows)
    f = settings.f
    neighbours = None
    if settings.definition == "byzfl":
        f = fit_f(aggregation.mda, f, m, clip_f=settings.clip_f)
        neighbours = max(1, m - f - 1)
    elif settings.definition == "paper":
        f = fit_f(aggregation.krum, f, m, clip_f=settings.clip_f)
    else:
        raise ConfigError(f'`definition` must be "paper" or "byzfl", got {settings.definition!r}')
    selected = getattr(settings, "selected", None)
    if selected is None:
        selected = 1 if selects_one else m - f
    weights = aggregation.multi_krum(
        finite_gram(rows), f=0, neighbours=neighbours or max(1, m - f - 2), selected=selected
    )
    return stacked.restore(base.weighted_sum(rows, torch.arange(m), weights))


@dataclass(frozen=True)
class Bulyan(Aggregator):
    """Mean around the median of the models that Krum selects.

    Krum selects m - 2 f models, one after the other. Of these, each coordinate is the mean of the
    m - 4 f values nearest to their median. Needs m >= 4 f + 3. El Mhamdi, Guerraoui and Rouault,
    "The hidden vulnerability of distributed learning in Byzantium" (ICML 2018).

    Args:
        f: Number of attackers to assume.
        clip_f: Assume fewer if there are too few models, with a warning, instead of an error.

    Example:
        >>> Bulyan(f=1)([[0.0], [1.0], [2.0], [1.0], [1.0], [2.0], [100.0]])
        [1.0]
    """

    f: int = 0
    clip_f: bool = field(default=False, kw_only=True)

    def __call__(self, models: Models) -> Any:
        """Aggregate models; the result has their type."""
        return aggregate(aggregation.bulyan, models, f=self.f, clip_f=self.clip_f)


@dataclass(frozen=True)
class MDA(Aggregator):
    """Mean of the m - f models of least diameter (minimum diameter averaging).

    The subset S of m - f models with the least max_{i, j in S} ||x_i - x_j||, the first one in
    lexicographic order if several are equal. Needs m >= 2 f + 1. El Mhamdi, Guerraoui, Guirguis,
    Hoang and Rouault, "Genuinely distributed Byzantine machine learning" (PODC 2020).

    Args:
        f: Number of attackers to assume.
        clip_f: Assume fewer if there are too few models, with a warning, instead of an error.

    Example:
        >>> MDA(f=2)([[0.0], [1.0], [2.0], [100.0], [5.0]])
        [1.0]
    """

    f: int = 0
    clip_f: bool = field(default=False, kw_only=True)

    def __call__(self, models: Models) -> Any:
        """Aggregate models; the result has their type."""
        return aggregate(aggregation.mda, models, f=self.f, clip_f=self.clip_f)


@dataclass(frozen=True)
class SMEA(Aggregator):
    """Mean of the m - f models of least maximum variance.

    The subset of m - f models whose covariance matrix has the smallest largest eigenvalue. All
    subsets are tried. Needs m >= 2 f + 1. Allouah, Guerraoui, Gupta, Pinot and Stephan, "On the
    privacy-robustness-utility trilemma in distributed learning" (ICML 2023).

    Args:
        f: Number of attackers to assume.
        clip_f: Assume fewer if there are too few models, with a warning, instead of an error.

    Example:
        >>> SMEA(f=1)([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [50.0, 50.0]])
        [0.3333333333333333, 0.3333333333333333]
    """

    f: int = 0
    clip_f: bool = field(default=False, kw_only=True)

    def __call__(self, models: Models) -> Any:
        """Aggregate models; the result has their type."""
        return aggregate(aggregation.smea, models, f=self.f, clip_f=self.clip_f)


@dataclass(frozen=True)
class CAF(Aggregator):
    """Weighted mean by a filter that lowers the maximum variance.

    All c_i begin at 1. While they sum to more than m - 2 f, c_i is multiplied by
    1 - t_i / max_j t_j with t_i = <x_i - mu_c, v>^2. mu_c is the weighted mean, and v the direction
    of the largest weighted variance. The mu_c of the least maximum variance is the result. Needs
    m >= 2 f + 1. Allouah, Guerraoui and Stephan, "Towards trustworthy federated learning with
    untrusted participants" (ICML 2025).

    Args:
        f: Number of attackers to assume.
        clip_f: Assume fewer if there are too few models, with a warning, instead of an error.

    Example:
        >>> round(CAF(f=1)([[0.0], [1.0], [2.0], [100.0], [-3.0]])[0], 3)
        0.024
    """

    f: int = 0
    clip_f: bool = field(default=False, kw_only=True)

    def __call__(self, models: Models) -> Any:
        """Aggregate models; the result has their type."""
        return aggregate(aggregation.caf, models, f=self.f, clip_f=self.clip_f)


@dataclass(frozen=True)
class DnC(Aggregator):
    """Mean without the models that are farthest along the direction of largest variance.

    The score of a model is <x_i - mean, v>^2, where v is the first right singular vector of the
    centred models. The ceil(removed f) largest scores are removed, at most m - 1. Shejwalkar and
    Houmansadr, "Manipulating the Byzantine" (NDSS 2021), with all coordinates and one iteration.

    Args:
        f: Number of attackers to assume.
        removed: Models to remove for each assumed attacker, above 0.
        clip_f: Assume fewer if there are too few models, with a warning, instead of an error.

    Example:
        >>> DnC(f=1)([[0.0], [1.0], [2.0], [100.0]])
        [1.0]
    """

    f: int = 0
    removed: float = 1.0
    clip_f: bool = field(default=False, kw_only=True)

    def __call__(self, models: Models) -> Any:
        """Aggregate models; the result has their type."""
        return aggregate(
            aggregation.dnc, models, f=self.f, removed=self.removed, clip_f=self.clip_f
        )


@dataclass(frozen=True)
class CenteredClipping(Aggregator):
    """Start v plus the mean of the clipped differences to it.

    Repeats L times v = v + (1/m) sum_i min(1, tau / ||x_i - v||) (x_i - v). Karimireddy, He and
    Jaggi, "Learning from history for Byzantine robust optimization" (ICML 2021). The object keeps
    no memory: pass the last result as `m`.

    Args:
        m: Start v, a model of the same type; by default 0.
        L: Number of iterations.
        tau: Largest norm of a difference, above 0.

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
        last = 0 if self.L <= 1 else None
        if self.m is None:
            rows = stacked.rows
            g = with_origin(finite_gram(rows, last=last))
        else:
            rows = with_own(stacked, (self.m,)).rows
            g = finite_gram(rows, last=1 if self.L <= 1 else None)
        weights = aggregation.centred_clipping(g, radius=self.tau, iterations=self.L)[: len(rows)]
        if not weights.any():
            return stacked.restore(torch.zeros_like(rows[0]))
        return stacked.restore(base.weighted_sum(rows, torch.arange(len(rows)), weights))


@dataclass(frozen=True)
class MoNNA(Aggregator):
    """Mean of the m - f models nearest to one model, which is among them.

    Needs m >= 2 f + 1. Farhadkhani, Guerraoui, Gupta, Hoang, Pinot and Stephan, "Robust
    collaborative learning with linear gradient overhead" (ICML 2023).

    Args:
        f: Number of attackers to assume.
        idx: Number of the trusted model, from 0.
        clip_f: Assume fewer if there are too few models, with a warning, instead of an error.

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
        order = torch.tensor([*others, self.idx])
        weights = torch.zeros(m, dtype=torch.float64)
        weights[order] = aggregation.monna(finite_gram(stacked.rows, order, last=1), f=f)
        return stacked.restore(base.weighted_sum(stacked.rows, torch.arange(m), weights))
