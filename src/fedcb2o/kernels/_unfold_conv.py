"""The convolutions of several networks as one batched product, by unfolded patches.

`torch.func.vmap` turns them into one convolution with a group for each network. Accelerators may
compute and, above all, differentiate that form at a fraction of the rate of their products. Here
the patches of a convolution become the rows of a matrix, with the channels of a pixel side by side,
and one batched product with the weights is the convolution. It consists of views, copies and
products, which repeat their bits; so do its derivatives.

>>> padding_margins("same", torch.zeros(1, 1, 3, 4))
[(1, 1), (1, 2)]
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from fedcb2o.nn.memory_layout import is_vmapped

Margins = Sequence[tuple[int, int]]
"""Zeros before and after an image: first (top, bottom), then (left, right)."""

FEW_CHANNELS = 8  # fewer have no form for the matrix units of accelerators


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    max_channels: int | None = None,
) -> Tensor:
    """Compute `F.conv2d`, unfolded where `torch.func.vmap` computes several networks.

    Each network has its own images, and the convolution itself has one group. With `max_channels`,
    only a convolution of fewer input channels is unfolded.
    """
    steps = _pair(stride)
    spacing = _pair(dilation)
    is_known = (
        not isinstance(padding, str)
        or padding == "valid"
        or (padding == "same" and steps == (1, 1))
    )
    is_several = is_known and groups == 1 and input.ndim == 4 and is_vmapped(input)
    if not (is_several and is_vmapped(weight)):
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)

    kind = input.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        input = input.to(dtype)
        weight = weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if max_channels is not None and weight.shape[1] >= max_channels:
        return F.conv2d(input, weight, bias, stride, padding, dilation)
    margins = padding_margins(padding, weight, spacing)
    return _unfold_conv2d(input, weight, bias, steps, margins, spacing)


def padding_margins(
    padding: str | int | Sequence[int], weight: Tensor, dilation: tuple[int, int] = (1, 1)
) -> Margins:
    """Return the zeros that a convolution's `padding` adds, before and after an image.

    `dilation` is the distance between the pixels of a kernel, in each direction.
    """
    if padding == "same":
        reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        return [(r // 2, r - r // 2) for r in reach]
    zeros = 0 if isinstance(padding, str) else padding
    return [(p, p) for p in _pair(zeros)]


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def _unfold_conv2d(
    x: Float[Tensor, "n C H W"],
    weight: Float[Tensor, "O C k l"],
    bias: Float[Tensor, " O"] | None,
    stride: tuple[int, int],
    margins: Margins,
    dilation: tuple[int, int],
) -> Float[Tensor, "n O h w"]:
    (top, bottom), (left, right) = margins
    windows = F.pad(x.permute(0, 2, 3, 1), (0, 0, left, right, top, bottom))
    directions = zip(weight.shape[2:], stride, dilation, strict=True)
    for axis, (k, s, d) in enumerate(directions, 1):
        windows = windows.unfold(axis, d * (k - 1) + 1, s)[..., ::d]

    n, h, w = windows.shape[:3]  # [n, h, w, C, k, l]
    patches = windows.permute(0, 1, 2, 4, 5, 3).reshape(n * h * w, weight[0].numel())
    matrix = weight.permute(2, 3, 1, 0).reshape(-1, len(weight))
    rows = patches @ matrix if bias is None else patches @ matrix + bias
    # One channel after the other: under vmap some layers and networks can read no other order.
    return rows.view(n, h, w, -1).permute(0, 3, 1, 2).contiguous()
