"""Models by the names of their tensors, and the one network that an agent and its user share."""

import copy
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from fedcb2o import Agent
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.experiments.config.settings import ModelSection
from fedcb2o.nn import batch_norm, parameters

DRAW = np.random.default_rng(0)
X = torch.tensor(DRAW.normal(size=(30, 4)), dtype=torch.float32)
Y = torch.arange(30) % 3


class Tied(nn.Module):
    """A network with a frozen layer, a constant buffer, a batch norm and tied parameters."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.first = nn.Linear(4, 3)
        self.second = nn.Linear(4, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        h = self.norm(self.base(x - self.mean))
        return self.first(h) + self.second(h)


def tied(seed=0):
    torch.manual_seed(0)
    network = Tied()
    with torch.no_grad():
        for p in network.parameters():
            if p.requires_grad:
                p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
    return network


def make(network, **options):
    options = {"method": "fedcbo", "buffers": "shared", **options}
    return Agent(network, validation=(X, Y), **options)


def loss_of(network):
    """Return the mean loss of a network on the samples, in evaluation."""
    with torch.no_grad():
        return float(F.cross_entropy(copy.deepcopy(network).eval()(X), Y))


def through_file(state, tmp_path):
    save_file({k: t.clone() for k, t in state.items()}, tmp_path / "model.safetensors")
    return load_file(tmp_path / "model.safetensors")


# Models by name

FORMS = {
    "publish": lambda network, path: make(network).publish(),
    "state_dict": lambda network, path: network.state_dict(),
    "reversed": lambda network, path: dict(reversed(network.state_dict().items())),
    "safetensors": lambda network, path: through_file(network.state_dict(), path),
    "arrays": lambda network, path: {k: t.numpy() for k, t in network.state_dict().items()},
    "float64": lambda network, path: {
        k: t.double() / 3 * 3 if t.is_floating_point() else t
        for k, t in network.state_dict().items()
        if k in make(network).publish() or k == "second.weight"
    },
    "without the first name of tied tensors": lambda network, path: {
        k: t for k, t in network.state_dict().items() if k != "first.weight"
    },
    "theta": lambda network, path: make(network).theta,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_model_is_the_same_row(form, tmp_path):
    other = tied(1)
    agent = make(tied())
    decision = agent.aggregate({"a": FORMS[form](other, tmp_path)})
    assert decision.refused == {}
    assert decision.losses["a"] == pytest.approx(loss_of(other), abs=1e-6)
    agent.theta = FORMS[form](other, tmp_path)
    torch.testing.assert_close(parameters.flatten(agent.network), parameters.flatten(other))


def changed(name, change):
    state = {k: t.clone() for k, t in tied(1).state_dict().items()}
    state[name] = change(state[name])
    return state


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (changed("base.weight", lambda t: t + 1), "its `base.weight` is not exchanged, and differs"),
        (changed("base.weight", lambda t: t[:2]), "its `base.weight` is not exchanged, and differs"),
        (changed("mean", lambda t: t + 5), "its `mean` is not exchanged, and differs"),
        (changed("second.weight", lambda t: -t), "`second.weight` and `first.weight` are one"),
        (changed("first.weight", lambda t: t.T), r"`first.weight` has shape \(4, 3\)"),
        ({"norm.weight": torch.ones(4)}, r"it lacks .*: send `agent.publish\(\)`"),
        (
            {f"module.{k}": t for k, t in tied().state_dict().items()},
            "it lacks `norm.running_mean` and holds `module.*without the prefix `module.`",
        ),
        ({**tied().state_dict(), "head": torch.ones(1)}, "it holds `head`, which the network does"),
    ],
)  # fmt: skip
def test_a_model_of_another_network_is_refused_by_name(state, reason):
    agent = make(tied())
    decision = agent.aggregate({"good": tied(1).state_dict(), "bad": state})
    assert [*decision.refused] == ["bad"]
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(decision.refused["bad"])
    with pytest.raises(ConfigError, match=reason):
        agent.theta = state


def test_counts_of_batches_may_differ():
    state = changed("norm.num_batches_tracked", lambda t: t + 7)
    assert make(tied()).aggregate({"a": state}).refused == {}


def adapters(seed=0):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    network = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0", "2"]))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in network.parameters():
            if p.requires_grad:
                p += 0.3 * torch.randn(p.shape, generator=generator)
    return network


def test_messages_of_peft_are_read_by_its_names():
    from peft import get_peft_model_state_dict

    other = adapters(1)
    message = get_peft_model_state_dict(other)
    assert not set(message) & set(make(other).publish())
    decision = make(adapters()).aggregate({"a": message, "b": {**message, "lora_C": X}})
    assert decision.losses["a"] == pytest.approx(loss_of(other), abs=1e-6)
    assert "it holds `lora_C`" in decision.refused["b"]


# One network


def test_adapters_that_change_nothing_are_an_error():
    network = adapters()
    agent = make(network)
    sent = make(adapters(1)).publish()
    network.merge_adapter()
    with pytest.raises(ConfigError, match=r"is merged into its layer.*`unmerge_adapter"):
        agent.aggregate({"a": sent})
    network.unmerge_adapter()
    before = agent.theta
    with network.disable_adapter(), pytest.raises(ConfigError, match="disabled"):
        agent.aggregate({"a": sent})
    assert agent.theta.equal(before)
    assert agent.aggregate({"a": sent}).losses["a"] == pytest.approx(loss_of(adapters(1)), abs=1e-6)


def test_a_network_that_merges_its_adapters_in_evaluation_is_an_error():
    class Merging(nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            self.weight.requires_grad_(False)
            self.lora_A = nn.Parameter(torch.ones(3, 4))
            self.merged = False

        def train(self, mode=True):
            if self.merged == mode:
                self.weight.data += (-1 if mode else 1) * self.lora_A.data
                self.merged = not mode
            return super().train(mode)

        def forward(self, x):
            return F.linear(x, self.weight if self.merged else self.weight + self.lora_A, self.bias)

    network = Merging()
    agent = Agent(network, judge=lambda states: torch.zeros(len(states), 1))
    agent._judge = None  # its checks of the network would refuse it, too
    before = network.weight.clone()
    with pytest.raises(ConfigError, match="merged"):
        agent.aggregate({"a": agent.publish()})
    torch.testing.assert_close(network.weight, before)


def new_buffer(network):
    network.mean.copy_(torch.full((4,), 2.0))


def new_buffer_object(network):
    network.mean = torch.full((4,), 2.0)


def frozen_weights(network):
    network.base.weight += 1.0


def replaced_layer(network):
    network.base = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).requires_grad_(False)


def assigned_parameter(network):
    network.first.bias = nn.Parameter(torch.tensor([5.0, 0.0, 0.0]))


def assigned_state(network):
    state = {k: t + 1 for k, t in network.norm.state_dict().items()}
    network.norm.load_state_dict(state, assign=True)


CHANGES = [
    new_buffer, new_buffer_object, frozen_weights, replaced_layer, assigned_parameter, assigned_state,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("method", ["fedcbo", "fedcb2o"])
def test_the_network_is_read_where_it_is_used(change, method):
    """Losses and the new model are those of an agent that is made after the change."""
    network = tied()
    agent = make(network, method=method)
    with torch.no_grad():
        change(network)
    sent = {"a": make(tied(1)).publish(), "b": make(tied(2)).publish()}
    later = make(copy.deepcopy(network), method=method)
    decisions = [one.aggregate(sent) for one in (agent, later)]
    assert decisions[0] == decisions[1]
    assert agent.theta.equal(later.theta)
    expected = tied()
    with torch.no_grad():
        change(expected)
    parameters.bind_(expected, make(tied(1)).theta)
    assert decisions[0].losses["a"] == pytest.approx(loss_of(expected), abs=1e-6)


def refrozen(network):
    network.first.requires_grad_(False)


def alternating(network):
    network.base.requires_grad_(True)
    network.norm.requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (refrozen, r"`first.weight` is not exchanged, and was \[3, 4\]"),
        (alternating, "not exchanged"),
        (lambda network: network.double(), "of torch.float64 on cpu, and was .4. of torch.float32"),
        (lambda network: network.to("meta"), "on meta, and was"),
        (lambda network: setattr(network, "first", nn.Linear(4, 5)), r"is \[5, 4\]"),
    ],
)
def test_a_change_of_the_exchanged_tensors_is_an_error(change, message):
    network = tied()
    agent = make(network)
    sent = agent.publish()
    change(network)
    for call in (agent.publish, lambda: agent.aggregate({"a": sent}), lambda: agent.theta):
        with pytest.raises(ConfigError, match=message):
            call()
    with pytest.raises(ConfigError, match=message):
        agent.theta = sent


def test_layers_of_one_size_in_turn_are_an_error():
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    network[1:].requires_grad_(False)
    agent = make(network)
    network[0].requires_grad_(False)
    network[1].requires_grad_(True)
    with pytest.raises(ConfigError, match=r"`0.weight` is not exchanged"):
        agent.publish()
    # A new agent is one of the new layer.
    assert sorted(make(network).publish()) == ["1.bias", "1.weight"]
    other = copy.deepcopy(network)
    other[1].weight.data *= 3
    decision = make(network).aggregate({"a": other.state_dict()})
    assert decision.losses["a"] == pytest.approx(loss_of(other), abs=1e-6)


class Counting(nn.Module):
    """A convolution with dropout; batched by vmap or one by one, never as a dense network."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 4)
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(3)
        self.norm.requires_grad_(False)

    def forward(self, x):
        return self.norm(self.dropout(self.conv(x.unsqueeze(1)).squeeze(2)))


