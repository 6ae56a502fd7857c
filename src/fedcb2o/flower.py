"""FedCB2O in Flower: peers through a relay, robust rules and attacks (extra `flower`).

- `PeerRelay`, a server strategy, sends each client the models of the peers that it chose.
- `AgentMod`, a client mod, chooses these peers and mixes their models with an `Agent`.
- `RobustStrategy` and `FlandersStrategy` keep a server, which aggregates by a robust rule.
- `AttackMod` makes a client malicious.

A round of Algorithm 1 is a round of Flower: clients train (LocalUpdate), then evaluate
(LocalAggregation, and the user's own evaluation). The relay sees all models.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.agent import Agent
from fedcb2o.errors import ConfigError
from fedcb2o.federated.aggregation import filter_models, replace_rejected
from fedcb2o.federated.attacks.section import AttackSection
from fedcb2o.federated.sections import as_component
from fedcb2o.nn import parameters
from fedcb2o.plugins import PluginChoice
from fedcb2o.rng import stream
from fedcb2o.user_values import to_tensor

try:
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
    from flwr.serverapp.strategy import FedAvg
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "fedcb2o.flower needs Flower, in an environment of its own: pip install 'fedcb2o[flower]'"
    ) from error

__all__ = [
    "AgentMod",
    "AttackMod",
    "FlandersStrategy",
    "PeerRelay",
    "RobustStrategy",
    "training_data",
]

_LOG = logging.getLogger(__name__)

Handler = Callable[[Message, Context], Message]
Rule = Callable[[Float[Tensor, "m d"]], Any]
"""Models, one per row -> one model [d]."""
_TensorsByName = dict[str, Tensor]

REQUEST = "fedcb2o.request"
DECISION = "fedcb2o.decision"
_OWN_MODEL = "fedcb2o.model"
_MEMORY = "fedcb2o.memory"
_PEER_MODEL = "fedcb2o.peer."
_UNREADABLE = (ValueError, TypeError, KeyError, OSError, EOFError, SyntaxError)

_NUM_IDS = 1_000_000  # numbers of agents

_TRAINING_DATA: ContextVar[Callable[[Any, Any], tuple[Any, Any]]] = ContextVar(
    "_TRAINING_DATA", default=lambda x, y: (x, y)
)


def _mean(models: Float[Tensor, "m d"]) -> Float[Tensor, " d"]:
    return models.mean(0)


class PeerRelay(FedAvg):
    """Server strategy that forwards to each client the models of the peers that it chose.

    There is no global model: each client keeps its own in its Flower context. The server decides
    nothing about weights, but it sees all models, and names the peers that clients may choose.

    Args:
        budget: M, the largest number of peers that a client chooses.
        keywords: Arguments of Flower's `FedAvg`, such as `fraction_train`.

    Attributes:
        decisions: Decision of each client in the last round, by its node id: a `ConfigRecord` with
            "peers", "weights", "own-weight" and "refused".
    """

    def __init__(self, budget: int, **keywords: Any) -> None:
        if budget < 1:
            raise ConfigError(f"`budget` must be at least 1, got {budget}")
        super().__init__(**keywords)
        self.budget = budget
        self.decisions: dict[str, ConfigRecord] = {}
        self._candidates: list[str] = []
        self._updates: dict[str, RecordDict] = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any
    ) -> Iterable[Message]:
        """Ask clients to train and to choose peers.

        Args:
            server_round: Round, from 1.
            arrays: The initial model.
            config: Flower's settings for the clients.
            grid: Flower's grid.

        Returns:
            One message per client.
        """
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._candidates = sorted(str(message.metadata.dst_node_id) for message in messages)
        for message in messages:
            message.content[REQUEST] = self._request()
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[None, Any]:
        """Keep the models of the clients until they are forwarded.

        Args:
            server_round: Round, from 1.
            replies: The replies of the clients.

        Returns:
            None in place of a global model, and the averaged metrics.
        """
        self._updates = dict(_usable_updates(replies, self.weighted_by_key))
        contents = list(self._updates.values())
        if not contents:
            return None, None
        return None, self.train_metrics_aggr_fn(contents, self.weighted_by_key)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any
    ) -> Iterable[Message]:
        """Forward models to the clients that trained.

        Args:
            server_round: Round, from 1.
            arrays: Not used.
            config: Flower's settings for the clients.
            grid: Not used.

        Returns:
            One message per client.
        """
        config["server-round"] = server_round
        messages = []
        for receiver, content in self._updates.items():
            answer = content.config_records.get(REQUEST, ConfigRecord())
            chosen = [str(peer) for peer in _as_list(answer.get("peers"))]
            peers = [peer for peer in chosen if peer in self._updates and peer != receiver]
            peers = sorted(set(peers))[: self.budget]
            samples = [self._num_samples(peer) for peer in peers]
            record = RecordDict({self.configrecord_key: config})
            record[REQUEST] = ConfigRecord({**self._request(), "peers": peers, "samples": samples})
            for peer in peers:
                record[_PEER_MODEL + peer] = _first_arrays(self._updates[peer])
            messages.append(
                Message(record, dst_node_id=int(receiver), message_type=MessageType.EVALUATE)
            )
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> Any:
        """Average the metrics of the clients, and keep their decisions.

        Args:
            server_round: Round, from 1.
            replies: The replies of the clients.

        Returns:
            The averaged metrics.
        """
        contents = {}
        for reply in replies:
            sender = str(reply.metadata.src_node_id)
            if reply.has_error():
                _LOG.warning("Client %s: %s", sender, reply.error.reason)
            elif _has_sample_count(reply.content, self.weighted_by_key):
                contents[sender] = reply.content
        decisions = {sender: c.config_records.get(DECISION) for sender, c in contents.items()}
        self.decisions = {sender: d for sender, d in decisions.items() if d is not None}
        if not contents:
            return None
        return self.evaluate_metrics_aggr_fn(list(contents.values()), self.weighted_by_key)

    def _request(self) -> ConfigRecord:
        return ConfigRecord({"candidates": list(self._candidates), "budget": self.budget})

    def _num_samples(self, peer: str) -> float:
        metrics = next(iter(self._updates[peer].metric_records.values()))
        return float(metrics[self.weighted_by_key])


class AgentMod:
    """Client mod with which an `Agent` chooses peers and mixes their models on this client.

    The app's train function gets the client's own model, and trains it. The app's evaluate function
    gets it after LocalAggregation. Model and memory are kept in the state of Flower's context. The
    mod goes with the server strategy `PeerRelay`.

    Args:
        make_agent: Function of Flower's context that returns a new `Agent`: network, validation
            samples, method and seed of this client.
        arrays_key: Name of the model in messages, as in the strategy.

    Example:
        app = ClientApp(mods=[AgentMod(make_agent)])
    """

    def __init__(
        self, make_agent: Callable[[Context], Agent], *, arrays_key: str = "arrays"
    ) -> None:
        self.make_agent = make_agent
        self.arrays_key = arrays_key

    def __call__(self, message: Message, context: Context, call_next: Handler) -> Message:
        """Answer a message of the relay, with the help of the app."""
        if REQUEST not in message.content.config_records:
            return call_next(message, context)
        request = message.content.pop(REQUEST)
        candidates = [id for id in request["candidates"] if id != str(context.node_id)]
        budget = int(request["budget"])
        if message.metadata.message_type.startswith(MessageType.TRAIN):
            return self._train(message, context, call_next, candidates, budget)
        return self._aggregate(message, context, call_next, candidates, budget, request)

    def _train(
        self,
        message: Message,
        context: Context,
        call_next: Handler,
        candidates: list[str],
        budget: int,
    ) -> Message:
        """Train the client's own model (LocalUpdate), and choose peers (line 1)."""
        own = context.state.get(_OWN_MODEL, message.content.get(self.arrays_key))
        agent = self._restore(context, own)
        message.content[self.arrays_key] = own
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        trained = _first_arrays(reply.content)
        peers = agent.select(candidates, budget) if candidates else []
        reply.content[REQUEST] = ConfigRecord({"peers": peers})
        context.state[_OWN_MODEL] = trained
        context.state[_MEMORY] = ArrayRecord(agent.state_dict())
        return reply

    def _aggregate(
        self,
        message: Message,
        context: Context,
        call_next: Handler,
        candidates: list[str],
        budget: int,
        request: ConfigRecord,
    ) -> Message:
        """Mix the forwarded models into the client's own (lines 3 to 7), and evaluate it."""
        agent = self._restore(context, context.state[_OWN_MODEL])
        if candidates:
            agent.select(candidates, budget)  # as in training
        models = {}
        for peer in request["peers"]:
            record = message.content.pop(_PEER_MODEL + peer)
            try:
                models[peer] = record.to_torch_state_dict()
            except _UNREADABLE:
                models[peer] = {}  # the agent refuses it
        samples = dict(zip(request["peers"], request["samples"], strict=True))
        decision = agent.aggregate(models, samples)
        mixed = ArrayRecord(agent.network.state_dict())
        context.state[_OWN_MODEL] = mixed
        context.state[_MEMORY] = ArrayRecord(agent.state_dict())
        message.content[self.arrays_key] = mixed
        reply = call_next(message, context)
        if not reply.has_error():
            reply.content[DECISION] = ConfigRecord(
                {
                    "peers": list(decision.weights),
                    "weights": list(decision.weights.values()),
                    "own-weight": decision.own_weight,
                    "refused": list(decision.refused),
                }
            )
        return reply

    def _restore(self, context: Context, own: ArrayRecord) -> Agent:
        """Return the client's agent with its model and memory; a new one in the first round."""
        agent = self.make_agent(context)
        agent.network.load_state_dict(own.to_torch_state_dict())
        if _MEMORY in context.state:
            agent.load_state_dict(context.state[_MEMORY].to_torch_state_dict())
        else:
            start = {"previous": parameters.flatten(agent.network)}
            agent.load_state_dict({**agent.state_dict(), **start})
        return agent


