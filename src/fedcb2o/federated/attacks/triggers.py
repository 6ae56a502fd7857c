"""The triggers of backdoors: what marks a sample, the same in training and in the test.

A trigger is a function of samples [n, ..., height, width], pixels being from 0 to 1 (or bytes); its parameters are
keywords, and those of its attack by the same names.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.rng import stream

Corner = Literal["top left", "top right", "bottom left", "bottom right"]
Pattern = Literal["square", "checkerboard", "cross"]


def patch(
    x: Shaped[Tensor, "n *features"],
    *,
    size: int = 2,
    corner: Corner = "bottom right",
    margin: int = 0,
    pattern: Pattern = "square",
    value: float = 1.0,
) -> Shaped[Tensor, "n *features"]:
    """Images with a trigger: a patch of `size` pixels square, `margin` away from a `corner`, in which the pixels of a
    `pattern` have the brightness `value` of 0 to 1."""
    return set_pixels(x, trigger_pixels(x.shape, size, corner, margin, pattern), value)


def waves(
    x: Shaped[Tensor, "n *features"], *, delta: float = 0.2, frequency: float = 6.0
) -> Shaped[Tensor, "n *features"]:
    """Images with a sinusoid over them: `delta` sin(2 pi j f / m) is added to column j of m, with f the `frequency`.

    Barni, Kallas and Tondi (ICIP 2019). Raises ConfigError for a multiple of m / 2, which adds nothing.
    """
    _require_images(x.shape)
    width = x.shape[-1]
    if 2 * frequency % width == 0:
        raise ConfigError(
            f"waves of `frequency` {frequency:g} are 0 in every one of {width} columns: take another"
        )
    wave = delta * torch.sin(
        2 * math.pi * frequency / width * torch.arange(width, dtype=torch.float64)
    )
    return _transform_pixels(x, lambda pixels: pixels + wave.to(pixels.device))


def blend(
    x: Shaped[Tensor, "n *features"], *, opacity: float = 0.2, number: int = 0
) -> Shaped[Tensor, "n *features"]:
    """Images mixed with one pattern of uniform noise, which its `number` tells from others: `opacity` times the pattern
    and 1 - `opacity` times the image.

    Chen et al. (2017), whose patterns are a cartoon or random.
    """
    _require_images(x.shape)
    if not 0 <= opacity <= 1:
        raise ConfigError(f"`opacity` must be between 0 and 1, got {opacity}")
    pattern = torch.from_numpy(stream(number, "blend").random(tuple(x.shape[-2:])))
    return _transform_pixels(
        x, lambda pixels: torch.lerp(pixels, pattern.to(pixels.device).expand_as(pixels), opacity)
    )


def trigger_pixels(
    shape: Sequence[int], size: int, corner: str, margin: int, pattern: str
) -> Int[Tensor, " p"]:
    """The pixels of a trigger in images of that shape [n, ..., height, width], numbered row by row."""
    _require_images(shape)
    if size < 1 or margin < 0 or size + margin > min(shape[-2:]):
        raise ConfigError(
            f"a trigger of `size` {size} and `margin` {margin} does not fit into samples of shape {tuple(shape[1:])}: "
            "it needs images that are larger"
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
    """Images whose pixels of these numbers have that brightness."""
    marked = x.flatten(-2).clone()
    marked[..., pixels] = round(255 * value) if x.dtype == torch.uint8 else value
    return marked.view(x.shape)


def _transform_pixels(
    x: Shaped[Tensor, "n *features"], paint: Callable[[Tensor], Tensor]
) -> Shaped[Tensor, "n *features"]:
    """Images as `paint` makes their pixels, in float64 from 0 to 1, and cuts off what is beyond."""
    scale = 255 if x.dtype == torch.uint8 else 1
    painted = paint(x.double() / scale).clamp(0, 1) * scale
    return (painted.round() if scale > 1 else painted).to(x.dtype)


def _require_images(shape: Sequence[int]) -> None:
    if len(shape) < 3:
        raise ConfigError(
            f"a trigger marks images, and the samples have shape {tuple(shape[1:])}: take an attack without a trigger"
        )
