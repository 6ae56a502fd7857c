"""Agents as objects: values by hand, bits equal to a simulation, invalid input."""

import copy
import math
import pickle
import re
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedcb2o import Agent, knows, load, stream
from fedcb2o.errors import ConfigError, DataError, RunError
from fedcb2o.federated.algorithms.section import AlgorithmSection
from fedcb2o.federated.contacts import AgentState
from fedcb2o.federated.decisions import Decisions
from fedcb2o.federated.loss_groups import target_quantiles
from fedcb2o.federated.ragged import Ragged
from fedcb2o.nn import parameters
from fedcb2o.simulation.adversarial_engine import AdversarialEngine
from fedcb2o.simulation.rounds import run_rounds
from tests import agents as agent_helpers

X = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
Y = torch.tensor([0, 1, 1])
EXCHANGE = {"name": "fedassay", "guards": {"trigger_exchange": 5}}


def linear(scale=0.0):
    network = nn.Linear(2, 2, bias=False)
    nn.init.eye_(network.weight)
    network.weight.data *= scale
    return network


def model(scale):
    return linear(scale).state_dict()


def test_fedcbo_by_hand():
    """Weights are exp(-alpha L), normalised; the model moves by lambda1 * gamma."""
    network = linear(1.0)
    method = {"name": "fedcbo", "alpha": 2.0, "lambda1": 10.0}
    agent = Agent(network, validation=(X, Y), method=method, gamma=0.05)
    decision = agent.aggregate({"a": model(3.0), "b": model(-1.0)})
    losses = [float(F.cross_entropy(X @ (scale * torch.eye(2)), Y)) for scale in (3.0, -1.0)]
    mu = np.exp(-2.0 * np.array(losses))
    mu /= mu.sum()
    assert [*decision.losses.values()] == pytest.approx(losses)
    assert [*decision.weights.values()] == pytest.approx(mu)
    assert decision.mixing_factor == pytest.approx(0.5)
    expected = 0.5 * 1.0 + 0.5 * (3.0 * mu[0] - mu[1])
    torch.testing.assert_close(network.weight.data, expected * torch.eye(2))


METHODS = [
    "fedcbo",
    {"name": "fedcb2o", "own_model": "trusted", "own_candidate": True, "first_contact": "whole"},
    {
        "name": "fedcb2o",
        "beta": 0.5,
        "own_model": "judged",
        "guards": {"loss_tolerance": 1.0, "max_distance": 0.9, "min_distance": 1.1},
    },
    "fedassay",
    {"name": "by_rule", "rule": "krum", "guards": {"loss_tolerance": 1.0, "max_distance": 0.9}},
    {"name": "by_rule", "rule": "krum", "pre_step": "nnm"},
    {"name": "by_rule", "rule": "centred_clipping"},
    {"name": "by_rule", "rule": "coordinate_median", "selection": "prob_sampling"},
]
FIRST = 2  # the agent that is compared


