"""Named randomness: every random draw of a run has its own counter-based stream.

A stream depends on the seed and on its name alone, so neither the order of execution nor the number of
workers can change a result. Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray


def stream(seed: int, *key: str | int) -> np.random.Generator:
    """The generator of one purpose, for example `stream(seed, "batches", n, agent)`.

    Equal arguments give equal draws; different ones give streams that are independent for all purposes.
    """
    return _generator(_stream_name(seed, *key))


def agent_streams(seed: int, *key: str | int, agents: Iterable[int]) -> list[np.random.Generator]:
    """`stream(seed, *key, j)` for each of some agents j."""
    start = _stream_name(seed, *key).removesuffix(")").removesuffix(",")
    return [_generator(f"{start}, {j})") for j in agents]


def _stream_name(seed: int, *key: str | int) -> str:
    return repr((int(seed), *(part if isinstance(part, str) else int(part) for part in key)))


def _generator(name: str) -> np.random.Generator:
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    words: Any = _Key(digest)
    return np.random.Generator(np.random.Philox(words, _START))


class _Key(ISeedSequence):
    """Gives Philox its key as it is: by its argument `key` it would first ask the system for a seed, and take twice as
    long."""

    def __init__(self, digest: bytes) -> None:
        self.digest = digest

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        """The words of the key."""
        return np.frombuffer(self.digest, _WORD, n_words)


_WORD = np.dtype("<u8")
_START = np.zeros(
    4, np.uint64
)  # Philox's counter, which it otherwise makes anew by Python's integers
