"""Lists of several agents, stored one after the other in one array.

>>> import numpy as np
>>> peers = Ragged.from_arrays([np.array([1, 4]), np.array([], int), np.array([2])])
>>> peers.take(np.array([2, 0])).tolist()
[[2], [1, 4]]
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NewType

import numpy as np
from jaxtyping import Bool, Int, Shaped

Indices = Int[np.ndarray, " _indices"]
"""Indices of agents in a group, or of lists in a `Ragged`."""

# The kinds of integers in a round. A type checker tells them apart.
AgentIds = NewType("AgentIds", Int[np.ndarray, " _agents"])
"""Ids of agents in the run."""
Members = NewType("Members", Int[np.ndarray, " _members"])
"""Indices of agents in their group."""
Positions = NewType("Positions", Int[np.ndarray, " _positions"])
"""Indices of agents in a batch of members."""
Entries = NewType("Entries", Int[np.ndarray, " _entries"])
"""Indices of received models in the flat arrays of an inbox, and of its decisions."""
Rows = NewType("Rows", Int[np.ndarray, " _rows"])
"""Rows of the model buffer."""


@dataclass(frozen=True)
class Ragged:
    """One list of numbers per agent, stored one after the other in `values`."""

    values: Shaped[np.ndarray, " k"]
    sizes: Int[np.ndarray, " a"]

    @classmethod
    def from_arrays(cls, arrays: Sequence[Shaped[np.ndarray, " _k"]]) -> "Ragged":
        """Store one array per agent."""
        values = np.concatenate(arrays) if len(arrays) else np.zeros(0, np.int64)
        return cls(values, np.array([len(array) for array in arrays], np.int64))

    @classmethod
    def empty(cls, count: int) -> "Ragged":
        """Return `count` empty lists."""
        return cls(np.zeros(0, np.int64), np.zeros(count, np.int64))

    @classmethod
    def concatenate(cls, batches: "Sequence[Ragged]") -> "Ragged":
        """Return all lists, those of one argument after the other."""
        if len(batches) == 1:
            return batches[0]
        values = np.concatenate([batch.values for batch in batches])
        return cls(values, np.concatenate([batch.sizes for batch in batches]))

    @classmethod
    def scatter(cls, count: int, *parts: "tuple[Indices, Ragged]") -> "Ragged":
        """Put each argument's lists at its ascending indices, among `count` empty lists."""
        # A part with all lists is the result.
        for indices, lists in parts:
            if len(indices) == count:
                return lists
        filled = np.concatenate([np.zeros(0, np.int64), *(indices for indices, _ in parts)])
        others = np.setdiff1d(np.arange(count), filled, assume_unique=True)
        whole = cls.concatenate([*(lists for _, lists in parts), cls.empty(len(others))])
        return whole.take(np.concatenate([filled, others]).argsort())

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, k: int) -> Shaped[np.ndarray, " m"]:
        start = int(self.sizes[:k].sum())
        return self.values[start : start + int(self.sizes[k])]

    def __iter__(self) -> Iterator[Shaped[np.ndarray, " m"]]:
        ends = self.sizes.cumsum()
        starts = (ends - self.sizes).tolist()
        return (self.values[a:b] for a, b in zip(starts, ends.tolist(), strict=True))

    @property
    def offsets(self) -> Int[np.ndarray, " a"]:
        """Index in `values` at which each list begins."""
        offsets: np.ndarray = self.sizes.cumsum() - self.sizes
        return offsets

    @property
    def list_index(self) -> Int[np.ndarray, " k"]:
        """Index of the list that holds each number."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    def flat_index(self, indices: Indices) -> Int[np.ndarray, " c"]:
        """Return the indices in `values` of some lists, in the order of `indices`."""
        sizes = self.sizes[indices]
        # From the place in the result to that in `values`.
        shifts = self.offsets[indices] - (sizes.cumsum() - sizes)
        return np.repeat(shifts, sizes) + np.arange(sizes.sum())

    def take(self, indices: Indices) -> "Ragged":
        """Return some lists, in the order of `indices`."""
        return Ragged(self.values[self.flat_index(indices)], self.sizes[indices])

    def filter(self, keep: Bool[np.ndarray, " k"]) -> "Ragged":
        """Return the lists without the numbers whose `keep` is False."""
        if keep.all():
            return self
        sizes = np.bincount(self.list_index[keep], minlength=len(self))
        return Ragged(self.values[keep], sizes)

    def tolist(self) -> list[list[Any]]:
        """Return the lists as Python numbers."""
        values = self.values.tolist()
        starts = self.offsets.tolist()
        ends = self.sizes.cumsum().tolist()
        return [values[a:b] for a, b in zip(starts, ends, strict=True)]