class ComparisonEngine(AdversarialEngine):
    """Engine that repeats each round of agent `FIRST` with an `Agent`, and compares the results."""

    agent = None
    method = None

    def aggregate_(self, n, states, active, deadline, on_step):
        group = self.engine.group
        spec, layout = group.spec, group.layout
        models_before = group.models.clone()
        if self.agent is None:
            network = agent_helpers.network()
            row = layout.own if layout.previous is None else layout.previous
            parameters.load_state_(
                network, parameters.tensor_views(network, models_before[int(row[FIRST])])
            )
            index = group.data.validation[FIRST]
            self.agent = Agent(
                network,
                validation=(group.data.samples.x[index], group.data.samples.y[index]),
                method=self.method,
                seed=spec.seed,
                id=FIRST,
                gamma=spec.training.gamma,
                rounds=spec.rounds,
                num_samples=len(group.data.train[FIRST]),
                malicious_share=spec.malicious_share,
            )
        agent = self.agent
        parameters.load_state_(
            agent.network, parameters.tensor_views(agent.network, models_before[FIRST])
        )
        others = set(range(spec.num_agents)) - {FIRST}
        asked = agent.select(others, agent_helpers.BUDGET)

        states, decisions, finite = super().aggregate_(n, states, active, deadline, on_step)
        states_after = AgentState.concatenate(states).take(np.concatenate(self.batches).argsort())
        expected = agent_helpers.decisions_of(Decisions.concatenate(decisions), FIRST)
        peers = [i for i in expected.ids if i != FIRST]
        inbox = self.engine.receive(
            n, Ragged.from_arrays([np.array(peers, int)]), np.array([FIRST])
        )
        samples = dict(zip(peers, inbox.num_samples.tolist(), strict=True))
        models = {i: models_before[row] for i, row in zip(peers, inbox.rows.tolist(), strict=True)}
        decision = agent.aggregate(models, samples)

        assert asked == [i for i in expected.asked if i != FIRST]
        assert parameters.flatten(agent.network).equal(agent_helpers.models_of(self.engine)[FIRST])
        state = agent.state_dict()
        assert state["contacts.ids"].equal(states_after.contacts[FIRST].ids)
        likelihood = states_after.contacts[FIRST].likelihood.view(torch.int64)
        assert state["contacts.likelihood"].view(torch.int64).equal(likelihood)
        weights = dict(zip(expected.ids, expected.weights, strict=True))
        np.testing.assert_equal([decision.weights[i] for i in peers], [weights[i] for i in peers])
        return states, decisions, finite


@pytest.mark.parametrize("method", METHODS, ids=lambda method: "")
def test_an_agent_decides_exactly_as_in_a_simulation(method):
    section = AlgorithmSection(**(method if isinstance(method, dict) else {"name": method}))
    engine = agent_helpers.local_engine(section.build())
    comparison = ComparisonEngine(engine)
    comparison.method = method
    for _ in run_rounds(comparison, AgentState.initial(len(agent_helpers.CLUSTER)), 0, 5, 0):
        pass
    assert comparison.agent.round == 5


def test_selection_is_repeated_until_the_round_ends():
    agent = Agent(linear(), validation=(X, Y), method="fedcbo", seed=3)
    first = agent.select("abcdefgh", 3)
    assert agent.select("abcdefgh", 3) == first
    assert len(first) == 3
    agent.aggregate({name: model(1.0) for name in first})
    assert not set(agent.select("abcdefgh", 3)) & set(first)  # unknown peers come first


@pytest.mark.parametrize("form", ["pickle", "state_dict", "file"])
def test_the_state_of_an_agent_is_restored(form, tmp_path):
    def round_of(agent):
        asked = agent.select("abcdef", 3)
        return asked, agent.aggregate({name: model(ord(name) - 98.0) for name in asked})

    method = {"name": "by_rule", "rule": "centred_clipping", "selection": "prob_sampling"}
    agent = Agent(linear(), validation=(X, Y), method=method)
    round_of(agent)
    if form == "pickle":
        restored = pickle.loads(pickle.dumps(agent))
    else:
        restored = Agent(copy.deepcopy(agent.network), validation=(X, Y), method=method)
        if form == "file":
            agent.save(tmp_path / "agent.safetensors")
            assert (tmp_path / "agent.safetensors").stat().st_mode & 0o777 == 0o600
            restored.load(tmp_path / "agent.safetensors")
        else:
            restored.load_state_dict(agent.state_dict())
    for _ in range(2):
        first, second = round_of(agent), round_of(restored)
        assert first[0] == second[0]
        np.testing.assert_equal(first[1].weights, second[1].weights)
        assert agent.network.weight.equal(restored.network.weight)


