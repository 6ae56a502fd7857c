"""Named random streams: a counter-based generator for every draw.

A stream depends only on the seed and on its name. Neither the order of execution nor the number of
workers can change a result. Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
(2011).

Example:
    >>> first = stream(0, "batches", 1, 7).integers(100, size=3)
    >>> again = stream(0, "batches", 1, 7).integers(100, size=3)
    >>> bool((first == again).all())
    True
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray


def stream(seed: int, *key: str | int) -> np.random.Generator:
    """Return the generator of one purpose, such as `stream(seed, "batches", n, agent)`.

    Args:
        seed: Seed of the run.
        key: Name of the stream, words and whole numbers.

    Returns:
        A generator at the start of its stream. Equal arguments give equal draws; different
        arguments give independent streams.
    """
    return _generator(_stream_name(seed, *key))


def agent_streams(seed: int, *key: str | int, agents: Iterable[int]) -> list[np.random.Generator]:
    """Return `stream(seed, *key, j)` for every agent j."""
    prefix = _stream_name(seed, *key).removesuffix(")").removesuffix(",")
    return [_generator(f"{prefix}, {j})") for j in agents]


def _stream_name(seed: int, *key: str | int) -> str:
    """Return the text of a stream's seed and key."""
    return repr((int(seed), *(part if isinstance(part, str) else int(part) for part in key)))


def _generator(name: str) -> np.random.Generator:
    """Return the generator of a stream's name."""
    words: Any = _Key(hashlib.blake2b(name.encode(), digest_size=16).digest())
    return np.random.Generator(np.random.Philox(words, _START))


class _Key(ISeedSequence):
    """Key for Philox as a seed sequence: as `key`, it would first ask the system for a seed."""

    def __init__(self, digest: bytes) -> None:
        self.digest = digest

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        """Return the words of the key, unsigned 64-bit integers whatever `dtype` says."""
        return np.frombuffer(self.digest, _WORD, n_words)


_WORD = np.dtype("<u8")
_START = np.zeros(4, np.uint64)  # Philox's counter; it is slower to build from Python integers
