"""How all agents move at once: the mixing matrix of a round (eq:local_agg_update)."""

import functools
import warnings
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.federated import lists
from fedcb2o.federated.round import Choices


def mixing_matrix(choices: Choices, num_rows: int) -> Tensor:
    """W [N, `num_rows`] with theta_{n+1} = W theta_n for the whole population, theta_n with all that was published:
    row j is (1 - f) e_j + f mu_j (eq:local_agg_update), sparse.

    An agent whose rule works on columns has the row e_j. Weights of zero are not stored, so that what is not trusted
    cannot even be not a number.
    """
    agents, owner, factor = choices.agents, lists.owners(choices.num_received), choices.factor
    rest = np.array([choices.before.get(j, (0, 0.0)) for j in agents.tolist()]) if choices.before else None
    total = np.bincount(owner, choices.weights, len(agents)) + choices.own_weight
    total += 0.0 if rest is None else rest[:, 1]
    moves = total > 0  # not of a rule on columns, whose weights are unknown
    own = np.where(moves, 1 - factor + factor * choices.own_weight, 1.0)
    from_peers = moves[owner]
    owner, columns, weights = owner[from_peers], choices.rows[from_peers], choices.weights[from_peers]
    parts = [(agents, agents, own), (agents[owner], columns, factor[owner] * weights)]
    if rest is not None:
        parts.append((agents[moves], rest[moves, 0].astype(np.int64), (factor * rest[:, 1])[moves]))
    rows, columns, values = (np.concatenate(each) for each in zip(*parts, strict=True))
    order = np.lexsort((columns, rows))
    rows, columns, values = rows[order], columns[order], values[order]
    first = np.flatnonzero(np.diff(rows, prepend=-1) | np.diff(columns, prepend=-1))
    values = np.add.reduceat(values, first).astype(np.float32)  # an agent that drew itself has two parts
    kept = values != 0
    rows, columns, values = rows[first][kept], columns[first][kept], values[kept]
    starts = np.searchsorted(rows, np.arange(len(agents) + 1))
    return sparse(torch.from_numpy(starts), torch.from_numpy(columns), torch.from_numpy(values), num_rows)


def sparse(starts: Tensor, columns: Tensor, values: Tensor, num_rows: int) -> Tensor:
    """A sparse matrix with `num_rows` columns from its parts, which are small to send to a worker."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        size = (len(starts) - 1, num_rows)
        return torch.sparse_csr_tensor(starts, columns, values, size, dtype=torch.float32, check_invariants=False)


def times(w: Tensor, device: torch.device) -> Callable[[Float[Tensor, "rows b"]], Float[Tensor, "N b"]]:
    """The product of a sparse matrix with what lies on a device. Off the CPU the matrix is dense: not every other
    device has sparse products, nor do they always repeat their bits."""
    return w.matmul if device.type == "cpu" else functools.partial(dense_product, w.to_dense().to(device))


def dense_product(w: Float[Tensor, "N rows"], block: Float[Tensor, "rows b"]) -> Float[Tensor, "N b"]:
    """W times a block, in which numbers that are not finite spoil what has a weight on them, and nothing else."""
    broken = (w != 0).to(w.dtype) @ block.isfinite().logical_not_().to(w.dtype) > 0
    return (w @ block.nan_to_num(0.0, 0.0, 0.0)).masked_fill_(broken, torch.nan)
