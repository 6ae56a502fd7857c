"""A convolution, and its derivatives, by products of spectra.

Frequency by frequency a convolution is a product of the channels of an image with a matrix (Mathieu, Henaff and LeCun,
"Fast Training of Convolutional Networks through FFTs", 2014), so that pixels of a kernel cost nothing. Images are small
here: their transforms are products with constant matrices, one for the rows and one for the columns, which a processor
computes at its best rate. All of it is products and copies, which repeat their bits.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fedcb2o.models import are_several
from fedcb2o.runtime.convolution import FEW, Margins, margins_of, pair

FEWER = 2  # times as many multiplications as spectra take: theirs are in smaller products

Spectrum = tuple[Float[Tensor, "_f _n _c"], Float[Tensor, "_f _n _c"]]  # the real part, and the imaginary one


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
    ours = input.ndim == weight.ndim == 4 and groups == 1 and pair(stride) == pair(dilation) == (1, 1)
    ours = ours and input.dtype == weight.dtype == torch.float32 and min(weight.shape[:2]) >= FEW
    ours = ours and input.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    ours = ours and not (are_several(input) or are_several(weight))
    ours = ours and input.shape[1] == weight.shape[1] and (bias is None or bias.shape == weight.shape[:1])
    if ours and (not isinstance(padding, str) or padding in ("same", "valid")):
        margins = margins_of(padding, weight)
        if _pay(input.shape, weight.shape, margins):
            return _Convolution.apply(input, weight, bias, margins)  # type: ignore[no-any-return, no-untyped-call]
    return F.conv2d(input, weight, bias, stride, padding, dilation, groups)


def _pay(images: Sequence[int], weight: Sequence[int], margins: Margins) -> bool:
    """Whether spectra take far fewer multiplications, that of the kernel counted once."""
    (n, channels, *shape), (found, _, *kernel) = images, weight
    after = _after(shape, kernel, margins)
    s, t = _sizes(shape, margins)
    half = s // 2 + 1

    def transform(h: int, w: int) -> int:
        return 2 * half * h * w + half * 2 * t * 2 * w

    spectra = channels * (n * transform(*shape) + found * transform(*kernel)) + n * found * transform(*after)
    spectra += 4 * half * t * n * channels * found
    return min(after) > 0 and FEWER * spectra < n * channels * found * math.prod(after) * math.prod(kernel)


class _Convolution(torch.autograd.Function):
    """y[i] = sum_d x[i + d - m] w[d] in each of two directions, m the margin before the image, is X conj(W)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, margins: Margins) -> Tensor:
        sizes, starts = _sizes(x.shape[2:], margins), [-before for before, _ in margins]
        spectrum, kernel = _spectrum(x, sizes), _spectrum(weight, sizes, starts)
        ctx.save_for_backward(*spectrum, *kernel)
        ctx.sizes, ctx.starts, ctx.shape, ctx.kernel = sizes, starts, x.shape[2:], weight.shape[2:]
        last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        ctx.layout = torch.channels_last if last else torch.contiguous_format
        y = _image(_times(spectrum, _turned(kernel), -1), sizes, _after(ctx.shape, ctx.kernel, margins))
        if bias is None:
            return y.contiguous(memory_format=ctx.layout)
        return torch.add(y, bias[:, None, None], out=torch.empty(y.shape, memory_format=ctx.layout))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        spectrum, kernel = ctx.saved_tensors[:2], ctx.saved_tensors[2:]
        needed, gradient = ctx.needs_input_grad, _spectrum(g, ctx.sizes)
        x = weight = None
        if needed[0]:
            x = _image(_times(gradient, kernel, 1), ctx.sizes, ctx.shape).contiguous(memory_format=ctx.layout)
        if needed[1]:
            by_channel = _times(_turned(spectrum), gradient, -1)
            weight = _image(by_channel, ctx.sizes, ctx.kernel, ctx.starts).transpose(0, 1).contiguous()
        return x, weight, gradient[0][0].sum(0) if needed[2] else None, None  # frequency 0 is the sum over pixels


def _after(shape: Sequence[int], kernel: Sequence[int], margins: Margins) -> list[int]:
    return [side + sum(ends) - k + 1 for side, k, ends in zip(shape, kernel, margins, strict=True)]


def _sizes(shape: Sequence[int], margins: Margins) -> list[int]:
    """The period of each direction: what goes past one end of an image, into zeros, ends before the other."""
    return [side + max(ends) for side, ends in zip(shape, margins, strict=True)]


@functools.cache
def _tables(size: int, count: int, start: int) -> tuple[Float[Tensor, "_r _c"], ...]:
    """What transforms `count` numbers, the first at `start`, of a period: real ones to the real and imaginary parts, by
    turns, of half of the frequencies [2 h, count]; their inverse [count, 2 h]; and stacked real and imaginary ones to
    the real parts of all [size, 2 count], and to the imaginary ones."""
    angle = 2 * math.pi / size * torch.outer(torch.arange(size), torch.arange(start, start + count)).double()
    cos, sin = angle.cos(), angle.sin()
    half = size // 2 + 1
    rows = torch.stack([cos[:half], -sin[:half]], 1)
    # The other half is the conjugate of this one, whose first, and last of an even number, have none there.
    weights = torch.tensor([1.0, *[2.0] * ((size - 1) // 2), *[1.0] * (size % 2 == 0)]).double()
    back = (rows * weights[:, None, None]).reshape(2 * half, count).T
    tables = rows.reshape(2 * half, count), back / size, torch.cat([cos, sin], 1), torch.cat([-sin, cos], 1)
    return tuple(table.float().contiguous() for table in tables)


def _spectrum(x: Float[Tensor, "n C h w"], sizes: Sequence[int], starts: Sequence[int] = (0, 0)) -> Spectrum:
    n, channels, h, w = x.shape
    rows, *_ = _tables(sizes[0], h, starts[0])
    _, _, real, imaginary = _tables(sizes[1], w, starts[1])
    found = (rows @ x.permute(2, 3, 0, 1).reshape(h, -1)).view(len(rows) // 2, 2 * w, n * channels)
    first, second = (_each(table, found).view(-1, n, channels) for table in (real, imaginary))
    return first, second


def _image(
    spectrum: Spectrum, sizes: Sequence[int], shape: Sequence[int], starts: Sequence[int] = (0, 0)
) -> Float[Tensor, "n C h w"]:
    (h, w), (n, channels) = shape, spectrum[0].shape[1:]
    _, back, *_ = _tables(sizes[0], h, starts[0])
    _, _, real, imaginary = _tables(sizes[1], w, starts[1])
    first, second = (part.view(-1, sizes[1], n * channels) for part in spectrum)
    found = _each(real.T, first).baddbmm_(imaginary.T.expand(len(second), -1, -1), second)
    return (back / sizes[1] @ found.view(back.shape[1], -1)).view(h, w, n, channels).permute(2, 3, 0, 1)


def _each(table: Float[Tensor, "r k"], columns: Float[Tensor, "b k c"]) -> Float[Tensor, "b r c"]:
    return torch.bmm(table.expand(len(columns), -1, -1), columns)


def _turned(a: Spectrum) -> Spectrum:
    return a[0].mT, a[1].mT


def _times(a: Spectrum, b: Spectrum, sign: int) -> Spectrum:
    """The products of matrices a b, or, with a `sign` of -1, of a and the conjugate of b."""
    real = torch.bmm(a[0], b[0]).baddbmm_(a[1], b[1], alpha=-sign)
    return real, torch.bmm(a[1], b[0]).baddbmm_(a[0], b[1], alpha=sign)
