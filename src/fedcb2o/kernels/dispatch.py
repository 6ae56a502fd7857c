"""The primitives that a network is computed by, any network: PyTorch's own functions, or others in their place.

A dense layer's y = x W^T + b and its derivatives g W and g^T x are done by PyTorch's own products ("torch") or by those
of oneDNN ("onednn"), which is faster on some processors. Convolutions of several networks at once are one with a group
for each network ("grouped"), one batched product ("unfolded"), or that where they read few channels ("mixed"); those of
one network on a processor are PyTorch's own, or products of spectra ("fourier"). Any way agrees with the others to
rounding and not to the bit.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedcb2o.federated.run_spec import ConvolutionKernel, LinearKernel
from fedcb2o.kernels import fft_conv, onednn
from fedcb2o.kernels import unfold_conv as unfolded

_CONVOLUTIONS: dict[ConvolutionKernel, Callable[..., Any]] = {
    "grouped": F.conv2d,
    "unfolded": unfolded.conv2d,
    "mixed": functools.partial(unfolded.conv2d, max_channels=unfolded.FEW_CHANNELS),
    "fourier": fft_conv.conv2d,
}


def use_kernels(
    linear: LinearKernel = "torch", convolution: ConvolutionKernel = "grouped"
) -> contextlib.AbstractContextManager[Any]:
    """Within it, large dense layers of any network, in float32, go through what `linear` names, and convolutions are
    done as `convolution` says."""
    ours: dict[Any, Callable[..., Any]] = {}
    if linear == "onednn":
        ours[F.linear] = onednn.linear
    if convolution != "grouped":
        ours[F.conv2d] = _CONVOLUTIONS[convolution]
    return _ReplacedFunctions(ours) if ours else contextlib.nullcontext()


class _ReplacedFunctions(TorchFunctionMode):
    """Puts our functions in the place of PyTorch's, for any network: `nn.Linear` calls `F.linear`."""

    def __init__(self, ours: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.replacements = ours

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self.replacements.get(func, func)(*args, **(kwargs or {}))
