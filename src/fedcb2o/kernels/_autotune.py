"""The fastest kernels of this machine, chosen by a short timing and recorded in the run.

A resumed run uses the recorded kernels. Two kernels agree to rounding and not to the bit, so that a
choice must not depend on chance: a kernel other than the default is chosen only if it is clearly
faster.

The precision is chosen in the same way: products in bfloat16 take tens of times as long as in
float32 on a processor without instructions for them.
"""

import copy
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from fedcb2o.data import features
from fedcb2o.federated.inference import batched_forward, dense_layers
from fedcb2o.federated.local_update import allow_tf32, autocast
from fedcb2o.federated.run_spec import ConvolutionKernel, LinearKernel
from fedcb2o.federated.sections import Precision
from fedcb2o.kernels import _onednn
from fedcb2o.kernels.devices import deterministic
from fedcb2o.kernels.dispatch import use_kernels
from fedcb2o.nn import batch_norm
from fedcb2o.nn.parameters import contiguous_leaves, flatten, row_stride, trainable_stack
from fedcb2o.parallel._executors import one_thread

# Speedups from which on a kernel other than the default is chosen. A repeated measurement differs
# by a tenth, or by more on a busy machine, so each limit is where few measured networks were:
# dense layers 0.84 to 0.95 on one processor and 1.17 on another, the paper's network by spectra 1.7
# to 2. A table by instruction set would not hold: on a third processor, with AVX-512, dense layers
# gained 2.2 and spectra 0.6 to 1.2. Limited to AVX2, it gained 1.2 by dense layers and 0.9 to 2.1
# by spectra, depending on the network.
MIN_SPEEDUP = 1.05
MIN_CONV_SPEEDUP = 1.3
MIN_BFLOAT16_SPEEDUP = 1 / 3  # about 2 on a processor with bfloat16, 0.02 to 0.03 without
MIN_BATCHED_CONV_SPEEDUP = 1.1  # on a GPU, which is less shared; "mixed" was slower for the paper's

_REPEATS = 11
_TIMED_AGENTS = 16  # enough to fill a device


@functools.cache
def fastest_linear() -> LinearKernel:
    """Return the faster kernel of dense layers, tried in under a second on one thread.

    It is "onednn" if it is clearly faster for the paper's dense layer at batch size 64, else
    "torch".
    """
    if not _onednn.is_available():
        return "torch"
    return "onednn" if onednn_speedup() > MIN_SPEEDUP else "torch"


def onednn_speedup() -> float:
    """Return the speedup of oneDNN for the three products of the paper's dense layer."""
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 3136, generator=draw, requires_grad=True) for n in (64, 2048))
    g = torch.randn(64, 2048, generator=draw)
    bias = torch.zeros(2048, requires_grad=True)

    def layer(linear: LinearKernel) -> None:
        with use_kernels(linear):
            torch.autograd.grad(F.linear(x, weight, bias), (x, weight, bias), g)

    with one_thread():
        return _speedup(lambda: layer("torch"), lambda: layer("onednn"), time.thread_time)


def supported_precision(requested: Precision, device: torch.device) -> Precision:
    """Return the requested precision if the device computes it at a useful speed.

    "float32" takes the place of "bfloat16" where products in bfloat16 are far slower.
    """
    if requested == "bfloat16" and _bfloat16_speedup(device) < MIN_BFLOAT16_SPEEDUP:
        return "float32"
    return requested


@functools.cache
def _bfloat16_speedup(device: torch.device) -> float:
    """Return the speedup of bfloat16 over float32, tried in half a second on one thread.

    The result is 0 where the device has no bfloat16, or is a GPU that emulates it.
    """
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return 0.0

    def product(x: Shaped[Tensor, "n n"]) -> None:
        torch.matmul(x, x)[0, 0].cpu()  # waits for the device

    try:
        full = torch.ones(256, 256, device=device)
        half = full.to(torch.bfloat16)
        with deterministic(device), one_thread():
            return _speedup(lambda: product(full), lambda: product(half), time.perf_counter)
    except (RuntimeError, TypeError):
        return 0.0


