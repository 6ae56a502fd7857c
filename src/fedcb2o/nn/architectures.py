"""Built-in network architectures: (input_shape, num_classes, *, ...) -> network.

A configuration names an architecture by a function in `__all__`. The paper's network
(sec:experiments) is `cnn`: two 5x5 convolutions with max pooling, then two dense layers.

Example:
    >>> sum(p.numel() for p in logistic([1, 8, 8], 10).parameters())
    650
"""

import itertools
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcb2o.docstrings import share_entries
from fedcb2o.errors import ConfigError
from fedcb2o.nn.language_models import language_model
from fedcb2o.nn.memory_layout import ChannelsLast

__all__ = ["characters", "cnn", "factorisation", "language_model", "logistic", "mlp", "resnet"]

_MAX_LAYERS = 1000
_MAX_BLOCKS = 200  # the deepest network of He et al. (2016) has 1202 layers


def cnn(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    channels: Sequence[int] = (32, 64),
    hidden: int = 2048,
    down: Literal["pool", "stride"] = "pool",
    dense_activation: Literal["relu", "none"] = "relu",
) -> nn.Module:
    """Build the paper's network (sec:experiments).

    With 28x28 images, 47 classes and 2048 hidden units, d = 6,572,975. Pooling comes before ReLU:
    the two commute exactly, and ReLU then reads a quarter of the values.

    Args:
        input_shape: Shape of an image, [channels, height, width], at least 4x4 pixels.
        channels: Channels of the two convolutions.
        hidden: Units of the first dense layer.
        down: Halving of the resolution by each convolution: "pool" is max pooling after it,
            "stride" is its stride, a quarter of the work.
        dense_activation: "none" omits the ReLU between the dense layers, as in the authors'
            released code.

    Raises:
        ConfigError: The shape is not that of an image, or a width is below 1.
    """
    input_channels, height, width = _image_shape("cnn", input_shape)
    _check_widths("cnn", [hidden])
    if len(channels) != 2 or min(channels) < 1:
        raise ConfigError(
            f"model `cnn`: `channels` must be two numbers of 1 or more, got {list(channels)}"
        )
    first, second = channels

    def stage(fan_in: int, fan_out: int) -> list[nn.Module]:
        if down == "stride":
            return [nn.Conv2d(fan_in, fan_out, 5, stride=2, padding=2), nn.ReLU()]
        return [nn.Conv2d(fan_in, fan_out, 5, padding=2), nn.MaxPool2d(2), nn.ReLU()]

    if down == "stride":  # a strided convolution rounds up, pooling rounds down
        height = -(-height // 4)
        width = -(-width // 4)
    else:
        height = height // 4
        width = width // 4

    layers = [
        ChannelsLast(),
        *stage(input_channels, first),
        *stage(first, second),
        nn.Flatten(),
        nn.Linear(second * height * width, hidden),
    ]
    if dense_activation == "relu":
        layers.append(nn.ReLU())
    layers.append(nn.Linear(hidden, num_classes))
    return nn.Sequential(*layers)


def mlp(
    input_shape: Sequence[int], num_classes: int, *, hidden: Sequence[int] = (64,)
) -> nn.Module:
    """Build dense layers with ReLU between them.

    Args:
        hidden: Units of each hidden layer.

    Raises:
        ConfigError: A hidden layer has less than 1 unit.
    """
    _check_widths("mlp", hidden)
    widths = [math.prod(input_shape), *hidden, num_classes]
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def logistic(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """Build multinomial logistic regression: one dense layer."""
    return mlp(input_shape, num_classes, hidden=())


def resnet(
    input_shape: Sequence[int], num_classes: int, *, width: int = 16, blocks: int = 1
) -> nn.Module:
    """Build a residual network for small images, of 6 * `blocks` + 2 layers.

    He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition" (2016), Section 4.2:
    three stages with `width`, 2 `width` and 4 `width` channels, each at half the resolution of the
    previous one. Group normalisation (Wu and He, 2018) with 8 channels a group replaces batch
    normalisation, whose statistics are not parameters and differ between agents
    (`fedcb2o.nn.batch_norm`).

    Args:
        input_shape: Shape of an image, [channels, height, width], at least 4x4 pixels.
        width: Channels of the first stage, a multiple of 8.
        blocks: Residual blocks of each stage, at least 1.

    Raises:
        ConfigError: The shape is not that of an image, or a parameter is out of range.
    """
    channels, *_ = _image_shape("resnet", input_shape)
    if width < 8 or width % 8:
        raise ConfigError(
            f"model `resnet`: `width` must be a multiple of 8, the channels of a group, got {width}"
        )
    if not 1 <= blocks <= _MAX_BLOCKS:
        raise ConfigError(
            f"model `resnet`: `blocks` must be at least 1 and at most {_MAX_BLOCKS}, got {blocks}"
        )

    widths = [width] + [factor * width for factor in (1, 2, 4) for _ in range(blocks)]
    # Layers draw their initial parameters in this order.
    return nn.Sequential(
        _convolution(channels, width),
        _group_norm(width),
        nn.ReLU(),
        *(_ResidualBlock(fan_in, fan_out) for fan_in, fan_out in itertools.pairwise(widths)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, num_classes),
    )


def characters(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    embedding: int = 8,
    hidden: int = 256,
    layers: int = 2,
) -> nn.Module:
    """Build the network of LEAF for the next character: an LSTM.

    Args:
        input_shape: [length]: the numbers of the characters, from 0.
        num_classes: Number of characters; larger numbers in samples count as the last one.
        embedding: Length of the vector of a character.
        hidden: Units of each layer.
        layers: Number of layers.

    Raises:
        ConfigError: The shape is another one, or a number is below 1.
    """
    if len(input_shape) != 1 or min(embedding, hidden, layers) < 1:
        raise ConfigError(
            "model `characters` needs rows of numbers, and `embedding`, `hidden` and `layers` of 1"
            f" or more, got {list(input_shape)}, {embedding}, {hidden} and {layers}"
        )
    return _Characters(num_classes, embedding, hidden, layers)


class _Characters(nn.Module):
    """Vectors of characters, an LSTM, and a dense layer on its last output."""

    def __init__(self, num_classes: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(num_classes, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.dense = nn.Linear(hidden, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the next character, [n, num_classes]."""
        vectors = self.vectors(x.long().clamp(0, self.vectors.num_embeddings - 1))
        logits: Tensor = self.dense(self.lstm(vectors)[0][:, -1])
        return logits


def factorisation(
    input_shape: Sequence[int], num_classes: int, *, sizes: Sequence[int], dim: int = 8
) -> nn.Module:
    """Build a factorisation of ratings: the product of two vectors, with biases.

    Koren, Bell and Volinsky, "Matrix Factorization Techniques for Recommender Systems" (2009).

    Args:
        input_shape: [2]: the number of the user and that of the item, from 0.
        num_classes: Number of outputs, 1.
        sizes: Number of users and number of items; larger numbers in samples count as the last one.
        dim: Length of the vectors.

    Raises:
        ConfigError: The shape is another one, or a size is below 1.
    """
    if list(input_shape) != [2] or num_classes != 1:
        raise ConfigError(
            "model `factorisation` needs samples of two numbers, user and item, and one output, got"
            f" {list(input_shape)} and {num_classes}"
        )
    if len(sizes) != 2 or min(*sizes, dim) < 1:
        raise ConfigError(
            "model `factorisation`: `sizes` must be two numbers of 1 or more, and `dim` one, got"
            f" {list(sizes)} and {dim}"
        )
    return _Factorisation(sizes, dim)


class _Factorisation(nn.Module):
    """Vectors of users and items; the last value of each is its bias."""

    def __init__(self, sizes: Sequence[int], dim: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.users = nn.Embedding(sizes[0], dim + 1)
        self.items = nn.Embedding(sizes[1], dim + 1)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the rating of each user and item, [n, 1]."""
        last = (self.users.num_embeddings - 1, self.items.num_embeddings - 1)
        user = self.users(x[:, 0].long().clamp(0, last[0]))
        item = self.items(x[:, 1].long().clamp(0, last[1]))
        product = (user[:, :-1] * item[:, :-1]).sum(1, keepdim=True)
        rating: Tensor = product + user[:, -1:] + item[:, -1:] + self.bias
        return rating


class _ResidualBlock(nn.Module):
    """Two convolutions and an identity shortcut (He et al. 2016, option A).

    Where the number of channels grows, the shortcut halves the resolution and the new channels
    are zero.
    """

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.stride = 1 if fan_in == fan_out else 2
        self.extra_channels = fan_out - fan_in
        self.change = nn.Sequential(
            _convolution(fan_in, fan_out, self.stride),
            _group_norm(fan_out),
            nn.ReLU(),
            _convolution(fan_out, fan_out),
            _group_norm(fan_out),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return ReLU(x + change(x)), in the channels and the resolution of the block's output."""
        padding = (0, 0, 0, 0, 0, self.extra_channels)
        shortcut = F.pad(x[..., :: self.stride, :: self.stride], padding)
        return F.relu(shortcut + self.change(x))


def _convolution(fan_in: int, fan_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(fan_in, fan_out, 3, stride=stride, padding=1, bias=False)


def _group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(channels // 8, channels)


def _image_shape(name: str, input_shape: Sequence[int]) -> tuple[int, int, int]:
    if len(input_shape) != 3 or min(input_shape[1:]) < 4:
        raise ConfigError(
            f"model `{name}` needs images [channels, height, width] of 4x4 pixels or more,"
            f" got {input_shape}"
        )
    channels, height, width = input_shape
    return channels, height, width


def _check_widths(name: str, hidden: Sequence[int]) -> None:
    if len(hidden) > _MAX_LAYERS:
        raise ConfigError(
            f"model `{name}`: `hidden` must have at most {_MAX_LAYERS} layers, got {len(hidden)}"
        )
    if any(width < 1 for width in hidden):
        raise ConfigError(
            f"model `{name}`: `hidden` needs layers of 1 unit or more, got {list(hidden)}"
        )


_ARGUMENTS = {
    "input_shape": "Shape of a sample; it is flattened.",
    "num_classes": "Number of outputs.",
}
for _name in __all__:
    share_entries(globals()[_name], _ARGUMENTS, "The network.")
