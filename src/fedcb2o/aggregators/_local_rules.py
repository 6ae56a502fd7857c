"""Aggregators that need more than the models of others: an agent's own model, losses, or counts.

>>> WeightedAverage()([[0.0, 1.0], [4.0, 1.0]], [3, 1])
[1.0, 1.0]
"""

from dataclasses import dataclass
from typing import Any

import torch

from fedcb2o.aggregators._base import (
    Aggregator,
    aggregate,
    aggregator,
    of_rule,
    row_values,
)
from fedcb2o.aggregators._conversion import Models, stack
from fedcb2o.errors import ConfigError
from fedcb2o.federated import aggregation
from fedcb2o.federated.aggregation import base
from fedcb2o.user_values import to_tensor

ClippedGossip = of_rule(
    "ClippedGossip",
    aggregation.clipped_gossip,
    "(radius=1.0)([[3.0, 4.0], [0.0, 0.5]], [0.0, 0.0])",
    "[0.2, 0.43333333333333335]",
)
CSPlus = of_rule("CSPlus", aggregation.cs_plus, "(f=1)([[8.0], [0.0], [4.0]], [0.0])", "[0.0]")
Balance = of_rule(
    "Balance", aggregation.balance, "()([[1.1, 0.0], [9.0, 9.0]], [1.0, 0.0], 0.0)", "[1.05, 0.0]"
)
UBAR = of_rule(
    "UBAR", aggregation.ubar, "(f=1)([[1.0], [2.0], [9.0]], [0.0], [0.3, 0.9, 0.1, 0.5])", "[0.5]"
)
FLTrust = of_rule(
    "FLTrust",
    aggregation.fltrust,
    "()([[2.0, 0.0], [-1.0, 0.0]], [1.0, 0.0], [0.0, 0.0])",
    "[1.0, 0.0]",
)
NormClipping = of_rule(
    "NormClipping",
    aggregation.norm_clipping,
    "(radius=1.0)([[3.0, 4.0], [0.0, 0.5]], [0.0, 0.0])",
    "[0.30000000000000004, 0.65]",
)
FLAME = of_rule(
    "FLAME",
    aggregation.flame,
    "(noise=0.0)([[1.0, 0.0], [2.0, 0.0], [0.0, -1.0]], [0.0, 0.0])",
    "[1.0, 0.0]",
)
LossClustering = of_rule(
    "LossClustering",
    aggregation.loss_clustering,
    "()([[0.0], [2.0], [90.0]], [0.1, 0.2, 5.0])",
    "[1.0]",
)
LPETSR = of_rule(
    "LPETSR", aggregation.lpe_tsr, "(temperature=0.001)([[1.0], [90.0]], [0.1, 5.0])", "[1.0]"
)


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
        equal = torch.ones(len(stack(models).rows))
        return aggregate(self, models, losses=losses, entropies=entropies, num_samples=equal)
