"""Denormal numbers, with which a processor computes up to hundreds of times more slowly."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor


@contextmanager
def flush_denormals() -> Iterator[None]:
    """Compute with zeros in place of denormal numbers, in this thread."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def flush_(row: Float[Tensor, " d"]) -> None:
    """Replace the denormal numbers of a received model by zeros; all others stay."""
    # The mode of the processor does not concern other devices.
    if row.device.type != "cpu":
        row[row.abs() < torch.finfo(row.dtype).tiny] = 0
        return
    numbers = row.numpy()
    # In this mode a product of a denormal number is 0, and needs no mask in memory.
    with flush_denormals():
        np.multiply(numbers, np.float32(1), out=numbers)
