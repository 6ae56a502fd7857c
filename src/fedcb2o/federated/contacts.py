"""State of several agents, and their candidate peers, in arrays over the agents.

One agent is a group of one. Arrays keep the number of calls independent of the number of agents.

>>> import numpy as np
>>> candidates = CandidatePeers.from_lists([np.arange(4)], np.zeros(2, int), np.array([0, 3]))
>>> [candidates.ids(k).tolist() for k in range(2)]
[[1, 2, 3], [0, 1, 2]]
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fedcb2o.federated.ragged import Indices, Ragged
from fedcb2o.federated.types import Contacts, CriterionInput, RuleState


@dataclass(frozen=True)
class ContactTable:
    """Contacts of agents: ascending ids, and P_n^j, NaN for a peer that never answered.

    Of many agents, contacts take most of the memory that grows: ids have 32 bits between rounds.
    """

    ids: Ragged
    likelihood: Float[np.ndarray, " k"]

    @classmethod
    def from_contacts(cls, contacts: Sequence[Contacts]) -> "ContactTable":
        """Store the contacts of each agent in one table."""
        ids = Ragged.from_arrays([agent.ids.numpy() for agent in contacts])
        likelihood = [agent.likelihood.numpy() for agent in contacts]
        return cls(ids, np.concatenate([np.zeros(0), *likelihood]))

    @classmethod
    def empty(cls, count: int) -> "ContactTable":
        """Return no contacts for `count` agents: the start (rem:sampling_likelihood_init)."""
        return cls(Ragged.empty(count), np.zeros(0))

    @classmethod
    def concatenate(cls, batches: "Sequence[ContactTable]") -> "ContactTable":
        """Return the contacts of all batches, one batch after the other."""
        ids = Ragged.concatenate([batch.ids for batch in batches])
        likelihood = [batch.likelihood for batch in batches]
        return cls(ids, likelihood[0] if len(batches) == 1 else np.concatenate(likelihood))

    def take(self, indices: Indices) -> "ContactTable":
        """Return the contacts of some agents, in the order of `indices`."""
        if len(indices) == len(self) and (indices == np.arange(len(self))).all():
            return self
        return ContactTable(self.ids.take(indices), self.likelihood[self.ids.flat_index(indices)])

    def forget(self, ids: Int[np.ndarray, " g"]) -> "ContactTable":
        """Return the contacts without the peers `ids`."""
        keep = ~np.isin(self.ids.values, ids)
        return ContactTable(self.ids.filter(keep), self.likelihood[keep])

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, k: int) -> Contacts:
        ids = self.ids[k]
        likelihood = Ragged(self.likelihood, self.ids.sizes)[k]
        return Contacts(torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(likelihood.copy()))

    def __iter__(self) -> Iterator[Contacts]:
        sizes = self.ids.sizes.tolist()
        ids = torch.split(torch.from_numpy(self.ids.values.astype(np.int64)), sizes)
        likelihood = torch.split(torch.from_numpy(self.likelihood.copy()), sizes)
        return map(Contacts, ids, likelihood)


@dataclass(frozen=True)
class AgentState:
    """State that agents carry from round to round; that of a rule without memory is empty.

    `clock` is the state of the simulated time; only checkpoints have it here.
    """

    contacts: ContactTable
    rule_states: tuple[RuleState, ...]
    clock: Float[np.ndarray, " N_and_1"] | None = None

    @classmethod
    def initial(cls, count: int) -> "AgentState":
        """Return the state of `count` agents before the first round."""
        return cls(ContactTable.empty(count), ({},) * count)

    @classmethod
    def concatenate(cls, batches: "Sequence[AgentState]") -> "AgentState":
        """Return the state of all batches, one batch after the other."""
        contacts = ContactTable.concatenate([batch.contacts for batch in batches])
        return cls(contacts, tuple(itertools.chain(*(batch.rule_states for batch in batches))))

    def without(self, ids: Int[np.ndarray, " g"]) -> "AgentState":
        """Return the state of agents that never met the peers `ids`."""
        return AgentState(self.contacts.forget(ids), self.rule_states)

    def updated(
        self, indices: Indices, contacts: ContactTable, rule_states: Sequence[RuleState]
    ) -> "AgentState":
        """Return the state with new contacts at ascending indices, and all rule states."""
        count = len(self.rule_states)
        if len(indices) < count:
            # Agents that are not in `indices` keep their contacts.
            others = np.setdiff1d(np.arange(count), indices, assume_unique=True)
            order = np.concatenate([indices, others]).argsort()
            both = ContactTable.concatenate([contacts, self.contacts.take(others)])
            contacts = both.take(order)
        return AgentState(contacts, tuple(rule_states))

    def take(self, indices: Indices) -> "AgentState":
        """Return the state of some agents, in the order of `indices`."""
        rule_states = tuple(self.rule_states[k] for k in indices.tolist())
        return AgentState(self.contacts.take(indices), rule_states)


@dataclass(frozen=True)
class CandidatePeers:
    """Peers that each of several agents may ask: a shared list of ids, less one position.

    Ids ascend in each list. `excluded` is a position in the agent's list; past the end, it excludes
    none.
    """

    # Agents may share a list, so that only `ids` takes time in proportion to the number of peers.
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
        """Make candidates from ascending lists, by default one each, less an `excluded` id."""
        list_index = np.arange(len(ids)) if list_index is None else list_index
        lists = Ragged.from_arrays(ids)
        candidates = cls(lists, list_index, np.full(len(list_index), len(lists.values)))
        if excluded is None:
            return candidates
        is_found, positions = candidates.find(np.arange(len(excluded)), excluded)
        candidates.excluded[is_found] = positions
        return candidates

    def including_self(self, agents: Int[np.ndarray, " a"]) -> "CandidatePeers":
        """Return the candidates with each agent itself among its own."""
        # Each agent is in its own list, and was only left out of it.
        if (self.excluded < self.lists.sizes[self.list_index]).all():
            past_end = np.full_like(self.excluded, len(self.lists.values))
            return dataclasses.replace(self, excluded=past_end)
        lists = [np.union1d(self.ids(k), agents[k : k + 1]) for k in range(len(agents))]
        return CandidatePeers.from_lists(lists)

    @property
    def counts(self) -> Int[np.ndarray, " a"]:
        """Number of candidates of each agent."""
        lengths: np.ndarray = self.lists.sizes[self.list_index]
        return lengths - (self.excluded < lengths)

    def ids(self, k: int) -> Int[np.ndarray, " c"]:
        """Return a copy of the candidates of the agent at index k, ascending."""
        ids = self.lists[int(self.list_index[k])]
        return np.delete(ids, self.excluded[k]) if self.excluded[k] < len(ids) else ids.copy()

    def find(
        self, agents: Indices, ids: Int[np.ndarray, " k"]
    ) -> tuple[Bool[np.ndarray, " k"], Int[np.ndarray, " f"]]:
        """Find ids among the candidates of agents; `agents` has one index for each id.

        Returns whether each id is a candidate of its agent, and the positions of those that are.
        """
        keys = self.lists.values
        list_index = self.list_index[agents]
        if not len(keys) or not len(ids):
            return np.zeros(len(ids), dtype=bool), np.zeros(0, np.int64)

        is_found: np.ndarray
        if len(self.lists) == 1 and keys[-1] - keys[0] == len(keys) - 1:
            # All agents, such as without a graph: a search would take time in each round.
            positions = ids - keys[0]
            is_found = (positions >= 0) & (positions < len(keys))
        else:
            # One number per pair of list and id, ascending, so that one search finds all.
            span = 1 + max(int(keys.max()), int(ids.max()))
            keys = self.lists.list_index * span + keys
            wanted = list_index * span + ids
            positions = keys.searchsorted(wanted)
            is_found = keys.take(positions, mode="clip") == wanted
            positions -= self.lists.offsets[list_index]
        excluded = self.excluded[agents]
        is_found &= positions != excluded
        positions = positions[is_found]
        return is_found, positions - (positions > excluded[is_found])

    def ids_at(self, positions: Ragged) -> Ragged:
        """Return the ids at positions among the candidates of agents, counted from 0."""
        agents = positions.list_index
        offsets = self.lists.offsets[self.list_index[agents]]
        shift = positions.values >= self.excluded[agents]
        return Ragged(self.lists.values[offsets + positions.values + shift], positions.sizes)


def match_history(
    state: RuleState, inputs: CriterionInput, ids: Int[Tensor, " m"]
) -> tuple[Int[Tensor, " k"], Bool[Tensor, " _s"], Int[Tensor, " _r"]]:
    """Match the peers in a rule's state, under "ids", with those received now.

    Returns the ids to keep, ascending; which entries of the state stay; and their positions among
    the ids.
    """
    kept = state.get("ids", ids[:0])
    # A peer under a new identity has no past: entries of an id that is no contact are dropped.
    is_known = torch.isin(kept, torch.cat([inputs.context.contacts.ids, inputs.own_entry.ids]))
    union = torch.from_numpy(np.union1d(kept[is_known], ids))
    return union, is_known, torch.searchsorted(union, kept[is_known])
