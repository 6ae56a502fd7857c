"""Built-in network architectures.

The paper's network (sec:experiments): two 5x5 convolutions with max pooling, then two dense layers.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from fedcb2o.errors import ConfigError
from fedcb2o.nn.memory_layout import ChannelsLast

__all__ = ["cnn", "logistic", "mlp", "resnet"]


def cnn(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    channels: Sequence[int] = (32, 64),
    hidden: int = 2048,
    down: Literal["pool", "stride"] = "pool",
    dense_activation: Literal["relu", "none"] = "relu",
) -> nn.Module:
    """The paper's network (sec:experiments); with 28x28 images, 47 classes and 2048 hidden units d = 6,572,975.

    Each convolution halves the resolution, by max pooling after it or, with `down = "stride"`, by its stride, which is
    a quarter of the work. Pooling stands before ReLU: the two commute exactly, and ReLU then touches a quarter of the
    values. `dense_activation="none"` leaves out the ReLU between the dense layers, as the authors' released code does.
    """
    seen, height, width = _image_shape("cnn", input_shape)
    _check_widths("cnn", [hidden])
    if len(channels) != 2 or min(channels) < 1:
        raise ConfigError(
            f"model `cnn`: `channels` must be two numbers of 1 or more, got {list(channels)}"
        )
    first, second = channels

    def halved(before: int, after: int) -> list[nn.Module]:
        if down == "stride":
            return [nn.Conv2d(before, after, 5, stride=2, padding=2), nn.ReLU()]
        return [nn.Conv2d(before, after, 5, padding=2), nn.MaxPool2d(2), nn.ReLU()]

    between = [nn.ReLU()] if dense_activation == "relu" else []
    height, width = (-(-side // 4) if down == "stride" else side // 4 for side in (height, width))
    return nn.Sequential(
        ChannelsLast(),
        *halved(seen, first),
        *halved(first, second),
        nn.Flatten(),
        *(nn.Linear(second * height * width, hidden), *between),
        nn.Linear(hidden, num_classes),
    )


def mlp(
    input_shape: Sequence[int], num_classes: int, *, hidden: Sequence[int] = (64,)
) -> nn.Module:
    """Dense layers of `hidden` units with ReLU between them."""
    _check_widths("mlp", hidden)
    widths = [math.prod(input_shape), *hidden, num_classes]
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def logistic(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """Multinomial logistic regression: one dense layer."""
    return mlp(input_shape, num_classes, hidden=())


def resnet(
    input_shape: Sequence[int], num_classes: int, *, width: int = 16, blocks: int = 1
) -> nn.Module:
    """A residual network for small images, of 6 * `blocks` + 2 layers, without batch statistics.

    He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition" (2016), Section 4.2: three stages of `blocks`
    blocks with `width`, 2 `width` and 4 `width` channels, each stage at half the resolution of the one before. Group
    normalisation (Wu and He, 2018) takes the place of batch normalisation, whose statistics are no parameters and
    differ between agents (`fedcb2o.nn.batch_norm`); a group is 8 channels.
    """
    channels, *_ = _image_shape("resnet", input_shape)
    if width < 8 or width % 8:
        raise ConfigError(
            f"model `resnet`: `width` must be a multiple of 8, the channels of a group, got {width}"
        )
    if blocks < 1:
        raise ConfigError(f"model `resnet`: `blocks` must be at least 1, got {blocks}")
    widths = [width] + [factor * width for factor in (1, 2, 4) for _ in range(blocks)]
    return nn.Sequential(
        *(_convolution(channels, width), _group_norm(width), nn.ReLU()),
        *(_ResidualBlock(before, after) for before, after in itertools.pairwise(widths)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(4 * width, num_classes),
    )


class _ResidualBlock(nn.Module):
    """Two convolutions and, past them, the input as it is; where there are more channels after them, its resolution is
    halved and the new channels are zero (He et al. 2016, option A)."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.stride = 1 if before == after else 2
        self.extra_channels = after - before
        self.change = nn.Sequential(
            *(_convolution(before, after, self.stride), _group_norm(after), nn.ReLU()),
            *(_convolution(after, after), _group_norm(after)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """ReLU(x + change(x))."""
        past = F.pad(x[..., :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra_channels))
        return F.relu(past + self.change(x))


def _convolution(before: int, after: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)


def _group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(channels // 8, channels)


def _image_shape(name: str, input_shape: Sequence[int]) -> tuple[int, int, int]:
    if len(input_shape) != 3 or min(input_shape[1:]) < 4:
        raise ConfigError(
            f"model `{name}` needs images [channels, height, width] of 4x4 pixels or more, got {input_shape}"
        )
    channels, height, width = input_shape
    return channels, height, width


def _check_widths(name: str, hidden: Sequence[int]) -> None:
    if any(width < 1 for width in hidden):
        raise ConfigError(
            f"model `{name}`: `hidden` needs layers of 1 unit or more, got {list(hidden)}"
        )
