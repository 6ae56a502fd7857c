"""Brownian increments: standard normals from each run's own streams.

A third or more of a step's time is spent here. On the CPU the normals come from NumPy's SFC64, in
pieces that stay in the cache, in float32 by Box and Muller's formula and in float64 by the
ziggurat; on other devices from PyTorch's generator.
"""

import concurrent.futures
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcb2o.rng import stream

_BLOCK = 2**15  # normals per stream: they fit the cache, and threads can share one run's draws
_MAX_BUFFER = 2**20  # normals that small runs draw at once, for several steps
_MIN_THREADED = 2**17  # normals from which a second thread pays off
_GROUP = 4  # normals that take a whole number of words

_Source = np.random.Generator | torch.Generator


class Normals:
    """Standard normals [runs, n, d] for one step after the other.

    The normals of a run depend only on its seed, the purpose, n and d, with any number of threads.
    `like` [..., d] has their d, dtype and device.
    """

    def __init__(self, seeds: Sequence[int], purpose: str, n: int, like: Tensor) -> None:
        dim, device = like.shape[-1], like.device
        self._shape = (n, dim)
        size = -(n * dim) % _GROUP + n * dim
        on_cpu = device.type == "cpu"

        # PyTorch's generator returns other numbers where more are requested at once: each step is
        # a request of its own.
        self._block = size
        ahead = 1
        threads = 1
        if on_cpu:
            self._block = _BLOCK
            ahead = max(1, min(64, _BLOCK // size, _MAX_BUFFER // (size * len(seeds))))
            threads = torch.get_num_threads()
        self._buffer = like.new_empty(len(seeds), ahead, size)

        starts = range(0, size, self._block)
        self._sources = [
            [_source(seed, purpose, start, device) for start in starts] for seed in seeds
        ]
        self._threads = threads
        self._used = ahead
        self._pool = concurrent.futures.ThreadPoolExecutor(threads)
        self._build_views()

    def next(self) -> Tensor:
        """Return the normals of the next step, a view [runs, n, d] that later calls overwrite."""
        if self._used == len(self._steps):
            self._used = 0
            if self._threads == 1 or self._buffer.numel() < _MIN_THREADED:
                _fill(self._work)
            else:
                shares = [self._work[part :: self._threads] for part in range(self._threads)]
                list(self._pool.map(_fill, shares))
        self._used += 1
        return self._steps[self._used - 1]

    def keep_runs(self, runs: Sequence[int]) -> None:
        """Continue with a part of the runs."""
        self._buffer = self._buffer[list(runs)]
        self._sources = [self._sources[run] for run in runs]
        self._build_views()

    def _build_views(self) -> None:
        """Assign parts of the buffer to sources, and to steps."""
        n, dim = self._shape
        runs, ahead, size = self._buffer.shape
        block = self._block
        runs_per_part = max(1, block // (ahead * size))

        self._work = []
        for first in range(0, runs, runs_per_part):
            last = first + runs_per_part
            starts = range(0, size, block)
            for start, sources in zip(
                starts, zip(*self._sources[first:last], strict=True), strict=True
            ):
                part = self._buffer[first:last, :, start : start + block]
                self._work.append((sources, part))

        # Views, also where a step does not fill its group: a copy would not change later.
        strides = (ahead * size, dim, 1)
        self._steps = [
            self._buffer.as_strided((runs, n, dim), strides, step * size) for step in range(ahead)
        ]


def _source(seed: int, purpose: str, start: int, device: torch.device) -> _Source:
    bits = stream(seed, purpose, start)
    if device.type == "cpu":
        # The named stream gives the seed, so that the streams of runs and purposes are independent.
        return np.random.Generator(np.random.SFC64(bits.integers(2**63, size=2)))
    return torch.Generator(device).manual_seed(int(bits.integers(2**63)))


def _fill(work: Sequence[tuple[Sequence[_Source], Tensor]]) -> None:
    """Fill each part, [runs, steps, size], from its runs' sources."""
    for sources, part in work:
        if part.is_cpu and part.dtype == torch.float32:
            _box_muller(sources, part.numpy())  # type: ignore[arg-type]
            continue
        for source, run in zip(sources, part, strict=True):
            if isinstance(source, np.random.Generator):
                source.standard_normal(out=run.numpy())
            else:
                run.normal_(generator=source)


def _box_muller(sources: Sequence[np.random.Generator], out: NDArray[np.float32]) -> None:
    """Fill each step with normals sqrt(-2 log u) cos v and sqrt(-2 log u) sin v.

    u has 32 random bits, the last of them set, so that the tails reach 6.6; v has 32.
    """
    runs, steps, size = out.shape
    draws = [source.bit_generator.random_raw(steps * size // 2) for source in sources]
    words = draws[0] if runs == 1 else np.concatenate(draws)
    bits = words.view("u4").reshape(runs, steps, 2, size // 2)

    bits_of_u = bits[:, :, 0]
    bits_of_u |= 1  # never log 0
    radius = bits_of_u.astype("f4")
    radius *= 2.0**-32
    np.log(radius, out=radius)
    radius *= -2
    np.sqrt(radius, out=radius)

    v = bits[:, :, 1].view("i4").astype("f4")
    v *= np.pi * 2.0**-31
    halves = ((np.cos, out[..., : size // 2]), (np.sin, out[..., size // 2 :]))
    for function, half in halves:
        function(v, out=half)
        half *= radius
