"""A convolution by products of spectra.

At each frequency a convolution is a product of an image's channels with a matrix (Mathieu, Henaff
and LeCun, "Fast Training of Convolutional Networks through FFTs", 2014), so that the cost does not
depend on the kernel's size. The images are small here: their transforms are products with constant
matrices, one for rows and one for columns, which a processor computes at its best rate. All steps
are products, sums and copies. They repeat their bits, and PyTorch differentiates them to any order.

Every pixel of a spectrum depends on every pixel of its image. A rounding error is therefore
relative to the image's largest value, not to nearby values, and one non-finite pixel makes its
whole image non-finite.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from fedcb2o.kernels._unfold_conv import Margins, padding_margins
from fedcb2o.nn.memory_layout import is_vmapped

MIN_SAVING = 2  # factor of multiplications saved; those of spectra are in smaller products

_Spectrum = tuple[Float[Tensor, "_f _n _c"], Float[Tensor, "_f _n _c"]]  # real, imaginary part


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Compute `F.conv2d`, by spectra where that takes far fewer multiplications.

    Spectra apply on a CPU, in float32, for one network, with stride and dilation 1 and one group.
    """
    if _is_supported(input, weight, bias, stride, padding, dilation, groups):
        margins = padding_margins(padding, weight)
        if _is_faster(input.shape, weight.shape, margins):
            return _fft_conv2d(input, weight, bias, margins)
    return F.conv2d(input, weight, bias, stride, padding, dilation, groups)


def _is_supported(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int | Sequence[int],
    padding: str | int | Sequence[int],
    dilation: int | Sequence[int],
    groups: int,
) -> bool:
    tensors = [tensor for tensor in (input, weight, bias) if tensor is not None]
    for tensor in tensors:
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu" or is_vmapped(tensor):
            return False
    if torch.is_autocast_enabled("cpu"):
        return False
    if not (input.ndim == weight.ndim == 4 and input.shape[1] == weight.shape[1] and groups == 1):
        return False
    for value in (stride, dilation):
        if np.size(value) > 2 or not np.all(np.equal(value, 1)):
            return False
    if bias is not None and bias.shape != weight.shape[:1]:
        return False
    if isinstance(padding, str):
        return padding in ("same", "valid")
    return bool(np.size(padding) <= 2)


def _is_faster(images: Sequence[int], weight: Sequence[int], margins: Margins) -> bool:
    """Return True if spectra take far fewer multiplications; the kernel's spectrum counts once."""
    n, channels, *shape = images
    filters, _, *kernel = weight
    output = _output_shape(shape, kernel, margins)
    if min(output) < 1 or min(map(min, margins)) < 0:  # an error, which PyTorch reports
        return False

    s, t = _periods(shape, margins)
    half = s // 2 + 1

    def transform(h: int, w: int) -> int:
        return 2 * half * h * w + half * 2 * t * 2 * w

    spectra = channels * (n * transform(*shape) + filters * transform(*kernel))
    spectra += n * filters * transform(*output)
    # A complex product takes four real ones.
    spectra += 4 * half * t * n * channels * filters
    direct = n * channels * filters * math.prod(output) * math.prod(kernel)
    return MIN_SAVING * spectra < direct


def _fft_conv2d(
    x: Float[Tensor, "n C H W"],
    weight: Float[Tensor, "O C k l"],
    bias: Float[Tensor, " O"] | None,
    margins: Margins,
) -> Float[Tensor, "n O h w"]:
    """Compute Y = X conj(W), the spectrum of y[i] = sum_d x[i + d - m] w[d] with margin m."""
    periods = _periods(x.shape[2:], margins)
    real, imaginary = _transform(x, periods)
    starts = [-before for before, _ in margins]
    kernel_real, kernel_imaginary = (part.mT for part in _transform(weight, periods, starts))
    # X conj(W), in real and imaginary parts.
    product = (
        torch.baddbmm(torch.bmm(real, kernel_real), imaginary, kernel_imaginary),
        torch.baddbmm(torch.bmm(imaginary, kernel_real), real, kernel_imaginary, alpha=-1),
    )

    y = _inverse_transform(product, periods, _output_shape(x.shape[2:], weight.shape[2:], margins))
    y = y.contiguous(memory_format=_memory_format(x, weight))
    return y if bias is None else y.add_(bias[:, None, None])


