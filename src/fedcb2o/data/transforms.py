"""Transforms: the difference between the samples of clusters (sec:experiments).

Every cluster holds the same samples, changed in its own way. A configuration names a transform by a
function in `__all__`, or a user's own: (samples, cluster, ...) -> samples of the same shapes and
types. Further inputs, by name, are `num_clusters` and `num_classes`. Its keyword arguments are
parameters of the configuration.

Example:
    >>> samples = Shard(torch.tensor([[[1, 2], [3, 4]]]), torch.tensor([0]))
    >>> rotation(samples, 1, 4).x.tolist()
    [[[2, 4], [1, 3]]]
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.nn import functional as F

from fedcb2o import plugins
from fedcb2o.data._dataset import Shard
from fedcb2o.data._sample_format import ValueRange, channels_last_hint, pixel_range, using_range
from fedcb2o.data.changed_samples import changed_shard, check_classes
from fedcb2o.docstrings import share_entries
from fedcb2o.errors import ConfigError

__all__ = ["flip", "invert", "permute_labels", "rotation"]

ClusterView = Callable[[Shard, int], Shard]
"""(samples, cluster) -> the samples as the agents of a cluster see them."""

_FLIPPED_AXES = ((), (-1,), (-2,), (-2, -1))


def rotation(
    samples: Shard, cluster: int, num_clusters: int, *, angles: Sequence[float] | None = None
) -> Shard:
    """Rotate images counter-clockwise (sec:experiments).

    Multiples of 90 degrees move pixels. Other angles interpolate between four pixels; outside of
    the image is black.

    Args:
        samples: Images [n, ..., s, s].
        angles: Angle of each cluster in degrees; by default cluster * 360 / K.

    Raises:
        ConfigError: The images are not square, or the number of angles is not K.
    """
    if angles is not None and len(angles) != num_clusters:
        raise ConfigError(
            f"`angles` has {len(angles)} numbers, and `num_clusters` is {num_clusters}: give one"
            " angle for each cluster"
        )
    degrees = cluster * 360 / num_clusters if angles is None else angles[cluster]
    x = samples.x
    if num_clusters > 1 and (x.ndim < 3 or x.shape[-1] != x.shape[-2]):
        cure = channels_last_hint(x.shape[1:]) or "set `num_clusters` = 1 for them"
        raise ConfigError(
            f"`num_clusters` = {num_clusters} turns square images, and the samples have shape"
            f" {tuple(x.shape[1:])}; {cure}"
        )
    if degrees % 360 == 0:
        return samples
    if degrees % 90 == 0:
        turned = torch.rot90(x, int(degrees // 90) % 4, dims=(-2, -1))
        return Shard(turned.contiguous(), samples.y)
    return Shard(_interpolated(x, degrees), samples.y)


def flip(samples: Shard, cluster: int) -> Shard:
    """Mirror images: left to right, top to bottom, then both.

    Args:
        samples: Images [n, ..., h, w].
        cluster: Cluster of the agent, from 0 to 3; 0 changes nothing.

    Raises:
        ConfigError: The samples are no images, or there are more than 4 clusters.
    """
    if samples.x.ndim < 3:
        raise ConfigError(
            f"`flip` mirrors images, and the samples have shape {tuple(samples.x.shape[1:])}"
        )
    if cluster >= len(_FLIPPED_AXES):
        raise ConfigError("`flip` makes 4 clusters: take `num_clusters` = 4 or fewer")
    return Shard(samples.x.flip(_FLIPPED_AXES[cluster]), samples.y)


def invert(samples: Shard, cluster: int) -> Shard:
    """Exchange black and white in cluster 1.

    Args:
        samples: Samples of any shape.
        cluster: Cluster of the agent, 0 or 1.

    Raises:
        ConfigError: There are more than 2 clusters.
    """
    if cluster > 1:
        raise ConfigError("`invert` makes 2 clusters: take `num_clusters` = 2")
    if not cluster:
        return samples
    low, high = pixel_range(samples.x)
    return Shard(low + high - samples.x, samples.y)


def permute_labels(samples: Shard, cluster: int, num_classes: int, *, shift: int = 1) -> Shard:
    """Rename the classes: c becomes (c + cluster * shift) mod C.

    Args:
        samples: Samples with classes.
        shift: Difference between the labels of two clusters.

    Raises:
        ConfigError: The samples have no classes, or a cluster has the labels of cluster 0.
    """
    if num_classes < 2:
        raise ConfigError("`permute_labels` renames classes, and the data have none")
    if cluster and cluster * shift % num_classes == 0:
        raise ConfigError(
            f"`permute_labels` with `shift` = {shift} gives clusters 0 and {cluster} the same"
            f" labels, as there are {num_classes} classes: take fewer clusters or another `shift`"
        )
    return Shard(samples.x, (samples.y + cluster * shift) % num_classes)


def unchanged(samples: Shard, cluster: int) -> Shard:
    """Return the samples as they are, for agents that bring their own data."""
    return samples


@dataclass(frozen=True)
class ClusterTransform:
    """A transform with its inputs: the view of each cluster on the samples.

    `num_classes` is 1 for data without classes. `value_range` is black and white of the data set.
    """

    function: functools.partial[Any]
    num_clusters: int
    num_classes: int
    value_range: ValueRange

    def __call__(self, samples: Shard, cluster: int) -> Shard:
        """Return samples as a cluster sees them.

        They have the same shapes and types, on the same device. ConfigError is raised if a user's
        transform returned anything else.
        """
        inputs = self._inputs
        with using_range(self.value_range):
            if plugins.USER_FUNCTION.get(self.function) is None:
                seen: Shard = self.function(samples, cluster, *inputs)
                return seen
            # A user's function gets copies on the CPU, which it may change.
            copies = Shard(samples.x.cpu().clone(), samples.y.cpu().clone())
            result = self.function(copies, cluster, *inputs)
        name = plugins.display_name("cluster transform", self.function)
        changed = changed_shard(name, result, samples)
        check_classes(name, changed.y, self.num_classes)
        return changed

    @functools.cached_property
    def _inputs(self) -> list[int]:
        """Inputs after samples and cluster that the function asks for by name."""
        known = {"num_clusters": self.num_clusters, "num_classes": self.num_classes}
        names = plugins.positional_inputs(self.function.func)[2:]
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"the cluster transform looks at `{name}`."
                    f"{plugins.did_you_mean(name, known)} There is: {', '.join(known)}"
                )
        return [known[name] for name in names]


def rotate(
    x: Shaped[Tensor, "n *features"], cluster: int, num_clusters: int
) -> Shaped[Tensor, "n *features"]:
    """Rotate square images by cluster * 360 / num_clusters degrees (sec:experiments).

    The rotation is counter-clockwise.
    """
    return rotation(Shard(x, torch.zeros(len(x))), cluster, num_clusters).x


def _interpolated(x: Tensor, degrees: float) -> Tensor:
    """Rotate images by bilinear interpolation, about the centre."""
    height, width = x.shape[-2:]
    theta = math.radians(degrees)
    v = torch.arange(height, dtype=torch.float64).unsqueeze(1) - (height - 1) / 2
    u = torch.arange(width, dtype=torch.float64) - (width - 1) / 2

    # Positions in the image with a black border of one pixel.
    row = (math.sin(theta) * u + math.cos(theta) * v + (height + 1) / 2).clamp(0, height + 1)
    column = (math.cos(theta) * u - math.sin(theta) * v + (width + 1) / 2).clamp(0, width + 1)
    # At most `height`, so that the next row is still in the bordered image.
    top = row.floor().clamp(max=height).long()
    left = column.floor().clamp(max=width).long()
    down = (row - top).float().to(x.device)
    right = (column - left).float().to(x.device)

    image = F.pad(x.float(), (1, 1, 1, 1), value=pixel_range(x)[0])
    upper = image[..., top, left] * (1 - right) + image[..., top, left + 1] * right
    lower = image[..., top + 1, left] * (1 - right) + image[..., top + 1, left + 1] * right
    turned = upper * (1 - down) + lower * down
    if x.dtype == torch.uint8:
        return turned.round().to(torch.uint8)
    return turned.to(x.dtype)


_ARGUMENTS = {
    "cluster": "Cluster of the agent.",
    "num_clusters": "Number K of clusters.",
    "num_classes": "Number C of classes.",
}
for _name in __all__:
    share_entries(globals()[_name], _ARGUMENTS, "The samples as the cluster sees them.")
