"""The oracle compared with values calculated by hand.

A model with odds k has the logits (0, log k) for the only sample x = 1. Its probability of class 1
is k / (1 + k). Its loss is log(1 + k) for class 0 and log((1 + k) / k) for class 1, so that
exp(-loss) is a fraction.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedcb2o.rng import stream
from tests.reference import (
    COLLUDER,
    DFEDAVGM,
    EXACT,
    FEDCB2O,
    FEDCBO,
    MOST,
    Agent,
    Info,
    Loss,
    Options,
    Training,
    batches,
    class_loss_gap,
    consensus_weights,
    evaluate,
    local_aggregations,
    local_update,
    local_updates,
    quantile,
    run_round,
    select,
    sublevel_set,
    update_likelihood,
)

INF, NAN = math.inf, math.nan
E_TO_ONE = (math.e / (1 + math.e), 1 / (1 + math.e))
# All peers are asked, and alpha = 1: weights are fractions.
SIMPLE = replace(FEDCB2O, selection="everyone", alpha=1.0, kappa=1.0)


def with_logits(a: float, b: float) -> nn.Module:
    module = nn.Linear(1, 2, bias=False, dtype=torch.float64)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[a], [b]], dtype=torch.float64))
    return module


def odds(k: float) -> nn.Module:
    return with_logits(0.0, math.log(k))


def garbage() -> nn.Module:
    return with_logits(1.7e308, -1.7e308)  # finite, but the loss of class 1 is infinite


def log_odds(agent: Agent) -> float:
    weight = next(agent.module.parameters()).detach()
    return float(weight[1, 0] - weight[0, 0])


def make_agent(
    k: float = 1.0,
    algorithm: Options = SIMPLE,
    *,
    labels: tuple[int, ...] = (0, 1),
    num_samples: int = 1,
    malicious: bool = False,
    cluster: int = 0,
) -> Agent:
    x = torch.ones(num_samples, 1, dtype=torch.float64)
    y = torch.zeros(num_samples, dtype=torch.int64)
    x_validation = torch.ones(len(labels), 1, dtype=torch.float64)
    return Agent(odds(k), x, y, x_validation, torch.tensor(labels), malicious, cluster, algorithm)


def aggregate(
    agents: list[Agent], n: int = 0, *, participation: float = 1.0, batch_size: int = 64
) -> list[Info]:
    training = Training(batch_size=batch_size)
    return local_aggregations(
        agents, n, seed=0, training=training, num_classes=2, participation=participation
    )


def weights_of_first(
    algorithm: Options, *, labels: tuple[int, ...] = (0, 1), n: int = 0
) -> dict[int, float]:
    """Return the weights of agent 0 with odds 1; its peers have odds 3 and 7."""
    return aggregate(
        [make_agent(1.0, algorithm, labels=labels), make_agent(3.0), make_agent(7.0)], n
    )[0].weights


def is_close(weights: dict[int, float], expected: dict[int, float]) -> bool:
    return weights == pytest.approx(expected, rel=1e-14, abs=1e-14)


def is_near(weights: dict[int, float], *fractions: float) -> bool:
    return is_close(weights, dict(enumerate(fractions)))


# ---- LocalUpdate ----


def test_two_steps_of_sgd_by_hand():
    # Label 0, odds 1: the gradient is p - (1, 0) = (-1/2, 1/2). With the step log 3, theta = log 3
    # (1/2, -1/2): the odds are 1/3, p = (3/4, 1/4), the gradient (-1/4, 1/4), the momentum's
    # velocity -(0.9/2 + 1/4) = -0.7.
    agent = make_agent(1.0)
    training = Training(gamma=math.log(3) / 4, lambda2=4.0, local_epochs=2)
    losses = local_update(agent, stream(0, "batches", 0, 0), training)
    assert losses == pytest.approx([math.log(2), math.log(4 / 3)], rel=1e-14)
    assert log_odds(agent) == pytest.approx(-2 * 1.2 * math.log(3), rel=1e-14)
    # In the next round the velocity starts at 0 again: one step with odds 9^-1.2 and gradient
    # -1 / (1 + 9^1.2).
    local_update(agent, stream(0, "batches", 1, 0), replace(training, local_epochs=1))
    assert log_odds(agent) == pytest.approx(-2 * math.log(3) * (1.2 + 1 / (1 + 9**1.2)), rel=1e-14)


def test_batches_are_consecutive_slices_of_the_epochs_permutations():
    draw = stream(3, "batches", 2, 1)
    first, second = draw.permutation(5), draw.permutation(5)
    expected = [first[:2], first[2:4], first[4:], second[:2], second[2:4], second[4:]]
    epochs = batches(5, stream(3, "batches", 2, 1), Training(batch_size=2, local_epochs=2))
    assert [list(map(int, b)) for b in epochs] == [list(map(int, b)) for b in expected]
    steps = batches(
        5, stream(3, "batches", 2, 1), Training(batch_size=2, local_epochs=9, local_steps=4)
    )
    assert [list(map(int, b)) for b in steps] == [list(map(int, b)) for b in expected[:4]]


# ---- Peer selection ----


@pytest.mark.parametrize(
    ("N", "M", "counts"), [(100, 20, [20, 20, 20, 20, 19]), (20, 6, [6, 6, 6, 1])]
)
def test_known_peers_do_not_fill_up_the_first_pass(N: int, M: int, counts: list[int]):
    agents = [make_agent(2.0, replace(FEDCB2O, budget=M)) for _ in range(N)]
    asked: list[int] = []
    for n, count in enumerate(counts):
        chosen = select(agents, 4, stream(0, "select", n, 4))
        assert len(chosen) == count
        assert chosen == sorted(set(chosen))
        agents[4].met |= set(chosen)
        asked += chosen
    assert sorted(asked) == [i for i in range(N) if i != 4]
    # All peers were asked once: from now on M are drawn by likelihood.
    agents[4].P = dict.fromkeys(asked, 0.5)
    assert len(select(agents, 4, stream(0, "select", 9, 4))) == M


def test_a_single_remaining_peer_gets_the_whole_weight():
    agents = [make_agent(1.0 + j, replace(FEDCB2O, budget=6)) for j in range(20)]
    training = Training(local_epochs=1)
    for n, count in enumerate((6, 6, 6, 1)):
        infos = run_round(agents, n, seed=1, training=training, num_classes=2)
        assert {len(info.received) for info in infos} == {count}
    assert all(info.weights == {j: 0.0, info.received[0]: 1.0} for j, info in enumerate(infos))


def test_own_candidate_can_be_drawn_and_takes_a_slot():
    agents = [make_agent(2.0, replace(FEDCB2O, budget=6, own_candidate=True)) for _ in range(6)]
    assert select(agents, 2, stream(0, "select", 0, 2)) == [0, 1, 2, 3, 4, 5]
    agents[2].met, agents[2].P = set(range(6)), {**dict.fromkeys(range(6), 0.0), 2: 0.5}
    assert select(agents, 2, stream(0, "select", 1, 2)) == [2]


def test_only_peers_with_a_positive_likelihood_are_drawn():
    agents = [make_agent(2.0, replace(FEDCB2O, budget=3)) for _ in range(6)]
    agents[0].met = {1, 2, 3, 4, 5}
    agents[0].P = {1: 0.0, 2: 1e-300, 3: 0.0, 4: 0.9, 5: 0.0}
    assert select(agents, 0, stream(0, "select", 0, 0)) == [2, 4]
    agents[0].P = dict.fromkeys(range(1, 6), 0.0)
    assert select(agents, 0, stream(0, "select", 0, 0)) == []


def test_peers_are_drawn_by_likelihood_and_unknown_ones_count_as_the_mean():
    # Known 1/2 and 1/4, so the unknown peer counts 3/8: shares 4/9, 2/9 and 3/9.
    agents = [make_agent(2.0, replace(FEDCB2O, budget=1)) for _ in range(4)]
    agents[0].met, agents[0].P = {1, 2, 3}, {1: 0.5, 2: 0.25}
    peers = [select(agents, 0, stream(s, "select", 0, 0))[0] for s in range(900)]
    # three deviations
    assert [peers.count(i) for i in (1, 2, 3)] == pytest.approx([400, 200, 300], abs=45)
    agents[0].P = {}
    peers = [select(agents, 0, stream(s, "select", 0, 0))[0] for s in range(900)]
    assert [peers.count(i) for i in (1, 2, 3)] == pytest.approx([300, 300, 300], abs=45)


def test_uniform_selection_is_one_draw_of_the_named_stream():
    agents = [make_agent(2.0, replace(DFEDAVGM, budget=3)) for _ in range(8)]
    expected = stream(5, "select", 2, 6).choice([0, 1, 2, 3, 4, 5, 7], size=3, replace=False)
    assert select(agents, 6, stream(5, "select", 2, 6)) == sorted(map(int, expected))


def test_attackers_ask_colluders_first_and_then_benign_agents_of_their_cluster():
    # Cluster 0: malicious 0 to 3, benign 4 to 6; cluster 1: malicious 7, benign 8.
    agents = [make_agent(malicious=j < 4 or j == 7, cluster=int(j > 6)) for j in range(9)]

    def asked_peers(j: int, budget: int) -> list[int]:
        agents[j].algorithm = replace(COLLUDER, budget=budget)
        return select(agents, j, stream(0, "select", 0, j))

    assert len(asked_peers(0, 2)) == 2
    assert set(asked_peers(0, 2)) < {1, 2, 3}
    assert asked_peers(0, 3) == [1, 2, 3]
    assert asked_peers(1, 4)[:3] == [0, 2, 3]
    assert asked_peers(1, 4)[3] in {4, 5, 6}
    assert asked_peers(2, 20) == [0, 1, 3, 4, 5, 6]
    assert asked_peers(7, 20) == [8]


# ---- Losses, likelihoods and the criterion ----


def test_losses_by_hand():
    # Odds 3: log 4 on class 0, log 4/3 on class 1. Labels 0, 1, 1.
    agent = make_agent(1.0, labels=(0, 1, 1))
    a, b = math.log(4), math.log(4 / 3)
    loss = evaluate(odds(3.0), agent, Training(batch_size=2))
    assert loss.mean == pytest.approx((a + 2 * b) / 3, rel=1e-14)
    assert loss.by_class == pytest.approx({0: a, 1: b}, rel=1e-14)
    agent.algorithm = replace(SIMPLE, validation_loss="batches")
    loss = evaluate(odds(3.0), agent, Training(batch_size=2))
    assert loss.mean == pytest.approx(((a + b) / 2 + b) / 2, rel=1e-14)
    assert loss.by_class == pytest.approx({0: a, 1: b}, rel=1e-14)


def test_a_loss_that_is_not_finite_counts_as_infinite():
    assert evaluate(garbage(), make_agent(), Training()) == Loss(INF, {0: 0.0, 1: INF})
    assert evaluate(with_logits(NAN, 0.0), make_agent(), Training()) == Loss(INF, {0: INF, 1: INF})


def test_likelihood_by_hand():
    # kappa = 1, zeta = 1/5: exp(-L) = 1/4 for L = log 4; then (1 - zeta) P + zeta / 2 for
    # L = log 2.
    agent = make_agent(1.0, replace(SIMPLE, zeta=0.2))
    update_likelihood(agent, 3, math.log(4))
    assert is_close(agent.P, {3: 0.05})
    update_likelihood(agent, 3, math.log(2))
    assert is_close(agent.P, {3: 0.14})
    released = make_agent(1.0, replace(SIMPLE, zeta=0.2, first_contact="whole"))
    update_likelihood(released, 3, math.log(4))
    assert is_close(released.P, {3: 0.25})
    update_likelihood(released, 3, math.log(2))
    assert is_close(released.P, {3: 0.3})
    update_likelihood(released, 3, INF)
    assert is_close(released.P, {3: 0.24})


def test_class_loss_gap_by_hand():
    losses = {
        0: Loss(1.0, {0: 1.0, 2: 0.5, 3: 2.0}),
        1: Loss(1.0, {0: 0.5, 2: 0.75, 3: 1.0}),
        2: Loss(1.0, {0: 0.5, 2: 0.25, 3: 1.0}),
        3: Loss(INF, {0: 0.5, 2: INF, 3: 1.0}),
    }
    gaps = [class_loss_gap(losses, i, 0, 4, FEDCB2O) for i in range(4)]
    assert gaps == [0.0, 0.25, -0.25, INF]
    gaps = [class_loss_gap(losses, i, 0, 4, replace(FEDCB2O, absent="zero")) for i in range(4)]
    assert gaps == [0.0, 0.25, 0.0, INF]


def test_class_loss_gap_if_the_agents_own_loss_is_infinite():
    losses = {
        0: Loss(INF, {0: INF, 1: 1.0}),
        1: Loss(INF, {0: INF, 1: 0.5}),
        2: Loss(1.0, {0: 2.0, 1: 0.5}),
    }
    assert [class_loss_gap(losses, i, 0, 2, FEDCB2O) for i in range(3)] == [INF, INF, -0.5]
    losses = {
        0: Loss(INF, {0: INF, 1: INF}),
        1: Loss(INF, {0: INF, 1: 0.5}),
        2: Loss(1.0, {0: 2.0, 1: 0.5}),
    }
    assert [class_loss_gap(losses, i, 0, 2, FEDCB2O) for i in range(3)] == [INF, INF, -MOST]


# ---- weights ----


def plain_weights(
    G: dict[int, float], *, L: dict[int, float] | None = None, j: int = 9, **options: object
) -> dict[int, float]:
    losses = {i: Loss((L or G)[i], {}) for i in G}
    trusted = options.get("own_model") == "trusted"
    settings = replace(FEDCB2O, **options)  # type: ignore[arg-type]
    return consensus_weights(
        G, sublevel_set(losses, list(G), j, settings), j, settings, trusted=trusted
    )


def test_weights_neither_underflow_nor_overflow():
    assert is_near(plain_weights({0: 2.0**20, 1: 2.0**20 + 0.5, 2: 2e6}, alpha=2.0), *E_TO_ONE, 0)
    assert is_near(plain_weights({0: -(2.0**20), 1: -(2.0**20) + 0.5}, alpha=2.0), *E_TO_ONE)
    assert plain_weights({0: 5.0, 1: INF}) == {0: 1.0, 1: 0.0}
    assert plain_weights({0: 5.0, 1: INF}, alpha=0.0) == {0: 1.0, 1: 0.0}
    assert plain_weights({0: 5.0, 1: 7.0}, alpha=0.0) == {0: 0.5, 1: 0.5}
    assert plain_weights({0: INF, 1: INF}) == {}
    assert plain_weights({0: -INF, 1: 0.0, 2: NAN}) == {0: 0.0, 1: 1.0, 2: 0.0}
    assert plain_weights({0: -MOST, 1: 0.0, 2: -MOST}) == {0: 0.5, 1: 0.0, 2: 0.5}
    assert plain_weights({}) == {}


def test_quantile_by_hand():
    losses = [float(i) for i in range(100, 0, -1)]
    assert 0.07 * 100 > 7  # the rounding error that `quantile` corrects
    assert quantile(losses, 0.07) == 7.0
    assert quantile(losses, 0.0701) == 8.0
    assert quantile(losses, 1.0) == 100.0
    assert quantile([3.0, 1.0, 2.0], 0.01) == 1.0
    assert quantile([3.0, 1.0, 1.0], 0.5) == 1.0


def test_the_sub_level_set_includes_ties():
    # L = 1, 2, 2, 4 and beta = 1/2: q = 2, and both models with L = 2 are members.
    G, L = (
        {0: math.log(4), 1: math.log(2), 2: math.log(4), 3: -9.0},
        {0: 1.0, 1: 2.0, 2: 2.0, 3: 4.0},
    )
    weights = plain_weights(G, L=L, alpha=1.0, beta=0.5)
    assert weights == pytest.approx({0: 1 / 4, 1: 1 / 2, 2: 1 / 4}, rel=1e-14)
    # beta = 1/4: the model of least L alone, for any G.
    assert plain_weights({**G, 0: 1e9}, L=L, alpha=1.0, beta=0.25) == {0: 1.0}
    # Trusted, j = 1: its weight is the largest weight of the other members.
    weights = plain_weights(G, L=L, j=1, alpha=1.0, beta=0.5, own_model="trusted")
    assert weights == pytest.approx({0: 1 / 3, 1: 1 / 3, 2: 1 / 3}, rel=1e-14)
    # Outside of the sub-level set a trusted model has no weight, either.
    weights = plain_weights(G, L=L, j=3, alpha=1.0, beta=0.5, own_model="trusted")
    assert weights == pytest.approx({0: 1 / 4, 1: 1 / 2, 2: 1 / 4}, rel=1e-14)


def test_own_model_by_hand():
    # G = log((1 + k) / 2): mu = 1, 1/2, 1/4 for odds 1 (its own), 3, 7.
    assert is_near(weights_of_first(SIMPLE), 0, 2 / 3, 1 / 3)
    assert is_near(weights_of_first(replace(SIMPLE, own_model="judged")), 4 / 7, 2 / 7, 1 / 7)
    assert is_near(weights_of_first(replace(SIMPLE, own_model="trusted")), 2 / 5, 2 / 5, 1 / 5)
    # An agent that sampled itself counts once.
    assert is_near(weights_of_first(replace(SIMPLE, own_candidate=True)), 4 / 7, 2 / 7, 1 / 7)
    assert is_near(
        weights_of_first(replace(SIMPLE, own_candidate=True, own_model="judged")),
        4 / 7,
        2 / 7,
        1 / 7,
    )
    assert is_near(
        weights_of_first(replace(SIMPLE, own_candidate=True, own_model="trusted")),
        2 / 5,
        2 / 5,
        1 / 5,
    )


def test_average_loss_until_the_switch_by_hand():
    # L = log((1 + k) / sqrt k), alpha = 2: mu = k / (1 + k)^2 = 16/64, 12/64, 7/64.
    late = replace(SIMPLE, alpha=2.0, criterion_from_round=3)
    fedcbo = replace(FEDCBO, selection="everyone", alpha=2.0)
    for n, algorithm in ((2, late), (99, fedcbo)):
        assert is_near(weights_of_first(algorithm, n=n), 0, 12 / 19, 7 / 19)
        assert is_near(
            weights_of_first(replace(algorithm, own_model="judged"), n=n), 16 / 35, 12 / 35, 7 / 35
        )
        assert is_near(
            weights_of_first(replace(algorithm, own_model="trusted"), n=n), 16 / 35, 12 / 35, 7 / 35
        )
    assert is_near(weights_of_first(late, n=3), 0, 4 / 5, 1 / 5)  # the squares of 1/2 and 1/4


def test_weights_with_an_absent_class_by_hand():
    # Class 1 alone: G = log((1 + k) / 2k) = log 2/3 and log 4/7. In the released code, class 0
    # adds the difference 0 - 0, so that G = 0.
    assert is_near(weights_of_first(SIMPLE, labels=(1,)), 0, 6 / 13, 7 / 13)
    assert is_near(weights_of_first(replace(SIMPLE, absent="zero"), labels=(1,)), 0, 1 / 2, 1 / 2)


def test_the_exact_consensus_point_by_hand():
    # Validation labels 0, 0, 0, 1: L rises with k over 1, 3, 7, so beta = 2/3 admits odds 1 and 3:
    # mu = 1, 1/2.
    exact = replace(EXACT, alpha=1.0, beta=2 / 3, mixing_factor=1.0)
    agents = [
        make_agent(1.0, exact, labels=(0, 0, 0, 1)),
        make_agent(3.0, exact),
        make_agent(7.0, exact),
    ]
    assert is_near(aggregate(agents)[0].weights, 2 / 3, 1 / 3, 0)
    assert log_odds(agents[0]) == pytest.approx(math.log(3) / 3, rel=1e-14)


# ---- rounds ----


def test_one_step_towards_the_consensus_point_by_hand():
    # m_0 = (2 log 3 + log 7) / 3, and theta = 0 moves to lambda1 gamma m_0 = 0.04 m_0.
    agents = [make_agent(1.0), make_agent(3.0), make_agent(7.0)]
    m = (2 * math.log(3) + math.log(7)) / 3
    infos = aggregate(agents)
    assert log_odds(agents[0]) == pytest.approx(0.04 * m, rel=1e-13)
    assert infos[0].asked == infos[0].received == [1, 2]
    # kappa = 1, zeta = 1/2: P = sqrt(k) / (1 + k) / 2.
    assert is_close(agents[0].P, {1: math.sqrt(3) / 8, 2: math.sqrt(7) / 16})
    assert agents[0].met == {1, 2}


def test_agents_mix_the_models_of_before_aggregation():
    swap = replace(SIMPLE, mixing_factor=1.0)
    agents = [make_agent(2.0, swap), make_agent(5.0, swap)]
    aggregate(agents)
    assert [log_odds(agent) for agent in agents] == [math.log(5), math.log(2)]


def test_sample_counts_by_hand():
    # Benign agents 0 and 1 have 1 and 2 samples, attackers 2 and 3 have 2 and 5.
    k, counts = (2.0, 3.0, 5.0, 7.0), (1, 2, 2, 5)
    a = [math.log(value) for value in k]

    def round_of(colluder: Options) -> tuple[list[Agent], list[Info]]:
        agents = [
            make_agent(
                k[j], colluder if j > 1 else DFEDAVGM, num_samples=counts[j], malicious=j > 1
            )
            for j in range(4)
        ]
        return agents, aggregate(agents)

    agents, infos = round_of(COLLUDER)
    assert is_near(infos[0].weights, 0.1, 0.2, 0.2, 0.5)
    assert log_odds(agents[0]) == pytest.approx(
        (a[0] + 2 * a[1] + 2 * a[2] + 5 * a[3]) / 10, rel=1e-14
    )
    assert is_near(infos[3].weights, 1 / 5, 2 / 5, 2 / 5, 0)
    assert log_odds(agents[3]) == pytest.approx((a[0] + 2 * a[1] + 2 * a[2]) / 5, rel=1e-14)
    assert infos[0].losses == {}
    _, infos = round_of(replace(COLLUDER, own_model="judged"))
    assert is_near(infos[3].weights, 0.1, 0.2, 0.2, 0.5)


def test_a_nan_model_is_dropped_and_its_sender_counts_as_met():
    agents = [make_agent(1.0), make_agent(3.0), make_agent(7.0)]
    agents[1].module = with_logits(NAN, 0.0)
    info = aggregate(agents)[0]
    assert (info.asked, info.received, info.weights) == ([1, 2], [2], {0: 0.0, 2: 1.0})
    assert (agents[0].met, set(agents[0].P)) == ({1, 2}, {2})
    assert log_odds(agents[0]) == pytest.approx(0.04 * math.log(7), rel=1e-13)


def test_an_agent_that_receives_only_garbage_keeps_its_model():
    agents = [make_agent(1.0), make_agent(1.0)]
    agents[1].module = garbage()
    info = aggregate(agents)[0]
    assert (info.received, info.values, info.weights) == ([1], {1: INF}, {0: 1.0, 1: 0.0})
    assert log_odds(agents[0]) == 0.0
    assert agents[0].P == {1: 0.0}


def test_models_with_huge_gaps_share_the_weight():
    # Odds e^800 and 3 e^800: G = log(1 + k) - log 2, so that the weights are as 1 to 1/3, though
    # exp(-G) of both is below 1e-347.
    agents = [make_agent(1.0), make_agent(1.0), make_agent(1.0)]
    agents[1].module, agents[2].module = (
        with_logits(0.0, 800.0),
        with_logits(0.0, 800.0 + math.log(3)),
    )
    assert aggregate(agents)[0].weights == pytest.approx({0: 0.0, 1: 3 / 4, 2: 1 / 4}, rel=1e-12)


def test_offline_agents_train_but_neither_ask_nor_answer():
    N = 6
    seed = next(s for s in range(99) if (stream(s, "online", 0).random(N) < 0.5).sum() == 3)
    online = stream(seed, "online", 0).random(N) < 0.5
    agents = [make_agent(1.0 + j) for j in range(N)]
    infos = run_round(agents, 0, seed=seed, training=Training(), num_classes=2, participation=0.5)
    twins = [make_agent(1.0 + j) for j in range(N)]
    local_updates(twins, 0, seed=seed, training=Training())
    for j in range(N):
        if online[j]:
            assert infos[j].asked == [i for i in range(N) if i != j]
            assert infos[j].received == [int(i) for i in np.flatnonzero(online) if i != j]
            assert agents[j].met == set(infos[j].asked)
            assert log_odds(agents[j]) != log_odds(twins[j])
        else:
            assert infos[j] == Info([], [], {j: 1.0}, {}, {})
            assert agents[j].met == set()
            assert log_odds(agents[j]) == log_odds(twins[j])


def test_an_agent_without_online_peers_keeps_its_model():
    seed = next(
        s for s in range(99) if list(stream(s, "online", 0).random(2) < 0.5) == [True, False]
    )
    for own_model in ("excluded", "judged", "trusted"):
        agents = [
            make_agent(1.0, replace(SIMPLE, own_model=own_model, mixing_factor=1.0)),
            make_agent(3.0),
        ]
        infos = local_aggregations(
            agents, 0, seed=seed, training=Training(), num_classes=2, participation=0.5
        )
        assert (infos[0].asked, infos[0].received, infos[0].weights) == ([1], [], {0: 1.0})
        assert log_odds(agents[0]) == 0.0


def test_weights_sum_to_one_in_every_round():
    algorithms = [
        FEDCB2O,
        FEDCBO,
        DFEDAVGM,
        replace(FEDCB2O, own_model="trusted", own_candidate=True),
        EXACT,
    ]
    agents = [make_agent(1.0 + j, replace(a, budget=3)) for j, a in enumerate(algorithms * 2)]
    agents += [make_agent(9.0, replace(COLLUDER, budget=3), malicious=True) for _ in range(3)]
    for n in range(8):
        for info in run_round(
            agents, n, seed=2, training=Training(), num_classes=2, participation=0.8
        ):
            assert sum(info.weights.values()) == pytest.approx(1.0, rel=1e-14)
            assert set(info.received) <= set(info.asked)
