"""Named random streams: a counter-based generator for every draw.

A stream depends only on the seed and on its name. Neither the order of execution nor the number of
workers can change a result. Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
(2011).

A generator takes longer to make than to draw a few numbers. `permutations`, `subsets` and
`weighted_subsets` therefore draw from many streams at once, in arrays, and return the same numbers
as the generators.

Example:
    >>> first = stream(0, "batches", 1, 7).integers(100, size=3)
    >>> again = stream(0, "batches", 1, 7).integers(100, size=3)
    >>> bool((first == again).all())
    True
"""

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard, overload

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

_Integers = NDArray[np.int64]
_Words = NDArray[np.uint64]
_Floats = NDArray[np.float64]
_Booleans = NDArray[np.bool_]

_Draw = Callable[[_Words], tuple[_Integers, _Integers, _Booleans]]
"""Keys of Philox -> numbers of each stream, words of 32 bits drawn, True where arrays fail."""

_MIN_STREAMS = 64  # for which arrays are faster than generators
_MIN_WEIGHTED_STREAMS = 16


def stream(seed: int, *key: str | int) -> np.random.Generator:
    """Return the generator of one purpose, such as `stream(seed, "batches", n, agent)`.

    Args:
        seed: Seed of the run.
        key: Name of the stream, words and whole numbers.

    Returns:
        A generator at the start of its stream. Equal arguments give equal draws; different
        arguments give independent streams.
    """
    return _generator(_digest(_stream_name(seed, *key)))


class AgentStreams(Sequence[np.random.Generator]):
    """The streams of several agents; a generator is made when it is first read."""

    def __init__(self, prefix: str, agents: Sequence[int]) -> None:
        self._prefix = prefix
        self._agents = agents
        self._generators: dict[int, np.random.Generator] = {}
        # Drawn by arrays from each stream: words of 32 bits, and then numbers of 64 bits.
        self._words_drawn: _Integers | None = None
        self._doubles_drawn = np.zeros(len(agents), np.int64)

    def __len__(self) -> int:
        return len(self._agents)

    @overload
    def __getitem__(self, k: int) -> np.random.Generator: ...
    @overload
    def __getitem__(self, k: slice) -> list[np.random.Generator]: ...
    def __getitem__(self, k: int | slice) -> "np.random.Generator | list[np.random.Generator]":
        if isinstance(k, slice):
            return [self[i] for i in range(len(self))[k]]
        generator = self._generators.get(k)
        if generator is None:
            generator = self._generators[k] = _generator(
                _digest(f"{self._prefix}, {self._agents[k]})")
            )
            if self._words_drawn is not None:
                _skip(generator, int(self._words_drawn[k]))
            generator.bit_generator.random_raw(int(self._doubles_drawn[k]), output=False)
        return generator

    @functools.cached_property
    def keys(self) -> _Words:
        """Keys of Philox, shape [a, 2]."""
        digests = b"".join([_digest(f"{self._prefix}, {j})") for j in self._agents])
        return np.frombuffer(digests, _WORD).reshape(-1, 2)

    def draw_arrays(self, draw: _Draw) -> tuple[_Integers, _Integers]:
        """Draw from all streams at once; return the numbers, and the streams that cannot.

        Generators that are made later continue after these draws.
        """
        numbers, num_words, is_rejected = draw(self.keys)
        self._words_drawn = np.where(is_rejected, 0, num_words)
        return numbers, np.flatnonzero(is_rejected)

    def draw_weighted(
        self, rows: _Integers, p: _Floats, sizes: _Integers
    ) -> tuple[_Integers, _Integers]:
        """Draw as `weighted_subsets` does; return the numbers, and the places that cannot."""
        start = self._doubles_drawn[rows]
        if self._words_drawn is not None:
            start = start + (self._words_drawn[rows] + 1) // 2
        numbers, num_doubles, is_rejected = _weighted_subsets(self.keys[rows], p, sizes, start)
        # Those with a generator continue with it.
        is_rejected |= np.isin(rows, list(self._generators))
        self._doubles_drawn[rows] += np.where(is_rejected, 0, num_doubles)
        return numbers, np.flatnonzero(is_rejected)

    @property
    def is_fresh(self) -> bool:
        """True if nothing was drawn."""
        return not self._generators and self._words_drawn is None


