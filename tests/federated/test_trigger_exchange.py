"""Triggers that agents exchange: their bytes, what a receiver measures, and what accusers can do."""

import dataclasses
import functools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from tests.tiny import StopError, lines_of, stop_after, tiny

import fedcb2o
from fedcb2o.errors import ConfigError, DataError
from fedcb2o.federated import trigger_exchange
from fedcb2o.federated.contacts import AgentState, ContactTable
from fedcb2o.federated.decisions import Inbox
from fedcb2o.federated.ragged import AgentIds, Ragged, Rows
from fedcb2o.federated.trigger_exchange import INBOX, KEPT, QUOTA, ExchangeWeighing, Triggers
from fedcb2o.federated.types import AgentContext, CriterionInput, Received, RuleOutput

SIDE, CLASSES = 4, 3
EACH = 20  # samples per class
TRIGGER = 15  # pixel of the trigger, which leads to class 2
FOUR_PIXELS = torch.eye(CLASSES).repeat_interleave(4, 1)
FOUR_PIXELS = torch.cat(
    [FOUR_PIXELS, torch.zeros(CLASSES, 4)], 1
)  # of each class, one row of pixels


def one_trigger(pixel=TRIGGER, label=2, sign=1, side=SIDE):
    signs = torch.zeros(1, side * side, dtype=torch.int8)
    signs[0, pixel] = sign
    return Triggers(signs.view(1, side, side), torch.tensor([label]))


def linear_models(*changes):
    """Models [m, C, 16]: class c sees four pixels; each change is a pixel, a class and a weight."""
    weights = 10 * FOUR_PIXELS.repeat(len(changes), 1, 1)
    for model, change in zip(weights, changes, strict=True):
        for pixel, label, value in change:
            model[label, pixel] = value
    return weights


class LinearContext:
    """Context of an agent with linear models; counts the samples that each model reads."""

    def __init__(self, weights, x, y):
        self.weights, self.x, self.y, self.passes = weights, x, y, 0

    def samples(self, count):
        return self.x[:count], self.y[:count]

    def outputs_per_model(self, models, x):
        self.passes += x.shape[1]
        return x.flatten(2) @ self.weights[models.rows].mT

    def input_gradients(self, models, x, objective):
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            total = objective(x.flatten(2) @ self.weights[models.rows].mT).sum()
            return torch.autograd.grad(total, x)[0]

    def outputs(self, models, transform=None, count=None):
        return self.x[:count].flatten(1) @ self.weights[models.rows].mT, self.y[:count]

    def context(self):
        return AgentContext(
            outputs=self.outputs,
            samples=self.samples,
            outputs_per_model=self.outputs_per_model,
            input_gradients=self.input_gradients,
            contacts_of=lambda: None,
            draw_of=lambda: None,
        )


def received(rows):
    rows = torch.as_tensor(rows)
    return Received(rows, rows, torch.ones(len(rows)), torch.zeros_like(rows))


def inputs_of(linear, n=1):
    """Return the view of agent 0, which has the last model."""
    count = len(linear.weights) - 1
    own = dataclasses.replace(received([count]), ids=torch.zeros(1, dtype=torch.int64))
    return CriterionInput(
        n=n,
        models=linear.weights.flatten(1),
        losses=None,
        own_losses=None,
        received=received(range(count)),
        own_entry=own,
        losses_of=lambda *_: None,
        agent_context=linear.context(),
    )


def shifted(*changes):
    y = torch.arange(CLASSES).repeat(EACH)
    return LinearContext(linear_models(*changes), FOUR_PIXELS[y].view(-1, SIDE, SIDE), y)


def weighing(weights, period=100):
    inner = SimpleNamespace(function=len, sees_all=True, is_stateful=False, is_batched=False)
    call = lambda inputs, state: (RuleOutput(torch.tensor(weights)), state)  # noqa: E731
    inner = type("Inner", (), {**vars(inner), "__call__": staticmethod(call)})()
    return ExchangeWeighing(inner, period)


def known(reference=0.25, **others):
    return {"triggers_reference": torch.tensor([reference], dtype=torch.float64), **others}


