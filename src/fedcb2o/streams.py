"""Named randomness: every random draw of a run has its own counter-based stream.

A stream depends on the seed and on its name alone, so neither the order of execution nor the number of
workers can change a result. Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
"""

import hashlib

import numpy as np


def stream(seed: int, *key: str | int) -> np.random.Generator:
    """The generator of one purpose, for example `stream(seed, "batches", n, agent)`.

    Equal arguments give equal draws; different ones give streams that are independent for all purposes.
    """
    name = repr((int(seed), *(part if isinstance(part, str) else int(part) for part in key)))
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
