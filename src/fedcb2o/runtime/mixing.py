"""How all agents move at once: the mixing matrix of a round (eq:local_agg_update)."""

import functools
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.federated.round import Mixed


def mixing_matrix(mixed: Sequence[Mixed], num_rows: int) -> Tensor:
    """W [N, `num_rows`] with theta_{n+1} = W theta_n for the whole population, theta_n with all that was published:
    row j is (1 - f) e_j + f mu_j (eq:local_agg_update), sparse.

    An agent whose rule works on columns has the row e_j. Weights of zero are not stored, so that what is not trusted
    cannot even be not a number.
    """
    rows, columns, values = [], [], []
    for j, choice in enumerate(mixed):
        row = dict.fromkeys([j], 1.0)
        before, rest = choice.before or (0, 0.0)
        total = float(choice.weights.sum()) + choice.own_weight + rest
        if choice.reduction is None and total > 0:
            if rest:
                row[before] = choice.factor * rest
            row[j] = 1 - choice.factor + choice.factor * choice.own_weight
            for i, weight in zip(choice.rows.tolist(), choice.weights.tolist(), strict=True):
                row[i] = row.get(i, 0.0) + choice.factor * weight
        kept = sorted((i, value) for i, value in row.items() if np.float32(value))
        rows.append(len(kept))
        columns += [i for i, _ in kept]
        values += [value for _, value in kept]
    return sparse(torch.tensor([0, *rows]).cumsum(0), torch.tensor(columns), torch.tensor(values), num_rows)


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
