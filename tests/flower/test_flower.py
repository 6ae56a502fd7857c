"""FedCB2O in Flower: the relay, robust strategies and attacks, on a grid in this process."""

import copy
import functools
import importlib
import re
from pathlib import Path

import pytest
import torch

flwr = pytest.importorskip("flwr", reason="Flower has an environment of its own: make flower")

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity
from sklearn.metrics import roc_auc_score
from tests.flower import same_run
from torch import nn

import fedcb2o
from fedcb2o import Agent
from fedcb2o.aggregators import Krum, Median
from fedcb2o.errors import ConfigError
from fedcb2o.flower import (
    AgentMod,
    AttackMod,
    FlandersStrategy,
    PeerRelay,
    RobustStrategy,
    training_data,
)
from fedcb2o.nn import parameters

X = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
Y = torch.tensor([0, 1, 1])


@pytest.fixture(autouse=True)
def flower_task(monkeypatch):
    """Set the ids of a task, which messages need and only Flower's runtime sets."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class LoopGrid:
    """Flower's grid in this process: every node answers immediately and keeps its context."""

    def __init__(self, app, count, first_id=2**63 - 2):  # unsigned, like Flower's ids
        self.app = app
        self.sent = []
        self.contexts = {}
        for j in range(count):
            config = {"partition-id": j, "num-partitions": count}
            id = first_id + j
            self.contexts[id] = Context(1, id, config, RecordDict(), {"out": ""})

    def get_node_ids(self):
        return list(self.contexts)

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            self.sent.append(copy.deepcopy(message))
            context = self.contexts[message.metadata.dst_node_id]
            replies.append(self.app(copy.deepcopy(message), context))
        return replies


def linear(scale=1.0):
    network = nn.Linear(2, 2, bias=False)
    network.weight.data = scale * torch.eye(2)
    return network


def make_agent(context, **changes):
    settings = {"validation": (X, Y), "method": {"name": "fedcbo", "mixing_factor": 1.0}}
    return Agent(linear(), **{**settings, **changes})


