"""Users' own parts that tell in a folder who calls them."""

import os
import time
from pathlib import Path

import torch

from fedcb2o.data import Dataset, Shard, digits
from fedcb2o.federated.criteria import average_loss


def halves(*, folder: str) -> Dataset:
    """The digits, as numbers that NumPy has no type for."""
    (Path(folder) / f"data-{time.monotonic_ns()}-{os.getpid()}").touch()
    found = digits()
    return Dataset(
        *(Shard(each.x.to(torch.bfloat16), each.y) for each in (found.pool, found.test)),
        found.class_names,
    )


def slow_loss(judged, *, folder: str, seconds: float):
    """The average loss, which takes some time."""
    (Path(folder) / f"{judged.n}-{os.getpid()}").touch()
    time.sleep(seconds)
    return average_loss(judged)


def broken(first: int):
    """Work that fails after a while."""
    yield first
    yield first + 1
    raise ValueError("out of numbers")
