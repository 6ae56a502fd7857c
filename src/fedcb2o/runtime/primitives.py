"""The fastest way to do a product on this machine: chosen by a short timing, recorded in the run, kept on resume.

A dense layer's y = x W^T + b and its derivatives g W and g^T x are done by PyTorch's own products ("torch") or by those
of oneDNN ("onednn"), which is faster on some processors. Convolutions read images with the channels of a pixel side by
side ("channels_last") faster, or as they come. Those of several networks at once are one with a group for each network
("grouped"), or one batched product ("unfolded"). Either way agrees with the other to rounding and not to the bit.

On another device than the CPU as many agents train in one program as its memory takes.
"""

import contextlib
import ctypes
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedcb2o.data.shard import features
from fedcb2o.errors import ConfigError
from fedcb2o.federated.evaluate import IMAGES, outputs_of
from fedcb2o.federated.local_update import Precision, float32_products, products_in
from fedcb2o.models import ChannelsLast, Layout, are_several, flatten, row_stride, stacked
from fedcb2o.runtime.convolution import conv2d

Linear = Literal["torch", "onednn"]
Convolution = Literal["grouped", "unfolded"]
Way = TypeVar("Way")

LARGE = 2**20  # weights of a dense layer from which on the choice matters
AHEAD = 1.05  # how many times as fast the other way must be, so that noise rarely decides
REPEATS = 8  # the least of so many is a time
TEAM = 16  # agents of a team that is timed: enough to fill a device


def by(linear: Linear = "torch", convolution: Convolution = "grouped") -> contextlib.AbstractContextManager[Any]:
    """Within it, large dense layers of any network, in float32, go through what `linear` names, and convolutions of
    several networks at once are done as `convolution` says."""
    ours: dict[Any, Callable[..., Any]] = {}
    if linear == "onednn":
        ours[F.linear] = _linear
    if convolution == "unfolded":
        ours[F.conv2d] = conv2d
    return _InPlaceOf(ours) if ours else contextlib.nullcontext()


def available() -> bool:
    """Whether this PyTorch has oneDNN's products."""
    return torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@functools.cache
def fastest_linear() -> Linear:
    """Which is faster here, tried on the paper's dense layer at batch 64 on one thread: under a second."""
    seconds = timings() if available() else {}
    return "onednn" if seconds and seconds["torch"] > AHEAD * seconds["onednn"] else "torch"


def timings(repeats: int = REPEATS) -> dict[Linear, float]:
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
    seconds = _least({linear: functools.partial(layer, linear) for linear in ways}, time.thread_time, repeats)
    torch.set_num_threads(before)
    return seconds


def _least(
    ways: Mapping[Way, Callable[[], Any]], clock: Callable[[], float], repeats: int = REPEATS
) -> dict[Way, float]:
    """The seconds that each way takes: the least of some repeats, which take turns, after one that builds kernels."""
    seconds = dict.fromkeys(ways, torch.inf)
    for repeat in range(repeats + 1):
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


def keep_memory() -> None:
    """Have this process keep the memory that it frees (glibc).

    The gradients of a large layer come and go in every step. Were they handed back to the system, it would clear and
    map their pages anew each time, and a step of the paper's network take 11% longer in float32, 22% in bfloat16.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX: nothing mapped by itself
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: nothing given back


def device_of(name: str | None) -> torch.device:
    """The device of a name, the CPU by default. Raises ConfigError where PyTorch finds none here."""
    try:
        device = torch.device(name or "cpu")
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"`device` = {name!r} is none that PyTorch {torch.__version__} finds here: {_here()}"
        ) from error
    return device


def _here() -> str:
    accelerators: Any = getattr(torch, "accelerator", None)  # from PyTorch 2.6 on
    kind = accelerators.current_accelerator() if accelerators is not None and accelerators.is_available() else None
    if kind is None:
        return 'there is "cpu"'
    return f'there are "cpu" and {accelerators.device_count()} of "{kind.type}"'


def name_of(device: torch.device) -> str | None:
    """What an accelerator is called by its maker, where PyTorch says so."""
    known = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return known(device) if known is not None else None


@contextlib.contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Within it, what is computed on a device is computed alike every time: by algorithms that repeat their bits, and
    with float32 products that are not rounded further. PyTorch warns of what it has no such algorithm for."""
    if device.type == "cpu":  # so it is there
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filling = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = False
    try:
        with float32_products(False, device.type):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filling


