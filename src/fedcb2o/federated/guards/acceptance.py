"""Checks of received models: a received model is hostile until it has passed here.

An agent in another program's loop asks for the `rejection_reason` of each message. Real peers check
shape, type and round in their protocol. On one machine these are known. Everywhere `max_abs` and
`is_acceptable` check the numbers, in a simulation once for each published row.

A model that is not accepted counts as not received: its sender has no likelihood before its first
answer, and keeps its likelihood later. The guards (`checks`) come next, in `validation.admit`. A
model that they do not admit was received, and lowers the likelihood of its sender.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

MAX_VALUE = 1e6
"""Largest absolute value in an acceptable model."""

_NUMBERS_PER_CALL = 2**19  # numbers of small models that are checked in one call


@dataclass(frozen=True)
class Message:
    """Downloaded message of one peer; its types are not known yet."""

    theta: Any
    num_samples: Any
    round: Any


def rejection_reason(message: Message, *, dim: int, n: int, largest: float | None = None) -> str:
    """Return the reason to reject a message in round n, or "" (alg:localAggregation, line 2)."""
    theta, claim = message.theta, message.num_samples
    if not isinstance(theta, Tensor) or theta.layout is not torch.strided:
        return "it holds no dense tensor"
    if theta.dtype != torch.float32 or theta.shape != (dim,):
        return (
            f"its model has type {theta.dtype} and shape {tuple(theta.shape)}, "
            f"expected float32 and ({dim},)"
        )
    if message.round != n:
        return f"its model is of round {message.round}, expected {n}"
    if largest is None:
        largest = float(max_abs(theta.unsqueeze(0), [0])[0])
    if not largest <= MAX_VALUE:
        return f"its model holds numbers that are not finite, or beyond {MAX_VALUE:g}"
    # True and False are numbers in Python, and no claims.
    if isinstance(claim, bool) or not isinstance(claim, int | float) or not 0 <= claim < np.inf:
        return f"it claims {claim!r:.40} samples"
    return ""


def max_abs(models: Float[Tensor, "p d"], rows: Sequence[int]) -> Float[np.ndarray, " m"]:
    """Return each model's largest absolute value, not finite if it is not."""
    if not len(rows):
        return np.zeros(0)
    dim = models.shape[1]
    if models.device.type == "cpu" and len(rows) * dim <= _NUMBERS_PER_CALL:
        # NumPy's calls take less time than PyTorch's; the numbers are read twice.
        numbers = _select(models, rows).detach().numpy()
        found: np.ndarray = np.maximum(-numbers.min(1), numbers.max(1)).astype(np.float64)
        return found
    # Small models are checked in one call. Large models are read once, a part at a time; from
    # another device there is one transfer.
    size = max(1, _NUMBERS_PER_CALL // dim)
    width = _NUMBERS_PER_CALL if models.device.type == "cpu" else dim  # a part stays in the cache
    extremes = []
    for k in range(0, len(rows), size):
        chunk = _select(models, rows[k : k + size])
        bounds = []
        for part in torch.split(chunk, width, 1):
            # Two passes take a quarter of the time of `aminmax`.
            bounds += [part.amin(1), part.amax(1)]
        extremes.append(torch.stack(bounds, -1))
    largest: np.ndarray = torch.cat(extremes).cpu().abs().amax(1).double().numpy()
    return largest


def are_finite(models: Float[Tensor, "p d"], rows: Sequence[int]) -> Bool[np.ndarray, " m"]:
    """Return whether each model holds finite numbers only."""
    size = max(1, _NUMBERS_PER_CALL // models.shape[1])
    sums = [_select(models, rows[k : k + size]).sum(1) for k in range(0, len(rows), size)]
    found: np.ndarray = torch.cat(sums).isfinite().cpu().numpy() if sums else np.ones(0, bool)
    # A sum of large numbers may be infinite, too.
    for k in np.flatnonzero(~found).tolist():
        found[k] = np.isfinite(max_abs(models, rows[k : k + 1])[0])
    return found


def _select(models: Float[Tensor, "p d"], rows: Sequence[int]) -> Float[Tensor, "m d"]:
    """Return rows: a view of rows at equal distances, otherwise a copy."""
    step = max(1, rows[1] - rows[0]) if len(rows) > 1 else 1
    regular = range(rows[0], rows[-1] + 1, step)
    if list(rows) == list(regular):
        return models[regular.start : regular.stop : step]
    return models.index_select(0, torch.tensor(rows).to(models.device))


def is_acceptable(largest: Float[np.ndarray, " m"]) -> Bool[np.ndarray, " m"]:
    """Return whether models count as downloaded, by their largest absolute values (line 2)."""
    acceptable: np.ndarray = largest <= MAX_VALUE
    return acceptable
