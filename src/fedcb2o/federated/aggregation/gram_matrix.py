"""The Gram matrix of models, and blocks of their columns."""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fedcb2o.nn import parameters

BLOCK_ELEMENTS = 400_000  # numbers at once: 1.6 MB of float32, which stay near the core


def column_blocks(
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"] | None = None,
    *,
    extra: Float[Tensor, "e d"] | None = None,
    columns: tuple[int, int] | None = None,
    size: int | None = None,
) -> Iterator[tuple[int, Float[Tensor, "m b"]]]:
    """(first column, block) for the rows of a pool and, last, those of `extra`; a block is valid until the next.

    Views where the rows follow each other, else copies into one buffer. `columns` are the first and last + 1.
    """
    start, stop = columns or (0, models.shape[1])
    first, count = (
        (0, len(models)) if rows is None else (int(rows[0]) if len(rows) else 0, len(rows))
    )
    follow = rows is None or parameters.is_contiguous_range(rows.tolist())
    where = None if rows is None else rows.to(models.device)
    added = 0 if extra is None else len(extra)
    size = _block_width(count + added, models.device) if size is None else size
    buffer = models.new_empty(
        0 if follow and not added else (count + added) * min(size, max(0, stop - start))
    )
    for a in range(start, stop, size):
        b = min(a + size, stop)
        if follow and not added:
            yield a, models[first : first + count, a:b]
            continue
        block = buffer[: (count + added) * (b - a)].view(count + added, b - a)
        if where is None or follow:
            block[:count] = models[first : first + count, a:b]
        else:
            torch.index_select(models[:, a:b], 0, where, out=block[:count])
        if extra is not None:
            block[count:] = extra[:, a:b]
        yield a, block


def _block_width(m: int, device: torch.device) -> int:
    return max(
        1024,
        (BLOCK_ELEMENTS if device.type == "cpu" else 64 * BLOCK_ELEMENTS)
        // max(1, m)
        // 1024
        * 1024,
    )


def gram(
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"] | None = None,
    *,
    extra: Float[Tensor, "e d"] | None = None,
    last: int | None = None,
    columns: tuple[int, int] | None = None,
    size: int | None = None,
) -> Float[Tensor, "k k"]:
    """X X^T of rows X of a pool, and of the rows of `extra` after them, in float64 on the CPU.

    Products and sums are in float64, and float32 numbers multiply exactly there. So a squared distance is wrong by
    at most about 1e-14 of the squared norms of the two models, whatever the other models are: nearly equal models need
    no centring, and a model of huge norm spoils its own entries only, as does one that is not finite. With `last`, only
    the diagonal and the columns of so many last rows are computed, and the others are NaN: one pass at the speed of
    memory. With `columns`, only that range counts: the matrices of ranges add up.
    """
    k = (len(models) if rows is None else len(rows)) + (0 if extra is None else len(extra))
    home = (
        torch.device("cpu") if models.device.type == "mps" else models.device
    )  # Apple's GPUs have no float64
    total = torch.zeros(k, k if last is None else last, dtype=torch.float64, device=home)
    squares = torch.zeros(k, dtype=torch.float64, device=home)
    if size is None:
        size = _block_width(k, models.device)
        size = (
            min(4096, size) if models.device.type == "cpu" else size
        )  # rounding grows with the length of a sum
    buffer = torch.empty(k * min(size, models.shape[1]), dtype=torch.float64, device=home)
    for _, block in column_blocks(models, rows, extra=extra, columns=columns, size=size):
        x = buffer[: block.numel()].view(block.shape).copy_(block)
        if last is None:
            total.addmm_(x, x.T)
        else:
            total.addmm_(x, x[k - last :].T)
            squares += x.mul_(x).sum(1)
    total = total.cpu()
    if last is None:
        return (total + total.T) / 2  # a product's two halves may differ in the last bit
    matrix = torch.full((k, k), torch.nan, dtype=torch.float64)
    if last:
        matrix[:, k - last :] = total
        matrix[k - last :] = total.T
        corner = total[k - last :]
        matrix[k - last :, k - last :] = (corner + corner.T) / 2
    matrix.diagonal().copy_(squares)
    return matrix


def relative_distances(
    models: Float[Tensor, "p d"], rows: Int[Tensor, " k"]
) -> Float[Tensor, " m"]:
    """How far models are from the last one, in units of its norm."""
    products = gram(models, rows, last=1)
    to_last = products[:-1, -1]
    squares = products.diagonal()
    return (squares[:-1] - 2 * to_last + squares[-1]).clamp(min=0).sqrt() / squares[-1].sqrt()
