"""Denormal numbers in received models cost no time, and no other number changes."""

import time

import numpy as np
import torch

from fedcb2o.peer._denormals import flush_, flush_denormals


def test_only_denormal_numbers_change():
    bits = torch.from_numpy(
        np.array(
            [0x00800000, 0x80800000, 0x3F800000, 0x7F7FFFFF, 0x80000000, 0x00000000], "<u4"
        ).view("<f4")
    )
    denormal = torch.from_numpy(np.array([1, 0x007FFFFF, 0x80000001], "<u4").view("<f4"))
    row = torch.cat([bits, denormal])
    flush_(row)
    assert row[: len(bits)].view(torch.int32).tolist() == bits.view(torch.int32).tolist()
    assert row[len(bits) :].tolist() == [0, 0, 0]
    assert torch.tensor([1e-40]).item() > 0  # outside, denormals stay


def test_products_of_tiny_numbers_are_not_slow():
    """The factors are normal numbers, their products denormal ones."""
    x = torch.rand(256, 512)
    tiny = torch.full((512, 512), 1e-25)
    plain = torch.rand(512, 512)

    def seconds(weights: torch.Tensor) -> float:
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            (x * 1e-15) @ weights
            best = min(best, time.perf_counter() - start)
        return best

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with flush_denormals():
            assert seconds(tiny) < 10 * seconds(plain)
    finally:
        torch.set_num_threads(threads)
