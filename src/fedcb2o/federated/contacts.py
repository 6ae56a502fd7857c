"""Of several agents at once: what each remembers, and whom it may ask. One agent is several of which there is one.

All is in arrays over the agents, so that what is decided for many costs few calls.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fedcb2o.federated.ragged import Indices, Ragged, complement
from fedcb2o.federated.types import Contacts, CriterionInput, RuleState


@dataclass(frozen=True)
class ContactTable:
    """The contacts of several agents: the `ids` of those whom each met, ascending, and the `likelihood` of each.

    Who gets an agent's `Contacts` gets copies.
    """

    ids: Ragged
    likelihood: Float[np.ndarray, " k"]

    @classmethod
    def from_contacts(cls, contacts: Sequence[Contacts]) -> "ContactTable":
        """The contacts of several agents."""
        ids = Ragged.from_arrays([each.ids.numpy() for each in contacts])
        return cls(
            ids, np.concatenate([np.zeros(0), *(each.likelihood.numpy() for each in contacts)])
        )

    @classmethod
    def empty(cls, count: int) -> "ContactTable":
        """Those of so many agents that have met nobody: P_0 = 0 (rem:sampling_likelihood_init)."""
        return cls(Ragged.empty(count), np.zeros(0))

    @classmethod
    def concatenate(cls, parts: "Sequence[ContactTable]") -> "ContactTable":
        """The contacts of the agents of all parts, one part after the other."""
        likelihood = [one.likelihood for one in parts]
        return cls(
            Ragged.concatenate([one.ids for one in parts]),
            likelihood[0] if len(parts) == 1 else np.concatenate(likelihood),
        )

    def take(self, rows: Indices) -> "ContactTable":
        """The contacts of the agents in some places, in their order."""
        if len(rows) == len(self) and (rows == np.arange(len(self))).all():
            return self
        return ContactTable(self.ids.take(rows), self.likelihood[self.ids.flat_index(rows)])

    def forget(self, ids: Int[np.ndarray, " g"]) -> "ContactTable":
        """The contacts without some peers: nobody has met these."""
        kept = ~np.isin(self.ids.values, ids)
        return ContactTable(self.ids.filter(kept), self.likelihood[kept])

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, k: int) -> Contacts:
        ids = self.ids[k]
        likelihood = self.ids.with_values(self.likelihood)[k]
        return Contacts(torch.from_numpy(ids.copy()), torch.from_numpy(likelihood.copy()))

    def __iter__(self) -> Iterator[Contacts]:
        sizes = self.ids.sizes.tolist()
        both = (
            torch.split(torch.from_numpy(values.copy()), sizes)
            for values in (self.ids.values, self.likelihood)
        )
        return map(Contacts, *both)


@dataclass(frozen=True)
class AgentState:
    """All that several agents remember from one round to the next: whom they `met`, and the `states` that their rules
    keep, where these have a memory."""

    contacts: ContactTable
    rule_states: tuple[RuleState, ...]

    @classmethod
    def initial(cls, count: int) -> "AgentState":
        """That of so many agents before the first round."""
        return cls(ContactTable.empty(count), ({},) * count)

    @classmethod
    def concatenate(cls, parts: "Sequence[AgentState]") -> "AgentState":
        """That of the agents of all parts, one part after the other."""
        return cls(
            ContactTable.concatenate([one.contacts for one in parts]),
            tuple(itertools.chain(*(one.rule_states for one in parts))),
        )

    def updated(
        self, rows: Indices, contacts: ContactTable, rule_states: Sequence[RuleState]
    ) -> "AgentState":
        """The same where agents in some places now remember whom they `met`, and all keep `states`."""
        if len(rows) < len(self):
            others = complement(rows, len(self))
            contacts = ContactTable.concatenate([contacts, self.contacts.take(others)]).take(
                np.concatenate([rows, others]).argsort()
            )
        return AgentState(contacts, tuple(rule_states))

    def take(self, rows: Indices) -> "AgentState":
        """That of the agents in some places, in their order."""
        return AgentState(
            self.contacts.take(rows), tuple(self.rule_states[k] for k in rows.tolist())
        )

    def __len__(self) -> int:
        return len(self.contacts)


@dataclass(frozen=True)
class CandidatePeers:
    """Whom each of some agents may ask: one of some lists of ascending ids, of which `which` says the number, but for
    the peer in the place `without` of it; a place past its end leaves nobody out.

    Agents may share lists: nothing here but `ids` takes time or memory in proportion to the number of peers.
    """

    lists: Ragged
    list_index: Indices
    excluded: Int[np.ndarray, " a"]

    @classmethod
    def from_lists(
        cls,
        ids: Sequence[Int[np.ndarray, " _n"]],
        list_index: Indices | None = None,
        excluded: Int[np.ndarray, " a"] | None = None,
    ) -> "CandidatePeers":
        """Peers by lists of their ids, of which by default each agent has its own; each `but` for one of them, which
        may not be among them."""
        list_index = np.arange(len(ids)) if list_index is None else list_index
        lists = Ragged.from_arrays(ids)
        everyone = cls(lists, list_index, np.full(len(list_index), len(lists.values)))
        if excluded is None:
            return everyone
        found, places = everyone.find(np.arange(len(excluded)), excluded)
        everyone.excluded[found] = places
        return everyone

    def including_self(self, agents: Int[np.ndarray, " a"]) -> "CandidatePeers":
        """These and, for each agent, itself."""
        if (self.excluded < self.lists.sizes[self.list_index]).all():
            return dataclasses.replace(
                self, excluded=np.full_like(self.excluded, len(self.lists.values))
            )
        return CandidatePeers.from_lists(
            [np.union1d(self.ids(k), agents[k : k + 1]) for k in range(len(agents))]
        )

    @property
    def counts(self) -> Int[np.ndarray, " a"]:
        """How many each agent may ask."""
        lengths: np.ndarray = self.lists.sizes[self.list_index]
        return lengths - (self.excluded < lengths)

    def ids(self, k: int) -> Int[np.ndarray, " c"]:
        """All that the agent in place k may ask, in an array of its own."""
        found = self.lists[int(self.list_index[k])]
        return np.delete(found, self.excluded[k]) if self.excluded[k] < len(found) else found.copy()

    def find(
        self, agents: Indices, ids: Int[np.ndarray, " k"]
    ) -> tuple[Bool[np.ndarray, " k"], Int[np.ndarray, " f"]]:
        """Which of some ids are among the peers of the agents in some places, and where those are, counted from 0."""
        keys = self.lists.values
        wanted = ids
        which = self.list_index[agents]
        if not len(keys) or not len(ids):
            return np.zeros(len(ids), dtype=bool), np.zeros(0, np.int64)
        if len(self.lists) > 1:
            span = 1 + max(int(keys.max()), int(ids.max()))
            keys = self.lists.row_ids * span + keys
            wanted = which * span + ids
        places = keys.searchsorted(wanted)
        found: np.ndarray = keys.take(places, mode="clip") == wanted
        places -= self.lists.offsets[which]
        without = self.excluded[agents]
        found &= places != without
        places = places[found]
        return found, places - (places > without[found])

    def ids_at(self, agents: Indices, positions: Int[np.ndarray, " k"]) -> Int[np.ndarray, " k"]:
        """The ids of what agents have in some places, counted from 0."""
        starts = self.lists.offsets[self.list_index[agents]]
        found: np.ndarray = self.lists.values[
            starts + positions + (positions >= self.excluded[agents])
        ]
        return found


def match_history(
    state: RuleState, inputs: CriterionInput, ids: Int[Tensor, " m"]
) -> tuple[Int[Tensor, " k"], Bool[Tensor, " _s"], Int[Tensor, " _r"]]:
    """Whom a rule with memory, which sees `ids` now, keeps something of, ascending: these, and those in its state whom
    the agent has met; which in the state these are, and their places now. A peer under a new name has no past."""
    kept = state.get("ids", ids[:0])
    known = torch.isin(kept, torch.cat([inputs.context.contacts.ids, inputs.own_entry.ids]))
    whose = torch.from_numpy(np.union1d(kept[known], ids))
    return whose, known, torch.searchsorted(whose, kept[known])