@pytest.mark.parametrize("fails", [False, True])
def test_the_network_is_as_before_after_an_evaluation(fails):
    network = Counting()
    network.norm.eval()  # as for frozen norms, in a network that trains
    agent = make(network)
    modes = [part.training for part in network.modules()]
    addresses = {k: t.data_ptr() for k, t in network.state_dict().items()}
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1)
    F.cross_entropy(network(X), Y).backward()
    sent = agent.publish()
    if fails:
        handle = network.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ConfigError, match="ZeroDivisionError"):
            agent.aggregate({"a": sent})
        handle.remove()
    else:
        agent.aggregate({"a": sent})
    assert [part.training for part in network.modules()] == modes
    assert {k: t.data_ptr() for k, t in network.state_dict().items()} == addresses
    before = network.conv.weight.clone()
    optimiser.step()
    assert not network.conv.weight.equal(before)


@pytest.mark.parametrize("norm", [{}, {"affine": False}, {"frozen": True}])
def test_statistics_are_exchanged_with_and_without_trained_weights(norm):
    def network(shift):
        torch.manual_seed(0)
        layer = nn.BatchNorm1d(4, affine=norm.get("affine", True))
        layer.requires_grad_(not norm.get("frozen", False))
        layer.running_mean += shift
        return nn.Sequential(layer, nn.Linear(4, 3))

    method = {"name": "fedcbo", "mixing_factor": 0.5}
    agent = Agent(network(0.0), validation=(X, Y), method=method, buffers="shared")
    other = Agent(network(4.0), validation=(X, Y), buffers="shared")
    agent.aggregate({"a": other.publish()})
    torch.testing.assert_close(agent.network[0].running_mean, torch.full((4,), 2.0))