@pytest.mark.parametrize(
    ("received", "reason"),
    [
        ({"weight": torch.full((2, 2), torch.nan)}, "not finite, or beyond 1e"),
        ({"weight": torch.full((2, 2), 1e30)}, "not finite, or beyond 1e"),
        ({}, "it lacks `weight`"),
        ({"module.weight": torch.zeros(2, 2)}, "lacks `weight` and holds `module.weight`"),
        ({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, "`bias`, which the network does"),
        ({"weight": torch.zeros(3, 2)}, r"`weight` has shape \(3, 2\) .*, expected \(2, 2\)"),
        ({"weight": "abcd"}, "`weight` holds words"),
        ({"weight": None}, "`weight` holds None"),
        ({"weight": torch.zeros(2, 2, dtype=torch.int64)}, "type torch.int64"),
        ({"weight": torch.zeros(2, 2).to_sparse()}, "`weight` holds a sparse tensor"),
        ({"weight": torch.zeros(2, 2, device="meta")}, "`weight` holds a meta tensor"),
        (np.zeros(5, np.float32), r"it has shape \(5,\)"),
        (torch.zeros(4, dtype=torch.int64), "type torch.int64"),
        (np.ma.array(np.zeros(4), mask=[0, 1, 0, 0]), "not finite, or beyond 1e"),
        ({1: 2}.values(), "it holds a dict_values, expected an array of numbers"),
        (np.zeros(4, complex), "it holds complex numbers"),
    ],
)
def test_invalid_models_are_refused(received, reason):
    network = linear(1.0)
    agent = Agent(network, validation=(X, Y), method="fedcbo", gamma=0.1)
    decision = agent.aggregate({"good": model(2.0), "bad": received})
    assert decision.weights == {"good": 1.0}
    assert list(decision.refused) == ["bad"]
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(decision.refused["bad"])
    torch.testing.assert_close(network.weight.data, 2.0 * torch.eye(2))


def test_models_and_losses_may_have_other_number_types():
    """A flat model may be big-endian. A masked loss is unknown, and its model has weight 0."""
    network = linear(1.0)
    agent = Agent(network, validation=(X, Y), method="fedcbo", gamma=0.1)
    agent.aggregate({"a": np.array([3.0, 0.0, 0.0, 2.0], ">f8")})
    torch.testing.assert_close(network.weight.data, torch.tensor([[3.0, 0.0], [0.0, 2.0]]))

    def judge(states):
        is_known = np.array([[float(state["weight"][0, 0]) != 1.0] * 2 for state in states])
        return np.ma.array(np.where(is_known, 0.5, -50.0), mask=~is_known)

    agent_with_judge = Agent(linear(), judge=judge, method="fedcbo")
    result = agent_with_judge.aggregate({"a": model(1.0), "b": model(2.0)}).weights
    assert result == {"a": 0.0, "b": 1.0}
    for labels in ([0.5, 1.0], np.ma.array([0, 1], mask=[1, 0])):
        agent = Agent(linear(), judge=lambda states, y=labels: (np.ones((len(states), 2)), y))
        with pytest.raises(ConfigError, match="the judge must return the class of each"):
            agent.aggregate({"a": model(1.0)})


def test_too_few_models_are_logged_once(caplog):
    method = {"name": "by_rule", "rule": {"name": "multi_krum", "f": 1}}
    agent = Agent(linear(1.0), validation=(X, Y), method=method)
    for _ in range(2):
        agent.aggregate({name: model(1.0) for name in "abcd"})
    assert caplog.messages == []
    for _ in range(3):
        agent.aggregate({name: model(1.0) for name in "abc"})
    assert len(caplog.messages) == 1
    assert "multi_krum with f = 1 needs 5 models" in caplog.text


@pytest.mark.parametrize("claim", [-1, math.nan, "many"])
def test_a_model_with_an_invalid_claim_is_refused(claim):
    agent = Agent(linear(1.0), validation=(X, Y), method="fedcbo")
    decision = agent.aggregate({"good": model(2.0), "bad": model(3.0)}, {"good": 5, "bad": claim})
    assert decision.weights == {"good": 1.0}
    assert "it claims" in decision.refused["bad"]


@pytest.mark.parametrize("method", ["fedcb2o", *METHODS], ids=lambda method: "")
def test_an_agent_aggregates_no_model_and_one_model(method):
    """Without models an agent keeps its own; with one, it moves by the method's weight."""
    network = linear(1.0)
    agent = Agent(network, validation=(X, Y), method=method)
    assert sum(agent.aggregate({}).weights.values()) == 0.0
    torch.testing.assert_close(network.weight.data, torch.eye(2))
    decision = agent.aggregate({"a": model(3.0)})
    weight = decision.weights["a"]
    if math.isnan(weight):  # the median of two models
        weight = 0.5
    expected = 1.0 + 2.0 * decision.mixing_factor * weight
    torch.testing.assert_close(network.weight.data, expected * torch.eye(2))


def test_a_class_without_validation_samples_is_ignored():
    network = linear(1.0)
    agent = Agent(network, validation=(X[1:], Y[1:]), method="fedcb2o")
    decision = agent.aggregate({"a": model(3.0), "b": model(-1.0)})
    assert np.isfinite([*decision.criterion.values(), *decision.losses.values()]).all()
    assert decision.weights["a"] > decision.weights["b"]


@pytest.mark.parametrize("interpolation", [1.0, 0.5])
def test_a_judge_gives_the_decisions_of_validation_data(interpolation):
    method = {
        "name": "fedcb2o",
        "beta": 0.7,
        "own_model": "judged",
        "guards": {"loss_tolerance": 1.0, "interpolation": interpolation},
    }

    def judge(states):
        losses = [F.cross_entropy(X @ state["weight"].T, Y, reduction="none") for state in states]
        return torch.stack(losses), Y

    models = {"a": model(3.0), "b": model(-1.0), "c": model(0.5)}
    decisions = [
        Agent(linear(1.0), method=method, **source).aggregate(models)
        for source in ({"validation": (X, Y)}, {"judge": judge})
    ]
    assert [*decisions[1].weights.values()] == pytest.approx([*decisions[0].weights.values()])
    assert [*decisions[1].criterion.values()] == pytest.approx([*decisions[0].criterion.values()])
    assert decisions[1].outside == decisions[0].outside


def test_frozen_parameters_stay_and_statistics_are_averaged():
    network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    network[0].requires_grad_(False)
    frozen = network[0].weight.clone()
    other = copy.deepcopy(network)
    other[1].running_mean += 4.0
    network.train()
    method = {"name": "fedcbo", "mixing_factor": 0.5}
    agent = Agent(network, validation=(X, Y), method=method, buffers="shared")
    agent.aggregate({"b": other.state_dict()})
    assert network[0].weight.equal(frozen)
    torch.testing.assert_close(network[1].running_mean, torch.full((3,), 2.0))
    assert network.training
    other[0].weight += 1.0
    decision = agent.aggregate({"b": other.state_dict()})
    assert "its `0.weight` is not exchanged, and differs" in decision.refused["b"]


def test_local_statistics_are_not_exchanged():
    network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    other = copy.deepcopy(network)
    with torch.no_grad():
        other[0].weight += 1.0
    other[1].running_mean += 1e6  # an attack on statistics: they are not read
    method = {"name": "fedcbo", "mixing_factor": 1.0}
    agent = Agent(network, validation=(X, Y), method=method)  # the default, as in a run
    assert "1.running_mean" not in agent.publish()
    decision = agent.aggregate({"b": other.state_dict()})
    assert decision.weights == {"b": 1.0}
    # The statistics are those of the mixed model on the validation samples.
    hidden = network[0](X.float())
    torch.testing.assert_close(network[1].running_mean, hidden.mean(0))
    torch.testing.assert_close(network[1].running_var, hidden.var(0))
    assert network.training
    with pytest.raises(ConfigError, match=r'`buffers` = "local" needs `validation` samples'):
        Agent(network, judge=len, buffers="local")
    with pytest.raises(ConfigError, match='`buffers` must be "shared" or "local" or "dropped"'):
        Agent(network, validation=(X, Y), buffers="own")
    assert "1.running_mean" in Agent(network, judge=len).publish()


def test_shared_statistics_with_enormous_variances_are_refused():
    network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    other = copy.deepcopy(network)
    other[1].running_var.fill_(1e4)
    agent = Agent(network, validation=(X, Y), buffers="shared")
    assert "guard `max_distance`" in agent.aggregate({"b": other.state_dict()}).refused["b"]
    assert network[1].running_var.eq(1).all()


def test_an_agent_may_predict_numbers():
    network = nn.Linear(2, 1)
    agent = Agent(
        network, validation=(X, [[0.5], [1.0], [1.5]]), loss="squared_error", method="fedcbo"
    )
    decision = agent.aggregate({"b": nn.Linear(2, 1).state_dict()})
    assert decision.own_loss > 0


def test_groups_of_targets_equal_the_classes_of_a_judge():
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(1))
    y = x.sum(1, keepdim=True)
    groups = target_quantiles(x, y, bins=3)

    def regression(scale):
        network = nn.Linear(2, 1, bias=False)
        nn.init.constant_(network.weight, scale)
        return network

    def judge(states):
        losses = [(x @ state["weight"].T - y).square()[:, 0] for state in states]
        return torch.stack(losses), groups

    method = {"name": "fedcb2o", "alpha": 5.0, "beta": 1.0, "criterion": "class_loss_gap"}
    models = {"a": regression(0.9).state_dict(), "b": regression(1.5).state_dict()}
    weights = {}
    own = {"name": "target_quantiles", "bins": 3}
    for kind, keywords in {
        "judge": {"judge": judge},
        "groups": {"validation": (x, y), "loss": "squared_error", "loss_groups": own},
        "none": {"validation": (x, y), "loss": "squared_error"},
    }.items():
        agent = Agent(regression(0.5), method=method, **keywords)
        if kind == "groups":
            agent = pickle.loads(pickle.dumps(agent))
        weights[kind] = agent.aggregate(models).weights
    assert weights["groups"] == pytest.approx(weights["judge"], abs=1e-6)
    assert weights["groups"] != pytest.approx(weights["none"], abs=0.1)
    with pytest.raises(ConfigError, match="`judge` returns the group of each sample"):
        Agent(regression(0.5), judge=judge, loss_groups=own)
    feature = {"name": "feature_quantiles", "feature": 5}
    with pytest.raises(ConfigError, match="must be below 2, got 5"):
        Agent(regression(0.5), validation=(x, y), loss="squared_error", loss_groups=feature)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ConfigError, "`validation` samples or a `judge`"),
        ({"validation": (X, Y), "judge": len}, ConfigError, "and not both"),
        ({"validation": X}, DataError, r"must be \(x, y\), .*got a Tensor$"),
        ({"validation": (X, ["a", "b", "b"])}, DataError, "whole numbers from 0"),
        ({"validation": (X, [0, 1, 2])}, DataError, "`y` holds the classes 0 to 2"),
        ({"validation": (X, Y[:2])}, DataError, "each needs one"),
        ({"validation": (X, Y), "method": "fedcb2"}, ConfigError, "fedcb2o"),
        ({"validation": (X, Y), "method": "ifca"}, ConfigError, "models"),
        ({"validation": (X, Y), "gamma": -1.0}, ConfigError, "`gamma` must be above 0"),
        ({"validation": (X, Y), "seed": "x"}, ConfigError, "`seed` must be a whole number"),
        ({"validation": (X, Y), "rounds": 0}, ConfigError, "`rounds` must be a whole number"),
        ({"validation": (X, Y), "num_samples": -2}, ConfigError, "`num_samples` must be"),
        ({"validation": (X, Y), "malicious_share": 1.0}, ConfigError, "`malicious_share` must be"),
        ({"validation": (X, Y), "method": {"name": "fedcbo", "alpha": -1.0}}, ConfigError, "alpha"),
        ({"validation": (X, Y), "method": EXCHANGE}, ConfigError, "looks for pixels"),
        ({"judge": len, "method": EXCHANGE}, ConfigError, "looks for pixels"),
    ],
)
def test_invalid_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        Agent(linear(), **arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda agent: agent.select("ab", 0), "`budget`"),
        (lambda agent: agent.select("ab", 1.5), "`budget`"),
        (lambda agent: agent.select([1.5], 1), "a text or a whole number"),
        (lambda agent: agent.select("aa", 1), "a name of its own"),
        (lambda agent: agent.aggregate({True: model(1.0)}), "a text or a whole number"),
    ],
)
def test_invalid_calls_are_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call(Agent(linear(), validation=(X, Y)))


