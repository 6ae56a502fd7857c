"""Server strategies that aggregate by a robust rule."""

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from jaxtyping import Float
from torch import Tensor

from fedcb2o.federated.aggregation import filter_models, replace_rejected
from fedcb2o.flower._numbers import TensorsByName, from_row, to_row
from fedcb2o.flower._records import (
    as_row,
    by_median,
    first_arrays,
    usable_metrics,
    usable_updates,
)
from fedcb2o.rng import stream
from fedcb2o.user_values import to_tensor

_LOG = logging.getLogger(__name__)

Rule = Callable[[Float[Tensor, "m d"]], Any]
"""Models, one per row -> one model [d]."""


def _mean(models: Float[Tensor, "m d"]) -> Float[Tensor, " d"]:
    return models.mean(0)


class RobustStrategy(FedAvg):
    """Server strategy that aggregates the models of the clients by a robust rule.

    A model with other arrays than the global one, or with numbers that are not finite, is refused.
    Arrays of whole numbers stay as they are in the global model. A model with float64 arrays is
    aggregated in float64. Metrics are medians over the clients, by default.

    Args:
        rule: Function from models, one per row, to one model, such as an object of
            `fedcb2o.aggregators`.
        keywords: Arguments of Flower's `FedAvg`, such as `fraction_train`.

    Raises:
        ConfigError: At aggregation: the rule needs more models than there are.
    """

    def __init__(self, rule: Rule, **keywords: Any) -> None:
        super().__init__(**by_median(keywords))
        self.rule = rule
        self._start: TensorsByName = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any
    ) -> Iterable[Message]:
        """Ask clients to train the global model."""
        self._start = arrays.to_torch_state_dict()
        messages: Iterable[Message] = super().configure_train(server_round, arrays, config, grid)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, Any]:
        """Aggregate the models of the clients.

        Raises ConfigError where the rule needs more models than there are.
        """
        rows: dict[int, Tensor] = {}
        contents: dict[int, RecordDict] = {}
        # Replies arrive in any order, and the sums of a rule depend on it.
        for sender, content in sorted(usable_updates(replies, self.weighted_by_key)):
            reason, theta = as_row(first_arrays(content), self._start)
            if reason:
                _LOG.warning("The model of client %s is refused: %s", sender, reason)
            else:
                rows[int(sender)] = theta
                contents[int(sender)] = content
        # Flower keeps the global model when there is none.
        if not rows:
            return None, None
        theta = self.aggregate(list(rows), torch.stack(list(rows.values())))
        arrays = ArrayRecord(from_row(theta, self._start))
        metrics = self.train_metrics_aggr_fn(list(contents.values()), self.weighted_by_key)
        return arrays, metrics

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Aggregate the metrics of the clients; None without a usable reply."""
        contents = usable_metrics(replies, self.weighted_by_key)
        if not contents:
            return None
        return self.evaluate_metrics_aggr_fn(list(contents.values()), self.weighted_by_key)

    def aggregate(self, ids: list[int], models: Float[Tensor, "m d"]) -> Float[Tensor, " d"]:
        """Aggregate models."""
        return to_tensor("the rule returned", self.rule(models)).to(models)


class FlandersStrategy(RobustStrategy):
    """Server strategy with the filter FLANDERS before a robust rule.

    Args:
        rule: Rule for the models that are kept; by default their mean.
        num_sampled: Number of parameters that the forecast reads.
        keywords: Arguments of Flower's `FedAvg`.
    """

    def __init__(
        self,
        f: int,
        rule: Rule = _mean,
        *,
        num_sampled: int = 500,
        window: int = 2,
        ridge: float = 1.0,
        seed: int = 0,
        **keywords: Any,
    ) -> None:
        super().__init__(rule, **keywords)
        self._filter = functools.partial(
            filter_models, f=f, num_sampled=num_sampled, window=window, ridge=ridge
        )
        self._state: Mapping[str, Tensor] = {}
        self._draw = stream(seed, "flanders")

    def aggregate(self, ids: list[int], models: Float[Tensor, "m d"]) -> Float[Tensor, " d"]:
        """Leave models out, aggregate the others, and remember both."""
        # Flower's ids are unsigned, and PyTorch's numbers are not.
        senders = torch.from_numpy(np.array(ids, np.uint64).view(np.int64))
        reference = to_row(self._start)
        self._state, is_kept = self._filter(self._state, senders, models, reference, self._draw)
        theta = super().aggregate(ids, models[is_kept])
        columns = theta[self._state["columns"]]
        self._state = replace_rejected(self._state, senders[~is_kept], columns)
        return theta
