"""Replacement of PyTorch's dense layers and convolutions by other kernels, in any network.

| kernel | computation |
|---|---|
| linear = "torch" | y = x W^T + b and its derivatives by PyTorch's products |
| linear = "onednn" | the same by oneDNN's products, faster on some processors |
| linear = "batched" | several networks as one batched product, for GPUs |
| convolution = "grouped" | several networks as one convolution with a group for each |
| convolution = "unfolded" | several networks as one batched product |
| convolution = "mixed" | "unfolded" for few input channels, else "grouped" |
| convolution = "fourier" | one network on a CPU, by products of spectra |

Kernels agree to rounding and not to the bit.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedcb2o.federated.run_spec import ConvolutionKernel, LinearKernel
from fedcb2o.kernels import _batched_linear, _fft_conv, _onednn, _unfold_conv

_LINEAR: dict[LinearKernel, Callable[..., Any]] = {
    "torch": F.linear,
    "onednn": _onednn.linear,
    "batched": _batched_linear.linear,
}

_CONVOLUTIONS: dict[ConvolutionKernel, Callable[..., Any]] = {
    "grouped": F.conv2d,
    "unfolded": _unfold_conv.conv2d,
    "mixed": functools.partial(_unfold_conv.conv2d, max_channels=_unfold_conv.FEW_CHANNELS),
    "fourier": _fft_conv.conv2d,
}


def use_kernels(
    linear: LinearKernel = "torch", convolution: ConvolutionKernel = "grouped"
) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which networks are computed by the named kernels."""
    replacements: dict[Any, Callable[..., Any]] = {}
    if linear != "torch":
        replacements[F.linear] = _LINEAR[linear]
    if convolution != "grouped":
        replacements[F.conv2d] = _CONVOLUTIONS[convolution]
    return _ReplacedFunctions(replacements) if replacements else contextlib.nullcontext()


class _ReplacedFunctions(TorchFunctionMode):
    """A mode that replaces PyTorch's functions; `nn.Linear` calls `F.linear`."""

    def __init__(self, replacements: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.replacements = replacements

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self.replacements.get(func, func)(*args, **(kwargs or {}))
