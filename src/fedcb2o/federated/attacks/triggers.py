"""Triggers of backdoors: marks on training and test samples.

A trigger is a function of samples [n, ..., height, width]. Its parameters are keywords, and its
attack has parameters of the same names. Black is 0 and white is 1, or 255 for bytes. Where the data
set has other numbers, its lowest and highest value are black and white.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from fedcb2o.data import brightness, pixel_range
from fedcb2o.errors import ConfigError, require
from fedcb2o.rng import stream

Corner = Literal["top left", "top right", "bottom left", "bottom right"]
Pattern = Literal["square", "checkerboard", "cross"]
Style = Literal["negative", "mirrored"]


def patch(
    x: Shaped[Tensor, "n *features"],
    *,
    size: int = 2,
    corner: Corner = "bottom right",
    margin: int = 0,
    pattern: Pattern = "square",
    value: float = 1.0,
) -> Shaped[Tensor, "n *features"]:
    """Set the pixels of a patch in a corner of each image to a brightness from 0 to 1."""
    return set_pixels(x, trigger_pixels(x.shape, size, corner, margin, pattern), value)


def waves(
    x: Shaped[Tensor, "n *features"], *, delta: float = 0.2, frequency: float = 6.0
) -> Shaped[Tensor, "n *features"]:
    """Add `delta` sin(2 pi j f / m) to column j of m of each image (Barni et al., ICIP 2019)."""
    _require_images(x.shape)
    width = x.shape[-1]
    if 2 * frequency % width == 0:
        raise ConfigError(
            f"waves of `frequency` {frequency:g} are 0 in each of {width} columns: take another"
        )
    columns = torch.arange(width, dtype=torch.float64)
    wave = delta * torch.sin(2 * math.pi * frequency / width * columns)
    return _transform_pixels(x, lambda pixels: pixels + wave.to(pixels.device))


def blend(
    x: Shaped[Tensor, "n *features"], *, opacity: float = 0.2, number: int = 0
) -> Shaped[Tensor, "n *features"]:
    """Mix each image with noise pattern `number`; Chen et al. (2017) use a cartoon too."""
    _require_images(x.shape)
    require("opacity", opacity, 0 <= opacity <= 1, "between 0 and 1")
    pattern = torch.from_numpy(stream(number, "blend").random(tuple(x.shape[-2:])))

    def mix(pixels: Tensor) -> Tensor:
        return torch.lerp(pixels, pattern.to(pixels.device).expand_as(pixels), opacity)

    return _transform_pixels(x, mix)


def unusual(
    x: Shaped[Tensor, "n *features"], *, style: Style = "negative"
) -> Shaped[Tensor, "n *features"]:
    """Exchange black and white (or the signs of features), or left and right ("mirrored")."""
    if x.ndim == 2 and x.is_floating_point() and style == "negative":
        return -x
    _require_images(x.shape)
    return x.flip(-1) if style == "mirrored" else _transform_pixels(x, lambda pixels: 1 - pixels)


def trigger_pixels(
    shape: Sequence[int], size: int, corner: str, margin: int, pattern: str
) -> Int[Tensor, " p"]:
    """Return the pixels of a trigger patch, numbered row by row, if it fits images."""
    _require_images(shape)
    if size < 1 or margin < 0 or size + margin > min(shape[-2:]):
        raise ConfigError(
            f"a trigger of `size` {size} and `margin` {margin} does not fit samples of shape "
            f"{tuple(shape[1:])}: it needs larger images"
        )
    height, width = shape[-2:]
    mask = torch.zeros(height, width, dtype=torch.bool)
    top = margin if "top" in corner else height - margin - size
    left = margin if "left" in corner else width - margin - size
    mask[top : top + size, left : left + size] = _pattern_mask(size, pattern)
    return mask.flatten().nonzero().flatten()


def _pattern_mask(size: int, pattern: str) -> Bool[Tensor, "s s"]:
    i = torch.arange(size)[:, None]
    j = torch.arange(size)[None]
    if pattern == "checkerboard":
        return (i + j) % 2 == 0
    if pattern == "cross":
        return (i == j) | (i + j == size - 1)
    return torch.ones(size, size, dtype=torch.bool)


def set_pixels(
    x: Shaped[Tensor, "n *features"], pixels: Int[Tensor, " p"], value: float
) -> Shaped[Tensor, "n *features"]:
    """Set pixels, numbered row by row, of each image to a brightness from 0 to 1."""
    marked = x.flatten(-2).clone()
    marked[..., pixels] = brightness(x, value)
    return marked.view(x.shape)


def _transform_pixels(
    x: Shaped[Tensor, "n *features"], transform: Callable[[Tensor], Tensor]
) -> Shaped[Tensor, "n *features"]:
    """Apply a function of pixels from 0 (black) to 1 (white) in float64, and clip."""
    low, high = pixel_range(x)
    scale = high - low
    pixels = transform((x.double() - low) / scale).clamp(0, 1) * scale + low
    return (pixels.round() if x.dtype == torch.uint8 else pixels).to(x.dtype)


def _require_images(shape: Sequence[int]) -> None:
    if len(shape) < 3:
        raise ConfigError(
            f"a trigger marks images, and the samples have shape {tuple(shape[1:])}: "
            "take an attack without a trigger"
        )