# Messages and names


def test_only_models_that_select_named_count():
    agent = make(tied(), seed=0)
    sent = {name: make(tied(1)).publish() for name in "abc"}
    (asked,) = agent.select("abc", 1)
    decision = agent.aggregate(sent)
    assert decision.weights == {asked: 1.0}
    assert decision.refused == dict.fromkeys({*"abc"} - {asked}, "it was not asked: `select` did not name it in this round")  # fmt: skip
    # A second call names peers in place of those that do not answer; without a call, all count.
    first, second = agent.select("abc", 1), agent.select("abc", 2)
    assert {*agent.aggregate(sent).weights} == {*first, *second}
    assert {*agent.aggregate(sent).weights} == {*"abc"}


def test_numbers_of_samples_go_with_names_of_peers():
    method = {"name": "by_rule", "rule": "by_num_samples"}
    agent = Agent(tied(), validation=(X, Y), method=method, num_samples=30)
    sent = {name: agent.publish() for name in ("Lab", "ward")}
    with pytest.raises(ConfigError, match="number for 'lab' and none for the model of 'Lab'"):
        agent.aggregate(sent, {"lab": 2000, "ward": 10})
    decision = agent.aggregate(sent, {"Lab": 60, "ward": 10})
    assert decision.weights == pytest.approx({"Lab": 0.6, "ward": 0.1})
    # A table of all peers, of which some sent no model; and numbers of some, which others lack.
    one = {"ward": sent["ward"]}
    assert agent.aggregate(one, {"Lab": 60, "ward": 30}).weights == {"ward": 0.5}
    assert agent.aggregate(sent, {"ward": 30}).weights == pytest.approx(
        {"Lab": 1 / 3, "ward": 1 / 3}
    )


