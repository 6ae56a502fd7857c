"""Comparison of outputs to rounding, and the layer in which two computations first differ."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_TOLERANCE = 1e-4
"""Largest difference of equal outputs, relative to the largest output; well above rounding."""

_Call = tuple[str, tuple[Tensor, Tensor]]
"""Call of a layer: its name, its input and its output."""


def agree(first: Tensor, second: Tensor) -> bool:
    """Return whether two outputs are equal to rounding.

    They have one shape and differ by at most 1e-4 of the largest number.
    """
    if first.shape != second.shape:
        return False
    a = first.detach().double()
    b = second.detach().double()
    # An infinite output sets no scale.
    finite = a[a.isfinite()].abs()
    scale = float(finite.max()) if len(finite) else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=_TOLERANCE * scale, equal_nan=True)


def equal(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have one shape and equal numbers; NaN equals NaN."""
    if torch.equal(first, second):
        return True
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    # NaN is not equal to itself; its bits are.
    bits = [
        tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)
    ]
    return torch.equal(*bits)


def first_difference(module: nn.Module, x: Tensor, parts: Sequence[Tensor]) -> str:
    """Name the innermost forward pass whose results for all samples and for parts differ first.

    `parts` are the same samples in parts. The name is that of the layer with its type.
    """
    apart = [_layer_calls(module, part) for part in parts]
    for call, *pieces in zip(_layer_calls(module, x), *apart, strict=False):
        if _differs(call, pieces, 1):
            place = call[0]
            if _differs(call, pieces, 0):  # its input does already
                place = place.rpartition(".")[0]
            kind = type(module.get_submodule(place)).__name__
            return f"its layer `{place}` ({kind})" if place else f"the forward pass of {kind}"
    return f"the forward pass of {type(module).__name__}"


def _differs(call: _Call, pieces: Sequence[_Call], end: int) -> bool:
    """Return whether the input (0) or output (1) of a call differs from its pieces."""
    name, ends = call
    whole = ends[end]
    parts = [piece[end] for other, piece in pieces if other == name]
    if not whole.ndim or {part.shape[1:] for part in parts} != {whole.shape[1:]}:
        return False
    joined = torch.cat(parts)
    return joined.shape == whole.shape and not agree(whole, joined)


def _layer_calls(module: nn.Module, x: Tensor) -> list[_Call]:
    """Return the input and output of each call of a layer, inner layers first."""
    calls: list[_Call] = []

    def record(name: str, layer: nn.Module, inputs: Any, output: Any) -> None:
        ends = (_first_tensor(inputs), _first_tensor(output))
        calls.append((name, ends))

    handles = [
        layer.register_forward_hook(functools.partial(record, name))
        for name, layer in module.named_modules()
    ]
    try:
        module(x)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _first_tensor(values: Any) -> Tensor:
    """Return a copy of the first tensor among a layer's inputs or outputs; else an empty one."""
    if isinstance(values, tuple | list) and values:
        values = values[0]
    if isinstance(values, Tensor):
        return values.detach().clone()
    return torch.zeros(())