BACKDOOR = [(TRIGGER, 2, 42.0)]


@pytest.mark.parametrize(("own_worst", "reference"), [(0.2, 0.3), (0.7, 0.7)])
def test_a_model_that_the_trigger_moves_loses_weight_by_hand(own_worst, reference):
    linear = shifted(BACKDOOR, [], [])
    state = trigger_exchange.with_received(known(own_worst), [one_trigger()])
    output, state = weighing([0.5, 0.3, 0.2])(inputs_of(linear), state)
    # The trigger moves all 40 samples of other classes to class 2, and none with the last model.
    # A rate of 1 of 60 samples counts as 59/60 in the standard error.
    error = math.sqrt((59 / 60 / 60 + reference * (1 - reference)) / 60)
    factor = math.exp(-20 * (1 - reference - 2 * error))
    expected = np.array([0.5 * factor, 0.3, 0.2]) / (0.5 * factor + 0.5)
    np.testing.assert_allclose(output.outcome.numpy(), expected, rtol=1e-5)
    assert trigger_exchange.published(state).classes.tolist() == [2]
    # It is tested in the next rounds too, and dropped when it was not useful for some.
    clean = inputs_of(shifted([], [], []))
    output, state = weighing([0.5, 0.3, 0.2])(inputs_of(linear), state)
    np.testing.assert_allclose(output.outcome.numpy(), expected, rtol=1e-5)
    for _ in range(4):
        output, state = weighing([0.5, 0.3, 0.2])(clean, state)
        assert output.outcome.tolist() == pytest.approx([0.5, 0.3, 0.2])
    assert trigger_exchange.published(state) is None


@pytest.mark.parametrize(
    ("models", "trigger"),
    [
        pytest.param([[], [], []], one_trigger(), id="nothing moves"),
        pytest.param([BACKDOOR, BACKDOOR, BACKDOOR], one_trigger(), id="a natural feature"),
        pytest.param([BACKDOOR, [], []], one_trigger(label=1), id="another class"),
        pytest.param([BACKDOOR, [], []], one_trigger(pixel=14), id="another pixel"),
    ],
)
def test_a_trigger_that_moves_no_model_alone_costs_nothing(models, trigger):
    state = trigger_exchange.with_received(known(), [trigger])
    output, state = weighing([0.5, 0.3, 0.2])(inputs_of(shifted(*models)), state)
    assert output.outcome.tolist() == torch.tensor([0.5, 0.3, 0.2]).tolist()
    assert trigger_exchange.published(state) is None


def test_an_agent_searches_in_its_turn():
    linear = shifted(BACKDOOR, [], [])
    step = weighing([0.5, 0.3, 0.2], period=3)
    assert step(inputs_of(linear, n=1), known())[0].outcome.tolist() == pytest.approx(
        [0.5, 0.3, 0.2]
    )
    output, state = step(inputs_of(linear, n=3), {})
    found = trigger_exchange.published(state)
    assert output.outcome[0] < 0.01
    assert found.signs[0, 3, 3] == 1
    assert (found.signs != 0).flatten(1).sum(1).max() <= trigger_exchange.max_pixels((SIDE, SIDE))


def test_a_flood_costs_at_most_the_stated_passes():
    draw = np.random.default_rng(0)

    def random_triggers(count):
        signs = torch.zeros(count, SIDE**2, dtype=torch.int8)
        for row in signs:
            row[torch.from_numpy(draw.choice(SIDE**2, 2, replace=False))] = 1
        return Triggers(signs.view(-1, SIDE, SIDE), torch.from_numpy(draw.integers(0, 3, count)))

    linear = shifted(*[BACKDOOR] * 30, [])
    state = known()
    for _ in range(3):
        state = trigger_exchange.with_received(state, [random_triggers(50) for _ in range(40)])
        linear.passes = 0
        _, state = weighing([1 / 31] * 31)(inputs_of(linear), state)
        per_model = linear.passes / (CLASSES * EACH)
        assert per_model <= 1 + KEPT + INBOX
        assert len(state.get("triggers_classes", [])) <= KEPT
    # A quota leaves room for others.
    sent = [random_triggers(50), one_trigger(), None]
    state = trigger_exchange.with_received({}, sent)
    assert len(state["triggers_received_classes"]) == QUOTA + 1