def test_a_model_that_is_not_finite_is_named():
    agent = make(tied())
    sent = make(tied(1)).publish()
    good = agent.theta
    with torch.no_grad():
        agent.network.first.bias[0] = torch.nan
    with pytest.raises(ConfigError, match="own model holds numbers that are not finite"):
        agent.aggregate({"a": sent})
    with pytest.warns(UserWarning, match="peers refuse this model"):
        agent.publish()
    agent.theta = good
    assert np.isfinite(agent.aggregate({"a": sent}).losses["a"])
    with torch.no_grad():
        agent.network.first.bias[0] = 2e6
    with pytest.warns(UserWarning, match=r"beyond 1e\+06"):
        agent.publish()
    broken = nn.Linear(4, 3)
    nn.init.constant_(broken.bias, torch.inf)
    with pytest.raises(ConfigError, match="not finite"):
        make(broken)


def test_validation_samples_of_bytes_are_named():
    x = (np.arange(120).reshape(30, 4) * 2).astype(np.uint8)
    with pytest.warns(UserWarning, match="divides by 255"):
        agent = Agent(tied(), validation=(x, Y), method="fedcbo", buffers="shared")
    decision = agent.aggregate({"a": make(tied(1)).publish()})
    outputs = tied(1).eval()(torch.tensor(x) / 255).detach()
    assert decision.losses["a"] == pytest.approx(float(F.cross_entropy(outputs, Y)), abs=1e-5)


# Saved agents


def test_a_saved_agent_has_its_model(tmp_path):
    path = tmp_path / "agent.safetensors"
    agent = make(tied())
    agent.aggregate({"a": make(tied(1)).publish()})
    with torch.no_grad():
        agent.network.first.bias += 1.0  # training after the round
    agent.save(path)
    again = make(tied(2))
    again.load(path)
    assert again.theta.equal(agent.theta)
    assert again.round == 1
    sent = {"a": make(tied(3)).publish()}
    assert agent.aggregate(sent) == again.aggregate(sent)

    other_base = tied()
    with torch.no_grad():
        other_base.base.weight += 1.0
    before = parameters.flatten(other_base)
    with pytest.raises(RunError, match="other frozen parameters"):
        make(other_base).load(path)
    assert parameters.flatten(other_base).equal(before)


def test_the_memory_of_another_method_or_network_is_refused():
    state = make(tied()).state_dict()
    for method in ("fedcb2o", {"name": "by_rule", "rule": "foolsgold"}):
        with pytest.raises(RunError, match="with the method fedcbo, and this one has"):
            Agent(tied(), validation=(X, Y), method=method).load_state_dict(state)
    saved, other = (
        Agent(tied(), validation=(X, Y), method={"name": "by_rule", "rule": {"name": rule}})
        for rule in ("krum", "mda")
    )
    with pytest.raises(
        RunError, match="method by_rule with krum, and this one has by_rule with mda"
    ):
        other.load_state_dict(saved.state_dict())
    with pytest.raises(RunError, match="another network: it lacks `weight`"):
        make(nn.Linear(4, 3)).load_state_dict(state)
    # Parameters may have other values.
    options = {"validation": (X, Y), "method": {"name": "fedcbo", "alpha": 3.0}}
    Agent(tied(), **options).load_state_dict(state)


