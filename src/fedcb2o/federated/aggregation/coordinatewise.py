"""Robust rules by columns: each coordinate of the models for itself.

A rule is a function `(block) -> [b]` of a block of columns [m, b] of the models. `base.apply`
applies it to one block after the other.

Example:
    >>> import torch
    >>> block = torch.tensor([[5.0], [1.0], [2.0], [9.0], [3.0]])
    >>> coordinate_median(block).tolist()
    [3.0]
    >>> trimmed_mean(block, f=2).tolist()
    [3.0]
"""

import functools

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.federated.aggregation.base import rule_signature, validate_byzantine_count

__all__ = ["coordinate_median", "meamed", "trimmed_mean"]

_MAX_NETWORK_ROWS = 32  # number of models up to which a sorting network is faster


def half_minus_one(m: int) -> int:
    """Return the largest f with m >= 2 f + 1."""
    return (m - 1) // 2


def sort_columns(block: Float[Tensor, "m b"]) -> Float[Tensor, "m b"]:
    """Sort each column in ascending order."""
    if block.device.type != "cpu" or block.dtype not in (torch.float32, torch.float64):
        return block.sort(dim=0).values
    # The fastest ways that were measured on a CPU: comparisons of whole rows for few models, and
    # NumPy along the rows of the transposed block for more. Either takes about a tenth of the time
    # of PyTorch's sort.
    if len(block) <= _MAX_NETWORK_ROWS:
        return _sort_by_network(block)
    values = torch.empty(block.T.shape, dtype=block.dtype).copy_(block.T)
    values.numpy().sort(axis=1)
    return values.T


def _sort_by_network(block: Float[Tensor, "m b"]) -> Float[Tensor, "m b"]:
    """Sort by comparisons of two rows, the lesser values first."""
    m = len(block)
    values = block.new_empty(m + 1, block.shape[1])
    values[:m] = block

    rows = list(values[:m].numpy())
    spare = values[m].numpy()
    positions = list(range(m))
    spare_position = m
    for i, j in _sorting_network(m):
        np.minimum(rows[i], rows[j], out=spare)
        np.maximum(rows[i], rows[j], out=rows[j])
        # The spare row has the lesser values and takes the place of row i, so that nothing is
        # copied.
        rows[i], spare = spare, rows[i]
        positions[i], spare_position = spare_position, positions[i]
    return values[positions]


@functools.cache
def _sorting_network(m: int) -> tuple[tuple[int, int], ...]:
    """Return the comparisons i < j of Batcher's merge exchange, which sort m values.

    Knuth, "The Art of Computer Programming", vol. 3, 5.2.2, Algorithm M.
    """
    pairs: list[tuple[int, int]] = []
    top = 1 << max(0, (m - 1).bit_length() - 1)
    p = top
    while p > 0:
        q, r, d = top, 0, p
        while d > 0:
            pairs += [(i, i + d) for i in range(m - d) if i & p == r]
            d, q, r = q - p, q >> 1, p
        p >>= 1
    return tuple(pairs)


@rule_signature("columns", gram_entries="none")
def coordinate_median(block: Float[Tensor, "m b"]) -> Float[Tensor, " b"]:
    """Compute the median of each coordinate.

    For even m, it is the mean of the middle two values. Yin, Chen, Ramchandran and Bartlett,
    "Byzantine-robust distributed learning: towards optimal statistical rates" (ICML 2018).

    Returns:
        The medians, shape [b].
    """
    return _median_of_sorted(sort_columns(block))


@rule_signature("columns", gram_entries="none", max_byzantine=half_minus_one)
def trimmed_mean(block: Float[Tensor, "m b"], *, f: int) -> Float[Tensor, " b"]:
    """Average each coordinate without its f largest and f smallest values.

    With sorted values v_1 <= ... <= v_m of a coordinate: (v_{f+1} + ... + v_{m-f}) / (m - 2 f).
    Needs m >= 2 f + 1. Yin, Chen, Ramchandran and Bartlett (ICML 2018).

    Returns:
        The trimmed means, shape [b].
    """
    m = len(block)
    f = validate_byzantine_count(trimmed_mean, f, m)
    return _column_means(sort_columns(block)[f : m - f])


@rule_signature("columns", gram_entries="none", max_byzantine=half_minus_one)
def meamed(block: Float[Tensor, "m b"], *, f: int) -> Float[Tensor, " b"]:
    """Average the values of each coordinate nearest to its median (MeaMed).

    The m - f nearest values count. Xie, Koyejo and Gupta, "Generalized Byzantine-tolerant SGD"
    (2018). Needs m >= 2 f + 1.

    Returns:
        The means around the median, shape [b].
    """
    m = len(block)
    return mean_around_median(block, m - validate_byzantine_count(meamed, f, m))


def mean_around_median(block: Float[Tensor, "m b"], count: int) -> Float[Tensor, " b"]:
    """Average the `count` values, 1 or more, nearest to the median of each column.

    In ascending order these values are a window. From the lower end, it moves past x_s while x_{s +
    count} is nearer to the median.
    """
    values = sort_columns(block)
    num_excluded = len(values) - count
    middle = _median_of_sorted(values)
    window = values[:count].clone()
    for s in range(0, num_excluded, count):  # x_{s + count} takes the place of x_s
        e = min(s + count, num_excluded)
        low = values[s:e]
        high = values[s + count : e + count]
        target = window[: e - s]
        target.copy_(torch.where(middle - low > high - middle, high, target))
    return _column_means(window)


def _median_of_sorted(values: Float[Tensor, "m b"]) -> Float[Tensor, " b"]:
    m = len(values)
    if m % 2:
        return values[m // 2].clone()
    # Halves are added, because the sum of two finite values may overflow.
    return values[m // 2 - 1] / 2 + values[m // 2] / 2


def _column_means(values: Float[Tensor, "n b"]) -> Float[Tensor, " b"]:
    """Return the mean of each column, which is finite for finite values."""
    n = len(values)
    return values.new_full((n,), 1 / n) @ values
