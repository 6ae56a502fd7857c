"""Client mods: an agent that decides on the client, and attacks."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType

from fedcb2o.agent import Agent
from fedcb2o.errors import ConfigError
from fedcb2o.federated.attacks.section import AttackSection
from fedcb2o.federated.sections import as_component
from fedcb2o.flower._numbers import from_row, to_row
from fedcb2o.flower._records import (
    DECISION,
    OWN_MODEL,
    PEER_MODEL,
    REQUEST,
    UNREADABLE,
    first_arrays,
)
from fedcb2o.nn import parameters
from fedcb2o.plugins import PluginChoice

Handler = Callable[[Message, Context], Message]

MEMORY = "fedcb2o.memory"
_NUM_IDS = 1_000_000  # numbers of agents

_TRAINING_DATA: ContextVar[Callable[[Any, Any], tuple[Any, Any]]] = ContextVar(
    "_TRAINING_DATA", default=lambda x, y: (x, y)
)


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
        own = context.state.get(OWN_MODEL, message.content.get(self.arrays_key))
        agent = self._restore(context, own)
        message.content[self.arrays_key] = own
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        trained = first_arrays(reply.content)
        peers = agent.select(candidates, budget) if candidates else []
        reply.content[REQUEST] = ConfigRecord({"peers": peers})
        context.state[OWN_MODEL] = trained
        context.state[MEMORY] = ArrayRecord(agent.state_dict())
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
        agent = self._restore(context, context.state[OWN_MODEL])
        if candidates:
            agent.select(candidates, budget)  # as in training
        models = {}
        for peer in request["peers"]:
            record = message.content.pop(PEER_MODEL + peer)
            try:
                models[peer] = record.to_torch_state_dict()
            except UNREADABLE:
                models[peer] = {}  # the agent refuses it
        samples = dict(zip(request["peers"], request["samples"], strict=True))
        decision = agent.aggregate(models, samples)
        mixed = ArrayRecord(agent.network.state_dict())
        context.state[OWN_MODEL] = mixed
        context.state[MEMORY] = ArrayRecord(agent.state_dict())
        message.content[self.arrays_key] = mixed
        reply = call_next(message, context)
        if not reply.has_error():
            record = {
                "peers": list(decision.weights),
                "weights": list(decision.weights.values()),
                "own-weight": decision.own_weight,
                "refused": list(decision.refused),
                "reasons": list(decision.refused.values()),
            }
            if "partition-id" in context.node_config:
                record["partition-id"] = int(context.node_config["partition-id"])
            reply.content[DECISION] = ConfigRecord(record)
        return reply

    def _restore(self, context: Context, own: ArrayRecord) -> Agent:
        """Return the client's agent with its model and memory; a new one in the first round."""
        agent = self.make_agent(context)
        agent.network.load_state_dict(own.to_torch_state_dict())
        if MEMORY in context.state:
            agent.load_state_dict(context.state[MEMORY].to_torch_state_dict())
        else:
            # Before the first round, the previous model is the initial one.
            start = {"previous": parameters.flatten(agent.network)}
            agent.load_state_dict({**agent.state_dict(), **start})
        return agent


class AttackMod:
    """Client mod that makes a client malicious.

    An attack on data acts on what the app's train function gets from `training_data`. An attack on
    models replaces the model that the client sends. The mod comes before `AgentMod`, so that the
    attacker's own model stays.

    Args:
        attack: An attack by name, or a table with its parameters, as in the section `attack` of a
            configuration. A client knows no other models, so the attack must not need any.
        is_malicious: Function of Flower's context; by default every client attacks.

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
        record = context.state.get(OWN_MODEL, first_arrays(message.content))
        before = record.to_torch_state_dict()
        me = int(context.node_config.get("partition-id", context.node_id)) % _NUM_IDS
        agent = Agent(
            to_row(before).float(),
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
            state = record.to_torch_state_dict()
            # The app may list its arrays in another order.
            trained = {name: state[name] for name in (*before, *state) if name in state}
            agent.theta = to_row(trained).float()  # agents compute in float32
            reply.content[key] = ArrayRecord(from_row(agent.publish(), trained))
        return reply


def training_data(x: Any, y: Any) -> tuple[Any, Any]:
    """Return the samples that this client trains on: poisoned ones under an attack on data.

    Samples and labels are those of the arguments unless an `AttackMod` poisons them.
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
