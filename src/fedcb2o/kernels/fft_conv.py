"""A convolution by products of spectra.

Frequency by frequency a convolution is a product of the channels of an image with a matrix (Mathieu, Henaff and LeCun,
"Fast Training of Convolutional Networks through FFTs", 2014), so that pixels of a kernel cost nothing. Images are small
here: their transforms are products with constant matrices, one for the rows and one for the columns, which a processor
computes at its best rate. All of it is products, sums and copies, which repeat their bits and which PyTorch
differentiates as often as it is asked to.

Every pixel of a spectrum meets every other: what rounding takes off is a part of the largest value of an image, where
it is else one of the values near by, and a number that is not finite leaves nothing finite in its image.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from fedcb2o.kernels.unfold_conv import Margins, padding_margins
from fedcb2o.nn.memory_layout import is_vmapped

MIN_SAVING = 2  # times as many multiplications as spectra take: theirs are in smaller products

_Spectrum = tuple[
    Float[Tensor, "_f _n _c"], Float[Tensor, "_f _n _c"]
]  # the real part, and the imaginary one


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """What takes the place of `F.conv2d`: by spectra where a processor computes one network, in float32, and they take
    far fewer multiplications."""
    given = [tensor for tensor in (input, weight, bias) if tensor is not None]
    ours = all(
        each.dtype == torch.float32 and each.device.type == "cpu" and not is_vmapped(each)
        for each in given
    )
    ours = ours and not torch.is_autocast_enabled("cpu")
    ours = (
        ours
        and input.ndim == weight.ndim == 4
        and input.shape[1] == weight.shape[1]
        and groups == 1
    )
    ours = ours and all(
        np.size(each) <= 2 and np.all(np.equal(each, 1)) for each in (stride, dilation)
    )
    ours = ours and (bias is None or bias.shape == weight.shape[:1])
    if ours and (
        padding in ("same", "valid") if isinstance(padding, str) else np.size(padding) <= 2
    ):
        margins = padding_margins(padding, weight)
        if _is_faster(input.shape, weight.shape, margins):
            return _fft_conv2d(input, weight, bias, margins)
    return F.conv2d(input, weight, bias, stride, padding, dilation, groups)


def _is_faster(images: Sequence[int], weight: Sequence[int], margins: Margins) -> bool:
    """Whether spectra take far fewer multiplications, that of the kernel counted once."""
    (n, channels, *shape), (found, _, *kernel) = images, weight
    after = _output_shape(shape, kernel, margins)
    if min(after) < 1 or min(map(min, margins)) < 0:  # an error, and PyTorch's to tell
        return False
    s, t = _periods(shape, margins)
    half = s // 2 + 1

    def transform(h: int, w: int) -> int:
        return 2 * half * h * w + half * 2 * t * 2 * w

    spectra = channels * (
        n * transform(*shape) + found * transform(*kernel)
    ) + n * found * transform(*after)
    spectra += 4 * half * t * n * channels * found
    return MIN_SAVING * spectra < n * channels * found * math.prod(after) * math.prod(kernel)


def _fft_conv2d(
    x: Float[Tensor, "n C H W"],
    weight: Float[Tensor, "O C k l"],
    bias: Float[Tensor, " O"] | None,
    margins: Margins,
) -> Float[Tensor, "n O h w"]:
    """y[i] = sum_d x[i + d - m] w[d] in each of two directions, m the margin before the image, is X conj(W)."""
    sizes = _periods(x.shape[2:], margins)
    real, imaginary = _transform(x, sizes)
    kernel = [part.mT for part in _transform(weight, sizes, [-before for before, _ in margins])]
    found = (
        torch.baddbmm(torch.bmm(real, kernel[0]), imaginary, kernel[1]),
        torch.baddbmm(torch.bmm(imaginary, kernel[0]), real, kernel[1], alpha=-1),
    )
    y = _inverse_transform(found, sizes, _output_shape(x.shape[2:], weight.shape[2:], margins))
    last = any(
        t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()
        for t in (x, weight)
    )
    y = y.contiguous(
        memory_format=torch.channels_last if last else torch.contiguous_format
    )  # as PyTorch has it
    return y if bias is None else y.add_(bias[:, None, None])


def _output_shape(shape: Sequence[int], kernel: Sequence[int], margins: Margins) -> list[int]:
    return [side + sum(ends) - k + 1 for side, k, ends in zip(shape, kernel, margins, strict=True)]


def _periods(shape: Sequence[int], margins: Margins) -> list[int]:
    """The period of each direction: what goes past one end of an image, into zeros, ends before the other."""
    return [side + max(ends) for side, ends in zip(shape, margins, strict=True)]


@functools.lru_cache(maxsize=64)
def _dft_tables(size: int, count: int, start: int) -> tuple[Float[Tensor, "_r _c"], ...]:
    """What transforms `count` numbers, the first at `start`, of a period: real ones to the real and imaginary parts, by
    turns, of half of the frequencies [2 h, count]; their inverse [count, 2 h]; and stacked real and imaginary ones to
    the real parts of all [size, 2 count], and to the imaginary ones."""
    angle = 2 * math.pi / size * np.outer(np.arange(size), np.arange(start, start + count))
    cos = np.cos(angle)
    sin = np.sin(angle)
    half = size // 2 + 1
    rows = np.stack([cos[:half], -sin[:half]], 1)
    # The other half is the conjugate of this one, whose first, and last of an even number, have none there.
    weights = np.array([1.0, *[2.0] * ((size - 1) // 2), *[1.0] * (size % 2 == 0)])
    back = (rows * weights[:, None, None]).reshape(2 * half, count).T / size
    tables = (
        rows.reshape(2 * half, count),
        back,
        np.concatenate([cos, sin], 1),
        np.concatenate([-sin, cos], 1),
    )
    with torch.inference_mode(False):  # they are kept for training as well
        return tuple(
            torch.from_numpy(np.ascontiguousarray(table, dtype=np.float32)) for table in tables
        )


def _transform(
    x: Float[Tensor, "n C h w"], sizes: Sequence[int], starts: Sequence[int] = (0, 0)
) -> _Spectrum:
    n, channels, h, w = x.shape
    rows, *_ = _dft_tables(sizes[0], h, starts[0])
    _, _, real, imaginary = _dft_tables(sizes[1], w, starts[1])
    found = (rows @ x.permute(2, 3, 0, 1).reshape(h, -1)).view(len(rows) // 2, 2 * w, n * channels)
    first, second = (
        torch.bmm(_expand_table(table, found), found).view(-1, n, channels)
        for table in (real, imaginary)
    )
    return first, second


def _inverse_transform(
    spectrum: _Spectrum, sizes: Sequence[int], shape: Sequence[int]
) -> Float[Tensor, "n C h w"]:
    (h, w), (n, channels) = shape, spectrum[0].shape[1:]
    _, back, *_ = _dft_tables(sizes[0], h, 0)
    _, _, real, imaginary = _dft_tables(sizes[1], w, 0)
    first, second = (part.view(-1, sizes[1], n * channels) for part in spectrum)
    found = torch.baddbmm(
        torch.bmm(_expand_table(real.T, first), first), _expand_table(imaginary.T, second), second
    )
    return (
        (back / sizes[1] @ found.view(back.shape[1], -1))
        .view(h, w, n, channels)
        .permute(2, 3, 0, 1)
    )


def _expand_table(
    table: Float[Tensor, "r k"], columns: Float[Tensor, "b k c"]
) -> Float[Tensor, "b r k"]:
    return table.expand(len(columns), -1, -1)