def agent_streams(seed: int, *key: str | int, agents: Iterable[int]) -> AgentStreams:
    """Return `stream(seed, *key, j)` for every agent j."""
    prefix = _stream_name(seed, *key).removesuffix(")").removesuffix(",")
    return AgentStreams(prefix, list(agents))


def permutations(draws: Sequence[np.random.Generator], n: int, times: int) -> _Integers:
    """Return `permutation(n)` of each generator, `times` in sequence, shape [a, times * n]."""
    orders, rest = np.empty((len(draws), times * n), np.int64), np.arange(len(draws))
    # Arrays take one step after the other for all streams.
    if n > 1 and 12 * times * n <= len(draws) and _can_draw_arrays(draws):
        orders, rest = draws.draw_arrays(functools.partial(_permutations, n=n, times=times))
    for k in rest.tolist():
        for t in range(times):
            orders[k, t * n : (t + 1) * n] = draws[k].permutation(n)
    return orders


def subsets(
    draws: Sequence[np.random.Generator], counts: _Integers, sizes: _Integers
) -> tuple[_Integers, _Integers]:
    """Draw some of the numbers below each count without replacement.

    The numbers are those of `choice(count, size, replace=False)` of each generator, ascending; all,
    without a draw, where `size` is `count` or more. Returns the numbers of all streams, one stream
    after the other, and how many each has.
    """
    sizes = np.minimum(counts, sizes)
    places = np.arange(sizes.max(initial=0))
    chosen = np.repeat(places[None], len(draws), 0)
    rest = np.flatnonzero((sizes < counts) & (sizes > 0))
    if len(rest) and _can_draw_arrays(draws):
        chosen, rest = draws.draw_arrays(functools.partial(_subsets, counts=counts, sizes=sizes))
    for k in rest.tolist():
        size = int(sizes[k])
        chosen[k, :size] = np.sort(draws[k].choice(int(counts[k]), size, replace=False))
    return chosen[places < sizes[:, None]], sizes


def weighted_subsets(
    draws: Sequence[np.random.Generator], rows: _Integers, p: _Floats, sizes: _Integers
) -> _Integers:
    """Draw from the streams at `rows`, without replacement, with probabilities p, shape [r, k].

    The numbers are those of `choice(k, size, replace=False, p=p)` of each generator, ascending; at
    least `size` probabilities are positive. The result has shape [r, max(sizes)]; in each row only
    the first `size` numbers are drawn.
    """
    chosen = np.full((len(rows), sizes.max(initial=0)), _ABSENT)
    rest = np.arange(len(rows))
    is_worth = chosen.size and len(rows) >= _MIN_WEIGHTED_STREAMS
    if is_worth and isinstance(draws, AgentStreams) and _arrays_equal_generators():
        chosen, rest = draws.draw_weighted(rows, p, sizes)
    for i in rest.tolist():
        draw, size = draws[int(rows[i])], int(sizes[i])
        chosen[i, :size] = np.sort(draw.choice(p.shape[1], size, replace=False, p=p[i]))
    return chosen


def _can_draw_arrays(draws: Sequence[np.random.Generator]) -> TypeGuard[AgentStreams]:
    """Return whether several streams can draw by arrays."""
    return (
        isinstance(draws, AgentStreams)
        and len(draws) >= _MIN_STREAMS
        and draws.is_fresh
        and _arrays_equal_generators()
    )


@functools.cache
def _arrays_equal_generators() -> bool:
    """Return whether this version of NumPy draws as the functions for arrays do."""
    digests = [_digest(f"{k}") for k in range(8)]
    keys = np.frombuffer(b"".join(digests), _WORD).reshape(-1, 2)
    counts, sizes = np.array([12, 25, 60, 1000, 10_000, 10_001, 20_000, 10**6]), np.full(8, 9)
    orders, _, _ = _permutations(keys, 7, times=2)
    chosen, _, _ = _subsets(keys, counts, sizes)
    p = np.arange(1, 97).reshape(8, 12) / np.arange(1, 97).reshape(8, 12).sum(1)[:, None]
    weighted, _, _ = _weighted_subsets(keys, p, sizes, np.full(8, 1))
    for k, digest in enumerate(digests):
        generators = [_generator(digest) for _ in range(3)]
        generators[2].random()
        if weighted[k].tolist() != sorted(generators[2].choice(12, 9, replace=False, p=p[k])):
            return False
        expected = [*generators[0].permutation(7), *generators[0].permutation(7)]
        subset = generators[1].choice(counts[k], 9, replace=False)
        if orders[k].tolist() != expected or chosen[k].tolist() != sorted(subset):
            return False
    return True