@pytest.mark.parametrize("result", [torch.zeros(2), torch.zeros(3, 4), (torch.zeros(2, 3), [0, 1])])
def test_a_judge_must_return_the_losses_of_every_model(result):
    agent = Agent(linear(), judge=lambda states: result)
    with pytest.raises(ConfigError, match="judge"):
        agent.aggregate({"a": model(1.0)})


def test_the_state_of_another_network_is_refused(tmp_path):
    agent = Agent(linear(), validation=(X, Y))
    agent.save(tmp_path / "agent.safetensors")
    with pytest.raises(RunError, match="another network"):
        Agent(nn.Linear(2, 2), validation=(X, Y)).load(tmp_path / "agent.safetensors")
    (tmp_path / "agent.safetensors").write_bytes(b"nothing")
    with pytest.raises(RunError, match="cannot be read"):
        agent.load(tmp_path / "agent.safetensors")


def broadcasting(outputs, targets):
    return (outputs - targets).square().mean(1)


@pytest.mark.parametrize(
    ("network", "options", "message"),
    [
        (
            nn.Sequential(nn.Linear(3, 2), nn.Softmax(dim=0)),
            {},
            r"mixes samples, .*`1` \(Softmax\)",
        ),
        (nn.Linear(3, 1), {"loss": broadcasting}, "depends on other samples"),
    ],
)
def test_networks_and_losses_that_mix_samples_are_named(network, options, message):
    targets = [0.5, 1.5, -1.0] if options else [0, 1, 1]
    with pytest.warns(UserWarning, match=message):
        Agent(network, validation=(torch.eye(3), np.array(targets)), **options)