def _memory_format(x: Tensor, weight: Tensor) -> torch.memory_format:
    """Return the format of PyTorch's own convolution."""
    for tensor in (x, weight):
        is_last = tensor.is_contiguous(memory_format=torch.channels_last)
        if is_last and not tensor.is_contiguous():
            return torch.channels_last
    return torch.contiguous_format


def _output_shape(shape: Sequence[int], kernel: Sequence[int], margins: Margins) -> list[int]:
    return [side + sum(ends) - k + 1 for side, k, ends in zip(shape, kernel, margins, strict=True)]


def _periods(shape: Sequence[int], margins: Margins) -> list[int]:
    """Return the period of each direction, long enough for zeros to separate both ends."""
    return [side + max(ends) for side, ends in zip(shape, margins, strict=True)]


@functools.lru_cache(maxsize=64)
def _dft_tables(size: int, count: int, start: int) -> tuple[Float[Tensor, "_r _c"], ...]:
    """Return the matrices that transform `count` numbers of a period of length `size`.

    The first number is at the place `start`. With h = size // 2 + 1, the matrices are:

    1. [2 h, count]: real numbers to alternating real and imaginary parts of half of the
       frequencies;
    2. [count, 2 h]: the inverse;
    3. [size, 2 count]: stacked real and imaginary parts to the real parts of all frequencies;
    4. [size, 2 count]: the same to the imaginary parts.
    """
    angle = 2 * math.pi / size * np.outer(np.arange(size), np.arange(start, start + count))
    cos = np.cos(angle)
    sin = np.sin(angle)
    half = size // 2 + 1
    rows = np.stack([cos[:half], -sin[:half]], 1)

    # The other half of the frequencies is conjugate to this one. The first frequency, and the last
    # of an even period, are their own conjugates.
    weights = np.array([1.0, *[2.0] * ((size - 1) // 2), *[1.0] * (size % 2 == 0)])
    inverse = (rows * weights[:, None, None]).reshape(2 * half, count).T / size
    tables = (
        rows.reshape(2 * half, count),
        inverse,
        np.concatenate([cos, sin], 1),
        np.concatenate([-sin, cos], 1),
    )
    with torch.inference_mode(False):  # cached, and used in training too
        return tuple(
            torch.from_numpy(np.ascontiguousarray(table, dtype=np.float32)) for table in tables
        )


def _transform(
    x: Float[Tensor, "n C h w"], periods: Sequence[int], starts: Sequence[int] = (0, 0)
) -> _Spectrum:
    n, channels, h, w = x.shape
    rows, *_ = _dft_tables(periods[0], h, starts[0])
    _, _, real, imaginary = _dft_tables(periods[1], w, starts[1])
    columns = (rows @ x.permute(2, 3, 0, 1).reshape(h, -1)).view(
        len(rows) // 2, 2 * w, n * channels
    )
    first, second = (
        torch.bmm(_expand_table(table, columns), columns).view(-1, n, channels)
        for table in (real, imaginary)
    )
    return first, second


def _inverse_transform(
    spectrum: _Spectrum, periods: Sequence[int], shape: Sequence[int]
) -> Float[Tensor, "n C h w"]:
    h, w = shape
    n, channels = spectrum[0].shape[1:]
    _, inverse, *_ = _dft_tables(periods[0], h, 0)
    _, _, real, imaginary = _dft_tables(periods[1], w, 0)
    first, second = (part.view(-1, periods[1], n * channels) for part in spectrum)
    columns = torch.baddbmm(
        torch.bmm(_expand_table(real.T, first), first),
        _expand_table(imaginary.T, second),
        second,
    )
    image = inverse / periods[1] @ columns.view(inverse.shape[1], -1)
    return image.view(h, w, n, channels).permute(2, 3, 0, 1)


def _expand_table(
    table: Float[Tensor, "r k"], columns: Float[Tensor, "b k c"]
) -> Float[Tensor, "b r k"]:
    return table.expand(len(columns), -1, -1)
