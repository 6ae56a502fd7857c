"""Models: theta in R^d as a row of one [N, d] tensor, and the networks that read it.

A network's parameters are views of a row, so that training changes the row in place and no model is ever copied.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedcb2o.errors import ConfigError
from fedcb2o.nn import batch_norm


def shared_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors that a model's theta is made of, by name and in their order: the statistics that agents share, then
    the parameters that are trained, those that are tied once. All else of a network is held once, and the same for all
    agents.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    return {**batch_norm.statistics(module, "shared"), **trained}


def agent_state(module: nn.Module) -> dict[str, Tensor]:
    """The tensors that make a network an agent's, by name: theta, and the statistics that are its own."""
    return {**shared_tensors(module), **batch_norm.statistics(module, "local")}


def load_state_(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Have a network be an agent's, by its `state`; raises ValueError where that is one of another network."""
    mine = agent_state(module)
    if {name: each.shape for name, each in tensors.items()} != {
        name: each.shape for name, each in mine.items()
    }:
        raise ValueError("it is the model of another network")
    for name, tensor in mine.items():
        tensor.detach().copy_(tensors[name])


def dimension(module: nn.Module) -> int:
    """d, the number of a model's parameters that are trained, and of statistics that agents share.

    Raises ConfigError for a module that theta would not describe: one with lazy layers, with parameters to be trained
    of another type than float32 or with none, or with a norm that keeps no statistics.
    """
    if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        raise ConfigError(
            "the model has a lazy layer, which has no parameters yet: give its size, which follows from the shape of "
            "samples that the model's function is told"
        )
    batch_norm.require_tracked_statistics(module)
    trained = [p for p in module.parameters() if p.requires_grad]
    if not trained or any(p.dtype != torch.float32 or not p.numel() for p in trained):
        raise ConfigError(
            "the model needs parameters to train (requires_grad), all of type float32 and none of them empty"
        )
    return sum(tensor.numel() for tensor in shared_tensors(module).values())


def last_layer_shape(module: nn.Module) -> tuple[int, int] | None:
    """The shape [C, h] of the weight of the last dense layer, where the network's parameters end in one with a bias."""
    last = list(shared_tensors(module).values())[-2:]
    dense = len(last) == 2 and last[0].ndim == 2 and last[1].shape == last[0].shape[:1]
    return (last[0].shape[0], last[0].shape[1]) if dense else None


def flatten(module: nn.Module) -> Float[Tensor, " d"]:
    """Theta of a module: a copy of its tensors one after the other, in the order of `named`."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in shared_tensors(module).values()])


def bind_(module: nn.Module, theta: Float[Tensor, " d"]) -> None:
    """Make the tensors of `module` views of `theta`: what trains the one trains the other."""
    start = 0
    for tensor in shared_tensors(module).values():
        tensor.data = theta[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()


def unstack_views(module: nn.Module, thetas: Float[Tensor, "m d"]) -> list[Float[Tensor, "m ..."]]:
    """The tensors of m networks, views of their models."""
    sizes = [tensor.shape for tensor in shared_tensors(module).values()]
    parts = torch.split(thetas, [size.numel() for size in sizes], dim=1)
    return [part.view(len(part), *size) for part, size in zip(parts, sizes, strict=True)]


def trainable_stack(
    module: nn.Module, thetas: Float[Tensor, "m d"]
) -> list[Float[Tensor, "m ..."]]:
    """The same for training: parameters that take gradients, and copies of the statistics, which a batched program
    changes in place where they lie side by side; after these, room for those that are local."""
    trained = [tensor.requires_grad for tensor in shared_tensors(module).values()]
    views = [
        view.detach().requires_grad_()
        if takes
        else view.clone(memory_format=torch.contiguous_format)
        for view, takes in zip(unstack_views(module, thetas), trained, strict=True)
    ]
    return [*views, *empty_local_statistics(module, len(thetas))]


def contiguous_leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors to train, each copied from the rows that it lies in: GPUs read and write one piece at several times the
    rate."""
    return [tensor.detach().contiguous().requires_grad_(tensor.requires_grad) for tensor in tensors]


def empty_local_statistics(module: nn.Module, m: int) -> list[Float[Tensor, "m ..."]]:
    """Room for the local statistics of m networks."""
    return [
        each.expand(m, -1).contiguous() for each in batch_norm.statistics(module, "local").values()
    ]


def is_bound(module: nn.Module, theta: Float[Tensor, " d"]) -> bool:
    """Whether every tensor of `module` that theta holds still lies inside `theta`, at its place."""
    place = theta.data_ptr()
    for tensor in shared_tensors(module).values():
        if tensor.data_ptr() != place or not tensor.is_contiguous():
            return False
        place += tensor.numel() * tensor.element_size()
    return place == theta.data_ptr() + theta.numel() * theta.element_size()


def initialise(make: Callable[[], nn.Module], draw: np.random.Generator) -> nn.Module:
    """A freshly initialised module, made by `make`, whose parameters depend on `draw` alone.

    PyTorch's layers draw from the global generator when they are built; it is put back as it was afterwards.
    """
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(int(draw.integers(2**63)))
        return make()


def row_checksums(models: Float[Tensor, "p d"]) -> Int[Tensor, "p 9"]:
    """What the bits of each of some models add up to in eight parts of it, and a last number: other sums, other models.

    A pass at the speed of memory, since the sums are of words of 64 bits: those of 32 take ten times as long.
    """
    even = models.shape[1] // 2 * 2
    parts = [part.sum(1) for part in models[:, :even].view(torch.int64).tensor_split(8, 1)]
    last = models[:, even:].contiguous().view(torch.int32).sum(1, dtype=torch.int64)
    return torch.stack([*parts, last], 1).cpu()


MIN_FOREACH_SIZE = 2**13  # parameters of a model below which calls cost more than copies


def row_stride(d: int) -> int:
    """The distance between two rows of models, in numbers: each begins at a multiple of 64 bytes, since the bits of a
    product can depend on where its factors lie."""
    return -(-d // 16) * 16


def is_contiguous_range(rows: Sequence[int]) -> bool:
    """Whether some rows follow each other: then they are a slice."""
    return list(rows) == list(range(rows[0], rows[0] + len(rows))) if rows else True


def gather_rows(models: Float[Tensor, "p d"], rows: Sequence[int]) -> Float[Tensor, "m d"]:
    """Some rows of models: a view where they follow each other, else a copy that lies as they do."""
    if is_contiguous_range(rows):
        return models[rows[0] : rows[0] + len(rows)] if rows else models[:0]
    dim = models.shape[1]
    found = models.new_zeros(len(rows), row_stride(dim))[:, :dim]
    if dim < MIN_FOREACH_SIZE:  # one call for all is then the faster way
        return found.copy_(models.index_select(0, torch.tensor(rows).to(models.device)))
    torch._foreach_copy_(found.unbind(), [models[row] for row in rows])
    return found
