"""Lists of several agents, one after the other: their numbers in one array, and in another how many each agent has."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Shaped

Indices = Int[np.ndarray, " _places"]
"""Places of agents among some."""


@dataclass(frozen=True)
class Ragged:
    """A list of numbers for each of some agents: `values`, one agent's after those of the one before, and their
    `sizes`."""

    values: Shaped[np.ndarray, " k"]
    sizes: Int[np.ndarray, " a"]

    @classmethod
    def from_arrays(cls, arrays: Sequence[Shaped[np.ndarray, " _k"]]) -> "Ragged":
        """From the list of each agent."""
        values = np.concatenate(arrays) if len(arrays) else np.zeros(0, np.int64)
        return cls(values, np.array([len(one) for one in arrays], np.int64))

    @classmethod
    def empty(cls, count: int) -> "Ragged":
        """An empty list for each of so many agents."""
        return cls(np.zeros(0, np.int64), np.zeros(count, np.int64))

    @classmethod
    def concatenate(cls, parts: "Sequence[Ragged]") -> "Ragged":
        """The lists of the agents of all parts, one part after the other."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            np.concatenate([one.values for one in parts]),
            np.concatenate([one.sizes for one in parts]),
        )

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, k: int) -> Shaped[np.ndarray, " m"]:
        start = int(self.sizes[:k].sum())
        return self.values[start : start + int(self.sizes[k])]

    def __iter__(self) -> Iterator[Shaped[np.ndarray, " m"]]:
        return iter(np.split(self.values, self.sizes.cumsum()[:-1]) if len(self) else [])

    @property
    def offsets(self) -> Int[np.ndarray, " a"]:
        """Where each list begins."""
        found: np.ndarray = self.sizes.cumsum() - self.sizes
        return found

    @property
    def row_ids(self) -> Int[np.ndarray, " k"]:
        """Whose each number is."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    def flat_index(self, rows: Indices) -> Int[np.ndarray, " c"]:
        """Where the lists of some agents lie, in the order of these."""
        wanted = self.sizes[rows]
        return np.repeat(self.offsets[rows] - (wanted.cumsum() - wanted), wanted) + np.arange(
            wanted.sum()
        )

    def take(self, rows: Indices) -> "Ragged":
        """The lists of some agents, in the order of these."""
        return Ragged(self.values[self.flat_index(rows)], self.sizes[rows])

    def filter(self, keep: Bool[np.ndarray, " k"]) -> "Ragged":
        """The lists without the numbers that are not kept."""
        if keep.all():
            return self
        return Ragged(self.values[keep], np.bincount(self.row_ids[keep], minlength=len(self)))

    @classmethod
    def scatter(cls, count: int, *parts: "tuple[Indices, Ragged]") -> "Ragged":
        """The lists of so many agents: of those in some places, ascending, each part's, of the others empty ones."""
        if len(parts) == 1 and len(parts[0][0]) == count:
            return parts[0][1]
        there = np.concatenate([np.zeros(0, np.int64), *(places for places, _ in parts)])
        others = complement(there, count)
        whole = cls.concatenate([*(lists for _, lists in parts), cls.empty(len(others))])
        return whole.take(np.concatenate([there, others]).argsort())

    def with_values(self, values: Shaped[np.ndarray, " k"]) -> "Ragged":
        """Lists as long as these, of other numbers."""
        return Ragged(values, self.sizes)

    def tolist(self) -> list[list[Any]]:
        """The list of each agent, in Python's numbers."""
        values = self.values.tolist()
        starts = self.offsets.tolist()
        ends = self.sizes.cumsum().tolist()
        return [values[a:b] for a, b in zip(starts, ends, strict=True)]


def complement(indices: Indices, count: int) -> Indices:
    """All places below `count` but these."""
    others = np.ones(count, dtype=bool)
    others[indices] = False
    return np.flatnonzero(others)