def _permutations(keys: _Words, n: int, times: int) -> tuple[_Integers, _Integers, _Booleans]:
    """Shuffle as `Generator.permutation` does (Fisher and Yates), `times` in sequence."""
    # 1. Swaps: a number up to i for each i from n - 1 to 1. A word whose last bits are above i is
    # skipped, so that streams reach a swap at different words.
    num_swaps = times * (n - 1)
    limits = np.append(np.tile(np.arange(n - 1, 0, -1), times), 0)
    masks = (1 << np.frexp(limits)[1].astype(np.int64)) - 1
    mean = ((masks + 1) / (limits + 1)).sum()
    words = _words(keys, int(mean + 6 * mean**0.5)).astype(np.int64)
    rows = np.arange(len(keys))
    step = np.zeros(len(keys), np.int64)
    swaps = np.zeros((len(keys), num_swaps + 1), np.int64)
    num_words = np.zeros(len(keys), np.int64)
    for word in words.T:
        number = word & masks[step]
        swaps[rows, step] = number  # the next word replaces a number above the limit
        num_words += step < num_swaps
        step = np.minimum(step + (number <= limits[step]), num_swaps)

    # 2. The orders.
    swaps = swaps[:, :-1].reshape(-1, n - 1)
    columns = np.arange(len(swaps))
    order = np.repeat(np.arange(n)[:, None], len(swaps), 1)
    for i, j in zip(range(n - 1, 0, -1), swaps.T, strict=True):
        moved = order[j, columns]
        order[j, columns] = order[i]
        order[i] = moved
    return order.T.reshape(len(keys), times * n), num_words, step < num_swaps


