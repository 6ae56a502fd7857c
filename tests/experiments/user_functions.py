"""User functions that record their calls as files in a folder."""

import os
import time
from pathlib import Path

import torch

from fedcb2o.data import Dataset, Shard, digits
from fedcb2o.federated.criteria import average_loss


def halves(*, folder: str) -> Dataset:
    """Return the digits in bfloat16, a type that NumPy lacks."""
    (Path(folder) / f"data-{time.monotonic_ns()}-{os.getpid()}").touch()
    dataset = digits()
    return Dataset(
        *(Shard(shard.x.to(torch.bfloat16), shard.y) for shard in (dataset.pool, dataset.test)),
        dataset.class_names,
    )


def slow_loss(inputs, *, folder: str, seconds: float):
    """Return the average loss after a pause."""
    (Path(folder) / f"{inputs.n}-{os.getpid()}").touch()
    time.sleep(seconds)
    return average_loss(inputs)


def broken(first: int):
    """Yield two numbers, then fail."""
    yield first
    yield first + 1
    raise ValueError("out of numbers")
