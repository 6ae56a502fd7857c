"""A dense layer and its derivatives by the products of oneDNN."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from fedcb2o.nn.memory_layout import is_vmapped

MIN_WEIGHTS = 2**20  # of a dense layer for which the kernel matters


def is_available() -> bool:
    """Return True if this PyTorch has oneDNN, and its product operator."""
    return torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `F.linear`, by oneDNN for a large layer of one network in float32 on a CPU."""
    is_large = input.ndim == weight.ndim == 2 and weight.numel() >= MIN_WEIGHTS
    is_float32 = input.dtype == weight.dtype == torch.float32
    if not (is_large and is_float32) or is_vmapped(input) or is_vmapped(weight):
        return F.linear(input, weight, bias)
    if input.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return F.linear(input, weight, bias)
    return _LinearFunction.apply(input, weight, bias)  # type: ignore[no-any-return, no-untyped-call]


def _matmul(a: Float[Tensor, "n k"], b: Float[Tensor, "m k"]) -> Float[Tensor, "n m"]:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    return product


class _LinearFunction(torch.autograd.Function):
    """A dense layer and its derivatives by oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute y = (W x^T)^T + b for inputs x [n, k], weights W [m, k] and a bias b [m]."""
        ctx.save_for_backward(x, weight)
        # W is the left operand, which saves oneDNN a copy of W into its own order.
        y = _matmul(weight, x.contiguous()).T
        if bias is None:
            return y.contiguous()
        return torch.add(y, bias, out=y.new_empty(y.shape))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Compute g W, g^T x and the sum of g, each only if it is needed; else None."""
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        g = g.contiguous()
        grad_bias = g.sum(0) if needs_bias else None
        if torch.is_grad_enabled():  # differentiated again, which oneDNN's products cannot be
            return g @ weight, g.T @ x, grad_bias
        grad_x = _matmul(g, weight.T) if needs_x else None
        grad_weight = _matmul(g.T, x.contiguous().T) if needs_weight else None
        return grad_x, grad_weight, grad_bias
