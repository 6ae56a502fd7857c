"""Lists of several agents, one after the other: their numbers in one array, and in another how many each agent has."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Shaped

Places = Int[np.ndarray, " _places"]
"""Places of agents among some."""


@dataclass(frozen=True)
class Lists:
    """A list of numbers for each of some agents: `values`, one agent's after those of the one before, and their
    `sizes`."""

    values: Shaped[np.ndarray, " k"]
    sizes: Int[np.ndarray, " a"]

    @classmethod
    def of(cls, each: Sequence[Shaped[np.ndarray, " _k"]]) -> "Lists":
        """From the list of each agent."""
        values = np.concatenate(each) if len(each) else np.zeros(0, np.int64)
        return cls(values, np.array([len(one) for one in each], np.int64))

    @classmethod
    def empty(cls, count: int) -> "Lists":
        """An empty list for each of so many agents."""
        return cls(np.zeros(0, np.int64), np.zeros(count, np.int64))

    @classmethod
    def join(cls, parts: "Sequence[Lists]") -> "Lists":
        """The lists of the agents of all parts, one part after the other."""
        if len(parts) == 1:
            return parts[0]
        return cls(np.concatenate([one.values for one in parts]), np.concatenate([one.sizes for one in parts]))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, k: int) -> Shaped[np.ndarray, " m"]:
        start = int(self.sizes[:k].sum())
        return self.values[start : start + int(self.sizes[k])]

    def __iter__(self) -> Iterator[Shaped[np.ndarray, " m"]]:
        return iter(np.split(self.values, self.sizes.cumsum()[:-1]) if len(self) else [])

    @property
    def starts(self) -> Int[np.ndarray, " a"]:
        """Where each list begins."""
        found: np.ndarray = self.sizes.cumsum() - self.sizes
        return found

    @property
    def owners(self) -> Int[np.ndarray, " k"]:
        """Whose each number is."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    def places(self, chosen: Places) -> Int[np.ndarray, " c"]:
        """Where the lists of some agents lie, in the order of these."""
        wanted = self.sizes[chosen]
        return np.repeat(self.starts[chosen] - (wanted.cumsum() - wanted), wanted) + np.arange(wanted.sum())

    def take(self, chosen: Places) -> "Lists":
        """The lists of some agents, in the order of these."""
        return Lists(self.values[self.places(chosen)], self.sizes[chosen])

    def only(self, kept: Bool[np.ndarray, " k"]) -> "Lists":
        """The lists without the numbers that are not kept."""
        if kept.all():
            return self
        return Lists(self.values[kept], np.bincount(self.owners[kept], minlength=len(self)))

    @classmethod
    def placed(cls, count: int, *parts: "tuple[Places, Lists]") -> "Lists":
        """The lists of so many agents: of those in some places, ascending, each part's, of the others empty ones."""
        if len(parts) == 1 and len(parts[0][0]) == count:
            return parts[0][1]
        there = np.concatenate([np.zeros(0, np.int64), *(places for places, _ in parts)])
        others = rest(there, count)
        whole = cls.join([*(lists for _, lists in parts), cls.empty(len(others))])
        return whole.take(np.concatenate([there, others]).argsort())

    def having(self, values: Shaped[np.ndarray, " k"]) -> "Lists":
        """Lists as long as these, of other numbers."""
        return Lists(values, self.sizes)

    def tolist(self) -> list[list[Any]]:
        """The list of each agent, in Python's numbers."""
        values, starts, ends = self.values.tolist(), self.starts.tolist(), self.sizes.cumsum().tolist()
        return [values[a:b] for a, b in zip(starts, ends, strict=True)]


def rest(places: Places, count: int) -> Places:
    """All places below `count` but these."""
    others = np.ones(count, dtype=bool)
    others[places] = False
    return np.flatnonzero(others)
