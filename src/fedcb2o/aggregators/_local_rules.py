"""Aggregators that need more than the models of others: an agent's own model, losses, or counts.

>>> WeightedAverage()([[0.0, 1.0], [4.0, 1.0]], [3, 1])
[1.0, 1.0]
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedcb2o.aggregators._base import (
    Aggregator,
    Robust,
    aggregate,
    aggregator,
    of_losses,
    of_received,
    row_values,
)
from fedcb2o.aggregators._conversion import Models, stack
from fedcb2o.errors import ConfigError
from fedcb2o.federated import aggregation
from fedcb2o.federated.aggregation import base
from fedcb2o.user_values import to_tensor


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
        counts = row_values("num_samples", num_samples, len(rows))
        if not ((counts >= 0) & counts.isfinite()).all() or not counts.sum() > 0:
            raise ConfigError(f"`num_samples` must be 0 or more, got {counts.tolist()}")
        base.require_finite(rows, (counts == 0).nonzero().flatten())
        weights = counts / counts.sum()
        return stacked.weighted(weights)


@aggregator(aggregation.clipped_gossip)
class ClippedGossip(Aggregator):
    """Agent's own model plus the mean of the clipped differences to it.

    Example:
        >>> ClippedGossip(radius=1.0)([[3.0, 4.0], [0.0, 0.5]], [0.0, 0.0])
        [0.2, 0.43333333333333335]
    """

    f: int = 0
    radius: float | None = None
    clip_f: bool = field(default=False, kw_only=True)

    __call__ = of_received


@aggregator(aggregation.cs_plus)
class CSPlus(Robust):
    """Agent's own model plus differences that are clipped at the 2 f + 1 farthest model.

    Example:
        >>> CSPlus(f=1)([[8.0], [0.0], [4.0]], [0.0])
        [0.0]
    """

    __call__ = of_received


@aggregator(aggregation.balance)
class Balance(Aggregator):
    """Mixture of the agent's own model and the mean of near models.

    Example:
        >>> Balance()([[1.1, 0.0], [9.0, 9.0]], [1.0, 0.0], 0.0)
        [1.05, 0.0]
    """

    gamma: float = 0.3
    kappa: float = 1.0
    alpha: float = 0.5

    def __call__(self, models: Models, own: Any, progress: float) -> Any:
        """Aggregate received models; `progress` is t, from 0 to 1."""
        return aggregate(self, models, progress, own=(own,))


@aggregator(aggregation.ubar)
class UBAR(Aggregator):
    """Mixture of the agent's own model and near models of low loss.

    Example:
        >>> UBAR(f=1)([[1.0], [2.0], [9.0]], [0.0], [0.3, 0.9, 0.1, 0.5])
        [0.5]
    """

    f: int = 0
    alpha: float = 0.5
    clip_f: bool = field(default=False, kw_only=True)

    def __call__(self, models: Models, own: Any, losses: Any) -> Any:
        """Aggregate received models; the last of `losses` is that of the agent's own."""
        return aggregate(self, models, own=(own,), losses=losses)


@aggregator(aggregation.fltrust)
class FLTrust(Aggregator):
    """Mean of scaled updates, weighted by their cosine to the agent's own update.

    Example:
        >>> FLTrust()([[2.0, 0.0], [-1.0, 0.0]], [1.0, 0.0], [0.0, 0.0])
        [1.0, 0.0]
    """

    def __call__(self, models: Models, own: Any, previous: Any) -> Any:
        """Aggregate received models; `own` and `previous` are after and before local training."""
        return aggregate(self, models, own=(own, previous))


@aggregator(aggregation.norm_clipping)
class NormClipping(Aggregator):
    """Mean of clipped updates since the model before the round.

    Example:
        >>> NormClipping(radius=1.0)([[3.0, 4.0], [0.0, 0.5]], [0.0, 0.0])
        [0.30000000000000004, 0.65]
    """

    radius: float | None = None

    def __call__(self, models: Models, previous: Any) -> Any:
        """Aggregate models; `previous` is the model before the round."""
        return aggregate(self, models, own=(previous,))


@aggregator(aggregation.flame)
class FLAME(Aggregator):
    """Mean of clipped updates of the majority's cluster, with noise.

    Example:
        >>> FLAME(noise=0.0)([[1.0, 0.0], [2.0, 0.0], [0.0, -1.0]], [0.0, 0.0])
        [1.0, 0.0]
    """

    noise: float = 0.001
    rng: np.random.Generator | None = None

    def __call__(self, models: Models, previous: Any) -> Any:
        """Aggregate models; `previous` is the model before the round."""
        return aggregate(self, models, self.rng or np.random.default_rng(), own=(previous,))


@aggregator(aggregation.lfighter)
class LFighter(Aggregator):
    """Mean of the models in one of two clusters of last-layer updates.

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
        return stacked.weighted(weights)


@aggregator(aggregation.sageflow)
class Sageflow(Aggregator):
    """Mean of confident models, weighted by 1 / loss^delta.

    Example:
        >>> Sageflow()([[0.0], [3.0], [9.0]], [1.0, 2.0, 0.1], [0.5, 0.5, 2.0])
        [1.0]
    """

    threshold: float = 1.0
    delta: float = 1.0

    def __call__(self, models: Models, losses: Any, entropies: Any) -> Any:
        """Aggregate models by their losses and mean prediction entropies on validation data."""
        num_samples = torch.ones(len(stack(models).rows))
        return aggregate(self, models, losses=losses, entropies=entropies, num_samples=num_samples)


@aggregator(aggregation.loss_clustering)
class LossClustering(Aggregator):
    """Mean of the models in the better one of two clusters of losses.

    Example:
        >>> LossClustering()([[0.0], [2.0], [90.0]], [0.1, 0.2, 5.0])
        [1.0]
    """

    __call__ = of_losses


@aggregator(aggregation.lpe_tsr)
class LPETSR(Aggregator):
    """Mean of the models, weighted by exp(-loss / temperature).

    Example:
        >>> LPETSR(temperature=0.001)([[1.0], [90.0]], [0.1, 5.0])
        [1.0]
    """

    temperature: float = 1.0

    __call__ = of_losses