SHARE = 0.5  # of what a device's memory has left beside the pool: the rest is for evaluation, mixing and fragments
UNKNOWN = 4 * 2**30  # bytes, where PyTorch does not say what a device has


def most_together(
    device: torch.device,
    pool: int,
    module: nn.Module,
    x: Shaped[Tensor, "n *features"],
    convolution: Convolution = "grouped",
) -> int:
    """How many agents a device trains in one program: as many as its memory has room for beside a pool of so many
    bytes, each with a batch like `x`; 1 where the network cannot be computed several times at once.

    It depends on the network and on the kind of device alone, not on what else is running there.
    """
    if cannot_be_several(module, x[:2]):
        return 1
    return max(1, int(SHARE * (memory_of(device) - pool) / bytes_of_training(module, x, convolution)))


def memory_of(device: torch.device) -> int:
    """The bytes of a device's memory."""
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    properties = getattr(getattr(torch, device.type, None), "get_device_properties", None)
    return int(getattr(properties(device), "total_memory", UNKNOWN)) if properties is not None else UNKNOWN


def bytes_of_training(module: nn.Module, x: Shaped[Tensor, "n *features"], convolution: Convolution = "grouped") -> int:
    """About the memory that an agent of a team takes: its model, gradient and momentum, each twice, and twice what a
    batch like `x` leaves for the backward pass, or once what the images leave that its model is judged on at once."""
    left: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        left[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    few, theta = x[:2], flatten(module)
    parameters = [view.requires_grad_() for view in stacked(module, theta.unsqueeze(0))]
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.random.fork_rng(devices=[]), by(convolution=convolution), hooks:
        outputs_of(module.train(), len(theta))(parameters, features(few).unsqueeze(0))
    ours = {p.data_ptr() for p in parameters}
    batch = sum(size for place, size in left.items() if place not in ours)
    return 6 * 4 * len(theta) + batch * max(2 * len(x), IMAGES) // max(1, len(few))


def cannot_be_several(module: nn.Module, x: Shaped[Tensor, "n *features"]) -> str:
    """Why a network cannot be computed several times at once, on samples like `x`; nothing where it can."""
    theta = flatten(module)
    try:
        for several in (features(x).unsqueeze(0), torch.stack([features(x)] * 2)):  # the same samples, and their own
            parameters = [p.requires_grad_() for p in stacked(module, torch.stack([theta, theta]))]
            with torch.random.fork_rng(devices=[]):
                outputs = outputs_of(module.train(), len(theta))(parameters, several)
            torch.autograd.grad(outputs.sum(), parameters, allow_unused=True)
    except Exception as error:  # a user's network may fail in any way
        return str(error)
    return ""


class _InPlaceOf(TorchFunctionMode):
    """Puts our functions in the place of PyTorch's, for any network: `nn.Linear` calls `F.linear`."""

    def __init__(self, ours: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.ours = ours

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.ours.get(func, func)(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What takes the place of `F.linear`: by oneDNN where a layer is large."""
    ours = input.ndim == weight.ndim == 2 and weight.numel() >= LARGE and input.dtype == weight.dtype == torch.float32
    ours = ours and not (are_several(input) or are_several(weight))
    if not ours or input.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return F.linear(input, weight, bias)
    return _Products.apply(input, weight, bias)  # type: ignore[no-any-return, no-untyped-call]


def _times(a: Float[Tensor, "n k"], b: Float[Tensor, "m k"]) -> Float[Tensor, "n m"]:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    return product


class _Products(torch.autograd.Function):
    """A dense layer, and its derivatives, by oneDNN. A matrix W on the left saves it a copy of W into its own order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        y = _times(weight, x).T
        return y.contiguous() if bias is None else torch.add(y, bias, out=y.new_empty(y.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needed, g = ctx.needs_input_grad, g.contiguous()
        return (
            _times(g, weight.T) if needed[0] else None,
            _times(g.T, x.T) if needed[1] else None,
            g.sum(0) if needed[2] else None,
        )
