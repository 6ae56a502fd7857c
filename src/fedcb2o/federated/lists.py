"""Lists of several agents, one after the other: their numbers in one array, and in another how many each agent has."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, Shaped

Sizes = Int[np.ndarray, " a"]
Lists = tuple[Int[np.ndarray, " _k"], Int[np.ndarray, " _a"]]


def joined(found: Sequence[Int[np.ndarray, " _k"]]) -> Lists:
    """Some lists, one after the other, and how long each is."""
    return np.concatenate(found), np.array([len(each) for each in found])


def owners(sizes: Sizes) -> Int[np.ndarray, " k"]:
    """Whose each number is."""
    return np.repeat(np.arange(len(sizes)), sizes)


def places(sizes: Sizes, chosen: Int[np.ndarray, " c"]) -> Int[np.ndarray, " k"]:
    """Where the lists of some agents lie, in the order of these."""
    starts, wanted = sizes.cumsum() - sizes, sizes[chosen]
    return np.repeat(starts[chosen] - (wanted.cumsum() - wanted), wanted) + np.arange(wanted.sum())


def part(values: Shaped[np.ndarray, " k"], sizes: Sizes, k: int) -> Shaped[np.ndarray, " m"]:
    """The list of the agent in place `k`."""
    start = int(sizes[:k].sum())
    return values[start : start + int(sizes[k])]


def split(values: list[float] | list[int], sizes: Sizes) -> list[list[float]] | list[list[int]]:
    """The list of each agent."""
    starts, ends = (sizes.cumsum() - sizes).tolist(), sizes.cumsum().tolist()
    return [values[a:b] for a, b in zip(starts, ends, strict=True)]  # type: ignore[return-value]