def test_a_network_whose_outputs_are_probabilities_gives_a_warning():
    network = nn.Sequential(nn.Linear(3, 2), nn.Softmax(dim=1))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with pytest.warns(UserWarning, match="returns probabilities, .*Leave out"):
        Agent(network, validation=(torch.eye(3), np.array([0, 1, 1])))
    assert all(torch.equal(before[name], p) for name, p in network.state_dict().items())


def test_state_dicts_may_hold_arrays():
    network = linear(1.0)
    agent = Agent(network, validation=(X, Y), method="fedcbo", gamma=0.1)
    agent.aggregate({"a": {"weight": 2.0 * np.eye(2)}})
    assert network.weight.tolist() == [[2.0, 0.0], [0.0, 2.0]]


def test_a_changed_network_is_refused():
    network = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    agent = Agent(network, validation=(X, Y))
    network[0].requires_grad_(False)
    with pytest.raises(ConfigError, match=r"`0.weight` is not exchanged, and was \[3, 2\]"):
        agent.aggregate({})


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_an_agent_without_a_network(kind):
    """Models are points in the plane, and a loss is the squared distance to a sample."""
    samples = np.array([[0.0, 0.0], [0.0, 2.0]])

    def judge(thetas):
        assert type(thetas) is type(kind([1.0]))
        return np.square(np.asarray(thetas)[:, None] - samples).sum(2)

    start = kind([4.0, 1.0])
    agent = Agent(start, judge=judge, method={"name": "fedcbo", "alpha": 1.0}, gamma=0.05)
    agent.theta = kind([2.0, 1.0])
    decision = agent.aggregate({"a": np.array([0.0, 1.0]), "b": torch.tensor([1.0, 1.0])})
    assert decision.losses == {"a": 1.0, "b": 2.0}
    mu = 1 / (1 + math.exp(-1.0))
    assert decision.weights["a"] == pytest.approx(mu)
    mixing = decision.mixing_factor
    expected = [(1 - mixing) * 2.0 + mixing * (1 - mu), 1.0]
    assert [*agent.theta] == pytest.approx(expected)
    assert type(agent.publish()) is type(start)
    assert [*start] == [4.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"network": np.zeros((2, 2))},
            r"a flat array of finite numbers \[d\], got shape \(2, 2\)",
        ),
        ({"network": [0.0, math.nan]}, "finite"),
        ({"network": [0.0], "judge": None, "validation": (X, Y)}, "needs a `judge`"),
        ({"network": [0.0], "id": -1}, "whole numbers from 0"),
        ({"network": [0.0], "attack": {"name": "sign_flip", "sybils": True}}, "`sybils`"),
        ({"network": [0.0], "attack": "sign_flop"}, "sign_flip"),
    ],
)
def test_invalid_arrays_and_attacks_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Agent(**{"judge": len, **arguments})


