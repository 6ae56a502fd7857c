"""Samples that two parts of a data set have in common, such as test samples to train on."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped
from numpy.typing import NDArray
from torch import Tensor

_NUM_PROBED = 16
"""Values of a sample that find candidates, so that large data sets are compared in little time."""
_MAX_ROWS = 2048
_MAX_COLUMNS = 1024
"""Rows that are compared in all values, and from which, with columns, chance is estimated."""
_LEAST_SHARE = 0.01
"""Share of shared samples from which they matter."""


def count_shared(part: Shaped[Tensor, "n *d"], other: Shaped[Tensor, "m *d"]) -> int:
    """Return the number of samples in a part that equal a sample of the other part.

    The number is 0 if it is below a hundredth of the part, or little above what chance gives, as
    for tables of few different values. Above 2048 samples that seem equal it is an estimate.
    """
    kind = torch.promote_types(part.dtype, other.dtype)
    if kind == torch.bfloat16:
        kind = torch.float32  # NumPy has no bfloat16
    if not part.numel() or not other.numel() or part.shape[1:] != other.shape[1:]:
        return 0
    rows, others = (x.detach().to(kind).reshape(len(x), -1).numpy() for x in (part, other))
    width = rows.shape[1]
    probed = np.unique(np.linspace(0, width - 1, _NUM_PROBED).astype(np.int64))
    # The bytes of whole rows take long to compare: first those of the most varied column.
    some = others[:: -(-len(others) // _MAX_ROWS)]
    varied = max(probed.tolist(), key=lambda column: len(np.unique(some[:, column])))
    similar = others[np.isin(_numbers(others[:, varied]), _numbers(rows[:, varied]))]
    keys, other_keys = _keys(rows[:, probed]), _keys(similar[:, probed])
    candidates = np.flatnonzero(np.isin(keys, other_keys))
    count = len(candidates)
    if count and width > len(probed):
        # Some samples that agree in the probed values are compared in all.
        candidates = candidates[:: -(-count // _MAX_ROWS)]
        counterparts = similar[np.isin(other_keys, keys[candidates])]
        is_equal = np.isin(_keys(rows[candidates]), _keys(counterparts))
        count = round(count * float(is_equal.mean()))
    if count < _LEAST_SHARE * len(rows):
        return 0
    return count if count > 10 * len(rows) * len(others) * _coincidence(others) else 0


def _keys(rows: NDArray[Any]) -> NDArray[np.bytes_]:
    """Return the bytes of each row as one value."""
    values = np.ascontiguousarray(rows)
    if values.dtype.kind == "f":
        values = values + 0.0  # -0.0 equals 0.0
    # NumPy leaves out zeros at the end of such values, which makes no two rows of one width equal.
    return values.view(f"S{values.shape[1] * values.itemsize}")[:, 0]


def _numbers(column: NDArray[Any]) -> NDArray[np.integer]:
    """Return the bytes of each value as an integer."""
    return _keys(column[:, None]).view(f"u{column.itemsize}")


def _coincidence(rows: NDArray[Any]) -> float:
    """Return the probability that two random rows are equal, if columns are independent."""
    rows = rows[:: -(-len(rows) // _MAX_ROWS)]
    step = max(1, rows.shape[1] // _MAX_COLUMNS)
    probability = 1.0
    for column in rows.T[::step]:
        _, counts = np.unique(column, return_counts=True)
        probability *= float(((counts / len(rows)) ** 2).sum())
        if probability < 1e-12:  # explains no number of rows
            break
    return probability
