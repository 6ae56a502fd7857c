"""Labelled samples, data sets, and the owners of samples."""

import functools
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from fedcb2o.data._sample_format import TOKEN_TYPES, ValueRange, value_range


@dataclass(frozen=True)
class Shard:
    """Labelled samples.

    Attributes:
        x: Samples [n, ...]: uint8 pixels, int32 or int64 tokens, or floating-point features.
        y: Class of each sample [n], or the targets of a regression [n] or [n, k].
    """

    x: Shaped[Tensor, "n *features"]
    y: Shaped[Tensor, "n *target"]

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        return f"Shard({len(self)} samples of shape {tuple(self.x.shape[1:])})"

    def part(self, chosen: Int[np.ndarray, " m"]) -> "Shard":
        """Return chosen samples, in the order of the indices."""
        indices = torch.from_numpy(chosen)
        return Shard(self.x[indices], self.y[indices])

    def to(self, device: torch.device | str) -> "Shard":
        """Return the samples on a device."""
        return Shard(self.x.to(device), self.y.to(device))


@dataclass(frozen=True)
class Owners:
    """Owners of the samples in a data set, as indices into `names`.

    Attributes:
        names: Names of the owners.
        pool: Owner of each sample in the pool.
        test: Owner of each test sample; -1 for samples that test every agent.
        validates: Samples of the pool that their owner reserved for validation. Agents without
            any hold out a share.
    """

    names: tuple[str, ...]
    pool: Int[Tensor, " n"]
    test: Int[Tensor, " t"]
    validates: Bool[Tensor, " n"]

    def __repr__(self) -> str:
        counts = torch.bincount(self.pool, minlength=len(self.names)).tolist()
        listed = [f"{name}: {count}" for name, count in zip(self.names, counts, strict=True)][:8]
        remaining = len(self.names) - len(listed)
        return f"Owners({', '.join(listed)}{f' and {remaining} more' if remaining else ''})"


@dataclass(frozen=True)
class Groups:
    """Groups of samples that no split divides, such as recordings, patients or days.

    Attributes:
        pool: Group of each sample in the pool, a whole number from 0.
        by_time: Whether groups are numbered in the order of time, so that splits hold out the last
            ones.
    """

    pool: Int[Tensor, " n"]
    by_time: bool = False

    def part(self, chosen: Int[np.ndarray, " m"]) -> "Groups":
        """Return the groups of chosen samples of the pool, in the order of the indices."""
        return Groups(self.pool[torch.from_numpy(chosen)], self.by_time)


class DatasetNames(NamedTuple):
    """Names of the classes and of the owners in a data set."""

    classes: tuple[str, ...]
    owners: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dataset:
    """A pool of samples for the agents, and a test set.

    Attributes:
        pool: Samples that are distributed among the agents; with `owners`, each agent holds its
            own samples.
        test: Test samples.
        class_names: Names of the classes 0 to C - 1; empty without classes.
        owners: Owners of the samples, if agents bring their own data.
        groups: Groups of samples that no split divides.
        is_checked: Whether `dataset` or `datasets` made and checked it.
    """

    pool: Shard
    test: Shard
    class_names: tuple[str, ...]
    owners: Owners | None = None
    groups: Groups | None = None
    is_checked: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Write the names of classes in one way, Unicode's composed form (NFC)."""
        names = self.class_names
        if isinstance(names, tuple) and all(isinstance(name, str) for name in names):
            composed = tuple(unicodedata.normalize("NFC", name) for name in names)
            object.__setattr__(self, "class_names", composed)

    @property
    def num_classes(self) -> int:
        """Number C of classes; 1 without classes, where all samples count as one class.

        Returns:
            Length of `class_names`, at least 1.
        """
        return max(1, len(self.class_names))

    @property
    def num_outputs(self) -> int:
        """Number of outputs of a network: one per class, or one per regression target.

        Returns:
            C for a data set with classes, else the number of values in a sample's target.
        """
        return len(self.class_names) or max(1, self.pool.y[:1].numel())

    @functools.cached_property
    def value_range(self) -> ValueRange:
        """Black and white: the lowest and highest value of the pool, as a network reads it.

        0 and 1 for bytes and for numbers from 0 to 1.
        """
        return value_range(self.pool.x)

    @property
    def names(self) -> DatasetNames:
        """Names of the classes and of the owners.

        Returns:
            Class names and owner names; each is empty if the data set has none.
        """
        owner_names = () if self.owners is None else self.owners.names
        return DatasetNames(self.class_names, owner_names)

    def labels(self, samples: Shard) -> Int[Tensor, " n"]:
        """Return the class of each sample; 0 for all samples without classes."""
        if self.class_names:
            return samples.y
        return torch.zeros(len(samples), dtype=torch.int64)


def hold_out(
    samples: Shard, per_class: Sequence[int], draw: np.random.Generator
) -> tuple[Shard, Shard]:
    """Split samples into a pool and a class-balanced test set, in their order.

    `per_class` is the number of random test samples of each class.
    """
    is_test = stratified_mask(samples.y.numpy(), per_class, draw)
    return samples.part(np.flatnonzero(~is_test)), samples.part(np.flatnonzero(is_test))


def stratified_mask(
    groups: Int[np.ndarray, " n"], counts: Sequence[int], draw: np.random.Generator
) -> Bool[np.ndarray, " n"]:
    """Select random samples, a given number of each group.

    Samples without a group have -1 in `groups`.
    """
    mask = np.zeros(len(groups), dtype=bool)
    for members, count in zip(group_members(groups, len(counts)), counts, strict=True):
        mask[draw.choice(members, count, replace=False)] = True
    return mask


def group_members(groups: Int[np.ndarray, " n"], count: int) -> list[Int[np.ndarray, " _m"]]:
    """Return the ascending indices of each group's members, one array per group.

    Samples without a group have -1 in `groups`.
    """
    # The first part of the split has the samples without a group.
    order = np.argsort(groups, kind="stable")
    return np.split(order, np.searchsorted(groups[order], np.arange(count + 1)))[1:-1]


def group_mask(
    groups: Int[np.ndarray, " n"], share: float, draw: np.random.Generator | None
) -> Bool[np.ndarray, " n"]:
    """Select whole groups with about a share of the samples, at least one group and not all.

    They are random groups, or without `draw` those of the highest numbers. There are two groups or
    more.
    """
    values, place, counts = np.unique(groups, return_inverse=True, return_counts=True)
    order = np.arange(len(values))[::-1]
    if draw is not None:
        order = draw.permutation(len(values))
    sizes = counts[order].cumsum()[:-1]
    count = 1 + int(np.abs(sizes - share * len(groups)).argmin())
    return np.isin(place, order[:count])


def features(x: Shaped[Tensor, "n *features"]) -> Float[Tensor, "n *features"]:
    """Convert samples to the input of a network.

    Pixels (uint8) are scaled to [0, 1], tokens (int32, int64) stay as they are, and other features
    become floating point.
    """
    if x.dtype == torch.uint8:
        return x.float() / 255
    if x.dtype in TOKEN_TYPES:
        return x
    return x.float()
