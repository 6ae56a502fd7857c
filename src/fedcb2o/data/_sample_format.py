"""Type, scale and layout of samples, and the check that the parts of a data set agree in them.

A network reads bytes (uint8) divided by 255, and all other numbers as they are. The same pixels as
bytes and as numbers are therefore two scales, which must not meet in one data set or federation.
"""

import contextlib
import contextvars
import warnings
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Shaped
from torch import Tensor

from fedcb2o.errors import ConfigError, DataError

SampleValues = Literal["bytes", "unit", "numbers"]
"""Bytes; numbers from 0 to 1; or other numbers."""

ValueRange = tuple[float, float]
"""Black and white: the lowest and the highest value of samples as a network reads them."""

TOKEN_TYPES = (torch.int32, torch.int64)
"""Types of tokens, which have no scale."""

OTHER_SCALE = 10.0
"""Numbers up to this and more are on another scale than numbers from 0 to 1."""

_MAX_COMPARED = 2048
"""Samples of a part whose scale is compared with that of other parts."""

_MIN_COMPARED = 20
"""Samples of a part from which its range is compared with that of other parts."""

_FAR = 3.0
"""Ranges of a part by which the mean of another part is outside of it if their scales differ."""

_RANGE: contextvars.ContextVar[ValueRange | None] = contextvars.ContextVar(
    "value_range", default=None
)


def match_samples(names: Sequence[str], samples: Sequence[Tensor]) -> list[Tensor]:
    """Check shape, type and scale of samples; return them in one type.

    `names` are those of the parts in messages, such as "`x_test`". DataError is raised if shapes,
    types or scales of two parts differ.
    """
    first = samples[0]
    shape = tuple(first.shape[1:])
    for name, part in zip(names, samples, strict=True):
        if part.shape[1:] != first.shape[1:]:
            raise DataError(
                f"the samples of {names[0]} have shape {shape}, and those of {name}"
                f" {tuple(part.shape[1:])}"
            )

    # The first part decides the type. Whole numbers from 0 to 255 are the same pixels as bytes, so
    # they are converted, with a warning.
    if len({part.dtype == torch.uint8 for part in samples if part.numel()}) > 1:
        samples = _match_types(names, samples)
    _check_scales(names, samples)
    if hint := channels_last_hint(shape):
        warnings.warn(hint, stacklevel=2)
    if is_nearly_black(samples):
        warnings.warn(
            "the samples are bytes (uint8) of 0 and 1 only, and bytes are divided by 255: give"
            " numbers (x.astype('float32')), or pixels from 0 to 255 (x * 255)",
            stacklevel=2,
        )
    return list(samples)


def _match_types(names: Sequence[str], samples: Sequence[Tensor]) -> list[Tensor]:
    """Convert all parts to the type of the first one, or raise DataError."""
    is_byte = [part.dtype == torch.uint8 for part in samples]
    byte_name = names[is_byte.index(True)]
    largest_byte = max(
        int(part.max()) for part in samples if part.dtype == torch.uint8 and part.numel()
    )
    for name, part in zip(names, samples, strict=True):
        if part.dtype == torch.uint8 or not part.numel():
            continue
        low, high = _extremes(part)
        # Whole numbers may be the same pixels, unless they are those of another scale: 0 and 1 next
        # to brighter bytes.
        has_bytes = low >= 0 and high <= 255 and bool((part == part.round()).all())
        if not has_bytes or (high <= 1 < largest_byte):
            raise DataError(
                f"the samples of {byte_name} are bytes (uint8), which are divided by 255, and those"
                f" of {name} are numbers from {low:g} to {high:g}, which are not: give both as"
                " uint8, or divide both by 255"
            )

    if not is_byte[0]:
        warnings.warn(
            f"the samples of {names[0]} are numbers from 0 to 255, so that the bytes (uint8) of"
            f" {byte_name} are taken as such numbers, which are not divided by 255",
            stacklevel=3,
        )
        return [part.to(samples[0].dtype) for part in samples]
    warnings.warn(
        f"the samples of {names[is_byte.index(False)]} are whole numbers from 0 to 255, and are"
        f" taken as pixels, like the bytes (uint8) of {names[0]}",
        stacklevel=3,
    )
    return [part.to(torch.uint8) for part in samples]


class _Numbers(NamedTuple):
    """Statistics of some samples of one part."""

    name: str
    num_samples: int
    low: float
    high: float
    mean: float

    def is_far_from(self, other: "_Numbers") -> bool:
        """Return whether the mean is far outside the other part's range."""
        # The range of few samples says little.
        if min(self.num_samples, other.num_samples) < _MIN_COMPARED:
            return False
        distance = max(other.low - self.mean, self.mean - other.high)
        return other.low < other.high and distance > _FAR * (other.high - other.low)


