"""What agents hold: labelled samples."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """Labelled samples: `x` is uint8 pixels or floating-point features, `y` the class of each sample."""

    x: Shaped[Tensor, "n *features"]
    y: Int[Tensor, " n"]

    def __len__(self) -> int:
        return len(self.y)

    def to(self, device: torch.device | str) -> "Shard":
        """The same samples on a device."""
        return Shard(self.x.to(device), self.y.to(device))


@dataclass(frozen=True)
class Dataset:
    """A pool of samples that agents share out, and a test set that only reports.

    `class_names` names the classes in order; labels run from 0 to `num_classes` - 1.
    """

    pool: Shard
    test: Shard
    class_names: tuple[str, ...]

    @property
    def num_classes(self) -> int:
        """C, the number of classes."""
        return len(self.class_names)

    def to(self, device: torch.device | str) -> "Dataset":
        """The same samples on a device."""
        return Dataset(self.pool.to(device), self.test.to(device), self.class_names)


def hold_out(samples: Shard, per_class: Sequence[int], draw: np.random.Generator) -> tuple[Shard, Shard]:
    """The samples without, and those with, `per_class[c]` random ones of each class c: a pool and a test set.

    Both keep the order that the samples came in.
    """
    held = np.zeros(len(samples), dtype=bool)
    for c, count in enumerate(per_class):
        held[draw.choice(np.flatnonzero(samples.y.numpy() == c), count, replace=False)] = True
    test = torch.from_numpy(held)
    return Shard(samples.x[~test], samples.y[~test]), Shard(samples.x[test], samples.y[test])


def features(x: Shaped[Tensor, "n *features"]) -> Float[Tensor, "n *features"]:
    """What a network reads: pixels (uint8) as numbers in [0, 1], floating-point features as they are."""
    return x.float() / 255 if x.dtype == torch.uint8 else x.float()
