"""Models as rows of one [N, d] tensor, and networks that are views of a row.

Training changes a row in place, and no model is copied.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedcb2o.errors import ConfigError
from fedcb2o.nn import batch_norm

MIN_FOREACH_SIZE = 2**13
"""Size d of a model below which one indexed copy is faster than a copy per row."""

_SHAPES: weakref.WeakKeyDictionary[nn.Module, list[torch.Size]] = weakref.WeakKeyDictionary()
"""Shapes of each network's `shared_tensors`, which do not change once it is in use."""


def shared_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return theta's tensors by name: shared statistics, then trained parameters.

    Tied parameters appear once. All other tensors of a network are the same for all agents.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    return {**batch_norm.statistics(module, "shared"), **trained}


def agent_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that distinguish one agent's network: theta and local statistics."""
    return {**shared_tensors(module), **batch_norm.statistics(module, "local")}


def load_state_(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors of an `agent_state` into a network.

    ValueError is raised if they are those of another network.
    """
    state = agent_state(module)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if shapes != {name: tensor.shape for name, tensor in state.items()}:
        raise ValueError("it is the model of another network")
    for name, tensor in state.items():
        tensor.detach().copy_(tensors[name])


def dimension(module: nn.Module) -> int:
    """Return d, the number of trained parameters and shared statistics, at least 1.

    ConfigError is raised for a network with lazy layers, without trained parameters, with trained
    parameters of another type than float32, or with a norm without statistics.
    """
    if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        raise ConfigError(
            "the model has a lazy layer, which has no parameters yet: give its size, which follows"
            " from the shape of samples that the model's function receives"
        )
    batch_norm.require_tracked_statistics(module)

    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trained:
        raise ConfigError(
            "the model needs parameters to train (requires_grad): it has none, or all are frozen"
        )
    for name, p in trained.items():
        if p.dtype != torch.float32 or not p.numel():
            raise ConfigError(
                "the model needs parameters to train, all of type float32 and none of them empty;"
                f" `{name}` has type {p.dtype} and shape {tuple(p.shape)}: call `.float()`, or"
                " freeze it by requires_grad_(False)"
            )
    return sum(tensor.numel() for tensor in shared_tensors(module).values())


class LastLayer(NamedTuple):
    """Place of a network's last linear layer in theta.

    Attributes:
        weight: Where the weight [C, h] lies, row by row.
        classes: The number C of classes.
        width: The number h of inputs of the layer.
        bias: Where the bias [C] lies; None for a layer without one.
    """

    weight: slice
    classes: int
    width: int
    bias: slice | None


def last_layer(module: nn.Module, num_classes: int) -> LastLayer | None:
    """Find the last linear layer: the last trained weight with a row per class, else None.

    Last means registered last. A convolution with a filter per class counts.
    """
    found = None
    start = 0
    for name, tensor in shared_tensors(module).items():
        end = start + tensor.numel()
        if tensor.ndim > 1 and tensor.shape[0] == num_classes:
            found = LastLayer(slice(start, end), num_classes, tensor[0].numel(), None)
            layer = name.rpartition(".")[0]
        elif (
            found
            and tensor.shape == (num_classes,)
            and start == found.weight.stop
            # A norm after the layer has a weight of the same shape.
            and name.rpartition(".")[0] == layer
        ):
            found = found._replace(bias=slice(start, end))
        start = end
    return found


def flatten(module: nn.Module) -> Float[Tensor, " d"]:
    """Return theta: a copy of a network's tensors, in the order of `shared_tensors`."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in shared_tensors(module).values()])


def bind_(module: nn.Module, theta: Float[Tensor, " d"]) -> None:
    """Make a network's tensors views of theta, so that training changes theta."""
    views = tensor_views(module, theta)
    for name, tensor in shared_tensors(module).items():
        tensor.data = views[name]


def tensor_views(module: nn.Module, theta: Float[Tensor, " d"]) -> dict[str, Tensor]:
    """Return the tensors of a model by name, as views of theta.

    Names and shapes are those of `shared_tensors`.
    """
    views = {}
    start = 0
    for name, tensor in shared_tensors(module).items():
        views[name] = theta[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()
    return views


def unstack_views(module: nn.Module, thetas: Float[Tensor, "m d"]) -> list[Float[Tensor, "m ..."]]:
    """Return the tensors of m networks as views of their models."""
    shapes = _SHAPES.get(module)
    if shapes is None:
        shapes = [tensor.shape for tensor in shared_tensors(module).values()]
        _SHAPES[module] = shapes
    columns = torch.split(thetas, [shape.numel() for shape in shapes], dim=1)
    return [part.view(len(part), *shape) for part, shape in zip(columns, shapes, strict=True)]


def trainable_stack(
    module: nn.Module, thetas: Float[Tensor, "m d"]
) -> list[Float[Tensor, "m ..."]]:
    """Return the tensors of m networks for batched training.

    Parameters are views that take gradients. Buffers for local statistics come last.
    """
    needs_gradient = [tensor.requires_grad for tensor in shared_tensors(module).values()]
    # Statistics are contiguous copies, because a batched program changes them in place.
    tensors = [
        view.detach().requires_grad_()
        if trained
        else view.clone(memory_format=torch.contiguous_format)
        for view, trained in zip(unstack_views(module, thetas), needs_gradient, strict=True)
    ]
    local = batch_norm.statistics(module, "local").values()
    return [*tensors, *(statistic.expand(len(thetas), -1).contiguous() for statistic in local)]


def contiguous_leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return contiguous copies of tensors to train, which GPUs read several times faster.

    They take gradients where the originals do.
    """
    return [tensor.detach().contiguous().requires_grad_(tensor.requires_grad) for tensor in tensors]


@contextlib.contextmanager
def borrowed(module: nn.Module) -> Iterator[None]:
    """Let other models be evaluated on a user's network, which is as before afterwards.

    Inside, buffers are copies, and parameters may be bound to other memory.
    """
    modes = [(part, part.training) for part in module.modules()]
    buffers = [
        (part._buffers, name, buffer)
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    tensors = [*shared_tensors(module).values(), *(buffer for *_, buffer in buffers)]
    memory = [tensor.data for tensor in tensors]
    # Since the last time, other layers may be frozen.
    _SHAPES.pop(module, None)
    try:
        for *_, buffer in buffers:
            buffer.data = buffer.data.clone()
        yield
    finally:
        for slots, name, buffer in buffers:
            slots[name] = buffer
        for tensor, data in zip(tensors, memory, strict=True):
            tensor.data = data
        # A network's own `train` may do more, such as unmerge adapters.
        module.train(modes[0][1])
        for part, mode in modes:
            part.training = mode


def is_bound(module: nn.Module, theta: Float[Tensor, " d"]) -> bool:
    """Return whether tensors are still views of theta, which training changes."""
    # The tensors follow each other in theta without gaps.
    address = theta.data_ptr()
    for tensor in shared_tensors(module).values():
        if tensor.data_ptr() != address or not tensor.is_contiguous():
            return False
        address += tensor.numel() * tensor.element_size()
    return address == theta.data_ptr() + theta.numel() * theta.element_size()


def initialise(make: Callable[[], nn.Module], draw: np.random.Generator) -> nn.Module:
    """Return a new network whose parameters depend only on a generator."""
    # PyTorch's layers draw from the global generator, whose state is restored afterwards.
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(int(draw.integers(2**63)))
        return make()


def row_checksums(models: Float[Tensor, "p d"]) -> Int[Tensor, "p 9"]:
    """Return the sums of each model's bits in eight parts, on the CPU.

    The last number of an odd dimension is the ninth sum. Different sums mean different models.
    """
    # 64-bit words are read at the speed of memory; sums of 32-bit words take ten times as long.
    even = models.shape[1] // 2 * 2
    parts = [part.sum(1) for part in models[:, :even].view(torch.int64).tensor_split(8, 1)]
    last = models[:, even:].contiguous().view(torch.int32).sum(1, dtype=torch.int64)
    return torch.stack([*parts, last], 1).cpu()


def row_stride(d: int) -> int:
    """Return the distance between two rows of models: d rounded up to 64 bytes.

    It is a multiple of 16 numbers.
    """
    # The bits of a product can depend on the alignment of its factors.
    return -(-d // 16) * 16


def is_contiguous_range(rows: Sequence[int]) -> bool:
    """Return whether row indices, or no rows, form a slice."""
    if not rows:
        return True
    return list(rows) == list(range(rows[0], rows[0] + len(rows)))


def copy_rows_(models: Float[Tensor, "p d"], to: Sequence[int], rows: Sequence[int]) -> None:
    """Copy rows of models to other rows of the same tensor."""
    if not to:
        return
    # PyTorch refuses an indexed copy from a view of the same buffer where the buffer has no gaps,
    # as where d fills whole cache lines.
    if is_contiguous_range(to):
        models[to[0] : to[0] + len(to)].copy_(gather_rows(models, rows))
    elif models.shape[1] < MIN_FOREACH_SIZE:
        places, sources = (torch.tensor(list(own)).to(models.device) for own in (to, rows))
        models.index_copy_(0, places, models.index_select(0, sources))
    else:
        torch._foreach_copy_([models[k] for k in to], [models[k] for k in rows])


def gather_rows(models: Float[Tensor, "p d"], rows: Sequence[int]) -> Float[Tensor, "m d"]:
    """Return rows of models: a view of consecutive rows, otherwise an aligned copy."""
    if not rows:
        return models[:0]
    if is_contiguous_range(rows):
        return models[rows[0] : rows[0] + len(rows)]

    dim = models.shape[1]
    gathered = models.new_zeros(len(rows), row_stride(dim))[:, :dim]
    if dim < MIN_FOREACH_SIZE:  # one indexed copy is faster than a copy per row
        return gathered.copy_(models.index_select(0, torch.tensor(rows).to(models.device)))
    torch._foreach_copy_(gathered.unbind(), [models[row] for row in rows])
    return gathered
