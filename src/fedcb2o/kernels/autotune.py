"""The fastest way to do a product on this machine: chosen by a short timing, recorded in the run, kept on resume.

Two ways agree to rounding and not to the bit, so a choice must not be a matter of chance: the way that is not the fixed
default is taken only where it is clearly faster.

Beside the primitives, networks with convolutions read images with the channels of a pixel side by side
("channels_last") faster, or as they come, and products in bfloat16 take tens of times as long as in float32 where a
processor has no instructions for them.
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

from fedcb2o.data._dataset import features
from fedcb2o.federated.inference import batched_forward
from fedcb2o.federated.local_update import Precision, allow_tf32, autocast
from fedcb2o.federated.run_spec import ConvolutionKernel, LinearKernel
from fedcb2o.kernels import onednn
from fedcb2o.kernels.devices import deterministic
from fedcb2o.kernels.dispatch import use_kernels
from fedcb2o.nn import batch_norm
from fedcb2o.nn.memory_layout import ChannelsLast, MemoryLayout, with_memory_format
from fedcb2o.nn.parameters import contiguous_leaves, flatten, row_stride, trainable_stack
from fedcb2o.parallel.executors import one_thread

# How many times as fast the other way must be. A ratio that is measured again scatters by a tenth, or more on a busy
# machine, so each lies where few networks of `models` were seen: dense layers 0.84 to 0.95 on one processor and 1.17 on
# another, `resnet` 0.86 to 1.26, plain convolutions 1.3 to 1.7, the paper's by spectra 1.7 to 2 (docs/log.md).
MIN_SPEEDUP = 1.05
MIN_CONV_SPEEDUP = 1.3
MIN_BFLOAT16_SPEEDUP = (
    1 / 3
)  # of bfloat16: about 2 where a processor has it, 0.02 to 0.03 on one that lacks it
MIN_BATCHED_CONV_SPEEDUP = (
    1.1  # on a GPU, which runs share less; the paper's network lay below, with "mixed"
)
_REPEATS = 11  # turns
_TIMED_AGENTS = 16  # agents of a team that is timed: enough to fill a device


@functools.cache
def fastest_linear() -> LinearKernel:
    """Which is faster here, tried on the paper's dense layer at batch 64 on one thread: under a second."""
    return "onednn" if onednn.is_available() and onednn_speedup() > MIN_SPEEDUP else "torch"


def onednn_speedup() -> float:
    """How many times as fast oneDNN does the layer's three products."""
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 3136, generator=draw, requires_grad=True) for n in (64, 2048))
    g = torch.randn(64, 2048, generator=draw)
    bias = torch.zeros(2048, requires_grad=True)

    def layer(linear: LinearKernel) -> None:
        with use_kernels(linear):
            torch.autograd.grad(F.linear(x, weight, bias), (x, weight, bias), g)

    with one_thread():
        return _speedup(lambda: layer("torch"), lambda: layer("onednn"), time.thread_time)


def supported_precision(asked: Precision, device: torch.device) -> Precision:
    """The precision that is asked for; "float32" in place of "bfloat16" where products in that are far slower."""
    return (
        "float32"
        if asked == "bfloat16" and _bfloat16_speedup(device) < MIN_BFLOAT16_SPEEDUP
        else asked
    )


@functools.cache
def _bfloat16_speedup(device: torch.device) -> float:
    """How many times as fast as in float32 a product is in bfloat16, tried on one thread in half a second at most; 0
    where the device has none, or is a GPU that imitates it."""
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
    """How many times as fast as the default the other way is: the median over turns of the two, after one that builds
    kernels. What slows a machine for a while slows both of a turn."""

    def seconds(compute: Callable[[], Any]) -> float:
        start = clock()
        compute()
        return clock() - start

    turns = [(seconds(default), seconds(other)) for _ in range(_REPEATS + 1)]
    return statistics.median(slow / fast if fast > 0 else 1.0 for slow, fast in turns[1:])


