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

from fedcb2o.federated.decisions import Choices
from fedcb2o.federated.types import Reduction
from fedcb2o.nn.parameters import follow, row_stride

TILE = 2048  # columns of the models that are mixed at once: N of them stay in a core's cache
WIDE = 8192  # the same where rules work on columns, which costs some calls for each block
LAST = 2**62  # after every id
BROAD = 2**16  # the same on another device than the CPU, where calls cost more and caches less


@dataclass(frozen=True)
class Mixture:
    """How the models in the rows `own` of a pool change: those `starts`, `columns` and `values` of a sparse matrix W
    say of which rows each becomes which sum; where a rule works on columns it moves by a share to a reduction.

    Small to send to a worker.
    """

    own: Int[np.ndarray, " a"]
    starts: Int[np.ndarray, " b"]
    columns: Int[np.ndarray, " k"]
    values: Float[np.ndarray, " k"]
    reductions: Mapping[int, tuple[Reduction, float]] = field(default_factory=dict)

    @property
    def tile(self) -> int:
        """How many columns of the models are mixed at once."""
        return WIDE if self.reductions else TILE


def mixture(choices: Choices, own: Int[np.ndarray, " a"], before: Int[np.ndarray, " a"] | None = None) -> Mixture:
    """W with theta_{n+1} = W theta_n for agents whose models lie in the rows `own`, and what they had before the round
    in the rows `before`: row j is (1 - f) e_j + f mu_j (eq:local_agg_update), f their factor.

    An agent whose rule works on columns has the row e_j. The models in a sum stand in the order of their ids, wherever
    they lie, so that it has the same bits in every pool. Weights of zero are not stored, so that what is not trusted
    cannot even be not a number.
    """
    ids, owner, factor, rest = choices.agents, choices.received.owners, choices.factor, np.nan_to_num(choices.before)
    total = np.bincount(owner, choices.weights, len(ids)) + choices.own_weight + rest
    moves = (total > 0) & ~np.isin(ids, list(choices.reductions))  # a rule on columns has no weights, or shows some
    share = np.where(moves, 1 - factor + factor * choices.own_weight, 1.0)
    of, agents = moves[owner], np.arange(len(ids))
    sender, row, weight = choices.received.values[of], choices.rows[of], (factor[owner] * choices.weights)[of]
    parts = [(agents, ids, own, share), (owner[of], sender, row, weight)]
    if before is not None:
        parts.append((agents[moves], np.full(moves.sum(), LAST), before[moves], (factor * rest)[moves]))
    owner, key, columns, values = (np.concatenate(each) for each in zip(*parts, strict=True))
    order = np.lexsort((key, owner))
    owner, key, columns, values = owner[order], key[order], columns[order], values[order]
    first = np.flatnonzero(np.diff(owner, prepend=-1) | np.diff(key, prepend=-1))
    values = np.add.reduceat(values, first).astype(np.float32)  # an agent that drew itself has two parts
    kept = values != 0
    starts = np.searchsorted(owner[first][kept], np.arange(len(ids) + 1))
    places = ids.searchsorted(np.array(list(choices.reductions), np.int64)).tolist()
    reductions = zip(places, choices.reductions.values(), strict=True)
    found = {k: (reduction, float(factor[k])) for k, reduction in reductions}
    return Mixture(own, starts, columns[first][kept], values[kept], found)


def mix_(pool: Float[Tensor, "p d"], by: Mixture, start: int, stop: int, *, copied: bool = False) -> None:
    """theta <- W theta in place for the columns from `start` to `stop`, a tile at a time (eq:local_agg_update); for the
    agents whose rules work on columns, theta <- (1 - f) theta + f times the reductions.

    With `copied` it works on a copy in memory, so that of models on a disk each page is read and written once.
    """
    device, columns = pool.device, pool[:, start:stop]
    w, tile = times(sparse(by, len(pool)), device), by.tile if device.type == "cpu" else BROAD
    if copied:
        columns = columns.new_empty(len(columns), row_stride(stop - start))[:, : stop - start].copy_(columns)
    rows = by.own.tolist()
    own = slice(rows[0], rows[0] + len(rows)) if follow(rows) else torch.from_numpy(by.own).to(device)
    for a in range(0, stop - start, tile):
        block = columns[:, a : a + tile]
        mixed = w(block)
        for k, (reduction, factor) in by.reductions.items():
            mixed[k].lerp_(reduction.of(block, start + a), factor)
        block[own] = mixed
    if copied:
        pool[:, start:stop][own] = columns[own]


def sparse(w: Mixture, num_rows: int) -> Tensor:
    """W for a pool of so many rows."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse (CSR tensor support is in beta state|invariant checks are)")
        starts, columns, values = map(torch.from_numpy, (w.starts, w.columns, w.values))
        size = (len(w.own), num_rows)
        return torch.sparse_csr_tensor(starts, columns, values, size, dtype=torch.float32, check_invariants=False)


def times(w: Tensor, device: torch.device) -> Callable[[Float[Tensor, "rows b"]], Float[Tensor, "N b"]]:
    """The product of a sparse matrix with what lies on a device. Off the CPU the matrix is dense: not every other
    device has sparse products, nor do they always repeat their bits."""
    return w.matmul if device.type == "cpu" else functools.partial(dense_product, w.to_dense().to(device))


def dense_product(w: Float[Tensor, "N rows"], block: Float[Tensor, "rows b"]) -> Float[Tensor, "N b"]:
    """W times a block, in which numbers that are not finite spoil what has a weight on them, and nothing else."""
    broken = (w != 0).to(w.dtype) @ block.isfinite().logical_not_().to(w.dtype) > 0
    return (w @ block.nan_to_num(0.0, 0.0, 0.0)).masked_fill_(broken, torch.nan)
