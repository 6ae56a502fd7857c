"""Aggregators that need more than the models of others: an agent's own model, losses, or counts.

>>> WeightedAverage()([[0.0, 1.0], [4.0, 1.0]], [3, 1])
[1.0, 1.0]
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.aggregators._base import Aggregator, aggregate
from fedcb2o.aggregators._conversion import Models, stack
from fedcb2o.errors import ConfigError
from fedcb2o.federated import aggregation
from fedcb2o.federated.aggregation import base
from fedcb2o.user_values import to_tensor

__all__ = [
    "FLAME",
    "LPETSR",
    "UBAR",
    "Balance",
    "CSPlus",
    "ClippedGossip",
    "FLTrust",
    "LFighter",
    "LossClustering",
    "NormClipping",
    "Sageflow",
    "WeightedAverage",
]


def _values(name: str, values: Any, m: int) -> Float[Tensor, " m"]:
    """Return one number per model. Raise ConfigError for another length."""
    tensor = to_tensor(f"`{name}` holds", values).double()
    if tensor.shape != (m,):
        raise ConfigError(f"`{name}` must hold one number per model, {m}, got {[*tensor.shape]}")
    return tensor


@dataclass(frozen=True)
class WeightedAverage(Aggregator):
    """Mean of the models, weighted by their numbers of samples.

    (n_1 x_1 + ... + n_m x_m) / (n_1 + ... + n_m). McMahan et al. (AISTATS 2017). Numbers of samples
    are claims of the senders: a false one moves the mean.

    Example:
        >>> WeightedAverage()([[0.0], [4.0]], [3, 1])
        [1.0]
    """

    def __call__(self, models: Models, num_samples: Any) -> Any:
        """Aggregate models; `num_samples` holds one positive number per model."""
        stacked = stack(models)
        rows = stacked.rows
        counts = _values("num_samples", num_samples, len(rows))
        if not ((counts >= 0) & counts.isfinite()).all() or not counts.sum() > 0:
            raise ConfigError(f"`num_samples` must be 0 or more, got {counts.tolist()}")
        base.require_finite(rows, (counts == 0).nonzero().flatten())
        weights = counts / counts.sum()
        return stacked.restore(base.weighted_sum(rows, torch.arange(len(rows)), weights))


@dataclass(frozen=True)
class ClippedGossip(Aggregator):
    """Agent's own model plus the mean of the clipped differences to it.

    x + (1/(m+1)) sum_j min(1, r / ||x_j - x||) (x_j - x) for m received models x_j and the agent's
    own x. By default r^2 = (1/f) times the sum of the m - f smallest ||x_j - x||^2. He, Karimireddy
    and Jaggi, "Byzantine-robust decentralized learning via ClippedGossip" (2022).

    Args:
        f: Number of attackers to assume.
        radius: Largest norm r of a difference, above 0; by default the paper's.
        clip_f: Assume fewer if there are too few models, with a warning, instead of an error.

    Example:
        >>> ClippedGossip(radius=1.0)([[3.0, 4.0], [0.0, 0.5]], [0.0, 0.0])
        [0.2, 0.43333333333333335]
    """

    f: int = 0
    radius: float | None = None
    clip_f: bool = field(default=False, kw_only=True)

    def __call__(self, models: Models, own: Any) -> Any:
        """Aggregate received models with the agent's own model."""
        return aggregate(
            aggregation.clipped_gossip,
            models,
            own=(own,),
            f=self.f,
            radius=self.radius,
            clip_f=self.clip_f,
        )


@dataclass(frozen=True)
class CSPlus(Aggregator):
    """Agent's own model plus differences that are clipped at the 2 f + 1 farthest model.

    As `ClippedGossip`, with r the distance of the farthest model without the 2 f farthest, or 0 for
    at most 2 f models. Gaucher, Dieuleveut and Hendrikx, "Unified breakdown analysis for Byzantine
    robust gossip" (ICML 2025).

    Args:
        f: Number of attackers to assume.
        clip_f: Assume fewer if there are too few models, with a warning, instead of an error.

    Example:
        >>> CSPlus(f=1)([[8.0], [0.0], [4.0]], [0.0])
        [0.0]
    """

    f: int = 0
    clip_f: bool = field(default=False, kw_only=True)

    def __call__(self, models: Models, own: Any) -> Any:
        """Aggregate received models with the agent's own model."""
        return aggregate(aggregation.cs_plus, models, own=(own,), f=self.f, clip_f=self.clip_f)