def _speedup(
    default: Callable[[], Any], other: Callable[[], Any], clock: Callable[[], float]
) -> float:
    """Return the time of the default divided by that of the other, the median over turns."""

    def seconds(compute: Callable[[], Any]) -> float:
        start = clock()
        compute()
        return clock() - start

    # A turn times both, so that a slow phase of the machine affects both. The first turn, which
    # builds kernels, does not count.
    turns = [(seconds(default), seconds(other)) for _ in range(_REPEATS + 1)]
    return statistics.median(slow / fast if fast > 0 else 1.0 for slow, fast in turns[1:])


def fastest_single_convolution(
    module: nn.Module, x: Shaped[Tensor, "n *features"], precision: Precision
) -> ConvolutionKernel:
    """Return the faster kernel of one network's convolutions on a CPU.

    It is "fourier" if it is clearly faster, else "grouped". The trial takes as long as two dozen
    training steps, or hardly any time where spectra do not apply.
    """
    if not any(isinstance(part, nn.Conv2d) for part in module.modules()):
        return "grouped"

    def outputs(convolution: ConvolutionKernel) -> Tensor:
        with use_kernels(convolution=convolution), autocast(precision, "cpu"):
            result: Tensor = network(features(x))
        return result

    def step(convolution: ConvolutionKernel) -> None:
        torch.autograd.grad(outputs(convolution).sum(), parameters, allow_unused=True)

    try:
        network = copy.deepcopy(module)  # its parameters are not rows of the model buffer
        batch_norm.train_(network)
        parameters = [p for p in network.parameters() if p.requires_grad]
        with one_thread(), torch.random.fork_rng(devices=[]):
            if torch.equal(outputs("grouped"), outputs("fourier")):  # spectra do not apply
                return "grouped"
            speedup = _speedup(lambda: step("grouped"), lambda: step("fourier"), time.thread_time)
    except Exception:  # a user's network may not be copyable
        return "grouped"
    return "fourier" if speedup > MIN_CONV_SPEEDUP else "grouped"


def fastest_batched_convolution(
    module: nn.Module,
    x: Shaped[Tensor, "n *features"],
    precision: Precision,
    device: torch.device,
    max_agents: int,
) -> ConvolutionKernel:
    """Return the fastest kernel of the convolutions of several agents on a device.

    `x` is a batch of each agent. Of the `max_agents` agents that train together, at most
    `_TIMED_AGENTS` are timed. It is "unfolded" or "mixed" if it is clearly faster than "grouped"
    and can be tried, else "grouped".
    """
    convolutions = [part for part in module.modules() if isinstance(part, nn.Conv2d)]
    if max_agents < 2 or not any(part.groups == 1 for part in convolutions):
        return "grouped"
    theta = flatten(module)
    agents = min(max_agents, _TIMED_AGENTS)
    others: tuple[ConvolutionKernel, ...] = ("unfolded", "mixed")

    def step(convolution: ConvolutionKernel) -> None:
        with use_kernels(convolution=convolution), autocast(precision, device.type):
            result = outputs(tensors, images)
        torch.autograd.grad(result.sum(), parameters, allow_unused=True)
        torch.zeros(1, device=device).cpu()  # waits for the device

    uses_tf32 = precision == "tf32"
    try:
        with (
            deterministic(device),
            torch.random.fork_rng(devices=[]),
            allow_tf32(uses_tf32, device.type),
        ):
            network = copy.deepcopy(module).to(device)  # not rows of the model buffer
            batch_norm.train_(network)
            outputs = batched_forward(network, dense_layers(network, len(theta)))
            buffer = torch.empty(agents, row_stride(len(theta)), device=device)
            thetas = buffer[:, : len(theta)].copy_(theta)
            tensors = contiguous_leaves(trainable_stack(network, thetas))
            parameters = [tensor for tensor in tensors if tensor.requires_grad]
            images = torch.stack([features(x.to(device))] * agents)
            grouped = functools.partial(step, "grouped")
            speedups = {
                kernel: _speedup(grouped, functools.partial(step, kernel), time.perf_counter)
                for kernel in others
            }
    except Exception:  # the device may lack an operation or memory
        return "grouped"
    best = max(others, key=lambda kernel: speedups[kernel])
    return best if speedups[best] > MIN_BATCHED_CONV_SPEEDUP else "grouped"
