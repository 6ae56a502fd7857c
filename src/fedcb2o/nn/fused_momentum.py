"""SGD with momentum in one pass over the parameters, for NVIDIA GPUs.

A step writes the parameters, their momentum and their copy in bfloat16, and reads the gradient in
bfloat16: 20 bytes per parameter. PyTorch's operations under autocast move more than twice as many.
Triton comes with PyTorch on Linux; it is imported here alone, and this module where it is used.
"""

import triton
from jaxtyping import Float
from torch import Tensor
from triton import language as tl

_BLOCK = 2048  # parameters of a program


def momentum_step_(
    parameter: Float[Tensor, "..."],
    momentum: Float[Tensor, "..."],
    gradient: Float[Tensor, "..."],
    low: Float[Tensor, "..."] | None,
    lr: float,
    factor: float,
) -> None:
    """Update parameters in place: m <- factor m + g, theta <- theta - lr m.

    The parameters theta and the momentum m are contiguous and in float32; the gradient is of any
    type. `low` is a contiguous copy of theta in bfloat16, which is updated, too; None without a
    copy.
    """
    # Without a copy the kernel gets a pointer that it does not use.
    count = parameter.numel()
    _momentum_kernel[(triton.cdiv(count, _BLOCK),)](
        parameter,
        momentum,
        gradient.contiguous(),
        parameter if low is None else low,
        count,
        lr,
        factor,
        HAS_LOW=low is not None,
        BLOCK=_BLOCK,
    )


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _momentum_kernel(  # type: ignore[no-untyped-def]  # parameters are pointers
    parameter,
    momentum,
    gradient,
    low,
    count,
    lr,
    factor,
    HAS_LOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = e < count
    g = tl.load(gradient + e, mask=mask).to(tl.float32)
    m = tl.load(momentum + e, mask=mask) * factor + g
    theta = tl.load(parameter + e, mask=mask) - lr * m
    tl.store(momentum + e, m, mask=mask)
    tl.store(parameter + e, theta, mask=mask)
    if HAS_LOW:
        tl.store(low + e, theta.to(low.dtype.element_ty), mask=mask)