@dataclass(frozen=True)
class Balance(Aggregator):
    """Mixture of the agent's own model and the mean of near models.

    A model x_j is near if ||x_j - x|| <= gamma exp(-kappa t) ||x||, where x is the agent's own
    model and t the finished part of the training. The result is alpha x + (1 - alpha) times the
    mean of the near models, or x without one. Fang et al., "Byzantine-robust decentralized
    federated learning" (CCS 2024).

    Args:
        gamma: Largest relative distance at the start, above 0.
        kappa: Decay rate of the largest relative distance.
        alpha: Weight of the agent's own model, from 0 to 1.

    Example:
        >>> Balance()([[1.1, 0.0], [9.0, 9.0]], [1.0, 0.0], 0.0)
        [1.05, 0.0]
    """

    gamma: float = 0.3
    kappa: float = 1.0
    alpha: float = 0.5

    def __call__(self, models: Models, own: Any, progress: float) -> Any:
        """Aggregate received models; `progress` is t, from 0 to 1."""
        return aggregate(
            aggregation.balance,
            models,
            progress,
            own=(own,),
            gamma=self.gamma,
            kappa=self.kappa,
            alpha=self.alpha,
        )


@dataclass(frozen=True)
class UBAR(Aggregator):
    """Mixture of the agent's own model and near models of low loss.

    Of the m - f models nearest to the agent's own, those that lose at most as much as it are
    averaged; without one, the model of least loss counts. The result is alpha x + (1 - alpha) times
    that mean. Guo et al., "Byzantine-resilient decentralized stochastic gradient descent" (2021).

    Args:
        f: Number of attackers to assume.
        alpha: Weight of the agent's own model, from 0 to 1.
        clip_f: Assume fewer if there are too few models, with a warning, instead of an error.

    Example:
        >>> UBAR(f=1)([[1.0], [2.0], [9.0]], [0.0], [0.3, 0.9, 0.1, 0.5])
        [0.5]
    """

    f: int = 0
    alpha: float = 0.5
    clip_f: bool = field(default=False, kw_only=True)

    def __call__(self, models: Models, own: Any, losses: Any) -> Any:
        """Aggregate received models; the last of `losses` is that of the agent's own."""
        stacked = stack(models)
        return aggregate(
            aggregation.ubar,
            models,
            _values("losses", losses, len(stacked.rows) + 1),
            own=(own,),
            f=self.f,
            alpha=self.alpha,
            clip_f=self.clip_f,
        )


@dataclass(frozen=True)
class FLTrust(Aggregator):
    """Mean of scaled updates, weighted by their cosine to the agent's own update.

    With updates g_j = x_j - b since the model b before the round and the agent's own update g_0:
    b + sum_j w_j (||g_0|| / ||g_j||) g_j / sum_j w_j, w_j = max(0, cos(g_j, g_0)). Cao, Fang, Liu
    and Gong, "FLTrust" (NDSS 2021). If no model is trusted, the agent's own model is the result.

    Example:
        >>> FLTrust()([[2.0, 0.0], [-1.0, 0.0]], [1.0, 0.0], [0.0, 0.0])
        [1.0, 0.0]
    """

    def __call__(self, models: Models, own: Any, previous: Any) -> Any:
        """Aggregate received models; `own` and `previous` are after and before local training."""
        return aggregate(aggregation.fltrust, models, own=(own, previous))


@dataclass(frozen=True)
class NormClipping(Aggregator):
    """Mean of clipped updates since the model before the round.

    b + (1/m) sum_j min(1, r / ||x_j - b||) (x_j - b); r is the median norm by default. Sun,
    Kairouz, Suresh and McMahan, "Can you really backdoor federated learning?" (2019).

    Args:
        radius: Largest norm r of an update, above 0; by default the median of the norms.

    Example:
        >>> NormClipping(radius=1.0)([[3.0, 4.0], [0.0, 0.5]], [0.0, 0.0])
        [0.30000000000000004, 0.65]
    """

    radius: float | None = None

    def __call__(self, models: Models, previous: Any) -> Any:
        """Aggregate models; `previous` is the model before the round."""
        return aggregate(aggregation.norm_clipping, models, own=(previous,), radius=self.radius)


@dataclass(frozen=True)
class FLAME(Aggregator):
    """Mean of clipped updates of the majority's cluster, with noise.

    The cluster has more than half of the models, by cosine distance. Their updates are clipped to
    the median norm S of all updates, and Gaussian noise of standard deviation `noise` S is added.
    Nguyen et al., "FLAME: taming backdoors in federated learning" (USENIX Security 2022).

    Args:
        noise: Standard deviation of the noise in units of S, 0 or more.
        rng: Source of randomness; by default a new one in each call.

    Example:
        >>> FLAME(noise=0.0)([[1.0, 0.0], [2.0, 0.0], [0.0, -1.0]], [0.0, 0.0])
        [1.0, 0.0]
    """

    noise: float = 0.001
    rng: np.random.Generator | None = None

    def __call__(self, models: Models, previous: Any) -> Any:
        """Aggregate models; `previous` is the model before the round."""
        rng = self.rng or np.random.default_rng()
        return aggregate(aggregation.flame, models, rng, own=(previous,), noise=self.noise)


