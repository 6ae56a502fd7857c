"""What is published, by whom and to whom: rows of the pool, claims, and what an attacker sees as it
crafts."""

import dataclasses

import numpy as np
import pytest
import torch
from tests import agents as ours
from tests.agents import (
    BAD,
    CLUSTER,
    GOOD,
    Held,
    attackers_of,
    block_of,
    held,
    network,
    run_rounds,
    terms_of,
)

from fedcb2o import knows
from fedcb2o.federated import (
    AgentState,
    Attack,
    Outbox,
    Ragged,
    aggregation,
    algorithms,
    craft_models_,
    make_outbox,
)
from fedcb2o.parallel._executors import SerialExecutor
from fedcb2o.simulation.local_engine import LocalEngine
from fedcb2o.simulation.rounds import run_rounds as simulate


def engine_of(attack, algorithm=None):
    return ours.together(algorithm or algorithms.dfedavgm(selection="everyone"), attack=attack)


def test_each_receiver_has_its_own_row_and_fellows_have_the_true_models(monkeypatch):
    seen, received = {}, {}

    @knows("benign", each_receiver=True)
    def numbered(view, draw):
        seen[view.agent] = view.receivers.tolist()
        return torch.stack(
            [torch.full_like(view.own, 100 * view.agent + i) for i in view.receivers.tolist()]
        )

    def by_samples(found, me):  # the rule of colluders, several at once
        whose, k = (
            me.ids.flatten().tolist(),
            len(found.ids) if found.ids.ndim == 1 else found.ids.shape[1],
        )
        for j, ids, rows in zip(whose, found.ids.view(-1, k), found.rows.view(-1, k), strict=True):
            received[j] = (ids.tolist(), rows.tolist(), engine.group.models[rows])
        return aggregation.sample_weights(found, me)

    def equal(judged):
        return by_samples(judged.received, judged.own_entry)

    monkeypatch.setattr("fedcb2o.federated.batched_aggregation.sample_weights", by_samples)
    algorithm = algorithms.by_rule(rule=equal, selection="everyone", needs_losses=False)
    engine = engine_of(Attack(craft=numbered, threat=numbered.threat), algorithm)
    run_rounds(engine)
    assert seen == dict.fromkeys(BAD, GOOD)
    assert sorted(received) == sorted(GOOD + BAD)
    for j, (ids, rows, thetas) in received.items():
        assert j in BAD or set(BAD) < set(ids)
        for i, row, theta in zip(ids, rows, thetas, strict=True):
            deceived = i in BAD and j in GOOD
            assert (row == i) == (not deceived)
            assert (theta.tolist() == [100.0 * i + j] * len(theta)) == deceived


def test_the_view_of_a_round():
    """Own models before and after training, data without poison, losses on them."""
    views = {}

    @knows("fellows", "benign")
    def watch(view, draw):
        views[view.agent] = (
            view,
            view.colluders().clone(),
            view.benign().clone(),
            float(draw.random()),
        )
        return view.own

    def poison(shard, draw):
        return dataclasses.replace(shard, y=torch.zeros_like(shard.y))

    engine = engine_of(Attack(poison=poison, craft=watch, threat=watch.threat))
    before = ours.models_of(engine).clone()
    run_rounds(engine)
    assert sorted(views) == BAD
    assert len({draw for *_, draw in views.values()}) == len(BAD)
    for j, (view, fellows, benign, _) in views.items():
        team = [i for i in BAD if CLUSTER[i] == CLUSTER[j]]
        assert view.previous.equal(before[j])
        assert fellows[team.index(j)].equal(view.own)
        assert not view.own.equal(view.previous)
        assert (
            (len(fellows), len(benign))
            == (view.num_colluders, view.num_benign)
            == (2, CLUSTER.count(CLUSTER[j]) - 2)
        )
        assert len(view.data.y.unique()) > 1
        assert view.losses(torch.stack([view.own, view.previous])).by_class.shape == (2, 4)