def test_the_previous_model_is_restored_by_name():
    agent = make(tied())
    state = dict(reversed(agent.state_dict().items()))
    agent.theta = agent.theta + 1
    agent.load_state_dict(state)
    assert agent._previous.equal(make(tied()).theta)


def test_a_file_of_0_2_is_read(tmp_path):
    """Its memory has neither names nor a method, and no model is in it."""
    agent = make(tied())
    agent.aggregate({"a": make(tied(1)).publish()})
    state = {k: t for k, t in agent.state_dict().items() if not k.startswith("previous.")}
    memory = json.dumps({"round": 1, "peers": ["a"]}).encode()
    state["memory"] = torch.frombuffer(bytearray(memory), dtype=torch.uint8)
    state["previous"] = agent.theta
    save_file(state, tmp_path / "agent.safetensors")
    again = make(tied(2))
    before = again.theta
    with pytest.warns(UserWarning, match="holds no model"):
        again.load(tmp_path / "agent.safetensors")
    assert again.round == 1
    assert again.theta.equal(before)
    assert again._previous.equal(agent.theta)


def test_a_model_with_variances_below_0_is_refused_and_changes_nothing():
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    agent = Agent(network, validation=(X, Y), method="dfedavgm", id=0, buffers="shared")
    good = agent.publish()
    bad = {**good, "1.running_var": good["1.running_var"] - 9}
    row = torch.cat([tensor.reshape(-1) for tensor in bad.values()])
    decision = agent.aggregate({1: row, 2: bad, 3: good})
    assert decision.weights == {3: 0.5}
    assert decision.refused == dict.fromkeys((1, 2), "its `1.running_var` holds variances below 0")
    assert network.eval()(X).isfinite().all()


def test_an_agent_and_a_run_have_one_default_for_statistics_of_norms():
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    Agent(network, validation=(X, Y))
    assert ModelSection.model_fields["buffers"].default == "local"
    assert batch_norm.has_local_statistics(network)


@pytest.mark.parametrize("norm", [{}, {"affine": False}])
def test_a_file_with_shared_statistics_is_read_by_an_agent_with_local_ones(norm, tmp_path):
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, **norm))
    before = Agent(copy.deepcopy(network), validation=(X, Y), buffers="shared")
    before.aggregate({"a": before.publish()})
    before.save(tmp_path / "agent.safetensors")
    nn.init.ones_(network[0].weight)
    agent = Agent(network, validation=(X, Y))
    agent.load(tmp_path / "agent.safetensors")
    assert network[0].weight.equal(before.network[0].weight)
    assert agent.round == 1
    assert agent.aggregate({"a": before.publish()}).refused == {}


def test_the_memory_of_an_agent_with_other_peers_is_refused():
    options = {"validation": (X, Y), "method": "fedcbo"}
    named, third = make(tied()), Agent(tied(), **options, id=3)
    for saved, other in ((named, third), (third, named), (third, Agent(tied(), **options, id=2))):
        with pytest.raises(RunError, match="their peers are not the same"):
            other.load_state_dict(saved.state_dict())
    Agent(tied(), **options, id=3).load_state_dict(third.state_dict())


@pytest.mark.parametrize("count", [1, 47, 10**18])
def test_local_statistics_are_estimated_on_all_validation_samples(count):
    """The number of training samples weighs models, and selects no samples."""
    network = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3))
    agent = Agent(network, validation=(X, Y), method="dfedavgm", num_samples=count, buffers="local")
    decision = agent.aggregate({"a": agent.publish()}, samples={"a": 3})
    assert decision.weights == {"a": pytest.approx(3 / (3 + count))}
    assert torch.allclose(network[0].running_mean, X.mean(0), atol=1e-6)
    assert torch.allclose(network[0].running_var, X.var(0), rtol=1e-5)