@pytest.mark.parametrize("models", [[np.zeros(1)], "ab", None])
def test_received_models_must_be_a_table(models):
    agent = Agent(np.zeros(1), judge=len)
    with pytest.raises(ConfigError, match="`models` must be a table"):
        agent.aggregate(models)
    with pytest.raises(ConfigError, match="`samples` must be a table"):
        agent.aggregate({"a": np.zeros(1)}, [3])


def test_an_agent_with_an_integer_id_has_peers_with_integer_ids():
    agent = Agent(linear(), validation=(X, Y), id=2)
    for peers in ([1, 2], [True], ["a"], [-1], [10**6]):
        with pytest.raises(ConfigError, match=r"itself has the number 2|whole numbers from 0"):
            agent.select(peers, 1)
    assert agent.select([np.int64(7)], 1) == [7]


@knows("benign")
def half_of_the_mean(view, draw, *, share=0.5):
    return share * view.benign().mean(0)


BENIGN = {"a": model(1.0), "b": model(4.0)}


@pytest.mark.parametrize(
    ("attack", "expected"),
    [
        ("sign_flip", -1.0),  # from 1 to 3: 1 - 2
        ({"name": "sign_flip", "scale": 2.0}, -3.0),
        ({"name": "boosting", "factor": 1000.0}, 2001.0),
        (half_of_the_mean, 1.25),
        ({"name": half_of_the_mean, "share": 1.0}, 2.5),
        ({"name": "sign_flip", "from_round": 1}, 3.0),
        ({"name": "label_flip", "source": 0, "target": 1}, 3.0),
    ],
)
def test_attacks_are_chosen_as_in_a_configuration(attack, expected):
    network = linear(1.0)
    agent = Agent(network, validation=(X, Y), attack=attack)
    network.load_state_dict(model(3.0))
    published = agent.publish(benign=BENIGN)["weight"]
    torch.testing.assert_close(published, expected * torch.eye(2))
    assert network.weight[0, 0] == 3.0
    preset = {"extends": "digits-fedassay", "name": "same", "attack": attack}
    build = load(preset).attack.build()
    assert (build.craft is None) == (agent._data.attack.craft is None)


