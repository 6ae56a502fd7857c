"""Models as rows of numbers, and medians of metrics, without Flower's types."""

import statistics
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

TensorsByName = dict[str, Tensor]
Metric = float | list[float] | list[int]


def floats(state: TensorsByName) -> TensorsByName:
    return {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}


def row_type(state: TensorsByName) -> torch.dtype:
    """Return the type of a model's row: float64 if an array has it, or float32."""
    types = {tensor.dtype for tensor in state.values()}
    return torch.float64 if torch.float64 in types else torch.float32


def to_row(state: TensorsByName) -> Float[Tensor, " d"]:
    """Return the floating-point numbers of a model."""
    dtype = row_type(state)
    return torch.cat([tensor.reshape(-1).to(dtype) for tensor in floats(state).values()])


def from_row(theta: Float[Tensor, " d"], like: TensorsByName) -> TensorsByName:
    """Return a model by names; arrays of whole numbers are those of `like`."""
    tensors = dict(like)
    start = 0
    for name, tensor in floats(like).items():
        values = theta[start : start + tensor.numel()]
        tensors[name] = values.reshape(tensor.shape).to(tensor.dtype).clone()
        start += tensor.numel()
    return tensors


def median_metrics(records: Sequence[Mapping[str, Metric]]) -> dict[str, float | list[float]]:
    """Return the median over clients of each metric that more than half of the clients send.

    Of lists it is the median of each item. NaN, a missing metric and a list of another length count
    as larger than all numbers.
    """
    names = dict.fromkeys(name for record in records for name in record)
    medians: dict[str, float | list[float]] = {}
    for name in names:
        values = [record[name] for record in records if name in record]
        # A number has no length, and a list of one item stays a list.
        sizes = [len(value) if isinstance(value, list) else None for value in values]
        size = statistics.mode(sizes)
        if 2 * sizes.count(size) <= len(records):
            continue
        usable = [v for v, s in zip(values, sizes, strict=True) if s == size]
        width = 1 if size is None else size
        table = torch.full((len(records), width), torch.nan, dtype=torch.float64)
        table[: len(usable)] = torch.tensor(usable, dtype=torch.float64).view(len(usable), width)
        ordered = table.sort(dim=0).values  # NaN is last
        middle = (ordered[(len(records) - 1) // 2] + ordered[len(records) // 2]) / 2
        medians[name] = middle.item() if size is None else middle.tolist()
    return medians
