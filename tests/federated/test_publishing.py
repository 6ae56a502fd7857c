"""Published models and claims of agents, and the view of an attacker that crafts models."""

import dataclasses

import numpy as np
import pytest
import torch
from tests import agents as ours
from tests.agents import (
    BENIGN_IDS,
    CLUSTER,
    MALICIOUS_IDS,
    AgentSamples,
    adversary_of,
    agent_group_of,
    agent_samples,
    network,
    run_rounds,
    run_spec_of,
)

from fedcb2o import knows
from fedcb2o.federated import aggregation, algorithms
from fedcb2o.federated.adversary import Attack
from fedcb2o.federated.contacts import AgentState
from fedcb2o.federated.publishing import (
    DeceptiveOutbox,
    craft_models_,
    deceptive_outbox,
    make_outbox,
)
from fedcb2o.federated.ragged import Ragged
from fedcb2o.parallel._executors import SerialExecutor
from fedcb2o.simulation.adversarial_engine import AdversarialEngine
from fedcb2o.simulation.local_engine import LocalEngine
from fedcb2o.simulation.rounds import run_rounds as simulate


def engine_of(attack, algorithm=None):
    return ours.local_engine(algorithm or algorithms.dfedavgm(selection="everyone"), attack=attack)


def test_each_receiver_gets_its_own_crafted_model_and_fellows_get_the_true_ones(monkeypatch):
    targets, received = {}, {}

    @knows("benign", each_receiver=True)
    def numbered(view, draw):
        targets[view.agent] = view.receivers.tolist()
        return torch.stack(
            [torch.full_like(view.own, 100 * view.agent + i) for i in view.receivers.tolist()]
        )

    def by_samples(arrivals, receiver):  # the colluders' rule, for several agents
        receiver_ids = receiver.ids.flatten().tolist()
        k = len(arrivals.ids) if arrivals.ids.ndim == 1 else arrivals.ids.shape[1]
        for j, ids, rows in zip(
            receiver_ids, arrivals.ids.view(-1, k), arrivals.rows.view(-1, k), strict=True
        ):
            received[j] = (ids.tolist(), rows.tolist(), engine.group.models[rows])
        return aggregation.sample_weights(arrivals, receiver)

    def equal(inputs):
        return by_samples(inputs.received, inputs.own_entry)

    monkeypatch.setattr("fedcb2o.simulation.adversarial_engine.sample_weights", by_samples)
    algorithm = algorithms.by_rule(rule=equal, selection="everyone", needs_losses=False)
    engine = engine_of(Attack(craft=numbered, threat=numbered.threat), algorithm)
    run_rounds(engine)
    assert targets == dict.fromkeys(MALICIOUS_IDS, BENIGN_IDS)
    assert sorted(received) == sorted(BENIGN_IDS + MALICIOUS_IDS)
    for j, (ids, rows, thetas) in received.items():
        assert j in MALICIOUS_IDS or set(MALICIOUS_IDS) < set(ids)
        for i, row, theta in zip(ids, rows, thetas, strict=True):
            is_deceived = i in MALICIOUS_IDS and j in BENIGN_IDS
            assert (row == i) == (not is_deceived)
            assert (theta.tolist() == [100.0 * i + j] * len(theta)) == is_deceived


def test_an_attacker_sees_models_clean_data_and_losses():
    """The view has the models before and after training, the clean data, and losses on them."""
    views = {}

    @knows("fellows", "benign")
    def record_view(view, draw):
        views[view.agent] = (
            view,
            view.colluders().clone(),
            view.benign().clone(),
            float(draw.random()),
        )
        return view.own

    def poison(shard, draw):
        return dataclasses.replace(shard, y=torch.zeros_like(shard.y))

    engine = engine_of(Attack(poison=poison, craft=record_view, threat=record_view.threat))
    before = ours.models_of(engine).clone()
    run_rounds(engine)
    assert sorted(views) == MALICIOUS_IDS
    assert len({draw for *_, draw in views.values()}) == len(MALICIOUS_IDS)
    for j, (view, fellows, benign, _) in views.items():
        cluster_attackers = [i for i in MALICIOUS_IDS if CLUSTER[i] == CLUSTER[j]]
        assert view.previous.equal(before[j])
        assert fellows[cluster_attackers.index(j)].equal(view.own)
        assert not view.own.equal(view.previous)
        assert (
            (len(fellows), len(benign))
            == (view.num_colluders, view.num_benign)
            == (2, CLUSTER.count(CLUSTER[j]) - 2)
        )
        assert len(view.data.y.unique()) > 1
        assert view.losses(torch.stack([view.own, view.previous])).by_class.shape == (2, 4)


