"""Gram matrix of models, computed a block of columns at a time.

The models are rows of a buffer and stay there. Next to them, only one block of columns of a few MB
is held, so that no [m, m, d] temporary and no copy of all models is ever needed.

Example:
    >>> import torch
    >>> models = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])
    >>> gram(models, torch.tensor([0, 2])).tolist()
    [[1.0, 3.0], [3.0, 9.0]]
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fedcb2o.nn import parameters

_BLOCK_ELEMENTS = 400_000  # 1.6 MB of float32, which stay in the cache of a core
_GRAM_COLUMNS = 4096  # the rounding of a sum grows with its length


def column_blocks(
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"] | None = None,
    *,
    extra: Float[Tensor, "e d"] | None = None,
    size: int | None = None,
) -> Iterator[tuple[int, Float[Tensor, "m b"]]]:
    """Iterate over blocks of columns of models (and `extra` ones), each with its first column.

    A block is a view if the rows are consecutive, else a copy in one reused buffer, valid until the
    next block. By default it fits the cache.
    """
    d = models.shape[1]
    num_extra = 0 if extra is None else len(extra)
    first, count = 0, len(models)
    if rows is not None:
        first = int(rows[0]) if len(rows) else 0
        count = len(rows)
    is_range = rows is None or parameters.is_contiguous_range(rows.tolist())
    is_view = is_range and not num_extra
    index = None if rows is None else rows.to(models.device)

    if size is None:
        size = _block_width(count + num_extra, models.device)
    num_buffered = 0 if is_view else (count + num_extra) * min(size, d)
    buffer = models.new_empty(num_buffered)

    for a in range(0, d, size):
        b = min(a + size, d)
        if is_view:
            yield a, models[first : first + count, a:b]
            continue

        block = buffer[: (count + num_extra) * (b - a)].view(count + num_extra, b - a)
        if index is None or is_range:
            block[:count] = models[first : first + count, a:b]
        else:
            torch.index_select(models[:, a:b], 0, index, out=block[:count])
        if extra is not None:
            block[count:] = extra[:, a:b]
        yield a, block


def _block_width(m: int, device: torch.device) -> int:
    # Off the CPU calls cost more and caches less.
    elements = _BLOCK_ELEMENTS if device.type == "cpu" else 64 * _BLOCK_ELEMENTS
    return max(1024, elements // max(1, m) // 1024 * 1024)


def gram(
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"] | None = None,
    *,
    extra: Float[Tensor, "e d"] | None = None,
    last: int | None = None,
    size: int | None = None,
) -> Float[Tensor, "k k"]:
    """Compute the Gram matrix X X^T in float64 on the CPU.

    Products and sums are in float64, where float32 numbers multiply exactly. A squared distance is
    therefore wrong by at most about 1e-14 of the squared norms of its two models, and nearly equal
    models need no centring. A model that is huge or not finite spoils its own entries only. The
    rows of `extra` follow. With `last`, only the diagonal and the columns of the `last` last rows
    are computed, in one pass at the speed of memory; the other entries are NaN.
    """
    k = len(models) if rows is None else len(rows)
    k += 0 if extra is None else len(extra)
    # Devices of Apple have no float64.
    has_float64 = models.device.type != "mps"
    device = models.device if has_float64 else torch.device("cpu")
    if size is None:
        size = _block_width(k, models.device)
        if models.device.type == "cpu":
            size = min(_GRAM_COLUMNS, size)

    # 1. Add up the products, a block of columns at a time.
    total = torch.zeros(k, k if last is None else last, dtype=torch.float64, device=device)
    squares = torch.zeros(k, dtype=torch.float64, device=device)
    buffer = torch.empty(k * min(size, models.shape[1]), dtype=torch.float64, device=device)
    for _, block in column_blocks(models, rows, extra=extra, size=size):
        x = buffer[: block.numel()].view(block.shape).copy_(block)
        if last is None:
            total.addmm_(x, x.T)
        else:
            total.addmm_(x, x[k - last :].T)
            squares += x.mul_(x).sum(1)

    # 2. Make the matrix symmetric: the two halves of a product may differ in the last bit.
    total = total.cpu()
    if last is None:
        return (total + total.T) / 2
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
    """Compute distances to the last model, in units of its norm."""
    products = gram(models, rows, last=1)
    to_last = products[:-1, -1]
    squares = products.diagonal()
    squared = (squares[:-1] - 2 * to_last + squares[-1]).clamp(min=0)
    return squared.sqrt() / squares[-1].sqrt()


def distances_to_own(
    models: Float[Tensor, "p d"], rows: Int[Tensor, "a m"], own: Int[Tensor, " a"]
) -> Float[Tensor, "a m"]:
    """Compute distances to each agent's own model, in units of its norm, in float64 on the CPU.

    The result of an agent does not depend on the others.
    """
    width = min(models.shape[1], _GRAM_COLUMNS)
    step = max(1, _BLOCK_ELEMENTS // (width * (1 + rows.shape[1])))
    # Devices of Apple have no float64.
    dtype = torch.float64 if models.device.type != "mps" else torch.float32
    found = []
    for some_rows, some_own in zip(torch.split(rows, step), torch.split(own, step), strict=True):
        squares = torch.zeros(rows.shape[1], dtype=torch.float64)
        norms = torch.zeros(1, dtype=torch.float64)
        index = torch.cat([some_own[:, None], some_rows], 1).to(models.device)
        for start in range(0, models.shape[1], width):
            block = models[:, start : start + width]
            x = block.index_select(0, index.flatten()).to(dtype)
            x = x.view(*index.shape, block.shape[1])
            norms = norms + x[:, :1].square().sum(-1).double().cpu()
            x = x[:, 1:].sub_(x[:, :1])
            squares = squares + x.square_().sum(-1).double().cpu()
        found.append(squares.sqrt() / norms.sqrt())
    return torch.cat(found)