def test_lies_about_samples_are_believed_up_to_what_the_terms_allow():
    """13 samples are the truth of a benign agent, 17 the most that is believed, 20 the truth of an
    attacker."""
    weights = {}
    for name, claims in (("truth", None), ("lie", 10**9), ("understatement", 1)):
        terms = terms_of(algorithms.dfedavgm(selection="everyone"), network(), max_samples=17)
        block = block_of(
            terms,
            attackers_of(Attack(claimed_samples=claims)),
            Held(held().samples, held().train, held().validation),
        )
        (done,) = simulate(
            LocalEngine(block, SerialExecutor(block)),
            AgentState.initial(len(CLUSTER)),
            0,
            1,
            0,
        )
        of_first = (
            done.decisions.received[0],
            Ragged(done.decisions.weights, done.decisions.received.sizes)[0],
        )
        weights[name] = dict(zip(*(each.tolist() for each in of_first), strict=True))
        fellows = Ragged(done.decisions.weights, done.decisions.received.sizes)[3]
        assert np.isclose(
            fellows.max() / fellows.min(), 17 / 13
        )  # among themselves they tell the truth
    total = 5 * 13 + 4 * 17
    assert weights["truth"] == weights["lie"]
    assert weights["lie"][3] == pytest.approx(17 / total)
    assert weights["understatement"][3] == pytest.approx(1 / (5 * 13 + 4))


# The outbox and what is crafted, by hand


def by_hand(each, crafts):
    """Of a benign agent and two attackers, which deceive the agents 4 and 7."""
    return Outbox(
        own=np.array([2, 0, 1]),
        first_crafted=np.array(crafts),
        is_attacking=np.array([False, True, True]),
        per_receiver=each,
        receivers=np.array([4, 7]),
        num_samples=np.array([13.0, 20.0, 20.0]),
        claimed_samples=np.array([13.0, 1.0, 1e9]),
    )


SENDERS, RECEIVERS = np.array([0, 1, 1, 1, 2, 2, 2]), np.array([4, 4, 7, 5, 4, 7, 9])


@pytest.mark.parametrize(
    ("each", "crafts", "rows"),
    [(True, [3, 3, 5], [2, 3, 4, 0, 5, 6, 1]), (False, [3, 3, 4], [2, 3, 3, 0, 4, 4, 1])],
)
def test_rows_by_hand(each, crafts, rows):
    """Each receiver has a row of its own, or all have the same; who is not deceived has the model
    that was trained."""
    assert by_hand(each, crafts).rows(SENDERS, RECEIVERS).tolist() == rows


def test_claims_by_hand():
    """Fellow attackers are told the truth."""
    assert by_hand(True, [3, 3, 5]).samples_claimed_to(SENDERS, RECEIVERS).tolist() == [
        13,
        1,
        1,
        20,
        1e9,
        1e9,
        20,
    ]


@pytest.mark.parametrize("n", [0, 1, 2])
def test_an_outbox_deceives_from_its_round_on(n):
    attack = Attack(craft=lambda view, draw: view.own, claimed_samples=7, from_round=1)
    made = make_outbox(engine_of(attack).group, n)
    assert made.receivers.tolist() == GOOD
    assert np.flatnonzero(made.is_attacking).tolist() == (BAD if n >= 1 else [])
    for found, of_the_bad in ((made.num_samples, 20), (made.claimed_samples, 7 if n >= 1 else 20)):
        assert found.tolist() == [of_the_bad if j in BAD else 13 for j in range(len(CLUSTER))]


def test_what_is_crafted_lies_in_the_rows_of_its_attacker():
    """One that is not finite itself crafts nothing."""

    @knows(each_receiver=True)
    def numbered(view, draw):
        return torch.stack(
            [torch.full_like(view.own, 100 * view.agent + i) for i in view.receivers.tolist()]
        )

    block = engine_of(Attack(craft=numbered, threat=numbered.threat)).group
    before, finite = block.models.clone(), np.arange(len(CLUSTER)) != 4
    found = craft_models_(block, np.array(BAD), 0, finite, lambda ids: block.models[ids])
    assert np.isnan(found[BAD.index(4)]).all()
    for j, sizes in zip(BAD, found, strict=True):
        if j != 4:
            assert sizes.tolist() == [100 * j + i for i in GOOD]
            before[block.layout.crafted_rows(j)] = torch.tensor(sizes).float().unsqueeze(1)
    assert block.models.equal(before)