class RobustStrategy(FedAvg):
    """Server strategy that aggregates the models of the clients by a robust rule.

    A model with other arrays than the global one, or with numbers that are not finite, is refused.
    Arrays of whole numbers stay as they are in the global model.

    Args:
        rule: Function from models, one per row, to one model, such as an object of
            `fedcb2o.aggregators`.
        keywords: Arguments of Flower's `FedAvg`, such as `fraction_train`.

    Raises:
        ConfigError: At aggregation: the rule needs more models than there are.
    """

    def __init__(self, rule: Rule, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.rule = rule
        self._start: _TensorsByName = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any
    ) -> Iterable[Message]:
        """Ask clients to train the global model.

        Args:
            server_round: Round, from 1.
            arrays: The global model.
            config: Flower's settings for the clients.
            grid: Flower's grid.

        Returns:
            One message per client.
        """
        self._start = arrays.to_torch_state_dict()
        messages: Iterable[Message] = super().configure_train(server_round, arrays, config, grid)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, Any]:
        """Aggregate the models of the clients.

        Args:
            server_round: Round, from 1.
            replies: The replies of the clients.

        Returns:
            The new global model, and the averaged metrics.

        Raises:
            ConfigError: The rule needs more models than there are.
        """
        rows: dict[int, Tensor] = {}
        contents: dict[int, RecordDict] = {}
        for sender, content in sorted(_usable_updates(replies, self.weighted_by_key)):
            reason, theta = _as_row(_first_arrays(content), self._start)
            if reason:
                _LOG.warning("The model of client %s is refused: %s", sender, reason)
            else:
                rows[int(sender)] = theta
                contents[int(sender)] = content
        if not rows:
            return None, None
        theta = self.aggregate(list(rows), torch.stack(list(rows.values())))
        arrays = ArrayRecord(_from_row(theta, self._start))
        metrics = self.train_metrics_aggr_fn(list(contents.values()), self.weighted_by_key)
        return arrays, metrics

    def aggregate(self, ids: list[int], models: Float[Tensor, "m d"]) -> Float[Tensor, " d"]:
        """Aggregate models.

        Args:
            ids: Node ids of the clients.
            models: Their models, shape [m, d].

        Returns:
            The aggregate, shape [d].
        """
        return to_tensor("the rule returned", self.rule(models)).to(models)


