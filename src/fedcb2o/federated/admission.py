"""What is received is hostile: only what passes here is seen by anything else.

An engine to which messages come from outside asks `refusal` of each. On one machine shape, type and round are what they
are, so that there each published row is looked at once by its `extents`.

A model that is not of the right length and type, not finite, larger than `BOUND` or of another round is refused; a
claimed number of samples is refused where it is none, and believed up to what the terms allow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedcb2o.nn.parameters import gather_rows

MAX_VALUE = 1e6  # models with larger numbers are not received
_NUMBERS_PER_CALL = 2**19  # numbers of small models that are looked at in one call


@dataclass(frozen=True)
class Message:
    """What an agent downloads: a model, and what its sender says of it; nothing is known of their types yet."""

    theta: Any
    num_samples: Any
    round: Any


def rejection_reason(message: Message, *, dim: int, n: int) -> str:
    """Why a message is not received in round `n` (alg:localAggregation, line 2); nothing where it is."""
    theta = message.theta
    claim = message.num_samples
    if not isinstance(theta, Tensor) or theta.layout is not torch.strided:
        return "it holds no dense tensor"
    if theta.dtype != torch.float32 or theta.shape != (dim,):
        return f"its model has type {theta.dtype} and shape {tuple(theta.shape)}, expected float32 and ({dim},)"
    if message.round != n:
        return f"its model is of round {message.round}, expected {n}"
    if not is_admissible(max_abs(theta.unsqueeze(0), [0])).all():
        return f"its model holds numbers that are not finite, or beyond {MAX_VALUE:g}"
    if isinstance(claim, bool) or not isinstance(claim, int | float) or not 0 <= claim < np.inf:
        return f"it claims {claim!r:.40} samples"
    return ""


def clip_claimed_samples(
    claims: Float[np.ndarray, " m"], max_samples: int
) -> Float[np.ndarray, " m"]:
    """How many samples peers that claim so many are believed to have trained on."""
    found: np.ndarray = np.minimum(claims, max_samples)
    return found


def max_abs(models: Float[Tensor, "p d"], rows: Sequence[int]) -> Float[np.ndarray, " m"]:
    """The largest size of a number in each of some models; not finite where one is not.

    One pass over large models, and from another device one transfer.
    """
    size = max(1, _NUMBERS_PER_CALL // models.shape[1])
    some = [gather_rows(models, rows[k : k + size]) for k in range(0, len(rows), size)]
    ends = [
        torch.stack((each.amin(1), each.amax(1)), -1) for each in some
    ]  # a quarter of the time of aminmax
    sizes: np.ndarray = (
        torch.cat(ends).cpu().abs().amax(1).double().numpy() if ends else np.zeros(0)
    )
    return sizes


def is_admissible(largest: Float[np.ndarray, " m"]) -> Bool[np.ndarray, " m"]:
    """Which models of such extents are received."""
    good: np.ndarray = largest <= MAX_VALUE
    return good
