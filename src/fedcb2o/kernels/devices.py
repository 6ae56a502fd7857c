"""The device of a run: deterministic computation, and how many agents it trains at once."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from fedcb2o.data import features
from fedcb2o.errors import ConfigError
from fedcb2o.federated.inference import SAMPLES_PER_PASS, batched_forward, dense_layers
from fedcb2o.federated.local_update import allow_tf32
from fedcb2o.federated.run_spec import ConvolutionKernel
from fedcb2o.kernels.dispatch import use_kernels
from fedcb2o.nn import batch_norm
from fedcb2o.nn.parameters import flatten, trainable_stack

MEMORY_SHARE = 0.5  # of the memory next to the model buffer; the rest is for evaluation and mixing

_FALLBACK_MEMORY = 4 * 2**30  # bytes of a device whose memory PyTorch does not report
_MODEL_COPIES = 6  # model, gradient and momentum of an agent, each twice
_FLOAT32_BYTES = 4


def resolve_device(name: str | None) -> torch.device:
    """Return the device of PyTorch's name; the CPU for None.

    ConfigError is raised if PyTorch does not find the device on this machine.
    """
    try:
        device = torch.device(name or "cpu")
        # A name may be valid although the machine has no such device.
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"`device` = {name!r} is not a device that PyTorch {torch.__version__} finds on this "
            f"machine: {_describe_devices()}"
        ) from error
    return device


def is_cpu(name: str | None) -> bool:
    """Return True if a device's name means the CPU, on any machine; None does."""
    return name is None or name == "cpu"


def device_name(device: torch.device) -> str | None:
    """Return the vendor's name of an accelerator; None where PyTorch does not report it."""
    get_name = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return get_name(device) if get_name is not None else None


@contextlib.contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Use algorithms that repeat their bits, and float32 products without further rounding.

    PyTorch warns of operations for which it has no such algorithm. On a CPU all algorithms repeat
    their bits.
    """
    if device.type == "cpu":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    was_enabled = torch.are_deterministic_algorithms_enabled()
    was_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    was_filling = memory.fill_uninitialized_memory

    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = False
    try:
        with allow_tf32(False, device.type):
            yield
    finally:
        torch.use_deterministic_algorithms(was_enabled, warn_only=was_warning)
        memory.fill_uninitialized_memory = was_filling


def max_batched_agents(
    device: torch.device,
    buffer_bytes: int,
    module: nn.Module,
    x: Shaped[Tensor, "n *features"],
    convolution: ConvolutionKernel = "grouped",
) -> int:
    """Return how many agents a device trains in one program.

    Their training fits into `MEMORY_SHARE` of the memory next to the model buffer. It is 1 for a
    network that cannot be computed several times at once. `x` is a batch of each agent.
    """
    if batching_obstacle(module, x[:2]):
        return 1
    # The number depends on the network and on the kind of device, not on other programs there.
    free = device_memory(device) - buffer_bytes
    return max(1, int(MEMORY_SHARE * free / training_bytes(module, x, convolution)))


def device_memory(device: torch.device) -> int:
    """Return the memory of a device in bytes: PyTorch's number, or a cautious one."""
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    get_properties = getattr(getattr(torch, device.type, None), "get_device_properties", None)
    if get_properties is None:
        return _FALLBACK_MEMORY
    return int(getattr(get_properties(device), "total_memory", _FALLBACK_MEMORY))


def training_bytes(
    module: nn.Module, x: Shaped[Tensor, "n *features"], convolution: ConvolutionKernel = "grouped"
) -> int:
    """Estimate the memory in bytes that one agent of a training batch takes.

    It is that of the model, its gradient and its momentum, each twice, and of the activations:
    twice those of the batch `x`, or once those of the images on which a model is validated at once.
    """
    saved: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    sample = x[:2]
    theta = flatten(module)
    tensors = trainable_stack(module, theta.unsqueeze(0))
    batch_norm.train_(module)
    # The tensors that a forward pass saves for its gradient are the activations.
    hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
    forward = batched_forward(module, dense_layers(module, len(theta)))
    with torch.random.fork_rng(devices=[]), use_kernels(convolution=convolution), hooks:
        forward(tensors, features(sample).unsqueeze(0))

    # The tensors of the model are saved, too, and count once.
    own = {tensor.data_ptr() for tensor in tensors}
    activations = sum(size for address, size in saved.items() if address not in own)
    images = max(2 * len(x), SAMPLES_PER_PASS)
    model = _MODEL_COPIES * _FLOAT32_BYTES * len(theta)
    return model + activations * images // max(1, len(sample))


def batching_obstacle(module: nn.Module, x: Shaped[Tensor, "n *features"]) -> str:
    """Return the reason why a network cannot be computed several times at once.

    It is the error of an attempt with two models, or "" if it succeeds.
    """
    theta = flatten(module)
    batch_norm.train_(module)
    # In evaluation the models share samples; in training each one has its own.
    shared_samples = features(x).unsqueeze(0)
    separate_samples = torch.stack([features(x)] * 2)
    try:
        forward = batched_forward(module, dense_layers(module, len(theta)))
        for samples in (shared_samples, separate_samples):
            tensors = trainable_stack(module, torch.stack([theta, theta]))
            with torch.random.fork_rng(devices=[]):
                outputs = forward(tensors, samples)
            parameters = [tensor for tensor in tensors if tensor.requires_grad]
            torch.autograd.grad(outputs.sum(), parameters, allow_unused=True)
    except Exception as error:  # a user's network may fail in any way
        return str(error)
    return ""


def _describe_devices() -> str:
    accelerators: Any = getattr(torch, "accelerator", None)  # from PyTorch 2.6 on
    if accelerators is None or not accelerators.is_available():
        return 'there is "cpu"'
    kind = accelerators.current_accelerator()
    if kind is None:
        return 'there is "cpu"'
    return f'there are "cpu" and {accelerators.device_count()} of "{kind.type}"'