def test_attacks_draw_the_numbers_of_a_simulation():
    agent = Agent(linear(1.0), validation=(X, Y), attack="random_model", seed=5, id=3)
    noise = stream(5, "craft", 0, 3).standard_normal(4, dtype=np.float32).reshape(2, 2)
    published = agent.publish()["weight"].numpy()
    np.testing.assert_allclose(published / published[0, 0], noise / noise[0, 0], rtol=1e-5)


def test_attacks_may_poison_data_or_equivocate():
    flip = Agent(
        linear(), validation=(X, Y), attack={"name": "label_flip", "source": 0, "target": 1}
    )
    assert flip.training_data(X, Y)[1].tolist() == [1, 1, 1]
    assert Agent(linear(), validation=(X, Y)).training_data(X, Y)[1].tolist() == [0, 1, 1]
    agent = Agent(linear(1.0), validation=(X, Y), attack="equivocation")
    models = agent.publish(benign=BENIGN)
    assert sorted(models) == ["a", "b"]
    assert not models["a"]["weight"].equal(models["b"]["weight"])
    with pytest.raises(ConfigError, match="pass `benign`"):
        agent.publish()
    with pytest.raises(ConfigError, match=r"the model of 'a' cannot be used .*lacks `weight`"):
        agent.publish(benign={"a": {}})


