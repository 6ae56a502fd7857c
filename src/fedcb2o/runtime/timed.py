"""The fastest way to do a product on this machine: chosen by a short timing, recorded in the run, kept on resume.

Beside the primitives, networks with convolutions read images with the channels of a pixel side by side
("channels_last") faster, or as they come.
"""

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from fedcb2o.data.shard import features
from fedcb2o.federated.evaluate import outputs_of
from fedcb2o.federated.local_update import Precision, float32_products, products_in
from fedcb2o.federated.terms import Convolution, Linear
from fedcb2o.models import ChannelsLast, Layout, flatten, row_stride, stacked
from fedcb2o.runtime import onednn
from fedcb2o.runtime.devices import repeatable
from fedcb2o.runtime.primitives import by

Way = TypeVar("Way")

AHEAD = 1.05  # how many times as fast the other way must be, so that noise rarely decides
REPEATS = 8  # the least of so many is a time
TEAM = 16  # agents of a team that is timed: enough to fill a device


@functools.cache
def fastest_linear() -> Linear:
    """Which is faster here, tried on the paper's dense layer at batch 64 on one thread: under a second."""
    seconds = timings() if onednn.available() else {}
    return "onednn" if seconds and seconds["torch"] > AHEAD * seconds["onednn"] else "torch"


def timings() -> dict[Linear, float]:
    """The seconds that the layer's three products take either way: the least of some repeats, which take turns."""
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 3136, generator=draw, requires_grad=True) for n in (64, 2048))
    g, bias = torch.randn(64, 2048, generator=draw), torch.zeros(2048, requires_grad=True)

    def layer(linear: Linear) -> None:
        with by(linear):
            torch.autograd.grad(F.linear(x, weight, bias), (x, weight, bias), g)

    ways: tuple[Linear, Linear] = ("torch", "onednn")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds = _least({linear: functools.partial(layer, linear) for linear in ways}, time.thread_time)
    torch.set_num_threads(before)
    return seconds


def _least(ways: Mapping[Way, Callable[[], Any]], clock: Callable[[], float]) -> dict[Way, float]:
    """The seconds that each way takes: the least of some repeats, which take turns, after one that builds kernels."""
    seconds = dict.fromkeys(ways, torch.inf)
    for repeat in range(REPEATS + 1):
        for way, compute in ways.items():
            start = clock()
            compute()
            taken = clock() - start
            if repeat:
                seconds[way] = min(seconds[way], taken)
    return seconds


def fastest_layout(module: nn.Module, x: Shaped[Tensor, "n *features"], precision: Precision) -> Layout:
    """How a network with convolutions reads a batch like `x` faster here, tried on one thread: with the channels of an
    image one after the other, or those of a pixel. The former where it can read no other."""
    parts = list(module.modules())
    if (
        x.ndim != 4
        or not any(isinstance(p, nn.Conv2d) for p in parts)
        or any(isinstance(p, ChannelsLast) for p in parts)
    ):
        return "contiguous"
    before, parameters = torch.get_num_threads(), list(module.train().parameters())

    def step(network: nn.Module) -> None:
        torch.autograd.grad(network(features(x)).sum(), parameters, allow_unused=True)

    ways: dict[Layout, Callable[[], None]] = {
        "contiguous": functools.partial(step, module),
        "channels_last": functools.partial(step, nn.Sequential(ChannelsLast(), module)),
    }
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), products_in(precision, "cpu"):
            seconds = _least(ways, time.thread_time)
    except Exception:  # a user's network may look at how its images lie
        return "contiguous"
    finally:
        torch.set_num_threads(before)
    return "channels_last" if seconds["contiguous"] > AHEAD * seconds["channels_last"] else "contiguous"


def fastest_convolution(
    module: nn.Module, x: Shaped[Tensor, "n *features"], precision: Precision, device: torch.device, together: int
) -> Convolution:
    """How a device computes a network with convolutions faster for so many agents, or for a team of `TEAM`: tried on a
    training step of theirs with a batch like `x`. "grouped" where that cannot be tried."""
    if together < 2 or not any(isinstance(part, nn.Conv2d) and part.groups == 1 for part in module.modules()):
        return "grouped"
    theta, team = flatten(module), min(together, TEAM)
    outputs = outputs_of(module.train(), len(theta))

    def step(convolution: Convolution) -> None:
        with by(convolution=convolution), products_in(precision, device.type):
            found = outputs(parameters, images)
        torch.autograd.grad(found.sum(), parameters, allow_unused=True)
        torch.zeros(1, device=device).cpu()  # waits for the device

    ways: tuple[Convolution, Convolution] = ("grouped", "unfolded")
    tf32 = precision == "tf32"
    try:
        with repeatable(device), torch.random.fork_rng(devices=[]), float32_products(tf32, device.type):
            thetas = torch.empty(team, row_stride(len(theta)), device=device)[:, : len(theta)].copy_(theta)
            parameters = [view.requires_grad_() for view in stacked(module, thetas)]
            images = torch.stack([features(x.to(device))] * team)
            seconds = _least({way: functools.partial(step, way) for way in ways}, time.perf_counter)
    except Exception:  # the device may lack an operation, or memory
        return "grouped"
    return "unfolded" if seconds["grouped"] > AHEAD * seconds["unfolded"] else "grouped"