class FlandersStrategy(RobustStrategy):
    """Server strategy with the filter FLANDERS before a robust rule.

    Args:
        f: Number of models to leave out.
        rule: Rule for the models that are kept; by default their mean.
        num_sampled: Number of parameters that the forecast reads.
        window: Number of past rounds in the forecast.
        ridge: Regularisation of the forecast.
        seed: Seed of the choice of parameters.
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
        """Leave models out, aggregate the others, and remember both.

        Args:
            ids: Node ids of the clients.
            models: Their models, shape [m, d].

        Returns:
            The aggregate, shape [d].
        """
        # Flower's ids are unsigned, and PyTorch's numbers are not.
        senders = torch.from_numpy(np.array(ids, np.uint64).view(np.int64))
        reference = _to_row(self._start)
        self._state, is_kept = self._filter(self._state, senders, models, reference, self._draw)
        theta = super().aggregate(ids, models[is_kept])
        columns = theta[self._state["columns"]]
        self._state = replace_rejected(self._state, senders[~is_kept], columns)
        return theta


class AttackMod:
    """Client mod that makes a client malicious.

    An attack on data acts on what the app's train function gets from `training_data`. An attack on
    models replaces the model that the client sends. The mod comes before `AgentMod`, so that the
    attacker's own model stays.

    Args:
        attack: An attack by name, or a table with its parameters, as in the section `attack` of a
            configuration. A client knows no other models, so the attack must not need any.
        is_malicious: Function of Flower's context; by default every client attacks.
        seed: Seed of the attack.

    Raises:
        ConfigError: The attack, or a parameter of it, is unknown, or needs more than one client
            knows.
    """

    def __init__(
        self,
        attack: PluginChoice,
        *,
        is_malicious: Callable[[Context], bool] = lambda context: True,
        seed: int = 0,
    ) -> None:
        built = AttackSection.model_validate(as_component(attack)).build()
        if "benign" in built.threat.knows or built.threat.each_receiver:
            raise ConfigError(
                "the attack needs the models of other clients, or sends one model per receiver; a "
                "Flower client has only its own"
            )
        self.attack = attack
        self.is_malicious = is_malicious
        self.seed = seed

    def __call__(self, message: Message, context: Context, call_next: Handler) -> Message:
        """Let the app train, and poison its data or its model."""
        is_train = message.metadata.message_type.startswith(MessageType.TRAIN)
        if not is_train or not self.is_malicious(context):
            return call_next(message, context)
        before = context.state.get(_OWN_MODEL, _first_arrays(message.content))
        me = int(context.node_config.get("partition-id", context.node_id)) % _NUM_IDS
        agent = Agent(
            _to_row(before.to_torch_state_dict()),
            judge=_no_judge,
            attack=self.attack,
            seed=self.seed,
            id=me,
        )
        agent.round = _server_round(message) - 1
        token = _TRAINING_DATA.set(agent.training_data)
        try:
            reply = call_next(message, context)
        finally:
            _TRAINING_DATA.reset(token)
        if not reply.has_error():
            key, record = next(iter(reply.content.array_records.items()))
            trained = record.to_torch_state_dict()
            agent.theta = _to_row(trained)
            reply.content[key] = ArrayRecord(_from_row(agent.publish(), trained))
        return reply


def training_data(x: Any, y: Any) -> tuple[Any, Any]:
    """Return the samples that this client trains on: poisoned ones under an attack on data.

    Args:
        x: Samples, an array or tensor [n, ...].
        y: Their labels [n].

    Returns:
        Samples and labels: those of the arguments, unless an `AttackMod` poisons them.
    """
    return _TRAINING_DATA.get()(x, y)


def _no_judge(states: Any) -> Any:
    raise ConfigError("an attack on models has no samples in a Flower client")


def _server_round(message: Message) -> int:
    """Return the round of a message, from 1; 1 where the strategy gives none."""
    for config in message.content.config_records.values():
        if "server-round" in config:
            return int(config["server-round"])
    return 1


def _usable_updates(replies: Iterable[Message], key: str) -> Iterator[tuple[str, RecordDict]]:
    """Yield sender and content of each reply with one model and a number of samples."""
    for reply in replies:
        sender = str(reply.metadata.src_node_id)
        if reply.has_error():
            _LOG.warning("Client %s: %s", sender, reply.error.reason)
        elif len(reply.content.array_records) == 1 and _has_sample_count(reply.content, key):
            yield sender, reply.content
        else:
            _LOG.warning(
                "The reply of client %s is refused: it needs a model and `%s`", sender, key
            )


def _has_sample_count(content: RecordDict, key: str) -> bool:
    """Test if a reply has one record of metrics, with a positive number of samples."""
    metrics = list(content.metric_records.values())
    if len(metrics) != 1:
        return False
    count = metrics[0].get(key)
    return isinstance(count, int | float) and 0 < count < float("inf")


def _first_arrays(content: RecordDict) -> ArrayRecord:
    return next(iter(content.array_records.values()))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _floats(state: _TensorsByName) -> _TensorsByName:
    return {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}


def _as_row(record: ArrayRecord, like: _TensorsByName) -> tuple[str, Float[Tensor, " d"]]:
    """Return the reason to refuse a model, or an empty text, and its floating-point numbers."""
    nothing = torch.zeros(0)
    try:
        state = record.to_torch_state_dict()
    except _UNREADABLE as error:
        return f"it cannot be read: {error}", nothing
    names = _floats(like)
    for name, tensor in names.items():
        if name not in state or state[name].shape != tensor.shape:
            return f"`{name}` is missing, or has another shape", nothing
    theta = torch.cat([state[name].reshape(-1).float() for name in names])
    reason = "" if theta.isfinite().all() else "it holds numbers that are not finite"
    return reason, theta


def _to_row(state: _TensorsByName) -> Float[Tensor, " d"]:
    """Return the floating-point numbers of a model."""
    return torch.cat([tensor.reshape(-1).float() for tensor in _floats(state).values()])


def _from_row(theta: Float[Tensor, " d"], like: _TensorsByName) -> _TensorsByName:
    """Return a model by names; arrays of whole numbers are those of `like`."""
    tensors = dict(like)
    start = 0
    for name, tensor in _floats(like).items():
        values = theta[start : start + tensor.numel()]
        tensors[name] = values.reshape(tensor.shape).to(tensor.dtype).clone()
        start += tensor.numel()
    return tensors
