"""Peer selection and contacts: by hand, in the first passes, and batched against single agents."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcb2o.federated import algorithms, selection
from fedcb2o.federated.batched_aggregation import update_likelihoods
from fedcb2o.federated.contacts import CandidatePeers, ContactTable
from fedcb2o.federated.ragged import Ragged
from fedcb2o.federated.selection import prob_sampling, select_colluding_peers, uniform
from fedcb2o.federated.types import Contacts
from fedcb2o.rng import agent_streams, stream

INF = float("inf")


NO_CONTACTS = Contacts(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64))


def sample_peers(contacts, n, budget=6, seed=0):
    return prob_sampling(contacts, torch.arange(1, n), budget, stream(seed, "x"))


def contacts_after(
    contacts, asked, answered, losses, *, kappa=2.0, zeta=0.5, first_contact="average"
):
    """Return the contacts of one agent after a round."""
    ragged_ids = (Ragged.from_arrays([torch.as_tensor(ids).numpy()]) for ids in (asked, answered))
    losses = torch.as_tensor(losses, dtype=torch.float64).numpy()
    algorithm = algorithms.fedcb2o(kappa=kappa, zeta=zeta, first_contact=first_contact)
    (updated,) = update_likelihoods(
        algorithm, ContactTable.from_contacts([contacts]), *ragged_ids, losses
    )
    return updated


@pytest.mark.parametrize(
    ("n", "budget", "counts"), [(100, 20, [20, 20, 20, 20, 19]), (20, 6, [6, 6, 6, 1])]
)
def test_the_first_pass_has_no_top_up(n, budget, counts):
    contacts, num_asked = NO_CONTACTS, []
    for k in range(len(counts)):
        asked = sample_peers(contacts, n, budget, seed=k)
        num_asked.append(len(asked))
        contacts = contacts_after(contacts, asked, asked, torch.ones(len(asked)))
    assert num_asked == counts
    assert contacts.ids.tolist() == list(range(1, n))


@pytest.mark.parametrize(
    ("num_known", "num_unknown", "counts"),  # eight asked, at most a quarter newcomers, rounded up
    [
        (0, 20, (0, 8)),
        (3, 20, (3, 5)),
        (20, 20, (6, 2)),
        (20, 1, (7, 1)),
        (20, 0, (8, 0)),
        (2, 3, (2, 3)),
    ],
)
def test_newcomers_are_limited_to_a_share_unless_known_peers_are_few(
    num_known, num_unknown, counts
):
    known_ids = torch.arange(1, 1 + num_known)
    contacts = contacts_after(NO_CONTACTS, known_ids, known_ids, torch.ones(num_known))
    for seed in range(5):
        sampled = prob_sampling(
            contacts,
            torch.arange(1, 1 + num_known + num_unknown),
            8,
            stream(seed, "x"),
            newcomer_share=0.25,
        ).tolist()
        assert sampled == sorted(set(sampled))
        assert (sum(i <= num_known for i in sampled), sum(i > num_known for i in sampled)) == counts


def test_known_peers_of_likelihood_zero_leave_room_for_newcomers():
    contacts = contacts_after(NO_CONTACTS, range(1, 6), range(1, 6), [0.1, INF, INF, INF, INF])
    sampled = prob_sampling(
        contacts, torch.arange(1, 20), 4, stream(0, "x"), newcomer_share=0.25
    ).tolist()
    assert sampled[0] == 1
    assert all(i > 5 for i in sampled[1:])
    assert len(sampled) == 4


def test_a_peer_whose_likelihood_underflows_is_never_drawn_again():
    peers = torch.arange(1, 5)
    contacts = contacts_after(NO_CONTACTS, peers, peers, [0.1, 1e5, INF, 0.2])
    assert contacts.likelihood[1:3].tolist() == [0.0, 0.0]
    for seed in range(20):
        # two are positive: two are drawn
        assert sample_peers(contacts, 5, budget=3, seed=seed).tolist() == [1, 4]


def test_no_peer_is_drawn_without_a_positive_likelihood():
    contacts = Contacts(torch.arange(1, 5), torch.zeros(4, dtype=torch.float64))
    assert sample_peers(contacts, 5).tolist() == []


def test_a_peer_that_never_answers_counts_as_an_average_one():
    contacts = contacts_after(NO_CONTACTS, [1, 2, 3], [1, 2], [0.0, 0.0])
    assert contacts.likelihood[:2].tolist() == [0.5, 0.5]
    assert contacts.likelihood[2].isnan()
    sampled = [
        i for seed in range(300) for i in sample_peers(contacts, 4, budget=1, seed=seed).tolist()
    ]
    assert all(70 < sampled.count(i) < 130 for i in (1, 2, 3))


def test_likelihood_by_hand():
    first = contacts_after(NO_CONTACTS, [4], [4], [1.0], zeta=0.25)
    gain = torch.exp(torch.tensor(-2.0, dtype=torch.float64)).item()
    assert first.likelihood.item() == pytest.approx(0.25 * gain)
    second = contacts_after(first, [4], [4], [0.0], zeta=0.25)
    assert second.likelihood.item() == pytest.approx(0.75 * 0.25 * gain + 0.25)
    whole = contacts_after(NO_CONTACTS, [4], [4], [1.0], zeta=0.25, first_contact="whole")
    assert whole.likelihood.item() == pytest.approx(gain)


@given(st.integers(0, 12), st.integers(0, 12), st.integers(1, 15))
def test_colluders_ask_fellows_first(num_colluders, num_benign, budget):
    fellows = CandidatePeers.from_lists([np.arange(num_colluders)])
    benign = CandidatePeers.from_lists([np.arange(100, 100 + num_benign)])
    asked = select_colluding_peers(fellows, benign, budget, [stream(0, "x")])[0].tolist()
    assert len(asked) == len(set(asked)) == min(budget, num_colluders + num_benign)
    assert sum(i < 100 for i in asked) == min(budget, num_colluders)


def test_uniform_draws_all_peers_equally_often():
    counts = torch.zeros(5)
    for seed in range(500):
        counts[uniform(NO_CONTACTS, torch.arange(5), 2, stream(seed, "x"))] += 1
    assert counts.sum() == 1000
    assert ((counts > 150) & (counts < 250)).all()


# Several agents at once


class Counted(np.ndarray):
    """Ids that record how many of them one operation reads at most."""

    most = 0

    def __array_ufunc__(self, ufunc, method, *inputs, **keywords):
        plain = [np.asarray(array) for array in inputs]
        Counted.most = max([Counted.most, *(array.size for array in plain)])
        return getattr(ufunc, method)(*plain, **keywords)


@pytest.mark.parametrize("select", [selection.prob_sampling, selection.uniform])
def test_selection_does_not_read_all_candidates(select):
    """One operation reads at most eight of a million ids."""
    peers = CandidatePeers.from_lists(
        [np.arange(10**6).view(Counted)], np.array([0, 0]), excluded=np.array([5, 7])
    )
    contacts = ContactTable(Ragged(np.array([3, 9]), np.array([2, 0])), np.ones(2))
    Counted.most = 0
    asked = selection.BATCHED_SELECTION.get(select)(
        contacts, peers, 4, agent_streams(0, "x", agents=range(2))
    )
    assert asked.sizes.tolist() == [4, 4]
    assert Counted.most <= 8
    assert not set(asked[0].tolist()) & {5}


SELECTIONS = {name: (getattr(selection, name), {}) for name in selection.__all__}
SELECTIONS["newcomers"] = (selection.prob_sampling, {"newcomer_share": 0.4})


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", SELECTIONS)
def test_batched_selection_equals_that_of_single_agents(name, shared):
    """Draws and contacts agree over eight rounds, with different numbers of contacts."""
    (select, options), all_ids, count = SELECTIONS[name], np.arange(12), 5
    candidates = [all_ids] if shared else [all_ids[all_ids % 4 != j % 4] for j in range(count)]
    own_ids = np.arange(count)
    peers = CandidatePeers.from_lists(
        candidates, np.zeros_like(own_ids) if shared else None, excluded=own_ids
    )
    contacts, rule = ContactTable.empty(count), algorithms.fedcb2o()
    for n in range(8):
        draws = [agent_streams(n, "x", agents=own_ids.tolist()) for _ in range(2)]
        asked = selection.BATCHED_SELECTION.get(select)(contacts, peers, 3, draws[0], **options)
        is_answered = stream(n, "answers").random(len(asked.values)) < 0.7
        answered = asked.filter(is_answered)
        loss_lists = Ragged(stream(n, "losses").random(len(answered.values)), answered.sizes)
        updated = update_likelihoods(rule, contacts, asked, answered, loss_lists.values)
        for j in own_ids.tolist():
            ids = torch.from_numpy(candidates[0 if shared else j])
            single_ids = select(contacts[j], ids[ids != j], 3, draws[1][j], **options)
            assert single_ids.tolist() == asked[j].tolist()
            has_answered = Ragged(is_answered, asked.sizes)[j]
            single_contacts = contacts.take(np.array([j]))
            single_updated = update_likelihoods(
                rule,
                single_contacts,
                Ragged.from_arrays([single_ids.numpy()]),
                Ragged.from_arrays([single_ids.numpy()[has_answered]]),
                loss_lists[j],
            )
            assert single_updated[0].ids.equal(updated[j].ids)
            assert (
                single_updated[0]
                .likelihood.view(torch.int64)
                .equal(updated[j].likelihood.view(torch.int64))
            )
        contacts = updated


def test_batched_colluders_ask_the_peers_of_single_colluders():
    all_ids, list_ids = np.arange(10), np.array([0, 1, 0])
    fellows, benign = ([all_ids[:3], all_ids[3:5]], [all_ids[5:7], all_ids[7:]])
    own_ids = np.array([1, 4, 2])
    for budget in range(1, 6):
        draws = [agent_streams(budget, "x", agents=range(3)) for _ in range(2)]
        candidates = (
            CandidatePeers.from_lists(fellows, list_ids, excluded=own_ids),
            CandidatePeers.from_lists(benign, list_ids),
        )
        asked = selection.select_colluding_peers(*candidates, budget, draws[0])
        for k in range(3):
            single_fellows, single_benign = (
                CandidatePeers.from_lists([fellows[list_ids[k]]], excluded=own_ids[k : k + 1]),
                CandidatePeers.from_lists([benign[list_ids[k]]]),
            )
            single_asked = selection.select_colluding_peers(
                single_fellows, single_benign, budget, draws[1][k : k + 1]
            )
            assert single_asked[0].tolist() == asked[k].tolist()
