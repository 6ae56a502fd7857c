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
    Agent,
    Info,
    Loss,
    Options,
    Training,
    consensus_weights,
    local_aggregations,
    local_updates,
    run_round,
    sublevel_set,
)

INF, NAN = math.inf, math.nan
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


# ---- Peer selection ----


# ---- Losses, likelihoods and the criterion ----


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
