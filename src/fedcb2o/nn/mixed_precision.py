"""Tensors of a network that may be kept in bfloat16, and devices that update them in one pass."""

import importlib.util

import torch
from torch import nn

from fedcb2o.nn.parameters import shared_tensors


def has_triton(device: torch.device) -> bool:
    """Return whether Triton compiles for a device: an NVIDIA GPU where it is installed."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def autocast_positions(module: nn.Module) -> list[int]:
    """Return which tensors only those layers read that autocast computes in bfloat16.

    They are the parameters of dense layers and convolutions, as positions in `shared_tensors`.
    """
    low: set[int] = set()
    others: set[int] = set()
    for part in module.modules():
        kind = low if type(part) in (nn.Linear, nn.Conv2d) else others
        kind.update(id(parameter) for parameter in part.parameters(recurse=False))
    # A tensor that another layer reads, too, stays in float32.
    tensors = shared_tensors(module).values()
    return [i for i, tensor in enumerate(tensors) if id(tensor) in low - others]
