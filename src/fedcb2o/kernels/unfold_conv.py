"""The convolutions of several networks, each with weights and images of its own, as one batched product.

`torch.func.vmap` makes one convolution of them, with a group for each network: a form that accelerators may compute,
and above all differentiate, at a fraction of the rate of their products. Here the patches that a convolution sees are
written out as the rows of a matrix, the channels of a pixel side by side, and one batched product with the weights is
the convolution. All of it, and so its derivatives, is made of views, copies and products that repeat their bits.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from fedcb2o.nn.memory_layout import is_vmapped

Margins = Sequence[
    tuple[int, int]
]  # of zeros before and after an image, from top to bottom and from left to right

FEW_CHANNELS = 8  # channels: what reads fewer has no form for the units that devices have for products of matrices


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
    """What takes the place of `F.conv2d`: unfolded where `torch.func.vmap` computes several networks, on images of
    their own, and the convolution has no groups itself; of those only what reads fewer `channels` than these."""
    steps = _pair(stride)
    apart = _pair(dilation)
    known = (
        padding == "valid"
        or (padding == "same" and steps == (1, 1))
        or not isinstance(padding, str)
    )
    if not (known and groups == 1 and input.ndim == 4 and is_vmapped(input) and is_vmapped(weight)):
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    kind = input.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        input = input.to(dtype)
        weight = weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if max_channels is not None and weight.shape[1] >= max_channels:
        return F.conv2d(input, weight, bias, stride, padding, dilation)
    return _unfold_conv2d(
        input, weight, bias, steps, padding_margins(padding, weight, apart), apart
    )


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def padding_margins(
    padding: str | int | Sequence[int], weight: Tensor, apart: tuple[int, int] = (1, 1)
) -> Margins:
    """The zeros that a convolution's `padding` stands for, pixels of its kernel being so far `apart`."""
    if padding == "same":
        reach = [d * (k - 1) for d, k in zip(apart, weight.shape[2:], strict=True)]
        return [(r // 2, r - r // 2) for r in reach]
    return [(p, p) for p in _pair(0 if isinstance(padding, str) else padding)]


def _unfold_conv2d(
    x: Float[Tensor, "n C H W"],
    weight: Float[Tensor, "O C k l"],
    bias: Float[Tensor, " O"] | None,
    stride: tuple[int, int],
    margins: Margins,
    dilation: tuple[int, int],
) -> Float[Tensor, "n O h w"]:
    (top, bottom), (left, right) = margins
    seen = F.pad(x.permute(0, 2, 3, 1), (0, 0, left, right, top, bottom))
    for axis, (k, s, d) in enumerate(zip(weight.shape[2:], stride, dilation, strict=True), 1):
        seen = seen.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    n, h, w = seen.shape[:3]  # [n, h, w, C, k, l]
    patches = seen.permute(0, 1, 2, 4, 5, 3).reshape(n * h * w, weight[0].numel())
    matrix = weight.permute(2, 3, 1, 0).reshape(-1, len(weight))
    found = patches @ matrix if bias is None else patches @ matrix + bias
    # Channel after channel, since under vmap some layers can read no other order, nor some networks any.
    return found.view(n, h, w, -1).permute(0, 3, 1, 2).contiguous()
