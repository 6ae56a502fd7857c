"""The device that a run computes on, so that its bits repeat, and how many agents it trains in one program.

On another device than the CPU these are as many as its memory takes.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from fedcb2o.data._dataset import features
from fedcb2o.errors import ConfigError
from fedcb2o.federated.inference import SAMPLES_PER_PASS, batched_forward
from fedcb2o.federated.local_update import allow_tf32
from fedcb2o.federated.run_spec import ConvolutionKernel
from fedcb2o.kernels.dispatch import use_kernels
from fedcb2o.nn import batch_norm
from fedcb2o.nn.parameters import flatten, trainable_stack

MEMORY_SHARE = 0.5  # of what a device's memory has left beside the pool: the rest is for evaluation, mixing and fragments
_FALLBACK_MEMORY = 4 * 2**30  # bytes, where PyTorch does not say what a device has


def resolve_device(name: str | None) -> torch.device:
    """The device of a name, the CPU by default. Raises ConfigError where PyTorch finds none here."""
    try:
        device = torch.device(name or "cpu")
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"`device` = {name!r} is none that PyTorch {torch.__version__} finds here: {_describe_devices()}"
        ) from error
    return device


def is_cpu(name: str | None) -> bool:
    """Whether a device's name means the CPU, wherever that may be."""
    return name is None or name == "cpu"


def _describe_devices() -> str:
    accelerators: Any = getattr(torch, "accelerator", None)  # from PyTorch 2.6 on
    kind = (
        accelerators.current_accelerator()
        if accelerators is not None and accelerators.is_available()
        else None
    )
    if kind is None:
        return 'there is "cpu"'
    return f'there are "cpu" and {accelerators.device_count()} of "{kind.type}"'


def device_name(device: torch.device) -> str | None:
    """What an accelerator is called by its maker, where PyTorch says so."""
    known = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return known(device) if known is not None else None


@contextlib.contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Within it, what is computed on a device is computed alike every time: by algorithms that repeat their bits, and
    with float32 products that are not rounded further. PyTorch warns of what it has no such algorithm for."""
    if device.type == "cpu":  # so it is there
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    memory: Any = torch.utils.deterministic
    filling = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = False
    try:
        with allow_tf32(False, device.type):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filling


def max_batched_agents(
    device: torch.device,
    pool: int,
    module: nn.Module,
    x: Shaped[Tensor, "n *features"],
    convolution: ConvolutionKernel = "grouped",
) -> int:
    """How many agents a device trains in one program: as many as its memory has room for beside a pool of so many
    bytes, each with a batch like `x`; 1 where the network cannot be computed several times at once.

    It depends on the network and on the kind of device alone, not on what else is running there.
    """
    if batching_obstacle(module, x[:2]):
        return 1
    return max(
        1,
        int(MEMORY_SHARE * (device_memory(device) - pool) / training_bytes(module, x, convolution)),
    )


def device_memory(device: torch.device) -> int:
    """The bytes of a device's memory."""
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    properties = getattr(getattr(torch, device.type, None), "get_device_properties", None)
    return (
        int(getattr(properties(device), "total_memory", _FALLBACK_MEMORY))
        if properties is not None
        else _FALLBACK_MEMORY
    )


def training_bytes(
    module: nn.Module, x: Shaped[Tensor, "n *features"], convolution: ConvolutionKernel = "grouped"
) -> int:
    """About the memory that an agent of a team takes: its model, gradient and momentum, each twice, and twice what a
    batch like `x` leaves for the backward pass, or once what the images leave that its model is judged on at once."""
    left: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        left[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    few = x[:2]
    theta = flatten(module)
    tensors = trainable_stack(module, theta.unsqueeze(0))
    batch_norm.train_(module)
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.random.fork_rng(devices=[]), use_kernels(convolution=convolution), hooks:
        batched_forward(module, len(theta))(tensors, features(few).unsqueeze(0))
    ours = {tensor.data_ptr() for tensor in tensors}
    batch = sum(size for place, size in left.items() if place not in ours)
    return 6 * 4 * len(theta) + batch * max(2 * len(x), SAMPLES_PER_PASS) // max(1, len(few))


def batching_obstacle(module: nn.Module, x: Shaped[Tensor, "n *features"]) -> str:
    """Why a network cannot be computed several times at once, on samples like `x`; nothing where it can."""
    theta = flatten(module)
    batch_norm.train_(module)
    try:
        for several in (
            features(x).unsqueeze(0),
            torch.stack([features(x)] * 2),
        ):  # the same samples, and their own
            tensors = trainable_stack(module, torch.stack([theta, theta]))
            with torch.random.fork_rng(devices=[]):
                outputs = batched_forward(module, len(theta))(tensors, several)
            torch.autograd.grad(
                outputs.sum(), [each for each in tensors if each.requires_grad], allow_unused=True
            )
    except Exception as error:  # a user's network may fail in any way
        return str(error)
    return ""
