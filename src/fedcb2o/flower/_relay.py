"""Server strategy that forwards models between clients."""

from collections.abc import Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from fedcb2o.errors import ConfigError
from fedcb2o.flower._records import (
    DECISION,
    PEER_MODEL,
    REQUEST,
    by_median,
    first_arrays,
    usable_metrics,
    usable_updates,
)


class PeerRelay(FedAvg):
    """Server strategy that forwards to each client the models of the peers that it chose.

    There is no global model: each client keeps its own in its Flower context. The server decides
    nothing about weights, but it sees all models, and names the peers that clients may choose.

    Args:
        budget: M, the largest number of peers that a client chooses.
        keywords: Arguments of Flower's `FedAvg`, such as `fraction_train`.

    Attributes:
        decisions: Decision of each client in the last round, by its node id: a `ConfigRecord` with
            "peers", "weights", "own-weight", "refused", the "reasons" of the refused ones, and the
            client's "partition-id", if any.
        metrics: Metrics that each client sent in the last round, by its node id.
    """

    def __init__(self, budget: int, **keywords: Any) -> None:
        if budget < 1:
            raise ConfigError(f"`budget` must be at least 1, got {budget}")
        super().__init__(**by_median(keywords))
        self.budget = budget
        self.decisions: dict[str, ConfigRecord] = {}
        self.metrics: dict[str, MetricRecord] = {}
        self._candidates: list[str] = []
        self._updates: dict[str, RecordDict] = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any
    ) -> Iterable[Message]:
        """Ask clients to train and to choose peers.

        Rounds count from 1, as in all methods of a strategy.
        """
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._candidates = sorted(str(message.metadata.dst_node_id) for message in messages)
        for message in messages:
            message.content[REQUEST] = self._request()
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[None, Any]:
        """Keep the models of the clients until they are forwarded.

        None takes the place of a global model.
        """
        self._updates = dict(usable_updates(replies, self.weighted_by_key))
        contents = list(self._updates.values())
        if not contents:
            return None, None
        return None, self.train_metrics_aggr_fn(contents, self.weighted_by_key)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any
    ) -> Iterable[Message]:
        """Forward models to the clients that trained."""
        config["server-round"] = server_round
        messages = []
        for receiver, content in self._updates.items():
            answer = content.config_records.get(REQUEST, ConfigRecord())
            # A client may write anything: only peers that trained count, up to the budget.
            listed = answer.get("peers")
            chosen = [str(peer) for peer in listed] if isinstance(listed, list) else []
            peers = [peer for peer in chosen if peer in self._updates and peer != receiver]
            peers = sorted(set(peers))[: self.budget]
            samples = [self._num_samples(peer) for peer in peers]
            record = RecordDict({self.configrecord_key: config})
            record[REQUEST] = ConfigRecord({**self._request(), "peers": peers, "samples": samples})
            for peer in peers:
                record[PEER_MODEL + peer] = first_arrays(self._updates[peer])
            messages.append(
                Message(record, dst_node_id=int(receiver), message_type=MessageType.EVALUATE)
            )
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> Any:
        """Aggregate the metrics of the clients, and keep their decisions."""
        contents = usable_metrics(replies, self.weighted_by_key)
        decisions = {sender: c.config_records.get(DECISION) for sender, c in contents.items()}
        self.decisions = {sender: d for sender, d in decisions.items() if d is not None}
        self.metrics = {
            sender: next(iter(content.metric_records.values()))
            for sender, content in contents.items()
        }
        if not contents:
            return None
        return self.evaluate_metrics_aggr_fn(list(contents.values()), self.weighted_by_key)

    def _request(self) -> ConfigRecord:
        return ConfigRecord({"candidates": list(self._candidates), "budget": self.budget})

    def _num_samples(self, peer: str) -> float:
        metrics = next(iter(self._updates[peer].metric_records.values()))
        return float(metrics[self.weighted_by_key])
