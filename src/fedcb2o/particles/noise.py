"""The Brownian increments of many runs: standard normals, each run with its own named streams.

A third or more of a step's time is spent here. On the CPU they come from NumPy's SFC64, in pieces that stay in the
cache, in float32 by Box and Muller's formula and in float64 by the ziggurat; elsewhere from PyTorch's generator.
"""

import concurrent.futures
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcb2o.rng import stream

_BLOCK = (
    2**15
)  # normals to a stream: few enough for the cache, and threads can share one run's draws
_MAX_BUFFER = 2**20  # normals that small runs draw at once, for several steps
_MIN_THREADED = 2**17  # normals that are worth a second thread
_GROUP = 4  # so many take a whole number of words

_Source = np.random.Generator | torch.Generator


class Normals:
    """Standard normals [runs, n, d], step by step; those of a run depend on its seed, the purpose, n and d alone.

    So a batch of runs sees the same numbers as its runs one by one, with any number of threads.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        purpose: str,
        n: int,
        dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shape = (n, dim)
        size = -(n * dim) % _GROUP + n * dim
        on_cpu = device.type == "cpu"
        # PyTorch's generator gives others where it is asked for more at once: elsewhere each step is drawn by itself.
        ahead = max(1, min(64, _BLOCK // size, _MAX_BUFFER // (size * len(seeds)))) if on_cpu else 1
        self._block = _BLOCK if on_cpu else size
        self._buffer = torch.empty(len(seeds), ahead, size, dtype=dtype, device=device)
        starts = range(0, size, self._block)
        self._sources = [
            [_source(seed, purpose, start, device) for start in starts] for seed in seeds
        ]
        threads = torch.get_num_threads() if on_cpu else 1
        self._pool = concurrent.futures.ThreadPoolExecutor(threads) if threads > 1 else None
        self._threads = threads
        self._build_views()
        self._used = ahead

    def next(self) -> Tensor:
        """The next [runs, n, d]: a view that the following calls overwrite."""
        if self._used == len(self._steps):
            self._used = 0
            if self._pool is None or self._buffer.numel() < _MIN_THREADED:
                _fill(self._work)
            else:
                shares = [self._work[part :: self._threads] for part in range(self._threads)]
                list(self._pool.map(_fill, shares))
        self._used += 1
        return self._steps[self._used - 1]

    def keep_runs(self, runs: Sequence[int]) -> None:
        """Go on with these runs alone."""
        self._buffer = self._buffer[list(runs)]
        self._sources = [self._sources[run] for run in runs]
        self._build_views()

    def _build_views(self) -> None:
        """Which sources fill which part of the buffer, and where in it each step's normals lie."""
        n, dim = self._shape
        runs, ahead, size = self._buffer.shape
        block = self._block
        together = max(1, block // (ahead * size))  # runs
        self._work = [
            (sources, self._buffer[first : first + together, :, start : start + block])
            for first in range(0, runs, together)
            for start, sources in zip(
                range(0, size, block),
                zip(*self._sources[first : first + together], strict=True),
                strict=True,
            )
        ]
        # Views, also where a step does not fill its group: a copy would stay as it is.
        strides = (ahead * size, dim, 1)
        self._steps = [
            self._buffer.as_strided((runs, n, dim), strides, step * size) for step in range(ahead)
        ]


def _source(seed: int, purpose: str, start: int, device: torch.device) -> _Source:
    bits = stream(seed, purpose, start)
    if device.type == "cpu":
        return np.random.Generator(np.random.SFC64(bits.integers(2**63, size=2)))
    return torch.Generator(device).manual_seed(int(bits.integers(2**63)))


def _fill(work: Sequence[tuple[Sequence[_Source], Tensor]]) -> None:
    """Fill each part, [runs, steps, size], from its runs' sources."""
    for sources, part in work:
        if part.is_cpu and part.dtype == torch.float32:
            _box_muller(sources, part.numpy())  # type: ignore[arg-type]
            continue
        for source, own in zip(sources, part, strict=True):
            if isinstance(source, np.random.Generator):
                source.standard_normal(out=own.numpy())
            else:
                own.normal_(generator=source)


def _box_muller(sources: Sequence[np.random.Generator], out: NDArray[np.float32]) -> None:
    """Fill each step from its own words with sqrt(-2 log u) cos v and sqrt(-2 log u) sin v (Box and Muller, 1958).

    u has 32 random bits, the last of them set, so that the tails reach 6.6; v has 32.
    """
    runs, steps, size = out.shape
    drawn = [source.bit_generator.random_raw(steps * size // 2) for source in sources]
    words = drawn[0] if runs == 1 else np.concatenate(drawn)
    bits = words.view("u4").reshape(runs, steps, 2, size // 2)
    for_u = bits[:, :, 0]
    for_v = bits[:, :, 1].view("i4")
    for_u |= 1  # never log 0
    radius = for_u.astype("f4")
    radius *= 2.0**-32
    np.log(radius, out=radius)
    radius *= -2
    np.sqrt(radius, out=radius)
    v = for_v.astype("f4")
    v *= np.pi * 2.0**-31
    for function, part in ((np.cos, out[..., : size // 2]), (np.sin, out[..., size // 2 :])):
        function(v, out=part)
        part *= radius
