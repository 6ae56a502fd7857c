"""Line 7 of Algorithm 2 for several agents, theta <- theta - lambda1 gamma (theta - m_j).

The models of all agents are one matrix, which is multiplied by a sparse matrix W.

>>> matrix = MixingMatrix(
...     own=np.array([0, 1]),
...     row_offsets=np.array([0, 2, 3]),
...     columns=np.array([0, 1, 1]),
...     values=np.array([0.5, 0.5, 1.0], np.float32),
... )
>>> models = torch.tensor([[1.0], [3.0]])
>>> mix_(models, matrix, 0, 1)
>>> models.tolist()
[[2.0], [3.0]]
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fedcb2o.federated.decisions import Decisions
from fedcb2o.federated.types import Reduction
from fedcb2o.nn.parameters import is_contiguous_range, row_stride

_TILE_COLUMNS = 64, 2048  # least and most
_TILE_NUMBERS = 2**18  # of N models, which stay in a core's cache
REDUCTION_TILE_COLUMNS = 8192
"""Columns that are mixed at once where an agent has a reduction, which costs calls per tile."""
_DEVICE_TILE_COLUMNS = 2**16  # off the CPU, where calls cost more and caches less


@dataclass(frozen=True)
class MixingMatrix:
    """Sparse matrix W with theta_{n+1} = W theta_n, and reductions; small to send to a worker.

    Each row of W, from one of the `row_offsets` to the next, replaces the row `own` of the model
    buffer; columns are its rows. `reductions` has a reduction and its mixing factor by index in
    `own`.
    """

    own: Int[np.ndarray, " a"]
    row_offsets: Int[np.ndarray, " b"]
    columns: Int[np.ndarray, " k"]
    values: Float[np.ndarray, " k"]
    reductions: Mapping[int, tuple[Reduction, float]] = field(default_factory=dict)

    @classmethod
    def concatenate(cls, parts: "Sequence[MixingMatrix]") -> "MixingMatrix":
        """Return the matrix with the rows of all parts, one part after the other."""
        counts = np.concatenate([np.diff(part.row_offsets) for part in parts])
        first = np.cumsum([0, *(len(part.own) for part in parts)]).tolist()
        return cls(
            np.concatenate([part.own for part in parts]),
            np.concatenate([[0], counts.cumsum()]),
            np.concatenate([part.columns for part in parts]),
            np.concatenate([part.values for part in parts]),
            {
                start + k: reduction
                for start, part in zip(first, parts, strict=False)
                for k, reduction in part.reductions.items()
            },
        )

    @property
    def tile_columns(self) -> int:
        """Number of columns of the models that are mixed at once on a CPU."""
        if self.reductions:
            return REDUCTION_TILE_COLUMNS
        least, most = _TILE_COLUMNS
        return max(least, min(most, _TILE_NUMBERS // max(1, len(self.own)) // least * least))


def mixing_matrix(
    decisions: Decisions, own: Int[np.ndarray, " a"], previous: Int[np.ndarray, " a"] | None = None
) -> MixingMatrix:
    """Return W of agents: row j is (1 - f) e_j + f mu_j (eq:local_agg_update), f the mixing factor.

    It is e_j for a reduction. `own` and `previous` are rows of agents in the order of `decisions`,
    by id.
    """
    ids = decisions.agents
    span = 2 + int(max(ids.max(initial=0), decisions.received.values.max(initial=0)))
    factor = decisions.factor
    previous_weight = np.nan_to_num(decisions.previous_weight)
    agent = decisions.received.list_index
    total = np.bincount(agent, decisions.weights, len(ids))
    total = total + decisions.own_weight + previous_weight
    # An agent whose models all have weight 0 keeps its own. A reduction has no weights, or weights
    # for the record alone.
    moves = (total > 0) & ~np.isin(ids, list(decisions.reductions))

    # Entries of W as (agent, peer, row of the buffer, value).
    agents = np.arange(len(ids))
    own_value = np.where(moves, 1 - factor + factor * decisions.own_weight, 1.0)
    entries: list[tuple[np.ndarray, ...]] = [(agents, ids, own, own_value)]
    counts = moves[agent]
    received_value = (factor[agent] * decisions.weights)[counts]
    senders = decisions.received.values[counts]
    entries.append((agent[counts], senders, decisions.rows[counts], received_value))
    if previous is not None:
        # The model before the round is the last term of a sum.
        last = np.full(moves.sum(), span - 1)
        entries.append((agents[moves], last, previous[moves], (factor * previous_weight)[moves]))

    agent, peer, columns, values = (np.concatenate(each) for each in zip(*entries, strict=True))
    # The terms of a sum are in the order of ids, so that it has the same bits in every buffer.
    key = agent * span + peer
    order = key.argsort(kind="stable")  # fast, because the entries are a few sorted sequences
    key, columns, values = key[order], columns[order], values[order]

    # An agent that received its own model has two entries in one place.
    first = np.flatnonzero(np.diff(key, prepend=-1))
    values = np.add.reduceat(values, first).astype(np.float32)
    # Weights of zero are not stored, so that an infinite model without weight changes nothing.
    stored = values != 0
    offsets = np.searchsorted(key[first][stored], np.arange(len(ids) + 1) * span)

    reductions = {}
    for j, reduction in decisions.reductions.items():
        k = int(ids.searchsorted(j))
        reductions[k] = (reduction, float(factor[k]))
    return MixingMatrix(own, offsets, columns[first][stored], values[stored], reductions)


def mix_(
    models: Float[Tensor, "p d"],
    matrix: MixingMatrix,
    start: int,
    stop: int,
    *,
    through_copy: bool = False,
) -> None:
    """Compute theta <- W theta in place for columns from `start` to `stop` (eq:local_agg_update).

    `through_copy` works on a copy in memory, so that each page on a disk is read and written once.
    """
    device = models.device
    columns = models[:, start:stop]
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Sparse (CSR tensor support is in beta state|invariant checks are)"
        )
        w = torch.sparse_csr_tensor(
            torch.from_numpy(matrix.row_offsets),
            torch.from_numpy(matrix.columns),
            torch.from_numpy(matrix.values),
            (len(matrix.own), len(models)),
            dtype=torch.float32,
            check_invariants=False,
        )
    tile = matrix.tile_columns
    multiply: Callable[[Tensor], Tensor] = w.matmul
    if device.type != "cpu":  # not every device has sparse products that repeat their bits
        tile = _DEVICE_TILE_COLUMNS
        multiply = functools.partial(dense_product, w.to_dense().to(device))
    if through_copy:
        copy = columns.new_empty(len(columns), row_stride(stop - start))[:, : stop - start]
        columns = copy.copy_(columns)

    rows = matrix.own.tolist()
    own: slice | Tensor = torch.from_numpy(matrix.own).to(device)
    if is_contiguous_range(rows):
        own = slice(rows[0], rows[0] + len(rows))
    # A tile of all models stays in a core's cache.
    for a in range(0, stop - start, tile):
        block = columns[:, a : a + tile]
        mixed = multiply(block)
        for k, (reduction, factor) in matrix.reductions.items():
            mixed[k].lerp_(reduction.apply_to_buffer(block, start + a), factor)
        block[own] = mixed
    if through_copy:
        models[:, start:stop][own] = columns[own]


def dense_product(
    w: Float[Tensor, "N rows"], columns: Float[Tensor, "rows b"]
) -> Float[Tensor, "N b"]:
    """Multiply W with columns, where a number that is not finite spoils only sums that weigh it."""
    # 0 times infinity is NaN, so that such numbers are left out, and the sums that weigh them are
    # marked.
    is_infinite = columns.isfinite().logical_not_().to(w.dtype)
    is_spoilt = (w != 0).to(w.dtype) @ is_infinite > 0
    return (w @ columns.nan_to_num(0.0, 0.0, 0.0)).masked_fill_(is_spoilt, torch.nan)
