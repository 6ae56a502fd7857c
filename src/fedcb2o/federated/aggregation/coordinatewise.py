"""Robust aggregation rules by columns: each coordinate of the models for itself.

A rule is a function (block) -> [b] of a block of columns [m, b] of the models; see `aggregate`, which applies it to one
block after the other.
"""

import functools

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.federated.aggregation.base import clip_byzantine_count, rule_signature

__all__ = ["coordinate_median", "meamed", "trimmed_mean"]

MAX_NETWORK_ROWS = 32  # models up to which a network is faster


def half_minus_one(m: int) -> int:
    """The largest f with m >= 2 f + 1."""
    return (m - 1) // 2


def sort_columns(block: Float[Tensor, "m b"]) -> Float[Tensor, "m b"]:
    """The values of each column in order, the least first, in the fastest of the ways that were measured.

    Few models on the CPU: a network of comparisons of whole rows. More: NumPy sorts the rows of the transposed block.
    Either took about a tenth of the time of PyTorch's sort, which does it on other devices.
    """
    if block.device.type != "cpu" or block.dtype not in (torch.float32, torch.float64):
        return block.sort(dim=0).values
    if len(block) <= MAX_NETWORK_ROWS:
        return _sort_by_network(block)
    values = torch.empty(block.T.shape, dtype=block.dtype).copy_(block.T)
    values.numpy().sort(axis=1)
    return values.T


def _sort_by_network(block: Float[Tensor, "m b"]) -> Float[Tensor, "m b"]:
    """Each comparison puts the lesser values of two rows in the first and the greater in the second."""
    m = len(block)
    values = block.new_empty(m + 1, block.shape[1])
    values[:m] = block
    rows = list(values[:m].numpy())
    spare = values[m].numpy()
    places = list(range(m))
    free = m
    for i, j in sorting_network(m):
        np.minimum(rows[i], rows[j], out=spare)
        np.maximum(rows[i], rows[j], out=rows[j])
        rows[i], spare = spare, rows[i]
        places[i], free = free, places[i]
    return values[places]


@functools.cache
def sorting_network(m: int) -> tuple[tuple[int, int], ...]:
    """Batcher's merge exchange: the comparisons that sort m values (Knuth, "The Art of Computer Programming", vol. 3,
    5.2.2, Algorithm M)."""
    pairs: list[tuple[int, int]] = []
    top = 1 << max(0, (m - 1).bit_length() - 1)
    p = top
    while p > 0:
        q = top
        r = 0
        d = p
        while d > 0:
            pairs += [(i, i + d) for i in range(m - d) if i & p == r]
            d = q - p
            q = q >> 1
            r = p
        p >>= 1
    return tuple(pairs)


@rule_signature("columns", gram_entries="none")
def coordinate_median(block: Float[Tensor, "m b"]) -> Float[Tensor, " b"]:
    """The median of each coordinate, of an even number the mean of the middle two (Yin et al., "Byzantine-robust
    distributed learning: towards optimal statistical rates", ICML 2018).
    """
    return _median_of_sorted(sort_columns(block))


@rule_signature("columns", gram_entries="none", max_byzantine=half_minus_one)
def trimmed_mean(block: Float[Tensor, "m b"], *, f: int) -> Float[Tensor, " b"]:
    """The mean of each coordinate without its f largest and f smallest values (Yin et al. 2018). Needs m >= 2 f + 1."""
    m = len(block)
    f = clip_byzantine_count(trimmed_mean, f, m)
    return _column_means(sort_columns(block)[f : m - f])


@rule_signature("columns", gram_entries="none", max_byzantine=half_minus_one)
def meamed(block: Float[Tensor, "m b"], *, f: int) -> Float[Tensor, " b"]:
    """MeaMed: the mean of the m - f values of each coordinate that are nearest to its median (Xie, Koyejo and Gupta,
    "Generalized Byzantine-tolerant SGD", 2018). Needs m >= 2 f + 1.
    """
    m = len(block)
    return mean_around_median(block, m - clip_byzantine_count(meamed, f, m))


def mean_around_median(block: Float[Tensor, "m b"], count: int) -> Float[Tensor, " b"]:
    """The mean of the `count` values nearest to the median of each column.

    In order they are a window: from the lower end it moves over x_s as long as x_{s + count} is nearer to the median.
    """
    values = sort_columns(block)
    out = len(values) - count
    middle = _median_of_sorted(values)
    window = values[:count].clone()
    for s in range(0, out, count):  # x_{s + count} takes the place of x_s
        e = min(s + count, out)
        low = values[s:e]
        high = values[s + count : e + count]
        place = window[: e - s]
        place.copy_(torch.where(middle - low > high - middle, high, place))
    return _column_means(window)


def _median_of_sorted(values: Float[Tensor, "m b"]) -> Float[Tensor, " b"]:
    """The median of values in order, of an even number the mean of the middle two."""
    m = len(values)
    return values[m // 2].clone() if m % 2 else values[m // 2 - 1] / 2 + values[m // 2] / 2


def _column_means(values: Float[Tensor, "n b"]) -> Float[Tensor, " b"]:
    """The mean of each column, which no finite values make infinite."""
    n = len(values)
    return values.new_full((n,), 1 / n) @ values


def weighted_median(x: Float[Tensor, "k b"], weights: Float[Tensor, " k"]) -> Float[Tensor, " b"]:
    """The weighted median of each column, in place of the mean of eq:comp_csp: the least of its numbers that, with all
    below it, have half of the weight."""
    ordered, order = x.sort(dim=0, stable=True)
    below = weights.to(x.device)[order].cumsum(0)
    place = (below < weights.sum().to(x.device) / 2 - 1e-9).sum(0, keepdim=True)
    median: Float[Tensor, "1 b"] = ordered.gather(0, place)
    return median[0]
