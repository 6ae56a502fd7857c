"""FoolsGold: learning rates by hand and by plain loops, histories over rounds, and whole runs."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import agents as ours
from tests.agents import BENIGN_IDS, decisions_of, run_rounds
from tests.tiny import bits_for_any_workers, tiny
from tests.views import rule_input

from fedcb2o.errors import ConfigError
from fedcb2o.federated import algorithms
from fedcb2o.federated.aggregation import foolsgold
from fedcb2o.federated.aggregation.last_layer import learning_rates
from fedcb2o.federated.contacts import AgentState
from fedcb2o.nn.parameters import LastLayer
from fedcb2o.rng import stream


def plain_loop(histories: list[list[float]], kappa: float = 1.0) -> list[float]:
    """Algorithm 1 of Fung et al. 2020 from line 6 on, normalised. Rates are clipped to 0 and 1."""
    n = len(histories)

    def cosine(a, b):
        lengths = math.sqrt(sum(v * v for v in a)) * math.sqrt(sum(v * v for v in b))
        return sum(v * w for v, w in zip(a, b, strict=True)) / lengths if lengths else 0.0

    cs = [[cosine(a, b) for b in histories] for a in histories]
    v = [max([cs[i][j] for j in range(n) if j != i], default=-math.inf) for i in range(n)]
    alpha = []
    for i in range(n):
        for j in range(n):
            if i != j and v[j] > v[i]:
                cs[i][j] *= v[i] / v[j]  # pardoning
        alpha.append(
            min(1.0, max(0.0, 1 - max([cs[i][j] for j in range(n) if j != i], default=-math.inf)))
        )
    if max(alpha) == 0:
        return alpha
    alpha = [value / max(alpha) for value in alpha]
    for i, value in enumerate(alpha):
        logit = (
            math.inf if value == 1 else -math.inf if value == 0 else math.log(value / (1 - value))
        )
        alpha[i] = min(1.0, max(0.0, kappa * (logit + 0.5)))
    return [value / sum(alpha) for value in alpha]


def test_learning_rates_by_hand():
    # The first two have the cosine 0.6, which leaves 0.4; its logit plus 0.5 is about 0.0945.
    rate = math.log(0.4 / 0.6) + 0.5
    x = torch.tensor([[1.0, 0.0, 0.0], [3.0, 4.0, 0.0], [0.0, 0.0, 0.1]])
    result = learning_rates(x.double())
    assert result.tolist() == pytest.approx(
        [rate / (1 + 2 * rate), rate / (1 + 2 * rate), 1 / (1 + 2 * rate)]
    )
    assert result.tolist() == pytest.approx(plain_loop(x.tolist()))
    rates = [2 * rate, 2 * rate, 1.0]
    assert learning_rates(x.double(), 2.0).tolist() == pytest.approx(
        [value / sum(rates) for value in rates]
    )
    # Pardoning: the cosine 0.5 of the first becomes 0.5 * 0.5 / 0.7. The similar two keep 0.3.
    angles = torch.tensor([0.0, math.pi / 3, math.pi / 3 + math.acos(0.7)]).double()
    y = torch.stack([angles.cos(), angles.sin()], 1)
    share = 0.3 / (1 - 0.5 * 0.5 / 0.7)
    rates = [1.0, *[math.log(share / (1 - share)) + 0.5] * 2]
    assert learning_rates(y).tolist() == pytest.approx([value / sum(rates) for value in rates])
    assert plain_loop(y.tolist()) == pytest.approx([value / sum(rates) for value in rates])


def test_learning_rates_of_single_zero_and_equal_histories():
    one = torch.tensor([[1.0, 2.0]]).double()
    assert learning_rates(one).tolist() == [1]
    assert learning_rates(torch.tensor([[1.0, 2.0], [-3.0, 1.0]]).double()).tolist() == [0.5, 0.5]
    zero = torch.zeros(1, 2).double()
    assert learning_rates(torch.cat([one, zero])).tolist() == [0.5, 0.5]
    same = torch.tensor([[1.0, 0.0]] * 3).double()
    assert learning_rates(same).tolist() == [0, 0, 0]


@settings(max_examples=50)
@given(
    n=st.integers(1, 9),
    d=st.integers(2, 6),
    seed=st.integers(0, 10**6),
    kappa=st.sampled_from([0.5, 1.0, 3.0]),
)
def test_learning_rates_equal_the_plain_loop(n, d, seed, kappa):
    x = torch.from_numpy(stream(seed, "histories").normal(size=(n, d)))
    assert learning_rates(x, kappa).tolist() == pytest.approx(
        plain_loop(x.tolist(), kappa), abs=1e-9
    )


@pytest.mark.parametrize("count", [2, 5])
def test_sybils_with_similar_updates_have_almost_no_weight(count):
    draw = stream(0, "sybils")
    honest = torch.from_numpy(draw.normal(size=(6, 400)))
    direction = torch.from_numpy(draw.normal(size=400))
    for sybils in (
        direction.expand(count, -1),
        direction + 1e-3 * torch.from_numpy(draw.normal(size=(count, 400))),
    ):
        rates = learning_rates(torch.cat([honest, sybils]))
        assert float(rates[6:].sum()) < 1e-6
        assert rates[:6].tolist() == pytest.approx([1 / 6] * 6, rel=0.1)


# Histories

C, H = 3, 2


def layer(theta):
    """Last dense layer of a model: the weights and, last, the bias of each class."""
    return (
        torch.cat([theta[-C * (H + 1) : -C].view(C, H), theta[-C:].view(C, 1)], 1)
        .flatten()
        .double()
    )


LAYER = LastLayer(slice(-C * (H + 1), -C), C, H, slice(-C, None))


def agent_view(me, ids, models, before, contact_ids, n=0):
    """View of agent `me` with the models `ids`. Row `before` is its model before the round."""
    return rule_input(
        models, ids, me, n=n, contact_ids=contact_ids, previous=before, last_layer=LAYER
    )


def model_buffers(count):
    """Models of five agents and, in row 5, the model before the round.

    Four other parameters precede the last layer.
    """
    return [
        torch.from_numpy(stream(n, "pool").normal(size=(6, 4 + C * (H + 1)))).float()
        for n in range(count)
    ]


def test_histories_add_up_over_rounds():
    buffers = model_buffers(3)

    def assert_state(state, weights, expected, order):
        assert state["ids"].tolist() == sorted(expected)
        sums = torch.stack([expected[i] for i in sorted(expected)])
        torch.testing.assert_close(state["sums"].double(), sums, rtol=1e-5, atol=1e-5)
        histories = [expected[i].tolist() for i in order]  # the agent's own model is last
        assert weights.tolist() == pytest.approx(plain_loop(histories), abs=1e-5)

    def updates(n, *ids):
        return {i: layer(buffers[n][i]) - layer(buffers[n][5]) for i in ids}

    state, weights = foolsgold({}, agent_view(2, [0, 4], buffers[0], 5, []))
    expected = updates(0, 0, 2, 4)
    assert_state(state, weights, expected, (0, 4, 2))
    # Peer 0 is not received, and its history is kept.
    state, weights = foolsgold(state, agent_view(2, [1, 4], buffers[1], 5, [0, 4], n=1))
    for i, update in updates(1, 1, 2, 4).items():
        expected[i] = expected.get(i, 0) + update
    assert_state(state, weights, expected, (1, 4, 2))
    # Peer 4 is not a contact any more, so its history starts again.
    state, weights = foolsgold(state, agent_view(2, [1, 4], buffers[2], 5, [0, 1], n=2))
    later = updates(2, 1, 2, 4)
    expected |= {1: expected[1] + later[1], 2: expected[2] + later[2], 4: later[4]}
    assert_state(state, weights, expected, (1, 4, 2))
    # It is forgotten when it does not send a model.
    state, _ = foolsgold(state, agent_view(2, [1], buffers[2], 5, [0, 1], n=3))
    assert state["ids"].tolist() == [0, 1, 2]


def test_confidence_is_passed_to_the_learning_rates():
    (models,) = model_buffers(1)
    view = agent_view(2, [0, 1, 3, 4], models, 5, [])
    state, weights = foolsgold({}, view, confidence=0.2)
    histories = torch.stack([state["sums"][i] for i in (0, 1, 3, 4, 2)]).double()
    assert weights.equal(learning_rates(histories, 0.2))
    assert not weights.equal(foolsgold({}, view)[1])


def test_a_network_without_a_last_dense_layer_is_refused():
    (models,) = model_buffers(1)
    message = "the rule reads the last linear layer, and this model has none with a row and a bias"
    with pytest.raises(ConfigError, match=message):
        foolsgold({}, rule_input(models, [0], 2, previous=5))


# Rounds and runs


def test_whole_rounds_equal_the_plain_loop():
    """Updates are relative to the agent's model before the round. Some peers are absent."""
    algorithm = algorithms.by_rule(rule="foolsgold", needs_losses=False)
    engine, shadow = (ours.local_engine(algorithm, participation=0.7) for _ in range(2))
    histories, memory = {j: {} for j in BENIGN_IDS}, AgentState.initial(len(ours.CLUSTER))

    def tail(theta):
        return torch.cat([theta[-28:-4].view(4, 6), theta[-4:].view(4, 1)], 1).flatten().double()

    num_mixed = 0
    for n in range(4):
        before = ours.models_of(engine).clone()
        ours.models_of(shadow).copy_(before)
        shadow.train_(n)
        trained = ours.models_of(shadow)
        (result,) = run_rounds(engine, 1, memory, n)
        memory = result.state
        for j in BENIGN_IDS:
            decision = decisions_of(result.decisions, j)
            assert set(memory.rule_states[j]) == (
                {"ids", "sums"} if histories[j] or decision.asked else set()
            )
            if not decision.asked:  # absent in this round
                continue
            num_mixed += 1
            for i in [*decision.ids, j]:
                histories[j][i] = histories[j].get(i, 0) + tail(trained[i]) - tail(before[j])
            state, known_ids = memory.rule_states[j], sorted(histories[j])
            assert state["ids"].tolist() == known_ids
            target = torch.stack([histories[j][i] for i in known_ids])
            torch.testing.assert_close(state["sums"].double(), target)
            expected = plain_loop([histories[j][i].tolist() for i in [*decision.ids, j]])
            assert [*decision.weights, decision.own_weight] == pytest.approx(expected, abs=1e-6)
    assert num_mixed > 10


TEAM = {"benign": 3, "malicious": 2, "benign_samples": 20, "malicious_samples": 30, "budget": 4}


FOOLSGOLD = {"name": "by_rule", "rule": "foolsgold", "needs_losses": False}


def test_neither_workers_nor_interruptions_change_a_bit(tmp_path):
    """Agents are absent in some rounds, and sybils have new ids."""
    experiment = tiny(
        agents={**TEAM, "participation": 0.7},
        algorithm={
            **FOOLSGOLD,
            "rule": {"name": "foolsgold", "confidence": 0.5},
            "selection": "prob_sampling",
            "needs_losses": True,
        },
        attack={"name": "label_flip", "source": 9, "target": 4, "sybils": True},
    )
    digests = bits_for_any_workers(tmp_path, experiment)
    assert {"checkpoint state.0.ids", "checkpoint state.0.sums"} <= digests.keys()
