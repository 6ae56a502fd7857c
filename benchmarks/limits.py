"""Floating-point operations of the paper's network, the best rate of a core, and processor time."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

from fedcb2o.kernels import _onednn, dispatch

NUM_CLASSES = 47
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
Product = tuple[float, Callable[[], torch.Tensor]]


def multiplications(hidden: int) -> tuple[float, float]:
    """Return the multiply-add pairs per image: forward, and backward without image gradients."""
    first = 28 * 28 * 32 * 25
    rest = 14 * 14 * 64 * 25 * 32 + 64 * 7 * 7 * hidden + hidden * NUM_CLASSES
    return first + rest, first + 2 * rest


def products(dtype: torch.dtype = torch.float32) -> dict[str, Product]:
    """Return products like those of a round, with their floating-point operations."""
    x = torch.randn(64, 32, 14, 14).to(dtype)
    w = torch.randn(64, 32, 5, 5).to(dtype)
    x_last, w_last = (t.to(memory_format=torch.channels_last) for t in (x, w))
    a, b = torch.randn(2, 2048, 2048).to(dtype)
    convolution = 2.0 * 64 * 14 * 14 * 64 * 25 * 32
    square = 2.0 * 2048**3

    def by_onednn() -> torch.Tensor:
        with dispatch.use_kernels("onednn"):
            return F.linear(a, b)

    result: dict[str, Product] = {
        "5x5 convolution 32->64, batch 64": (convolution, lambda: F.conv2d(x, w, padding=2)),
        "the same, channels last": (convolution, lambda: F.conv2d(x_last, w_last, padding=2)),
        "product of 2048x2048 matrices": (square, lambda: a @ b),
    }
    if dtype == torch.float32 and _onednn.is_available():
        result["the same, oneDNN"] = (square, by_onednn)
    return result


def best_rates(context: object = None, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Return the best operations per second of this core in each product; ignore `context`."""
    del context
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rates = {}
    with torch.no_grad():
        for name, (operations, product) in products(dtype).items():
            product()
            seconds: list[float] = []
            end = time.perf_counter() + 0.5
            while len(seconds) < 5 or time.perf_counter() < end:
                start = time.perf_counter()
                product()
                seconds.append(time.perf_counter() - start)
            rates[name] = operations / min(seconds)
    torch.set_num_threads(threads)
    return rates


def process_tree(root: int) -> list[int]:
    """Return the ids of a process and all its descendants (Linux)."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        if fields := _stat_fields(int(path.parent.name)):
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    tree = [root]
    for pid in tree:
        tree += children.get(pid, [])
    return tree


def processor_seconds(pid: int, with_children: bool = False) -> float:
    """Return the processor time of a process (Linux), optionally with its ended children."""
    fields = _stat_fields(pid)
    end = 15 if with_children else 13
    return sum(map(int, fields[11:end])) / TICKS_PER_SECOND


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name; none for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
