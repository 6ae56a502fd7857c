"""Line 7 of Algorithm 2 for a whole block: theta <- theta - lambda1 gamma (theta - m_j), as W theta
(eq:local_agg_update)."""

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fedcb2o.federated.decisions import Decisions
from fedcb2o.federated.types import Reduction
from fedcb2o.nn.parameters import is_contiguous_range, row_stride

_TILE_COLUMNS = (
    2048  # columns of the models that are mixed at once: N of them stay in a core's cache
)
REDUCTION_TILE_COLUMNS = (
    8192  # the same where rules work on columns, which costs some calls for each block
)
_AFTER_EVERY_ID = 2**62  # after every id
_DEVICE_TILE_COLUMNS = (
    2**16
)  # the same on another device than the CPU, where calls cost more and caches less


@dataclass(frozen=True)
class MixingMatrix:
    """How the models in the rows `own` of a pool change: those `starts`, `columns` and `values` of a sparse matrix W
    say of which rows each becomes which sum; where a rule works on columns it moves by a share to a reduction.

    Small to send to a worker.
    """

    own: Int[np.ndarray, " a"]
    row_offsets: Int[np.ndarray, " b"]
    columns: Int[np.ndarray, " k"]
    values: Float[np.ndarray, " k"]
    reductions: Mapping[int, tuple[Reduction, float]] = field(default_factory=dict)

    @property
    def tile_columns(self) -> int:
        """How many columns of the models are mixed at once."""
        return REDUCTION_TILE_COLUMNS if self.reductions else _TILE_COLUMNS


def mixing_matrix(
    decisions: Decisions, own: Int[np.ndarray, " a"], previous: Int[np.ndarray, " a"] | None = None
) -> MixingMatrix:
    """W with theta_{n+1} = W theta_n for agents whose models lie in the rows `own`, and what they had before the round
    in the rows `before`: row j is (1 - f) e_j + f mu_j (eq:local_agg_update), f their factor.

    An agent whose rule works on columns has the row e_j. The models in a sum stand in the order of their ids, wherever
    they lie, so that it has the same bits in every pool. Weights of zero are not stored, so that what is not trusted
    cannot even be not a number.
    """
    ids = decisions.agents
    owner = decisions.received.row_ids
    factor = decisions.factor
    rest = np.nan_to_num(decisions.previous_weight)
    total = np.bincount(owner, decisions.weights, len(ids)) + decisions.own_weight + rest
    moves = (total > 0) & ~np.isin(
        ids, list(decisions.reductions)
    )  # a rule on columns has no weights, or shows some
    share = np.where(moves, 1 - factor + factor * decisions.own_weight, 1.0)
    of = moves[owner]
    agents = np.arange(len(ids))
    sender = decisions.received.values[of]
    row = decisions.rows[of]
    weight = (factor[owner] * decisions.weights)[of]
    parts = [(agents, ids, own, share), (owner[of], sender, row, weight)]
    if previous is not None:
        parts.append(
            (
                agents[moves],
                np.full(moves.sum(), _AFTER_EVERY_ID),
                previous[moves],
                (factor * rest)[moves],
            )
        )
    owner, key, columns, values = (np.concatenate(each) for each in zip(*parts, strict=True))
    order = np.lexsort((key, owner))
    owner = owner[order]
    key = key[order]
    columns = columns[order]
    values = values[order]
    first = np.flatnonzero(np.diff(owner, prepend=-1) | np.diff(key, prepend=-1))
    values = np.add.reduceat(values, first).astype(
        np.float32
    )  # an agent that drew itself has two parts
    kept = values != 0
    starts = np.searchsorted(owner[first][kept], np.arange(len(ids) + 1))
    places = ids.searchsorted(np.array(list(decisions.reductions), np.int64)).tolist()
    reductions = zip(places, decisions.reductions.values(), strict=True)
    found = {k: (reduction, float(factor[k])) for k, reduction in reductions}
    return MixingMatrix(own, starts, columns[first][kept], values[kept], found)


def mix_(
    models: Float[Tensor, "p d"],
    matrix: MixingMatrix,
    start: int,
    stop: int,
    *,
    through_copy: bool = False,
) -> None:
    """theta <- W theta in place for the columns from `start` to `stop`, a tile at a time (eq:local_agg_update); for the
    agents whose rules work on columns, theta <- (1 - f) theta + f times the reductions.

    With `copied` it works on a copy in memory, so that of models on a disk each page is read and written once.
    """
    device = models.device
    columns = models[:, start:stop]
    w = product_with(sparse_matrix(matrix, len(models)), device)
    tile = matrix.tile_columns if device.type == "cpu" else _DEVICE_TILE_COLUMNS
    if through_copy:
        columns = columns.new_empty(len(columns), row_stride(stop - start))[
            :, : stop - start
        ].copy_(columns)
    rows = matrix.own.tolist()
    own = (
        slice(rows[0], rows[0] + len(rows))
        if is_contiguous_range(rows)
        else torch.from_numpy(matrix.own).to(device)
    )
    for a in range(0, stop - start, tile):
        block = columns[:, a : a + tile]
        mixed = w(block)
        for k, (reduction, factor) in matrix.reductions.items():
            mixed[k].lerp_(reduction.apply_to_buffer(block, start + a), factor)
        block[own] = mixed
    if through_copy:
        models[:, start:stop][own] = columns[own]


def sparse_matrix(w: MixingMatrix, num_rows: int) -> Tensor:
    """W for a pool of so many rows."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Sparse (CSR tensor support is in beta state|invariant checks are)"
        )
        starts, columns, values = map(torch.from_numpy, (w.row_offsets, w.columns, w.values))
        size = (len(w.own), num_rows)
        return torch.sparse_csr_tensor(
            starts, columns, values, size, dtype=torch.float32, check_invariants=False
        )


def product_with(
    w: Tensor, device: torch.device
) -> Callable[[Float[Tensor, "rows b"]], Float[Tensor, "N b"]]:
    """The product of a sparse matrix with what lies on a device. Off the CPU the matrix is dense: not every other
    device has sparse products, nor do they always repeat their bits."""
    return (
        w.matmul
        if device.type == "cpu"
        else functools.partial(dense_product, w.to_dense().to(device))
    )


def dense_product(
    w: Float[Tensor, "N rows"], group: Float[Tensor, "rows b"]
) -> Float[Tensor, "N b"]:
    """W times a block, in which numbers that are not finite spoil what has a weight on them, and nothing else."""
    broken = (w != 0).to(w.dtype) @ group.isfinite().logical_not_().to(w.dtype) > 0
    return (w @ group.nan_to_num(0.0, 0.0, 0.0)).masked_fill_(broken, torch.nan)