def make_app(mods, scales=None):
    """Return clients that multiply their model by `scales`, or keep it."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message, context):
        scale = scales[context.node_config["partition-id"]] if scales else 1.0
        state = message.content["arrays"].to_torch_state_dict()
        arrays = ArrayRecord({name: scale * tensor for name, tensor in state.items()})
        metrics = MetricRecord({"num-examples": 3})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        theta = message.content["arrays"].to_torch_state_dict()["weight"].flatten().tolist()
        metrics = MetricRecord({"num-examples": 3, "theta": theta})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def start(strategy, grid, num_rounds=1):
    strategy.start(grid, ArrayRecord(linear().state_dict()), num_rounds=num_rounds)
    return strategy


def model_of(grid, j):
    context = list(grid.contexts.values())[j]
    return context.state["fedcb2o.model"].to_torch_state_dict()["weight"]


def test_a_client_mixes_like_an_agent_in_a_loop():
    scales = [1.0, 3.0, -1.0]
    grid = LoopGrid(make_app([AgentMod(make_agent)], scales), 3)
    relay = start(PeerRelay(budget=2), grid)
    agent = make_agent(None)
    models = {"1": linear(3.0).state_dict(), "2": linear(-1.0).state_dict()}
    decision = agent.aggregate(models)
    torch.testing.assert_close(model_of(grid, 0), agent.network.weight.data, rtol=0, atol=0)
    first = str(min(grid.contexts))
    assert relay.decisions[first]["weights"] == pytest.approx([*decision.weights.values()])
    theta = agent.network.weight.data.flatten().tolist()
    assert relay.metrics[first] == {"num-examples": 3, "theta": theta}


def test_the_relay_forwards_only_chosen_models():
    grid = LoopGrid(make_app([AgentMod(make_agent)]), 5)
    start(PeerRelay(budget=2), grid, num_rounds=2)
    first_forwarded, forwarded = grid.sent[5:10], grid.sent[15:]
    assert all(len(message.content.array_records) == 1 for message in grid.sent[:5])
    for message in forwarded:
        receiver = str(message.metadata.dst_node_id)
        peers = message.content["fedcb2o.request"]["peers"]
        assert len(peers) == 2
        assert receiver not in peers
        assert {*message.content.array_records} == {f"fedcb2o.peer.{peer}" for peer in peers}
    # In the second round the clients choose peers that they have not asked in the first.
    chosen = [
        {m.metadata.dst_node_id: {*m.content["fedcb2o.request"]["peers"]} for m in messages}
        for messages in (first_forwarded, forwarded)
    ]
    assert all(chosen[0][id].isdisjoint(chosen[1][id]) for id in grid.contexts)


def test_hostile_replies_are_refused():
    """Agents refuse a broken model, and the relay refuses a reply without metrics."""
    honest = make_app([AgentMod(make_agent)])

    def app(message, context):
        # a copy, so that the client's state is not changed
        reply = copy.deepcopy(honest(message, context))
        j = context.node_config["partition-id"]
        if message.metadata.message_type == "train" and j == 1:
            reply.content["arrays"]["weight"].data = b"no array"
        if message.metadata.message_type == "train" and j == 2:
            del reply.content["metrics"]
        if message.metadata.message_type == "train" and j == 3:
            reply.content["fedcb2o.request"] = ConfigRecord({"peers": ["unknown"] * 9})
        return reply

    grid = LoopGrid(app, 4)
    relay = start(PeerRelay(budget=3), grid)
    first, second, third, last = map(str, grid.contexts)
    assert third not in relay.decisions
    assert relay.decisions[first]["refused"] == [second]
    (reason,) = relay.decisions[first]["reasons"]
    assert reason
    assert relay.decisions[first]["peers"] == [last]
    assert relay.decisions[last]["peers"] == []


def assert_equals_a_run(folder):
    run = fedcb2o.run(same_run.TABLE, out=folder / "run", workers=1, watch=lambda *record: None)
    models = torch.load(folder / "models.pt")
    for j in range(8):
        expected = parameters.flatten(run.model(j)).double()
        assert (expected - models).norm(dim=1).min() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("name", ["median", "krum", "flanders"])
def test_robust_strategies_aggregate_like_their_rules(name):
    scales = [1.0, 1.1, 0.9, 1.2, 50.0]
    strategy = {
        "median": lambda: RobustStrategy(Median()),
        "krum": lambda: RobustStrategy(Krum(f=1)),
        "flanders": lambda: FlandersStrategy(f=1, window=1),
    }[name]()
    grid = LoopGrid(make_app([], scales), 5)
    arrays = ArrayRecord(linear().state_dict())
    for n in range(1, 3):
        if name == "flanders":
            scales[-1] = 50.0 * n
        messages = strategy.configure_train(n, arrays, ConfigRecord(), grid)
        result, _ = strategy.aggregate_train(n, grid.send_and_receive(messages))
    # The forecast repeats the last models. One client deviates, and the mean excludes it.
    expected = {"median": 1.1, "krum": 1.1, "flanders": 1.05}[name]
    assert result.to_torch_state_dict()["weight"][0, 0] == pytest.approx(expected)


@pytest.mark.parametrize("strategy", [RobustStrategy(Median()), PeerRelay(budget=2)])
@pytest.mark.parametrize("claim", [{"num-examples": 10**12}, {"theta": [9.0]}, {"more": 1.0}])
def test_a_client_cannot_set_the_metrics(strategy, claim):
    honest = make_app([] if isinstance(strategy, RobustStrategy) else [AgentMod(make_agent)])

    def app(message, context):
        reply = honest(message, context)
        metrics = reply.content["metrics"]
        metrics["accuracy"] = 0.9
        if context.node_config["partition-id"] == 0:
            metrics.update({"accuracy": 0.0, **claim})
        return reply

    result = strategy.start(LoopGrid(app, 3), ArrayRecord(linear().state_dict()), num_rounds=1)
    assert dict(result.train_metrics_clientapp[1]) == {"accuracy": 0.9}
    evaluated = result.evaluate_metrics_clientapp[1]
    assert evaluated["accuracy"] == 0.9
    assert evaluated["theta"] == [1.0, 0.0, 0.0, 1.0]


def test_own_functions_aggregate_metrics():
    def weighed(contents, samples_key):
        return MetricRecord({"count": sum(content["metrics"][samples_key] for content in contents)})

    strategy = RobustStrategy(
        Median(), train_metrics_aggr_fn=weighed, evaluate_metrics_aggr_fn=weighed
    )
    result = strategy.start(LoopGrid(make_app([]), 3), ArrayRecord(linear().state_dict()), 1)
    assert result.train_metrics_clientapp[1]["count"] == 9
    assert result.evaluate_metrics_clientapp[1]["count"] == 9


@pytest.mark.parametrize("make", [lambda: RobustStrategy(Median()), lambda: FlandersStrategy(f=1)])
def test_a_model_of_float64_keeps_its_digits(make):
    # The mean of FLANDERS keeps all models of the first round.
    attack = AttackMod("sign_flip", is_malicious=lambda c: c.node_config["partition-id"] == 0)
    weight = torch.tensor([1 / 3, 1 + 2**-30], dtype=torch.float64)  # both are not in float32
    grid = LoopGrid(make_app([attack] if type(make()) is RobustStrategy else []), 3)
    strategy = make()
    arrays = ArrayRecord({"weight": weight})
    replies = grid.send_and_receive(strategy.configure_train(1, arrays, ConfigRecord(), grid))
    result, _ = strategy.aggregate_train(1, replies)
    assert torch.equal(result.to_torch_state_dict()["weight"], weight)


def test_too_many_attackers_are_refused():
    strategy = RobustStrategy(Krum(f=2))
    with pytest.raises(ConfigError, match="krum"):
        start(strategy, LoopGrid(make_app([]), 4))


def test_a_robust_strategy_refuses_other_shapes_and_infinite_numbers(caplog):
    honest = make_app([])

    def app(message, context):
        reply = honest(message, context)
        j = context.node_config["partition-id"]
        weight = {1: torch.full((2, 2), torch.nan), 2: torch.zeros(3)}.get(j)
        if message.metadata.message_type == "train" and weight is not None:
            reply.content["arrays"] = ArrayRecord({"weight": weight})
        return reply

    grid = LoopGrid(app, 4)
    strategy = RobustStrategy(functools.partial(torch.mean, dim=0))
    arrays = ArrayRecord(linear().state_dict())
    replies = grid.send_and_receive(strategy.configure_train(1, arrays, ConfigRecord(), grid))
    result, _ = strategy.aggregate_train(1, replies)
    torch.testing.assert_close(result.to_torch_state_dict()["weight"], torch.eye(2))
    assert "not finite" in caplog.text
    assert "another shape" in caplog.text


def test_a_model_attack_does_not_change_the_attackers_own_model():
    attack = AttackMod("sign_flip", is_malicious=lambda c: c.node_config["partition-id"] == 1)
    grid = LoopGrid(make_app([attack, AgentMod(make_agent)], [1.0, 3.0]), 2)
    start(PeerRelay(budget=1), grid)
    receiver, attacker = grid.contexts
    (forwarded,) = (m for m in grid.sent[2:] if m.metadata.dst_node_id == receiver)
    published = forwarded.content[f"fedcb2o.peer.{attacker}"]
    # The attacker trains from 1 to 3, and publishes 1 - (3 - 1).
    torch.testing.assert_close(published.to_torch_state_dict()["weight"], -torch.eye(2))
    agent = make_agent(None)
    agent.network.weight.data *= 3.0
    agent.aggregate({"0": linear(1.0).state_dict()})
    torch.testing.assert_close(model_of(grid, 1), agent.network.weight.data)


def test_a_model_attack_reads_arrays_by_name():
    """The app returns its arrays in another order than it received them."""
    app = ClientApp(mods=[AttackMod("sign_flip", is_malicious=lambda c: True)])

    @app.train()
    def train(message, context):
        received = message.content["arrays"].to_torch_state_dict()
        trained = ArrayRecord({name: 3 * t for name, t in reversed(received.items())})
        metrics = MetricRecord({"num-examples": 3})
        return Message(RecordDict({"arrays": trained, "metrics": metrics}), reply_to=message)

    grid = LoopGrid(app, 2)
    strategy = RobustStrategy(functools.partial(torch.mean, dim=0))
    arrays = ArrayRecord({"a": torch.ones(2), "b": torch.full((2,), 5.0)})
    replies = grid.send_and_receive(strategy.configure_train(1, arrays, ConfigRecord(), grid))
    result, _ = strategy.aggregate_train(1, replies)
    # From x to 3 x, and published is x - 2 x.
    state = result.to_torch_state_dict()
    assert {name: t.tolist() for name, t in state.items()} == {"a": [-1, -1], "b": [-5, -5]}


def test_a_data_attack_changes_the_training_data():
    labels = {}
    app = ClientApp(
        mods=[
            AttackMod(
                {"name": "label_flip", "source": 1, "target": 0},
                is_malicious=lambda c: c.node_config["partition-id"] == 1,
            )
        ]
    )

    @app.train()
    def train(message, context):
        key = (message.content["config"]["server-round"], context.node_config["partition-id"])
        labels[key] = training_data(X, Y)[1].tolist()
        content = {"arrays": message.content["arrays"]}
        content["metrics"] = MetricRecord({"num-examples": 3})
        return Message(RecordDict(content), reply_to=message)

    strategy = RobustStrategy(functools.partial(torch.mean, dim=0), fraction_evaluate=0.0)
    start(strategy, LoopGrid(app, 2), num_rounds=2)
    assert labels == {(1, 0): [0, 1, 1], (1, 1): [0, 0, 0], (2, 0): [0, 1, 1], (2, 1): [0, 0, 0]}


def test_the_code_of_the_page_runs():
    text = (Path(__file__).parents[2] / "docs" / "flower.md").read_text()
    pattern = r"<!-- no test: needs Flower[^>]*-->\n```python\n(.*?)^```"
    first, second = re.findall(pattern, text, re.DOTALL | re.MULTILINE)
    namespace = {}
    exec(first, namespace)
    exec(second, namespace)
    grid = LoopGrid(make_app([AgentMod(namespace["make_agent"])]), 3)
    agent = namespace["make_agent"](next(iter(grid.contexts.values())))
    assert agent.select(["1", "2"], 2) == ["1", "2"]


def test_the_clients_of_the_example_report_their_auc(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples" / "flower")
    example = importlib.import_module("fedcb2o_digits")
    relay = PeerRelay(budget=1)
    grid = LoopGrid(example.client, 2)
    result = relay.start(grid, ArrayRecord(example.network().state_dict()), num_rounds=1)
    assert result.evaluate_metrics_clientapp[1]["auc"] > 0.9
    assert {*relay.metrics} == {str(id) for id in grid.contexts}
    network = example.network()
    network.load_state_dict(
        next(iter(grid.contexts.values())).state["fedcb2o.model"].to_torch_state_dict()
    )
    test = fedcb2o.data.digits().test
    expected = roc_auc_score(test.y, network(test.x).softmax(1).detach(), multi_class="ovr")
    assert relay.metrics[str(min(grid.contexts))]["auc"] == pytest.approx(expected)


@pytest.mark.parametrize("attack", ["alie", "dissensus", "min_max"])
def test_attacks_that_need_other_clients_are_refused(attack):
    with pytest.raises(ConfigError, match="models of other clients"):
        AttackMod(attack)
