"""What the paper's network costs in floating-point operations, and the best rate at which a core does them."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

from fedcb2o.kernels import dispatch, onednn

NUM_CLASSES = 47
Product = tuple[float, Callable[[], torch.Tensor]]


def multiplications(hidden: int) -> tuple[float, float]:
    """Multiply-add pairs that one image costs: forward, and in the backward pass (the images need no gradient)."""
    first = 28 * 28 * 32 * 25
    rest = 14 * 14 * 64 * 25 * 32 + 64 * 7 * 7 * hidden + hidden * NUM_CLASSES
    return first + rest, first + 2 * rest


def products(dtype: torch.dtype = torch.float32) -> dict[str, Product]:
    """Products like a round's, each with its floating-point operations."""
    x = torch.randn(64, 32, 14, 14).to(dtype)
    w = torch.randn(64, 32, 5, 5).to(dtype)
    y, v = (t.to(memory_format=torch.channels_last) for t in (x, w))
    a, b = torch.randn(2, 2048, 2048).to(dtype)
    convolution = 2.0 * 64 * 14 * 14 * 64 * 25 * 32
    square = 2.0 * 2048**3

    def by_onednn() -> torch.Tensor:
        with dispatch.use_kernels("onednn"):
            return F.linear(a, b)

    found: dict[str, Product] = {
        "5x5 convolution 32->64, batch 64": (convolution, lambda: F.conv2d(x, w, padding=2)),
        "the same, channels last": (convolution, lambda: F.conv2d(y, v, padding=2)),
        "product of 2048x2048 matrices": (square, lambda: a @ b),
    }
    if dtype == torch.float32 and onednn.is_available():
        found["the same, oneDNN"] = (square, by_onednn)
    return found


def rate(world: object = None, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """The best floating-point operations per second that this core reaches in each product."""
    del world  # a worker calls it as a function of its world
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    best = {}
    with torch.no_grad():
        for name, (count, product) in products(dtype).items():
            product()
            seconds = []
            end = time.perf_counter() + 0.5
            while len(seconds) < 5 or time.perf_counter() < end:
                start = time.perf_counter()
                product()
                seconds.append(time.perf_counter() - start)
            best[name] = count / min(seconds)
    torch.set_num_threads(before)
    return best


def family(root: int) -> list[int]:
    """The process `root` and all its descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
        children.setdefault(parent, []).append(int(path.parent.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found