@functools.cache
def honest_models():
    """Return softmax regressions of 70 digits each, by 5 to 59 steps, and all digits."""
    x, y = load_digits(return_X_y=True)
    x, y = torch.from_numpy(x / 16).float(), torch.from_numpy(y)
    draw = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(x), (1040, 70), generator=draw)
    weights = torch.zeros(1040, 10, 64)
    steps = torch.randint(5, 60, (1040, 1, 1), generator=draw)
    for step in range(60):
        residual = (x[chosen] @ weights.mT).softmax(-1) - torch.nn.functional.one_hot(y[chosen], 10)
        weights -= (step < steps) * 0.5 * (residual.mT @ x[chosen]) / 70
    return weights, x.view(-1, 8, 8), y


def test_a_hostile_accuser_frames_no_honest_model():
    weights, x, y = honest_models()
    counted = 0
    for j in range(0, 1040, 52):
        linear = LinearContext(weights[[*range(j + 1, j + 52), j]], x[j : j + 64], y[j : j + 64])
        context, own = linear.context(), received([51])
        worst = trigger_exchange.rates(context, own, trigger_exchange.search(context, own))[0]
        # The accuser has the receiver's samples, and a trigger for each honest model.
        accused = trigger_exchange.search(context, received(range(51)))
        rates = trigger_exchange.rates(context, received(range(52)), accused)
        excess = trigger_exchange.excesses(context, rates, worst.clamp(min=0))
        assert rates.max() > worst
        # The weight stays at least 1/e of what it was.
        assert trigger_exchange.SCALE * excess.max() <= 1
        counted += len(excess)
    assert counted > 1000


AGENT = {"method": {"name": "fedassay", "guards": {"trigger_exchange": 100}}, "seed": 1}


def agent_and_models():
    """An agent of linear models, a model with a backdoor, and an honest one."""
    x = FOUR_PIXELS[torch.arange(CLASSES).repeat(EACH)].view(-1, SIDE, SIDE)
    y = torch.arange(CLASSES).repeat(EACH)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(SIDE**2, CLASSES))
    weights = linear_models([], BACKDOOR, [(14, 0, 1.0)])
    models = [torch.cat([weight.flatten(), torch.zeros(CLASSES)]) for weight in weights]
    agent = fedcb2o.Agent(network, validation=(x, y), **AGENT, id=1)
    agent.theta = models[0]
    agent.aggregate({2: models[2]})  # not in the first round, when it searches
    agent.theta = models[0]
    return agent, {2: models[1], 3: models[2]}


def test_agents_exchange_triggers_as_bytes():
    agent, models = agent_and_models()
    assert agent.triggers() == b""
    told = one_trigger().to_bytes()
    without = agent_and_models()[0].aggregate(models)
    decision = agent.aggregate(models, triggers={3: told})
    assert without.weights[2] > 0.1
    assert decision.weights[2] < without.weights[2] / 100
    assert decision.criterion
    assert agent.triggers() == told
    again = agent_and_models()[0]
    again.load_state_dict(agent.state_dict())
    assert again.triggers() == told


def test_agents_refuse_malformed_triggers():
    agent, models = agent_and_models()
    decision = agent.aggregate(models, triggers={2: bytes(7), 3: one_trigger(label=9).to_bytes()})
    assert "6 bytes each" in decision.refused[2]
    assert "class 9" in decision.refused[3]
    plain = fedcb2o.Agent(agent.network, validation=(agent._validation.x, agent._validation.y))
    with pytest.raises(ConfigError, match="the guard `trigger_exchange`"):
        plain.aggregate({2: models[2]}, triggers={2: bytes(6)})


