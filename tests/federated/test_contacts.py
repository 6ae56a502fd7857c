"""Contacts and candidate peers of several agents, compared with plain lists."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcb2o.federated.contacts import AgentState, CandidatePeers, ContactTable
from fedcb2o.federated.ragged import Ragged
from fedcb2o.federated.types import Contacts

ascending = st.lists(st.integers(0, 12), max_size=6, unique=True).map(sorted)
several = st.lists(ascending, min_size=1, max_size=5)


def contacts_of(ids):
    """Contacts with likelihoods that identify the peer, id / 7."""
    return Contacts(
        torch.tensor(ids, dtype=torch.int64), torch.tensor(ids, dtype=torch.float64) / 7
    )


def contact_table(id_lists):
    return ContactTable.from_contacts([contacts_of(ids) for ids in id_lists])


def assert_contacts(table, id_lists):
    for contacts in ([table[k] for k in range(len(table))], list(table)):
        assert [one.ids.tolist() for one in contacts] == id_lists
        assert [one.likelihood.tolist() for one in contacts] == [
            [i / 7 for i in ids] for ids in id_lists
        ]


# Contacts


@given(several, several, st.data())
def test_contact_tables_equal_plain_lists(id_lists, others, data):
    assert_contacts(contact_table(id_lists), id_lists)
    assert_contacts(
        ContactTable.concatenate([contact_table(id_lists), contact_table(others)]),
        id_lists + others,
    )
    rows = data.draw(st.lists(st.integers(0, len(id_lists) - 1), max_size=6))
    assert_contacts(
        contact_table(id_lists).take(np.array(rows, np.int64)), [id_lists[k] for k in rows]
    )
    forgotten = data.draw(ascending)
    assert_contacts(
        contact_table(id_lists).forget(np.array(forgotten, np.int64)),
        [[i for i in ids if i not in forgotten] for ids in id_lists],
    )
    assert_contacts(ContactTable.empty(len(id_lists)), [[]] * len(id_lists))


@given(several, st.data())
def test_an_update_replaces_the_contacts_of_its_agents_only(id_lists, data):
    members = [k for k in range(len(id_lists)) if data.draw(st.booleans())]
    new = [data.draw(ascending) for _ in members]
    table = contact_table(new) if new else ContactTable.empty(0)
    states = [{"kept": torch.tensor(k)} for k in range(len(id_lists))]
    after = AgentState(contact_table(id_lists), ({},) * len(id_lists)).updated(
        np.array(members, np.int64), table, states
    )
    assert_contacts(
        after.contacts,
        [new[members.index(k)] if k in members else ids for k, ids in enumerate(id_lists)],
    )
    assert [int(state["kept"]) for state in after.rule_states] == list(range(len(id_lists)))


# Candidate peers


@given(several, st.booleans(), st.data())
def test_candidate_peers_equal_plain_lists(lists, shared, data):
    """Lists are shared or one per agent, without the agent. Check ids, membership and positions."""
    count = data.draw(st.integers(1, 5)) if shared else len(lists)
    list_index = [data.draw(st.integers(0, len(lists) - 1)) if shared else k for k in range(count)]
    own = [data.draw(st.integers(0, 12)) for _ in range(count)]
    ids = [np.array(row, np.int64) for row in lists]
    peers = CandidatePeers.from_lists(
        ids, np.array(list_index) if shared else None, excluded=np.array(own)
    )
    expected = [[i for i in lists[list_index[k]] if i != own[k]] for k in range(count)]
    assert [peers.ids(k).tolist() for k in range(count)] == expected
    assert peers.counts.tolist() == [len(row) for row in expected]
    pairs = [(k, i) for k in range(count) for i in range(13)]
    is_candidate, places = peers.find(*(np.array(row) for row in zip(*pairs, strict=True)))
    assert is_candidate.tolist() == [i in expected[k] for k, i in pairs]
    assert places.tolist() == [expected[k].index(i) for k, i in pairs if i in expected[k]]
    positions = Ragged.from_arrays([np.arange(len(row)) for row in expected])
    assert peers.ids_at(positions).tolist() == expected
    with_self = peers.including_self(np.array(own))
    assert [with_self.ids(k).tolist() for k in range(count)] == [
        sorted({*expected[k], own[k]}) for k in range(count)
    ]