def mean_loss(inputs):
    return inputs.losses.mean


def test_a_method_is_the_same_by_name_and_by_table():
    sections = {"data": {"name": "digits"}, "model": {"name": "mlp"}, "name": "same", "rounds": 1}
    agents = {"benign": 2, "malicious": 0, "budget": 1, "benign_samples": 9}
    runs = [
        load({**sections, "seeds": [0], "agents": agents, "algorithm": method})
        for method in ("fedassay", {"name": "fedassay"})
    ]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("criterion", ["average_loss", {"name": "average_loss"}, mean_loss])
def test_criteria_are_chosen_as_in_a_configuration(criterion):
    method = {"name": "fedcb2o", "criterion": criterion, "mixing_factor": 1.0}
    agent = pickle.loads(pickle.dumps(Agent(linear(1.0), validation=(X, Y), method=method)))
    decision = agent.aggregate({"a": model(3.0), "b": model(-1.0)})
    assert decision.criterion == decision.losses
    load({"extends": "digits-fedassay", "name": "same", "algorithm": method})


def test_agents_in_threads_decide_as_in_sequence():
    def rounds(j):
        agent = Agent(linear(1.0 + j), validation=(X, Y), method=METHODS[2], seed=1, id=j)
        for _ in range(3):
            asked = agent.select(set(range(8)) - {j}, 3)
            agent.aggregate({i: model(i - 2.0) for i in asked})
        return agent.theta

    with ThreadPoolExecutor(8) as executor:
        for j, theta in enumerate(executor.map(rounds, range(8))):
            assert theta.equal(rounds(j))


def nll(outputs, targets):
    return torch.nn.functional.nll_loss(outputs, targets, reduction="none")


def test_a_loss_of_classes_below_0_gives_a_warning():
    """The negative log-likelihood reads log-probabilities: of scores it is their negative."""
    samples = (torch.eye(3), np.array([0, 1, 1]))
    with pytest.warns(UserWarning, match=r"of a class is -5.*, below 0: .* \(LogSoftmax\)"):
        Agent(with_bias(5.0), validation=samples, loss=nll)
    network = nn.Sequential(with_bias(5.0), nn.LogSoftmax(dim=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Agent(network, validation=samples, loss=nll)


def with_bias(value):
    network = nn.Linear(3, 2)
    with torch.no_grad():
        network.weight.zero_()
        network.bias.fill_(value)
    return network


def failing_judge(models):
    raise KeyError("lost")


def test_an_error_of_a_judge_names_its_file_and_line():
    agent = Agent(np.zeros(2), judge=failing_judge)
    line = failing_judge.__code__.co_firstlineno + 1
    place = re.escape(f"failing_judge` failed at line {line} of {__file__}: KeyError: 'lost'")
    with pytest.raises(ConfigError, match=place):
        agent.aggregate({"a": np.ones(2)})


class Failing(nn.Linear):
    def forward(self, x):
        raise KeyError("lost")


def test_an_error_of_a_network_names_its_file_and_line():
    line = Failing.forward.__code__.co_firstlineno + 1
    with pytest.raises(ConfigError, match=re.escape(f" at line {line} of {__file__}: ")):
        Agent(Failing(3, 2), validation=(torch.eye(3), np.array([0, 1, 1])))


@pytest.mark.parametrize("value", ["0.1", math.inf, math.nan, None])
@pytest.mark.parametrize("key", ["gamma", "malicious_share"])
def test_numbers_of_an_agent_are_finite(key, value):
    with pytest.raises(ConfigError, match=f"`{key}` must be a finite number, got "):
        Agent(linear(1.0), validation=(X, Y), **{key: value})
