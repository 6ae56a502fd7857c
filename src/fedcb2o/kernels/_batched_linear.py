"""Dense layers of several networks, with derivatives in the memory order of the weights.

Under `torch.func.vmap` PyTorch returns the derivative by the weights transposed, so that every step
of an optimiser reads two orders of memory. Here it is in the order of the weights.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcb2o.nn.memory_layout import is_vmapped


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `F.linear`, as one batched product where each network has its own inputs."""
    if bias is None or input.ndim != 2 or not all(map(is_vmapped, (input, weight, bias))):
        return F.linear(input, weight, bias)

    # Autocast does not reach into an autograd function.
    kind = input.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        input = input.to(dtype)
        weight = weight.to(dtype)
        bias = bias.to(dtype)
    outputs: Tensor = _BatchedLinear.apply(input, weight, bias)  # type: ignore[no-untyped-call]  # PyTorch has no types
    return outputs


class _BatchedLinear(torch.autograd.Function):
    """A dense layer of several networks; inside `torch.func.vmap` it receives all of them."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        x, weight, _ = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        (g,) = gradients
        x, weight = ctx.saved_tensors
        by_x = torch.bmm(g, weight) if ctx.needs_input_grad[0] else None
        by_weight = torch.bmm(g.mT, x) if ctx.needs_input_grad[1] else None
        return by_x, by_weight, g.sum(1)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, int, int], *tensors: Tensor) -> tuple[Tensor, int]:
        stacked = [tensor.movedim(dim, 0) for tensor, dim in zip(tensors, in_dims, strict=True)]
        outputs: Tensor = _BatchedLinear.apply(*stacked)  # type: ignore[no-untyped-call]  # PyTorch has no types
        return outputs, 0
