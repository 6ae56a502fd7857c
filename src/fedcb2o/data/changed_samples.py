"""Samples that a user's function changed: they stay of one kind."""

import math
from typing import Any

import torch
from torch import Tensor

from fedcb2o.data._dataset import Shard
from fedcb2o.errors import ConfigError, describe_type
from fedcb2o.user_values import returned_tensor


def changed_shard(name: str, output: Any, shard: Shard) -> Shard:
    """Validate the samples and labels that a function made of a shard.

    They get the types and the device of the shard. `name` is that of the function in messages.
    """
    if not isinstance(output, Shard):
        raise ConfigError(f"the {name} returned {describe_type(output)}, expected a fedcb2o.Shard")
    x = changed_tensor(name, "samples", output.x, shard.x)
    return Shard(x, changed_tensor(name, "labels", output.y, shard.y))


def changed_tensor(name: str, part: str, values: Any, original: Tensor) -> Tensor:
    """Validate changed samples or labels; return them in the type of the original."""
    tensor = returned_tensor(name, values)
    is_float = original.dtype.is_floating_point
    if tensor.shape != original.shape or tensor.dtype.is_floating_point != is_float:
        cure = "it may change values only"
        if original.dtype == torch.uint8 and tensor.shape == original.shape:
            cure = "return pixels, x.round().clamp(0, 255).to(torch.uint8)"
        raise ConfigError(
            f"the {name} returned {part} of shape {tuple(tensor.shape)} and type {tensor.dtype}, "
            f"expected {tuple(original.shape)} and {original.dtype}: {cure}"
        )
    if tensor.dtype == original.dtype and not is_float:
        return tensor.to(original)
    if not is_float and not tensor.to(original).eq(tensor).all():
        raise ConfigError(
            f"the {name} returned {part} that are no numbers of type {original.dtype}"
        )
    # The sum of finite numbers may overflow, and only then is each one tested.
    if not math.isfinite(float(tensor.sum())) and not tensor.isfinite().all():
        raise ConfigError(f"the {name} returned {part} that are not finite")
    return tensor.to(original)


def check_classes(name: str, y: Tensor, num_classes: int) -> None:
    """Raise ConfigError for labels that are no classes; 1 means no classes."""
    if num_classes > 1 and y.numel() and not (y.min() >= 0 and y.max() < num_classes):
        raise ConfigError(f"the {name} returned labels outside 0 to {num_classes - 1}")