def _subsets(
    keys: _Words, counts: _Integers, sizes: _Integers
) -> tuple[_Integers, _Integers, _Booleans]:
    """Draw as `Generator.choice` does without replacement (Floyd), ascending."""
    places = np.arange(sizes.max())
    is_place = places < sizes[:, None]
    is_drawn = (sizes < counts)[:, None] & is_place
    last = (counts - sizes)[:, None] + places  # the largest number that each place may hold
    numbers, is_rejected = _bounded(keys, np.where(is_drawn, last + 1, 1).astype(np.uint64))
    numbers = np.where(is_drawn, numbers, np.where(is_place, places, _ABSENT))

    # A number that was drawn before stands for the last one that its place may hold.
    ascending = np.sort(numbers, 1)
    repeats = (np.diff(ascending) == 0) & (ascending[:, 1:] < _ABSENT)
    repeated = np.flatnonzero(repeats.any(1))
    if len(repeated):
        rows = numbers[repeated]
        for place in places[1:]:
            is_repeat = (rows[:, :place] == rows[:, place, None]).any(1) & is_place[repeated, place]
            rows[is_repeat, place] = last[repeated[is_repeat], place]
        ascending[repeated] = np.sort(rows, 1)

    # NumPy shuffles the end of all numbers for large subsets of many.
    is_large = (counts > 10_000) & (sizes > counts // 50)
    num_words = np.where(sizes < counts, 2 * sizes - 1, 0).clip(0)  # with those of a shuffle
    return ascending, num_words, is_rejected | is_large | (counts >= 2**32)


def _weighted_subsets(
    keys: _Words, p: _Floats, sizes: _Integers, start: _Integers
) -> tuple[_Integers, _Integers, _Booleans]:
    """Draw as `Generator.choice` does with probabilities, ascending, after `start` numbers.

    Numbers with probabilities are drawn at once, with replacement; repeats are drawn again, without
    the numbers that were found.
    """
    limits = start + 3 * sizes + 8  # streams that need more numbers are rejected
    words = _words(keys, 2 * int(limits.max()))
    uniform = ((words[:, ::2] | words[:, 1::2] << _HALF) >> _DROPPED_BITS) * 2.0**-53
    p = p.copy()
    found = np.full((len(keys), sizes.max()), _ABSENT)
    num_found, place = np.zeros_like(sizes), start.copy()
    rows = np.flatnonzero(sizes)
    while len(rows):
        missing = sizes[rows] - num_found[rows]
        columns = np.arange(missing.max())
        x = uniform[rows[:, None], place[rows, None] + columns]
        cumulative = p[rows].cumsum(1)
        cumulative /= cumulative[:, -1:]
        new = (cumulative[:, None] <= x[:, :, None]).sum(2)

        # The first of equal numbers counts.
        is_equal = new[:, :, None] == new[:, None]
        is_new = ~np.tril(is_equal, -1).any(2) & (columns < missing[:, None])
        i, j = np.nonzero(is_new)
        found[rows[i], (num_found[rows, None] + is_new.cumsum(1) - 1)[i, j]] = new[i, j]
        p[rows[i], new[i, j]] = 0
        num_found[rows] += is_new.sum(1)
        place[rows] += missing
        is_left = (num_found < sizes) & (place + sizes - num_found <= limits)
        rows = rows[is_left[rows]]
    return np.sort(found, 1), place - start, num_found < sizes


def _bounded(keys: _Words, bounds: _Words) -> tuple[_Integers, _Booleans]:
    """Draw a number below each bound (Lemire, 2019), and return which streams draw another word."""
    products = _words(keys, bounds.shape[1]) * bounds
    low = products & _LOW
    is_rejected = np.zeros(len(keys), bool)
    rows, columns = np.nonzero(low < bounds)
    bound = bounds[rows, columns]
    is_rejected[rows[low[rows, columns] < (2**32 - bound) % bound]] = True
    return (products >> _HALF).astype(np.int64), is_rejected


def _words(keys: _Words, count: int) -> _Words:
    """Return the first words of 32 bits of Philox 4x64-10, shape [a, count]."""
    counter = np.arange(1, 1 + -(-count // 8), dtype=np.uint64)
    a, b, c, d = (np.zeros((len(keys), len(counter)), np.uint64) for _ in range(4))
    a[:] = counter
    first, second = keys[:, :1], keys[:, 1:]
    for _ in range(10):
        high_a, high_c = _high(a, _FACTORS[0]), _high(c, _FACTORS[1])
        a, b, c, d = high_c ^ b ^ first, c * _FACTORS[1], high_a ^ d ^ second, a * _FACTORS[0]
        first, second = first + _STEPS[0], second + _STEPS[1]
    blocks = np.stack([a, b, c, d], 2).astype(_WORD, copy=False)
    return blocks.reshape(len(keys), -1).view("<u4")[:, :count].astype(np.uint64)


def _high(x: _Words, factor: np.uint64) -> _Words:
    """Return the upper 64 bits of products of 128 bits."""
    low, high = x & _LOW, x >> _HALF
    factor_low, factor_high = factor & _LOW, factor >> _HALF
    middle = high * factor_low + (low * factor_low >> _HALF)
    carry = low * factor_high + (middle & _LOW)
    upper: _Words = high * factor_high + (middle >> _HALF) + (carry >> _HALF)
    return upper


def _skip(generator: np.random.Generator, words: int) -> None:
    """Skip words of 32 bits."""
    generator.bit_generator.random_raw(words // 2, output=False)
    if words % 2:
        generator.integers(2**32, dtype=np.uint32)


def _stream_name(seed: int, *key: str | int) -> str:
    """Return the text of a stream's seed and key."""
    return repr((int(seed), *(part if isinstance(part, str) else int(part) for part in key)))


def _digest(name: str) -> bytes:
    """Return the key of a stream."""
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def _generator(key: bytes) -> np.random.Generator:
    """Return the generator of a key."""
    words: Any = _Key(key)
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
_LOW = np.uint64(2**32 - 1)
_HALF = np.uint64(32)
_DROPPED_BITS = np.uint64(11)  # of a word of 64 bits, for a number in [0, 1)
_FACTORS = np.array([0xD2E7470EE14C6C93, 0xCA5A826395121157], np.uint64)
_STEPS = np.array([0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B], np.uint64)
_ABSENT = np.iinfo(np.int64).max
