"""What agents hold: labelled samples, and whose they are where agents bring their own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """Labelled samples: `x` is uint8 pixels or floating-point features, `y` the class of each sample, or what else is
    to be told of it, as its loss has it."""

    x: Shaped[Tensor, "n *features"]
    y: Shaped[Tensor, "n *target"]

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        return f"Shard({len(self)} samples of shape {tuple(self.x.shape[1:])})"

    def part(self, chosen: Int[np.ndarray, " m"]) -> "Shard":
        """Some of the samples."""
        places = torch.from_numpy(chosen)
        return Shard(self.x[places], self.y[places])

    def to(self, device: torch.device | str) -> "Shard":
        """The same samples on a device."""
        return Shard(self.x.to(device), self.y.to(device))


@dataclass(frozen=True)
class Owners:
    """Whose each sample is: the number of one of these `names`.

    `test` is whose own test sample each of the test set is; -1: it tests everybody. `validates` are the samples of the
    pool that their owner brought for validation; of an owner without, a share is held out.
    """

    names: tuple[str, ...]
    pool: Int[Tensor, " n"]
    test: Int[Tensor, " t"]
    validates: Bool[Tensor, " n"]

    def __repr__(self) -> str:
        counts = torch.bincount(self.pool, minlength=len(self.names)).tolist()
        few = [f"{name}: {count}" for name, count in zip(self.names, counts, strict=True)][:8]
        more = len(self.names) - len(few)
        return f"Owners({', '.join(few)}{f' and {more} more' if more else ''})"


class DatasetNames(NamedTuple):
    """The names in a data set: of its classes, and of its owners."""

    classes: tuple[str, ...]
    owners: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dataset:
    """A pool of samples, and a test set that only reports. Agents share the pool out or, where it has `owners`, hold
    what is their own.

    `class_names` names the classes in order; labels run from 0 to C - 1. It is empty where samples are of no class.
    """

    pool: Shard
    test: Shard
    class_names: tuple[str, ...]
    owners: Owners | None = None

    @property
    def num_classes(self) -> int:
        """C, the number of classes; 1 where there are none, since all samples count as one then."""
        return max(1, len(self.class_names))

    @property
    def num_outputs(self) -> int:
        """How many numbers a network gives for a sample: one for each class, or for each number to be told."""
        return len(self.class_names) or max(1, self.pool.y[:1].numel())

    @property
    def names(self) -> DatasetNames:
        """All that a data set holds beside tensors."""
        return DatasetNames(self.class_names, () if self.owners is None else self.owners.names)

    def labels(self, samples: Shard) -> Int[Tensor, " n"]:
        """The class of each of some of its samples; 0 of all where there are none."""
        return samples.y if self.class_names else torch.zeros(len(samples), dtype=torch.int64)


def hold_out(
    samples: Shard, per_class: Sequence[int], draw: np.random.Generator
) -> tuple[Shard, Shard]:
    """The samples without, and those with, `per_class[c]` random ones of each class c: a pool and a test set.

    Both keep the order that the samples came in.
    """
    held = stratified_mask(samples.y.numpy(), per_class, draw)
    return samples.part(np.flatnonzero(~held)), samples.part(np.flatnonzero(held))


def stratified_mask(
    groups: Int[np.ndarray, " n"], counts: Sequence[int], draw: np.random.Generator
) -> Bool[np.ndarray, " n"]:
    """Which of n samples are `counts[g]` random ones of each group g."""
    held = np.zeros(len(groups), dtype=bool)
    for members, count in zip(group_members(groups, len(counts)), counts, strict=True):
        held[draw.choice(members, count, replace=False)] = True
    return held


def group_members(groups: Int[np.ndarray, " n"], count: int) -> list[Int[np.ndarray, " _m"]]:
    """The places of the members of each of so many groups, ascending; what is of group -1 is in none."""
    order = np.argsort(groups, kind="stable")
    return np.split(order, np.searchsorted(groups[order], np.arange(count + 1)))[1:-1]


def features(x: Shaped[Tensor, "n *features"]) -> Float[Tensor, "n *features"]:
    """What a network reads: pixels (uint8) as numbers in [0, 1], floating-point features as they are."""
    return x.float() / 255 if x.dtype == torch.uint8 else x.float()