@dataclass(frozen=True)
class LFighter(Aggregator):
    """Mean of the models in one of two clusters of last-layer updates.

    Against label flips: the last layers are clustered by k-means in the two classes that change
    most, and the large, dissimilar cluster counts. Jebreel, Domingo-Ferrer, Sánchez and
    Blanco-Justicia, "LFighter" (Neural Networks 2024).

    Example:
        >>> heads = [[[1.0, 0.0], [0.0, 0.0]], [[1.1, 0.0], [0.1, 0.0]], [[-1.0, 0.0], [2.0, 0.0]]]
        >>> LFighter()([[0.0], [1.0], [9.0]], heads, [[0.0, 0.0], [0.0, 0.0]])
        [0.5]
    """

    def __call__(self, models: Models, heads: Any, previous_head: Any) -> Any:
        """Aggregate models by their last layers [m, C, h + 1], weights and bias of each class."""
        layers = to_tensor("`heads` holds", heads).double()
        before = to_tensor("`previous_head` holds", previous_head).double()
        stacked = stack(models)
        m = len(stacked.rows)
        if layers.ndim != 3 or len(layers) != m or before.shape != layers.shape[1:]:
            raise ConfigError(
                f"`heads` must be [{m}, C, h + 1] and `previous_head` [C, h + 1], got "
                f"{[*layers.shape]} and {[*before.shape]}"
            )
        weights = aggregation.lfighter(torch.cat([layers, before.unsqueeze(0)]))[:m]
        base.require_finite(stacked.rows, torch.arange(m))
        return stacked.restore(base.weighted_sum(stacked.rows, torch.arange(m), weights))


@dataclass(frozen=True)
class Sageflow(Aggregator):
    """Mean of confident models, weighted by 1 / loss^delta.

    Models whose predictions have a mean entropy of `threshold` or more do not count. Park, Han,
    Choi and Moon, "Sageflow: robust federated learning against both stragglers and adversaries"
    (NeurIPS 2021).

    Args:
        threshold: Entropy in nats from which a model does not count.
        delta: Exponent of the loss.

    Example:
        >>> Sageflow()([[0.0], [3.0], [9.0]], [1.0, 2.0, 0.1], [0.5, 0.5, 2.0])
        [1.0]
    """

    threshold: float = 1.0
    delta: float = 1.0

    def __call__(self, models: Models, losses: Any, entropies: Any) -> Any:
        """Aggregate models by their losses and mean prediction entropies on validation data."""
        m = len(stack(models).rows)
        return aggregate(
            aggregation.sageflow,
            models,
            _values("losses", losses, m),
            _values("entropies", entropies, m),
            torch.ones(m),
            threshold=self.threshold,
            delta=self.delta,
        )


@dataclass(frozen=True)
class LossClustering(Aggregator):
    """Mean of the models in the better one of two clusters of losses.

    K-means with two clusters, from the least and the largest loss. Kritharakis, Jakovetic, Makris
    and Tserpes, "Robust federated learning under adversarial attacks via loss-based client
    clustering" (2025).

    Example:
        >>> LossClustering()([[0.0], [2.0], [90.0]], [0.1, 0.2, 5.0])
        [1.0]
    """

    def __call__(self, models: Models, losses: Any) -> Any:
        """Aggregate models by their losses on validation data."""
        m = len(stack(models).rows)
        return aggregate(aggregation.loss_clustering, models, _values("losses", losses, m))


@dataclass(frozen=True)
class LPETSR(Aggregator):
    """Mean of the models, weighted by exp(-loss / temperature).

    Local performance evaluation with temperature-scaled softmax reweighting, the rule of DB-Robust
    DSGD (https://openreview.net/forum?id=WeDc8CiLSn).

    Args:
        temperature: Above 0; a lower one concentrates the weights on the best models.

    Example:
        >>> LPETSR(temperature=0.001)([[1.0], [90.0]], [0.1, 5.0])
        [1.0]
    """

    temperature: float = 1.0

    def __call__(self, models: Models, losses: Any) -> Any:
        """Aggregate models by their losses on validation data."""
        m = len(stack(models).rows)
        return aggregate(
            aggregation.lpe_tsr,
            models,
            _values("losses", losses, m),
            temperature=self.temperature,
        )
