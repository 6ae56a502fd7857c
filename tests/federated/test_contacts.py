"""Whom each of several agents met and may ask, against plain lists."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcb2o.federated import AgentState, CandidatePeers, Contacts, ContactTable, Ragged

ascending = st.lists(st.integers(0, 12), max_size=6, unique=True).map(sorted)
several = st.lists(ascending, min_size=1, max_size=5)


def contacts_of(ids):
    """Each peer with a likelihood that tells which it is."""
    return Contacts(
        torch.tensor(ids, dtype=torch.int64), torch.tensor(ids, dtype=torch.float64) / 7
    )


def met_of(each):
    return ContactTable.from_contacts([contacts_of(ids) for ids in each])


def hold_equal(met, each):
    for found in ([met[k] for k in range(len(met))], list(met)):
        assert [one.ids.tolist() for one in found] == each
        assert [one.likelihood.tolist() for one in found] == [[i / 7 for i in ids] for ids in each]


# Whom they met


@given(several, several, st.data())
def test_contacts_are_those_of_each(each, others, data):
    hold_equal(met_of(each), each)
    hold_equal(ContactTable.concatenate([met_of(each), met_of(others)]), each + others)
    chosen = data.draw(st.lists(st.integers(0, len(each) - 1), max_size=6))
    hold_equal(met_of(each).take(np.array(chosen, np.int64)), [each[k] for k in chosen])
    gone = data.draw(ascending)
    hold_equal(
        met_of(each).forget(np.array(gone, np.int64)),
        [[i for i in ids if i not in gone] for ids in each],
    )
    hold_equal(ContactTable.empty(len(each)), [[]] * len(each))


@given(several, st.data())
def test_what_some_remember_afterwards_stands_in_their_places(each, data):
    those = [k for k in range(len(each)) if data.draw(st.booleans())]
    new = [data.draw(ascending) for _ in those]
    found = met_of(new) if new else ContactTable.empty(0)
    states = [{"kept": torch.tensor(k)} for k in range(len(each))]
    after = AgentState(met_of(each), ({},) * len(each)).updated(
        np.array(those, np.int64), found, states
    )
    hold_equal(
        after.contacts, [new[those.index(k)] if k in those else ids for k, ids in enumerate(each)]
    )
    assert [int(state["kept"]) for state in after.rule_states] == list(range(len(each)))


# Whom they may ask


@given(several, st.booleans(), st.data())
def test_peers_are_those_of_plain_lists(lists, shared, data):
    """Own or shared lists of ids, each agent left out of its own: how many they are, who is among
    them, and where."""
    count = data.draw(st.integers(1, 5)) if shared else len(lists)
    which = [data.draw(st.integers(0, len(lists) - 1)) if shared else k for k in range(count)]
    own = [data.draw(st.integers(0, 12)) for _ in range(count)]
    ids = [np.array(each, np.int64) for each in lists]
    peers = CandidatePeers.from_lists(
        ids, np.array(which) if shared else None, excluded=np.array(own)
    )
    plain = [[i for i in lists[which[k]] if i != own[k]] for k in range(count)]
    assert [peers.ids(k).tolist() for k in range(count)] == plain
    assert peers.counts.tolist() == [len(each) for each in plain]
    asked = [(k, i) for k in range(count) for i in range(13)]
    among, places = peers.find(*(np.array(each) for each in zip(*asked, strict=True)))
    assert among.tolist() == [i in plain[k] for k, i in asked]
    assert places.tolist() == [plain[k].index(i) for k, i in asked if i in plain[k]]
    positions = Ragged.from_arrays([np.arange(len(each)) for each in plain])
    assert peers.ids_at(positions).tolist() == plain
    both = peers.including_self(np.array(own))
    assert [both.ids(k).tolist() for k in range(count)] == [
        sorted({*plain[k], own[k]}) for k in range(count)
    ]
