"""Parts of other libraries' experiments: networks, a skew and an attack."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fedcb2o.errors import ConfigError
from fedcb2o.federated.adversary import AttackView, knows

# Channels and paddings of the convolutions, and hidden units.
_LAYERS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "cnn_mnist": ((20, 50), (0, 0), (500,)),
    "cnn_cifar": ((20, 100, 200), (2, 2, 2), (512, 256)),
    "lenet": ((6, 16), (2, 0), (120, 84)),
    "fc_mnist": ((), (), (100,)),
    "logreg_mnist": ((), (), ()),
}


class _Scaled(nn.Module):
    """Pixels minus a mean, divided by a standard deviation, per channel."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.mean = tuple(mean)
        self.std = tuple(std)

    def forward(self, x: Tensor) -> Tensor:
        shape = (-1, 1, 1)
        return (x - x.new_tensor(self.mean).view(shape)) / x.new_tensor(self.std).view(shape)


def network(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    kind: Literal["cnn_mnist", "cnn_cifar", "fc_mnist", "lenet", "logreg_mnist"],
    mean: list[float] = [],  # noqa: B006 - never written to
    std: list[float] = [],  # noqa: B006
) -> nn.Module:
    """Build a network of ByzFL or FLPoison, without the softmax, after scaled pixels."""
    channels, paddings, hidden = _LAYERS[kind]
    layers: list[nn.Module] = [_Scaled(mean, std)] if mean else []
    fan_in, *size = input_shape
    for fan_out, padding in zip(channels, paddings, strict=True):
        layers += [nn.Conv2d(fan_in, fan_out, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]
        size = [(pixels + 2 * padding - 4) // 2 for pixels in size]
        fan_in = fan_out
    layers.append(nn.Flatten())
    width = fan_in * math.prod(size)
    for units in hidden:
        layers += [nn.Linear(width, units), nn.ReLU()]
        width = units
    return nn.Sequential(*layers, nn.Linear(width, num_classes))


def similarity(
    labels: Int[np.ndarray, " n"],
    sizes: Int[np.ndarray, " N"],
    draw: np.random.Generator,
    *,
    share: float,
    agents: int,
) -> Int[np.ndarray, " n"]:
    """Deal a share of the samples at random, and the rest sorted by label (gamma similarity).

    The first `agents` agents hold sorted samples, and all others random ones.
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"`share` must be from 0 to 1, got {share}")
    is_sorted = np.arange(len(sizes)) < agents
    num_sorted = np.where(is_sorted, sizes - np.round(share * sizes).astype(np.int64), 0)
    ids = np.arange(len(sizes))
    assignment = np.empty(len(labels), np.int64)
    num_random = int((sizes - num_sorted).sum())
    assignment[:num_random] = np.repeat(ids, sizes - num_sorted)
    rest = num_random + np.argsort(labels[num_random:], kind="stable")
    assignment[rest] = np.repeat(ids, num_sorted)
    return assignment


@knows()
def gaussian_update(
    view: AttackView, draw: np.random.Generator, *, mean: float = 0.0, std: float = 1.0
) -> Float[Tensor, " d"]:
    """Send an update of Gaussian numbers."""
    noise = torch.from_numpy(draw.standard_normal(len(view.own), dtype=np.float32))
    return view.previous + mean + std * noise.to(view.previous)
