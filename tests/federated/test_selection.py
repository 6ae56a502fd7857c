"""Whom agents ask and what they remember: by hand, in the first passes, and many agents at once as
each alone."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcb2o.federated import CandidatePeers, Contacts, ContactTable, Ragged, algorithms, selection
from fedcb2o.federated.batched_aggregation import update_likelihoods
from fedcb2o.federated.selection import (
    prob_sampling,
    select_colluding_peers,
    uniform,
)
from fedcb2o.rng import agent_streams, stream

INF = float("inf")


NOBODY = Contacts(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64))


def ask(contacts, n, budget=6, seed=0):
    return prob_sampling(contacts, torch.arange(1, n), budget, stream(seed, "x"))


def after(contacts, asked, answered, losses, *, kappa=2.0, zeta=0.5, first_contact="average"):
    """The contacts of one agent after a round."""
    both = (Ragged.from_arrays([torch.as_tensor(ids).numpy()]) for ids in (asked, answered))
    losses = torch.as_tensor(losses, dtype=torch.float64).numpy()
    algorithm = algorithms.fedcb2o(kappa=kappa, zeta=zeta, first_contact=first_contact)
    (found,) = update_likelihoods(algorithm, ContactTable.from_contacts([contacts]), *both, losses)
    return found


@pytest.mark.parametrize(
    ("n", "budget", "counts"), [(100, 20, [20, 20, 20, 20, 19]), (20, 6, [6, 6, 6, 1])]
)
def test_the_first_pass_has_no_top_up(n, budget, counts):
    contacts, found = NOBODY, []
    for k in range(len(counts)):
        asked = ask(contacts, n, budget, seed=k)
        found.append(len(asked))
        contacts = after(contacts, asked, asked, torch.ones(len(asked)))
    assert found == counts
    assert contacts.ids.tolist() == list(range(1, n))


@pytest.mark.parametrize(
    ("met", "unmet", "counts"),  # of eight asked, at most a quarter newcomers, rounded up
    [
        (0, 20, (0, 8)),
        (3, 20, (3, 5)),
        (20, 20, (6, 2)),
        (20, 1, (7, 1)),
        (20, 0, (8, 0)),
        (2, 3, (2, 3)),
    ],
)
def test_newcomers_are_a_share_at_most_unless_there_is_room(met, unmet, counts):
    known = torch.arange(1, 1 + met)
    contacts = after(NOBODY, known, known, torch.ones(met))
    for seed in range(5):
        chosen = prob_sampling(
            contacts, torch.arange(1, 1 + met + unmet), 8, stream(seed, "x"), newcomer_share=0.25
        ).tolist()
        assert chosen == sorted(set(chosen))
        assert (sum(i <= met for i in chosen), sum(i > met for i in chosen)) == counts


def test_whose_likelihood_is_nothing_leaves_room_for_newcomers():
    contacts = after(NOBODY, range(1, 6), range(1, 6), [0.1, INF, INF, INF, INF])
    chosen = prob_sampling(
        contacts, torch.arange(1, 20), 4, stream(0, "x"), newcomer_share=0.25
    ).tolist()
    assert chosen[0] == 1
    assert all(i > 5 for i in chosen[1:])
    assert len(chosen) == 4


def test_a_likelihood_that_underflows_is_never_drawn_and_never_first_again():
    everyone = torch.arange(1, 5)
    contacts = after(NOBODY, everyone, everyone, [0.1, 1e5, INF, 0.2])
    assert contacts.likelihood[1:3].tolist() == [0.0, 0.0]
    for seed in range(20):
        assert ask(contacts, 5, budget=3, seed=seed).tolist() == [
            1,
            4,
        ]  # two are positive: two are drawn


def test_nobody_positive_is_nobody():
    contacts = Contacts(torch.arange(1, 5), torch.zeros(4, dtype=torch.float64))
    assert ask(contacts, 5).tolist() == []


def test_a_peer_that_never_answers_is_met_and_counts_as_an_average_one():
    contacts = after(NOBODY, [1, 2, 3], [1, 2], [0.0, 0.0])
    assert contacts.likelihood[:2].tolist() == [0.5, 0.5]
    assert contacts.likelihood[2].isnan()
    drawn = [i for seed in range(300) for i in ask(contacts, 4, budget=1, seed=seed).tolist()]
    assert all(70 < drawn.count(i) < 130 for i in (1, 2, 3))


def test_likelihood_by_hand():
    first = after(NOBODY, [4], [4], [1.0], zeta=0.25)
    gain = torch.exp(torch.tensor(-2.0, dtype=torch.float64)).item()
    assert first.likelihood.item() == pytest.approx(0.25 * gain)
    second = after(first, [4], [4], [0.0], zeta=0.25)
    assert second.likelihood.item() == pytest.approx(0.75 * 0.25 * gain + 0.25)
    whole = after(NOBODY, [4], [4], [1.0], zeta=0.25, first_contact="whole")
    assert whole.likelihood.item() == pytest.approx(gain)


@given(st.integers(0, 12), st.integers(0, 12), st.integers(1, 15))
def test_colluders_prefer_fellows(num_colluders, num_benign, budget):
    fellows, benign = (
        CandidatePeers.from_lists([np.arange(num_colluders)]),
        CandidatePeers.from_lists([np.arange(100, 100 + num_benign)]),
    )
    asked = select_colluding_peers(fellows, benign, budget, [stream(0, "x")])[0].tolist()
    assert len(asked) == len(set(asked)) == min(budget, num_colluders + num_benign)
    assert sum(i < 100 for i in asked) == min(budget, num_colluders)


def test_uniform_is_uniform():
    counts = torch.zeros(5)
    for seed in range(500):
        counts[uniform(NOBODY, torch.arange(5), 2, stream(seed, "x"))] += 1
    assert counts.sum() == 1000
    assert ((counts > 150) & (counts < 250)).all()


# Many agents


class Counted(np.ndarray):
    """Ids that remember how many of them were looked at in one go."""

    most = 0

    def __array_ufunc__(self, ufunc, method, *inputs, **keywords):
        plain = [np.asarray(each) for each in inputs]
        Counted.most = max([Counted.most, *(each.size for each in plain)])
        return getattr(ufunc, method)(*plain, **keywords)


@pytest.mark.parametrize("select", [selection.prob_sampling, selection.uniform])
def test_who_is_asked_costs_nothing_for_those_who_are_not(select):
    """Of a million peers only some are looked at, by their place: no pass over all."""
    peers = CandidatePeers.from_lists(
        [np.arange(10**6).view(Counted)], np.array([0, 0]), excluded=np.array([5, 7])
    )
    met = ContactTable(Ragged(np.array([3, 9]), np.array([2, 0])), np.ones(2))
    Counted.most = 0
    asked = selection.BATCHED_SELECTION.get(select)(
        met, peers, 4, agent_streams(0, "x", agents=range(2))
    )
    assert asked.sizes.tolist() == [4, 4]
    assert Counted.most <= 8
    assert not set(asked[0].tolist()) & {5}


SELECTIONS = {name: (getattr(selection, name), {}) for name in selection.__all__}
SELECTIONS["newcomers"] = (selection.prob_sampling, {"newcomer_share": 0.4})


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", SELECTIONS)
def test_many_ask_whom_each_asks_alone(name, shared):
    """Agents that met differently many, until each met all: the draws, and the contacts, of one
    agent alone."""
    (select, more), everybody, count = SELECTIONS[name], np.arange(12), 5
    some = [everybody] if shared else [everybody[everybody % 4 != j % 4] for j in range(count)]
    own = np.arange(count)
    peers = CandidatePeers.from_lists(some, np.zeros_like(own) if shared else None, excluded=own)
    met, rule = ContactTable.empty(count), algorithms.fedcb2o()
    for n in range(8):
        draws = [agent_streams(n, "x", agents=own.tolist()) for _ in range(2)]
        asked = selection.BATCHED_SELECTION.get(select)(met, peers, 3, draws[0], **more)
        there = stream(n, "answers").random(len(asked.values)) < 0.7
        answered = asked.filter(there)
        lost = Ragged(stream(n, "losses").random(len(answered.values)), answered.sizes)
        after = update_likelihoods(rule, met, asked, answered, lost.values)
        for j in own.tolist():
            ids = torch.from_numpy(some[0 if shared else j])
            alone = select(met[j], ids[ids != j], 3, draws[1][j], **more)
            assert alone.tolist() == asked[j].tolist()
            those, one = Ragged(there, asked.sizes)[j], met.take(np.array([j]))
            mine = update_likelihoods(
                rule,
                one,
                Ragged.from_arrays([alone.numpy()]),
                Ragged.from_arrays([alone.numpy()[those]]),
                lost[j],
            )
            assert mine[0].ids.equal(after[j].ids)
            assert mine[0].likelihood.view(torch.int64).equal(after[j].likelihood.view(torch.int64))
        met = after


def test_many_collude_as_each_alone():
    everybody, which = np.arange(10), np.array([0, 1, 0])
    fellows, benign = ([everybody[:3], everybody[3:5]], [everybody[5:7], everybody[7:]])
    own = np.array([1, 4, 2])
    for budget in range(1, 6):
        draws = [agent_streams(budget, "x", agents=range(3)) for _ in range(2)]
        many = (
            CandidatePeers.from_lists(fellows, which, excluded=own),
            CandidatePeers.from_lists(benign, which),
        )
        asked = selection.select_colluding_peers(*many, budget, draws[0])
        for k in range(3):
            near, far = (
                CandidatePeers.from_lists([fellows[which[k]]], excluded=own[k : k + 1]),
                CandidatePeers.from_lists([benign[which[k]]]),
            )
            alone = selection.select_colluding_peers(near, far, budget, draws[1][k : k + 1])
            assert alone[0].tolist() == asked[k].tolist()