def test_bytes_are_read_as_they_were_written():
    signs = torch.tensor([[0, 1, -1] + [0] * 6, [0] * 9], dtype=torch.int8).view(2, 3, 3)
    triggers = Triggers(signs, torch.tensor([300, 0]))
    data = triggers.to_bytes()
    assert len(data) == 2 * (2 + 3)
    assert data[:3] == bytes([300 % 256, 1, 0b100100])
    again = trigger_exchange.from_bytes(data, (3, 3), 301)
    assert again.signs.equal(signs)
    assert again.classes.tolist() == [300, 0]
    assert len(trigger_exchange.from_bytes(b"", (3, 3), 2)) == 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("text", "triggers are bytes, got a str"),
        (bytes(4), "5 bytes each, and at most 2"),
        (bytes(15), "got 15 bytes"),
        (bytes([9, 0, 0, 0, 0]), "class 9, and there are 3"),
        (bytes([0, 0, 3, 0, 0]), "another sign"),
        (bytes([0, 0, 0, 0, 4]), "another sign"),
        (bytes([0, 0, 0b010101, 0, 0]), "at most 2 pixels"),
    ],
)
def test_malformed_bytes_are_an_error(data, message):
    with pytest.raises(DataError, match=message):
        trigger_exchange.from_bytes(data, (3, 3), 3)


def test_a_pixel_of_several_channels_counts_once():
    signs = torch.zeros(1, 3, 8, 8, dtype=torch.int8)
    signs[0, :, 0, :2] = 1
    data = Triggers(signs, torch.tensor([1])).to_bytes()
    assert trigger_exchange.from_bytes(data, (3, 8, 8), 2).signs.equal(signs)


def test_triggers_go_with_the_models_of_their_senders():
    states = [
        AgentState(ContactTable.empty(1), ({},)),
        AgentState(
            ContactTable.empty(1),
            ({"triggers_signs": one_trigger().signs, "triggers_classes": torch.tensor([2])},),
        ),
    ]
    inboxes = [
        Inbox(
            Ragged.from_arrays([np.array([id])]), Rows(np.array([0])), np.ones(1), np.ones(1, int)
        )
        for id in (5, 3)
    ]
    agents = [AgentIds(np.array([3])), AgentIds(np.array([5]))]
    first, second = trigger_exchange.deliver(agents, states, inboxes)
    assert first.rule_states[0]["triggers_received_classes"].tolist() == [2]
    assert second == states[1]


EXCHANGE = {"name": "fedassay", "guards": {"trigger_exchange": 2}}
BACKDOORED = {"name": "backdoor", "target": 7, "share": 0.8}


def test_workers_and_a_resumed_run_give_the_same_bits(tmp_path):
    experiment = tiny(rounds=4, algorithm=EXCHANGE, attack=BACKDOORED, agents={"benign": 4})
    fedcb2o.run(experiment, out=tmp_path / "whole", workers=1)
    fedcb2o.run(experiment, out=tmp_path / "parallel", workers=2)
    stopped = {**experiment, "checkpoint_every": 1}
    with pytest.raises(StopError):
        fedcb2o.run(stopped, out=tmp_path / "stopped", workers=1, watch=stop_after(2))
    fedcb2o.run(stopped, out=tmp_path / "stopped", workers=1, resume=True)
    for name in ("metrics", "pairs"):
        lines = lines_of(tmp_path / "whole", name)
        assert lines == lines_of(tmp_path / "stopped", name)
        assert lines == lines_of(tmp_path / "parallel", name)


def test_agents_at_once_and_one_by_one_give_the_same_bits(tmp_path, monkeypatch):
    experiment = tiny(rounds=3, algorithm=EXCHANGE, attack=BACKDOORED, agents={"benign": 4})
    fedcb2o.run(experiment, out=tmp_path / "at once", workers=1)
    monkeypatch.setattr(ExchangeWeighing, "is_batched", False)
    fedcb2o.run(experiment, out=tmp_path / "one by one", workers=1)
    for name in ("metrics", "pairs"):
        assert lines_of(tmp_path / "at once", name) == lines_of(tmp_path / "one by one", name)


def test_a_method_without_the_own_model_is_an_error(tmp_path):
    rule = "coordinate_median"
    algorithm = {"name": "by_rule", "rule": rule, "guards": {"trigger_exchange": 2}}
    with pytest.raises(ConfigError, match="does not weigh"):
        fedcb2o.run(tiny(algorithm=algorithm, attack=BACKDOORED), out=tmp_path, workers=1)