def test_claimed_samples_are_capped_at_max_samples():
    """Benign agents have 13 samples and attackers 20. A receiver believes at most 17."""
    weights = {}
    for name, claims in (("truth", None), ("lie", 10**9), ("understatement", 1)):
        run_spec = run_spec_of(algorithms.dfedavgm(selection="everyone"), network(), max_samples=17)
        agent_group = agent_group_of(
            run_spec,
            adversary_of(Attack(claimed_samples=claims)),
            AgentSamples(
                agent_samples().samples, agent_samples().train, agent_samples().validation
            ),
        )
        (result,) = simulate(
            AdversarialEngine(LocalEngine(agent_group, SerialExecutor(agent_group))),
            AgentState.initial(len(CLUSTER)),
            0,
            1,
            0,
        )
        of_first_agent = (
            result.decisions.received[0],
            Ragged(result.decisions.weights, result.decisions.received.sizes)[0],
        )
        weights[name] = dict(zip(*(values.tolist() for values in of_first_agent), strict=True))
        of_attacker = Ragged(result.decisions.weights, result.decisions.received.sizes)[3]
        # attackers send each other true numbers
        assert np.isclose(of_attacker.max() / of_attacker.min(), 17 / 13)
    total = 5 * 13 + 4 * 17
    assert weights["truth"] == weights["lie"]
    assert weights["lie"][3] == pytest.approx(17 / total)
    assert weights["understatement"][3] == pytest.approx(1 / (5 * 13 + 4))


# The outbox and crafted models, by hand


def small_outbox(individual, first_rows):
    """Return the outbox of a benign agent and two attackers, which deceive the agents 4 and 7."""
    return DeceptiveOutbox(
        is_sent=np.ones(7, dtype=bool),
        own=np.array([2, 0, 1]),
        first_crafted=np.array(first_rows),
        is_crafting=np.array([False, True, True]),
        per_receiver=individual,
        receivers=np.array([4, 7]),
        num_samples=np.array([13.0, 20.0, 20.0]),
        claimed_samples=np.array([13.0, 1.0, 1e9]),
    )


SENDERS, RECEIVERS = np.array([0, 1, 1, 1, 2, 2, 2]), np.array([4, 4, 7, 5, 4, 7, 9])


@pytest.mark.parametrize(
    ("individual", "first_rows", "rows"),
    [(True, [3, 3, 5], [2, 3, 4, 0, 5, 6, 1]), (False, [3, 3, 4], [2, 3, 3, 0, 4, 4, 1])],
)
def test_rows_of_published_models_by_hand(individual, first_rows, rows):
    """Deceived receivers get individual crafted models or a common one.

    Other receivers get the trained model.
    """
    assert small_outbox(individual, first_rows).sent(SENDERS, RECEIVERS)[0].tolist() == rows


def test_claimed_samples_by_hand():
    """Fellow attackers receive the true numbers."""
    result = small_outbox(True, [3, 3, 5]).sent(SENDERS, RECEIVERS)[1].tolist()
    assert result == [13, 1, 1, 20, 1e9, 1e9, 20]


@pytest.mark.parametrize("n", [0, 1, 2])
def test_an_outbox_deceives_from_the_first_round_of_the_attack(n):
    attack = Attack(craft=lambda view, draw: view.own, claimed_samples=7, from_round=1)
    group = engine_of(attack).group
    outbox = deceptive_outbox(group, make_outbox(group, np.ones(len(CLUSTER), bool)), n, {})
    assert outbox.receivers.tolist() == BENIGN_IDS
    assert np.flatnonzero(outbox.is_crafting).tolist() == (MALICIOUS_IDS if n >= 1 else [])
    for counts, of_attackers in (
        (outbox.num_samples, 20),
        (outbox.claimed_samples, 7 if n >= 1 else 20),
    ):
        assert counts.tolist() == [
            of_attackers if j in MALICIOUS_IDS else 13 for j in range(len(CLUSTER))
        ]


def test_crafted_models_are_in_the_rows_of_their_attacker():
    """An attacker without a finite model crafts none."""

    @knows(each_receiver=True)
    def numbered(view, draw):
        return torch.stack(
            [torch.full_like(view.own, 100 * view.agent + i) for i in view.receivers.tolist()]
        )

    agent_group = engine_of(Attack(craft=numbered, threat=numbered.threat)).group
    before, finite = agent_group.models.clone(), np.arange(len(CLUSTER)) != 4
    magnitudes = craft_models_(
        agent_group, np.array(MALICIOUS_IDS), 0, finite, lambda ids: agent_group.models[ids]
    )
    assert np.isnan(magnitudes[MALICIOUS_IDS.index(4)]).all()
    for j, values in zip(MALICIOUS_IDS, magnitudes, strict=True):
        if j != 4:
            assert values.tolist() == [100 * j + i for i in BENIGN_IDS]
            before[agent_group.layout.crafted_rows(j)] = torch.tensor(values).float().unsqueeze(1)
    assert agent_group.models.equal(before)
