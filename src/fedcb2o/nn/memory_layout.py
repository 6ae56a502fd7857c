"""Memory layouts of images: channels-last for convolutions on a CPU."""

from typing import Literal

import torch
from torch import Tensor, nn

MemoryLayout = Literal["contiguous", "channels_last"]


class ChannelsLast(nn.Module):
    """Lays images out channel by channel within a pixel, which convolutions on a CPU read faster, unless they are those
    of several networks at once."""

    def forward(self, x: Tensor) -> Tensor:
        """The same values in another order of memory."""
        return (
            x
            if x.device.type != "cpu" or is_vmapped(x)
            else x.to(memory_format=torch.channels_last)
        )


def with_memory_format(module: nn.Module, layout: MemoryLayout) -> nn.Module:
    """A network that reads images in this layout, whatever theirs is."""
    return nn.Sequential(ChannelsLast(), module) if layout == "channels_last" else module


def is_vmapped(x: Tensor) -> bool:
    """Whether a network, under `torch.func.vmap`, sees in `x` one of several tensors that it is computed on at once."""
    return torch._C._functorch.is_batchedtensor(x)
