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

from fedcb2o.federated.ragged import Lists, Places, rest
from fedcb2o.federated.types import Contacts, Judged, State


@dataclass(frozen=True)
class Met:
    """The contacts of several agents: the `ids` of those whom each met, ascending, and the `likelihood` of each.

    Who gets an agent's `Contacts` gets copies.
    """

    ids: Lists
    likelihood: Float[np.ndarray, " k"]

    @classmethod
    def of(cls, contacts: Sequence[Contacts]) -> "Met":
        """The contacts of several agents."""
        ids = Lists.of([each.ids.numpy() for each in contacts])
        return cls(ids, np.concatenate([np.zeros(0), *(each.likelihood.numpy() for each in contacts)]))

    @classmethod
    def nobody(cls, count: int) -> "Met":
        """Those of so many agents that have met nobody: P_0 = 0 (rem:sampling_likelihood_init)."""
        return cls(Lists.empty(count), np.zeros(0))

    @classmethod
    def join(cls, parts: "Sequence[Met]") -> "Met":
        """The contacts of the agents of all parts, one part after the other."""
        likelihood = [one.likelihood for one in parts]
        return cls(
            Lists.join([one.ids for one in parts]), likelihood[0] if len(parts) == 1 else np.concatenate(likelihood)
        )

    def take(self, chosen: Places) -> "Met":
        """The contacts of the agents in some places, in their order."""
        if len(chosen) == len(self) and (chosen == np.arange(len(self))).all():
            return self
        return Met(self.ids.take(chosen), self.likelihood[self.ids.places(chosen)])

    def forget(self, ids: Int[np.ndarray, " g"]) -> "Met":
        """The contacts without some peers: nobody has met these."""
        kept = ~np.isin(self.ids.values, ids)
        return Met(self.ids.only(kept), self.likelihood[kept])

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, k: int) -> Contacts:
        ids, likelihood = self.ids[k], self.ids.having(self.likelihood)[k]
        return Contacts(torch.from_numpy(ids.copy()), torch.from_numpy(likelihood.copy()))

    def __iter__(self) -> Iterator[Contacts]:
        sizes = self.ids.sizes.tolist()
        both = (torch.split(torch.from_numpy(values.copy()), sizes) for values in (self.ids.values, self.likelihood))
        return map(Contacts, *both)


@dataclass(frozen=True)
class Memory:
    """All that several agents remember from one round to the next: whom they `met`, and the `states` that their rules
    keep, where these have a memory."""

    met: Met
    states: tuple[State, ...]

    @classmethod
    def blank(cls, count: int) -> "Memory":
        """That of so many agents before the first round."""
        return cls(Met.nobody(count), ({},) * count)

    @classmethod
    def join(cls, parts: "Sequence[Memory]") -> "Memory":
        """That of the agents of all parts, one part after the other."""
        return cls(Met.join([one.met for one in parts]), tuple(itertools.chain(*(one.states for one in parts))))

    def after(self, those: Places, met: Met, states: Sequence[State]) -> "Memory":
        """The same where agents in some places now remember whom they `met`, and all keep `states`."""
        if len(those) < len(self):
            others = rest(those, len(self))
            met = Met.join([met, self.met.take(others)]).take(np.concatenate([those, others]).argsort())
        return Memory(met, tuple(states))

    def take(self, chosen: Places) -> "Memory":
        """That of the agents in some places, in their order."""
        return Memory(self.met.take(chosen), tuple(self.states[k] for k in chosen.tolist()))

    def __len__(self) -> int:
        return len(self.met)


@dataclass(frozen=True)
class Peers:
    """Whom each of some agents may ask: one of some lists of ascending ids, of which `which` says the number, but for
    the peer in the place `without` of it; a place past its end leaves nobody out.

    Agents may share lists: nothing here but `ids` takes time or memory in proportion to the number of peers.
    """

    lists: Lists
    which: Places
    without: Int[np.ndarray, " a"]

    @classmethod
    def of(
        cls,
        ids: Sequence[Int[np.ndarray, " _n"]],
        which: Places | None = None,
        but: Int[np.ndarray, " a"] | None = None,
    ) -> "Peers":
        """Peers by lists of their ids, of which by default each agent has its own; each `but` for one of them, which
        may not be among them."""
        which, lists = np.arange(len(ids)) if which is None else which, Lists.of(ids)
        everyone = cls(lists, which, np.full(len(which), len(lists.values)))
        if but is None:
            return everyone
        found, places = everyone.find(np.arange(len(but)), but)
        everyone.without[found] = places
        return everyone

    def and_(self, agents: Int[np.ndarray, " a"]) -> "Peers":
        """These and, for each agent, itself."""
        if (self.without < self.lists.sizes[self.which]).all():
            return dataclasses.replace(self, without=np.full_like(self.without, len(self.lists.values)))
        return Peers.of([np.union1d(self.ids(k), agents[k : k + 1]) for k in range(len(agents))])

    @property
    def counts(self) -> Int[np.ndarray, " a"]:
        """How many each agent may ask."""
        lengths: np.ndarray = self.lists.sizes[self.which]
        return lengths - (self.without < lengths)

    def ids(self, k: int) -> Int[np.ndarray, " c"]:
        """All that the agent in place k may ask, in an array of its own."""
        found = self.lists[int(self.which[k])]
        return np.delete(found, self.without[k]) if self.without[k] < len(found) else found.copy()

    def find(self, agents: Places, ids: Int[np.ndarray, " k"]) -> tuple[Bool[np.ndarray, " k"], Int[np.ndarray, " f"]]:
        """Which of some ids are among the peers of the agents in some places, and where those are, counted from 0."""
        keys, wanted, which = self.lists.values, ids, self.which[agents]
        if not len(keys) or not len(ids):
            return np.zeros(len(ids), dtype=bool), np.zeros(0, np.int64)
        if len(self.lists) > 1:
            span = 1 + max(int(keys.max()), int(ids.max()))
            keys, wanted = self.lists.owners * span + keys, which * span + ids
        places = keys.searchsorted(wanted)
        found: np.ndarray = keys.take(places, mode="clip") == wanted
        places -= self.lists.starts[which]
        without = self.without[agents]
        found &= places != without
        places = places[found]
        return found, places - (places > without[found])

    def at(self, agents: Places, places: Int[np.ndarray, " k"]) -> Int[np.ndarray, " k"]:
        """The ids of what agents have in some places, counted from 0."""
        starts = self.lists.starts[self.which[agents]]
        found: np.ndarray = self.lists.values[starts + places + (places >= self.without[agents])]
        return found


def recalled(
    state: State, judged: Judged, ids: Int[Tensor, " m"]
) -> tuple[Int[Tensor, " k"], Bool[Tensor, " _s"], Int[Tensor, " _r"]]:
    """Whom a rule with memory, which sees `ids` now, keeps something of, ascending: these, and those in its state whom
    the agent has met; which in the state these are, and their places now. A peer under a new name has no past."""
    kept = state.get("ids", ids[:0])
    known = torch.isin(kept, torch.cat([judged.local.contacts.ids, judged.me.ids]))
    whose = torch.from_numpy(np.union1d(kept[known], ids))
    return whose, known, torch.searchsorted(whose, kept[known])
