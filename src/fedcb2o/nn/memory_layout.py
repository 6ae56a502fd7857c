"""Memory layouts of images: channels-last for convolutions on a CPU."""

from typing import Literal

import torch
from torch import Tensor, nn

MemoryLayout = Literal["contiguous", "channels_last"]


class ChannelsLast(nn.Module):
    """A conversion of images to channels-last memory, which CPU convolutions read faster.

    The images of several networks under `torch.func.vmap` stay as they are.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the same values, channels last on a CPU."""
        if x.device.type != "cpu" or is_vmapped(x):
            return x
        return x.to(memory_format=torch.channels_last)


def with_memory_format(module: nn.Module, layout: MemoryLayout) -> nn.Module:
    """Return a network that reads images in a layout, converted if needed."""
    if layout == "channels_last":
        return nn.Sequential(ChannelsLast(), module)
    return module


def is_vmapped(x: Tensor) -> bool:
    """Return whether `torch.func.vmap` batches a tensor over several networks."""
    return torch._C._functorch.is_batchedtensor(x)
