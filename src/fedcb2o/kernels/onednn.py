"""A dense layer, and its derivatives, by the products of oneDNN."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from fedcb2o.nn.memory_layout import is_vmapped

MIN_WEIGHTS = 2**20  # weights of a dense layer from which on the choice matters


def is_available() -> bool:
    """Whether this PyTorch has oneDNN's products."""
    return torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What takes the place of `F.linear`: by oneDNN where a layer is large."""
    ours = (
        input.ndim == weight.ndim == 2
        and weight.numel() >= MIN_WEIGHTS
        and input.dtype == weight.dtype == torch.float32
    )
    ours = ours and not (is_vmapped(input) or is_vmapped(weight))
    if not ours or input.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return F.linear(input, weight, bias)
    return _LinearFunction.apply(input, weight, bias)  # type: ignore[no-any-return, no-untyped-call]


def _matmul(a: Float[Tensor, "n k"], b: Float[Tensor, "m k"]) -> Float[Tensor, "n m"]:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    return product


class _LinearFunction(torch.autograd.Function):
    """A dense layer, and its derivatives, by oneDNN. A matrix W on the left saves it a copy of W into its own order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = _matmul(weight, x.contiguous()).T
        return y.contiguous() if bias is None else torch.add(y, bias, out=y.new_empty(y.shape))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad
        g = g.contiguous()
        if (
            torch.is_grad_enabled()
        ):  # it is to be differentiated again, and oneDNN's products cannot
            return g @ weight, g.T @ x, g.sum(0) if needed[2] else None
        return (
            _matmul(g, weight.T) if needed[0] else None,
            _matmul(g.T, x.contiguous().T) if needed[1] else None,
            g.sum(0) if needed[2] else None,
        )
