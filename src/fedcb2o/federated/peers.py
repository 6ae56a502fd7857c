"""Of several agents at once: whom each has met so far, and whom it may ask. One agent is several of which there is one.

All is in arrays over the agents, so that what is decided for many costs few calls.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from fedcb2o.federated import lists
from fedcb2o.federated.types import Contacts


@dataclass(frozen=True)
class Met:
    """The contacts of several agents, one agent's after those of the one before; `sizes` says how many each has."""

    ids: Int[np.ndarray, " k"]
    likelihood: Float[np.ndarray, " k"]
    sizes: lists.Sizes

    @classmethod
    def of(cls, contacts: Sequence[Contacts]) -> "Met":
        """The contacts of several agents."""
        ids, likelihood = ([getattr(each, name).numpy() for each in contacts] for name in ("ids", "likelihood"))
        return cls(np.concatenate(ids), np.concatenate(likelihood), np.array([len(each) for each in ids]))

    @classmethod
    def joined(cls, parts: "Sequence[Met]") -> "Met":
        """The contacts of the agents of all parts, one part after the other."""
        found = ([getattr(one, name) for one in parts if len(one)] for name in ("ids", "likelihood", "sizes"))
        return cls(*(each[0] if len(each) == 1 else np.concatenate(each) for each in found))

    def of_some(self, chosen: Int[np.ndarray, " c"]) -> "Met":
        """The contacts of the agents in some places, in their order."""
        if len(chosen) == len(self) and (chosen == np.arange(len(self))).all():
            return self
        places = lists.places(self.sizes, chosen)
        return Met(self.ids[places], self.likelihood[places], self.sizes[chosen])

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, k: int) -> Contacts:
        ids, likelihood = (lists.part(values, self.sizes, k) for values in (self.ids, self.likelihood))
        return Contacts(torch.from_numpy(ids), torch.from_numpy(likelihood))

    def __iter__(self) -> Iterator[Contacts]:
        sizes = self.sizes.tolist()
        return map(Contacts, *(torch.split(torch.from_numpy(values), sizes) for values in (self.ids, self.likelihood)))


@dataclass(frozen=True)
class Peers:
    """Whom each of some agents may ask: `which` of some lists of ascending ids, but for the one in the place `without`
    of it, where there is such a place.

    The lists lie one after the other, and agents may share them: nothing here but `ids` takes time or memory in
    proportion to the number of peers.
    """

    ids_of_lists: Int[np.ndarray, " n"]
    lengths: Int[np.ndarray, " l"]
    which: Int[np.ndarray, " a"]
    without: Int[np.ndarray, " a"]

    @classmethod
    def of(
        cls,
        ids: Sequence[Int[np.ndarray, " _n"]],
        which: Int[np.ndarray, " a"] | None = None,
        but: Int[np.ndarray, " a"] | None = None,
    ) -> "Peers":
        """Peers by lists of their ids, of which by default each agent has its own; each `but` for one of them, which
        may not be among them."""
        which = np.arange(len(ids)) if which is None else which
        whole = ids[0] if len(ids) == 1 else np.concatenate(ids)
        everyone = cls(whole, np.array([len(each) for each in ids]), which, np.full(len(which), len(whole)))
        if but is None:
            return everyone
        found, places = everyone.find(np.arange(len(but)), but)
        everyone.without[found] = places
        return everyone

    def and_(self, agents: Int[np.ndarray, " a"]) -> "Peers":
        """These and, for each agent, itself."""
        if (self.without < self.lengths[self.which]).all():
            return dataclasses.replace(self, without=np.full_like(self.without, len(self.ids_of_lists)))
        return Peers.of([np.union1d(self.ids(k), agents[k : k + 1]) for k in range(len(agents))])

    @property
    def counts(self) -> lists.Sizes:
        """How many each agent may ask."""
        lengths: np.ndarray = self.lengths[self.which]
        return lengths - (self.without < lengths)

    def ids(self, k: int) -> Int[np.ndarray, " c"]:
        """All that the agent in place k may ask, in an array of its own."""
        found = lists.part(self.ids_of_lists, self.lengths, int(self.which[k]))
        return np.delete(found, self.without[k]) if self.without[k] < len(found) else found.copy()

    def find(
        self, agents: Int[np.ndarray, " k"], ids: Int[np.ndarray, " k"]
    ) -> tuple[Bool[np.ndarray, " k"], Int[np.ndarray, " f"]]:
        """Which of some ids are among the peers of the agents in some places, and where those are, counted from 0."""
        if not len(self.ids_of_lists) or not len(ids):
            return np.zeros(len(ids), dtype=bool), np.zeros(0, np.int64)
        keys, wanted, which = self.ids_of_lists, ids, self.which[agents]
        if len(self.lengths) > 1:
            span = 1 + max(int(keys.max()), int(ids.max()))
            keys, wanted = lists.owners(self.lengths) * span + keys, which * span + ids
        places = keys.searchsorted(wanted)
        found: np.ndarray = keys.take(places, mode="clip") == wanted
        places -= self._starts[which]
        without = self.without[agents]
        found &= places != without
        places = places[found]
        return found, places - (places > without[found])

    def at(self, agents: Int[np.ndarray, " k"], places: Int[np.ndarray, " k"]) -> Int[np.ndarray, " k"]:
        """The ids of what agents have in some places, counted from 0."""
        found: np.ndarray = self.ids_of_lists[
            self._starts[self.which[agents]] + places + (places >= self.without[agents])
        ]
        return found

    @property
    def _starts(self) -> Int[np.ndarray, " l"]:
        starts: np.ndarray = self.lengths.cumsum() - self.lengths
        return starts