def _has_channels_last_overrun() -> bool:
    """Whether gradients of convolutions with the channels of a pixel side by side may write past their memory here:
    oneDNN's do so for some narrow networks on processors with AVX2 and no AVX-512 (PyTorch 2.13, docs/log.md)."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


def fastest_layout(
    module: nn.Module, x: Shaped[Tensor, "n *features"], precision: Precision
) -> MemoryLayout:
    """How a network with convolutions reads a batch like `x` faster here, tried on one thread: with the channels of an
    image one after the other, or those of a pixel where that is clearly faster and it can read them so."""
    parts = list(module.modules())
    if (
        x.ndim != 4
        or not any(isinstance(p, nn.Conv2d) for p in parts)
        or any(isinstance(p, ChannelsLast) for p in parts)
        or _has_channels_last_overrun()
    ):
        return "contiguous"
    batch_norm.train_(module)
    parameters = [p for p in module.parameters() if p.requires_grad]

    def step(network: nn.Module) -> None:
        torch.autograd.grad(network(features(x)).sum(), parameters, allow_unused=True)

    last = with_memory_format(module, "channels_last")
    try:
        with one_thread(), torch.random.fork_rng(devices=[]), autocast(precision, "cpu"):
            gain = _speedup(lambda: step(module), lambda: step(last), time.thread_time)
    except Exception:  # a user's network may look at how its images lie
        return "contiguous"
    return "channels_last" if gain > MIN_CONV_SPEEDUP else "contiguous"


def fastest_single_convolution(
    module: nn.Module, x: Shaped[Tensor, "n *features"], precision: Precision
) -> ConvolutionKernel:
    """How a processor computes the convolutions of one network faster, tried on a training step with a batch like `x`
    on one thread: "grouped", as PyTorch does, unless some are clearly faster by spectra ("fourier"). It takes as long
    as two dozen steps, or hardly any time where spectra would not be used."""
    if not any(isinstance(part, nn.Conv2d) for part in module.modules()):
        return "grouped"

    def outputs(convolution: ConvolutionKernel) -> Tensor:
        with use_kernels(convolution=convolution), autocast(precision, "cpu"):
            found: Tensor = there(features(x))
        return found

    def step(convolution: ConvolutionKernel) -> None:
        torch.autograd.grad(outputs(convolution).sum(), parameters, allow_unused=True)

    try:
        there = copy.deepcopy(module)  # what of it is in no row
        batch_norm.train_(there)
        parameters = [p for p in there.parameters() if p.requires_grad]
        with one_thread(), torch.random.fork_rng(devices=[]):
            if torch.equal(outputs("grouped"), outputs("fourier")):  # none is done by spectra
                return "grouped"
            gain = _speedup(lambda: step("grouped"), lambda: step("fourier"), time.thread_time)
    except Exception:  # a user's network may have no copy, or look at how its images lie
        return "grouped"
    return "fourier" if gain > MIN_CONV_SPEEDUP else "grouped"


def fastest_batched_convolution(
    module: nn.Module,
    x: Shaped[Tensor, "n *features"],
    precision: Precision,
    device: torch.device,
    max_agents: int,
) -> ConvolutionKernel:
    """How a device computes a network with convolutions faster for so many agents, or for a team of `TEAM`: tried on a
    training step of theirs with a batch like `x`. "grouped" unless another is clearly faster, and can be tried."""
    if max_agents < 2 or not any(
        isinstance(part, nn.Conv2d) and part.groups == 1 for part in module.modules()
    ):
        return "grouped"
    theta = flatten(module)
    team = min(max_agents, _TIMED_AGENTS)
    others: tuple[ConvolutionKernel, ...] = ("unfolded", "mixed")

    def step(convolution: ConvolutionKernel) -> None:
        with use_kernels(convolution=convolution), autocast(precision, device.type):
            found = outputs(tensors, images)
        torch.autograd.grad(found.sum(), parameters, allow_unused=True)
        torch.zeros(1, device=device).cpu()  # waits for the device

    tf32 = precision == "tf32"
    try:
        with (
            deterministic(device),
            torch.random.fork_rng(devices=[]),
            allow_tf32(tf32, device.type),
        ):
            there = copy.deepcopy(module).to(device)  # what of it is in no row
            batch_norm.train_(there)
            outputs = batched_forward(there, len(theta))
            thetas = torch.empty(team, row_stride(len(theta)), device=device)[
                :, : len(theta)
            ].copy_(theta)
            tensors = contiguous_leaves(trainable_stack(there, thetas))
            parameters = [tensor for tensor in tensors if tensor.requires_grad]
            images = torch.stack([features(x.to(device))] * team)
            grouped = functools.partial(step, "grouped")
            gains = {
                way: _speedup(grouped, functools.partial(step, way), time.perf_counter)
                for way in others
            }
    except Exception:  # the device may lack an operation, or memory
        return "grouped"
    best = max(others, key=lambda way: gains[way])
    return best if gains[best] > MIN_BATCHED_CONV_SPEEDUP else "grouped"