def _check_scales(names: Sequence[str], samples: Sequence[Tensor]) -> None:
    """Check that numbers have one scale.

    Raise DataError for numbers from 0 to 1 in one part and far larger ones in another. Warn where
    a part is far outside the range of the first one.
    """
    if samples[0].dtype in (torch.uint8, *TOKEN_TYPES):
        return
    parts = []
    for name, x in zip(names, samples, strict=True):
        if x.numel():
            # Some samples are enough to see the scale.
            x = x[:: -(-len(x) // _MAX_COMPARED)]
            parts.append(_Numbers(name, len(x), *_extremes(x), float(x.mean())))

    small = [part for part in parts if part.low >= 0 and 0 < part.high <= 1]
    large = [part for part in parts if part.low >= 0 and part.high >= OTHER_SCALE]
    if small and large:
        largest_mean = max(part.mean for part in small)
        if min(part.mean for part in large) >= OTHER_SCALE * largest_mean:
            raise DataError(
                f"the samples of {small[0].name} are numbers from 0 to 1, and those of"
                f" {large[0].name} numbers up to {large[0].high:g}: bring both to one scale (divide"
                " pixels by 255)"
            )
    for part in parts[1:]:
        first = parts[0]
        if part.is_far_from(first) or first.is_far_from(part):
            warnings.warn(
                f"the samples of {first.name} are numbers from {first.low:g} to {first.high:g} with"
                f" mean {first.mean:g}, and those of {part.name} from {part.low:g} to"
                f" {part.high:g} with mean {part.mean:g}: bring both to one scale (standardise both"
                " alike)",
                stacklevel=3,
            )
            return


def sample_values(x: Shaped[Tensor, "n *features"]) -> SampleValues:
    """Return type and scale of samples; "unit" is numbers from 0 to 1."""
    if x.dtype == torch.uint8:
        return "bytes"
    return "unit" if value_range(x) == (0.0, 1.0) else "numbers"


def value_range(x: Shaped[Tensor, "n *features"]) -> ValueRange:
    """Return black and white of samples, as a network reads them.

    These are 0 and 1 for bytes and for numbers from 0 to 1; else the lowest and the highest number.
    """
    if x.dtype == torch.uint8 or not x.numel():
        return 0.0, 1.0
    low, high = _extremes(x)
    if low >= 0 and high <= 1:
        return 0.0, 1.0
    return low, high if high > low else low + 1.0


@contextlib.contextmanager
def using_range(value_range: ValueRange) -> Iterator[None]:
    """Set black and white of a data set for functions that change its samples."""
    token = _RANGE.set(value_range)
    try:
        yield
    finally:
        _RANGE.reset(token)


def pixel_range(x: Shaped[Tensor, "*features"]) -> ValueRange:
    """Return black and white in the units of some samples.

    These are 0 and 255 for bytes; else the range of the data set in a run, or of these samples.
    """
    if x.dtype == torch.uint8:
        return 0, 255
    return _RANGE.get() or value_range(x)


def brightness(x: Shaped[Tensor, "*features"], value: float) -> float:
    """Convert a brightness, 0 black to 1 white, to units of samples.

    It is a whole number for bytes.
    """
    if not 0 <= value <= 1:
        raise ConfigError(
            f"`value` is a brightness from 0 (black) to 1 (white, the largest value of the data),"
            f" got {value}"
        )
    low, high = pixel_range(x)
    scaled = low + (high - low) * value
    return round(scaled) if x.dtype == torch.uint8 else scaled


def channels_last_hint(shape: Sequence[int]) -> str:
    """Describe the cure for images that seem to have their channels last.

    `shape` is that of a sample. The text is empty where the last axis is not one of channels.
    """
    if len(shape) != 3:
        return ""
    height, width, channels = shape
    is_square = height == width > max(3, channels) and channels in (1, 3, 4)
    is_photograph = min(height, width) >= 16 and channels in (3, 4)
    if not is_square and not is_photograph:
        return ""
    return (
        f"images of shape {tuple(shape)} seem to have their channels ({channels}) last, and they"
        " come first, [n, channels, height, width]: x.permute(0, 3, 1, 2), or"
        " numpy.moveaxis(x, -1, 1)"
    )


def is_nearly_black(samples: Sequence[Tensor]) -> bool:
    """Return whether samples are bytes of 0 and 1 only."""
    if any(part.dtype != torch.uint8 for part in samples):
        return False
    parts = [part for part in samples if part.numel()]
    # Most data sets have brighter pixels in their first samples.
    if not parts or max(int(part[:16].max()) for part in parts) > 1:
        return False
    return max(int(part.max()) for part in parts) == 1


def _extremes(x: Tensor) -> ValueRange:
    low, high = torch.aminmax(x)
    return float(low), float(high)
