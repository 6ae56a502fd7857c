"""LIGHTYEAR: a peer is trusted whose model does as well on the agent's own data as the agent's own, as surely, and as
rightly so.

Konstantin and Mukhopadhyay, "Don't reach for the stars: rethinking topology for resilient federated learning"
(arXiv 2508.05224, 2025). As in the authors' released code; of the text the abstract alone was at hand.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.federated.types import CriterionInput

__all__ = ["lightyear"]


def lightyear(
    inputs: CriterionInput,
    *,
    threshold: float = 0.6,
    decay: float = 0.95,
    bins: int = 15,
    confidence: Literal["probability", "output"] = "probability",
) -> Float[Tensor, " k"]:
    """The mean of the own model and of those whose agreement with it is `threshold` or more, mixed into the own model
    by decay^n in round n (the regularisation: agents end for themselves).

    The agreement is the mean of 1 - |a - a_own|, and at least 0, of three scores on the agent's validation data: the
    accuracy, the expected calibration error by so many `bins`, and the sharpness, which is the mean confidence. The
    released code takes the largest output before the softmax for the confidence: `confidence="output"`.
    """
    for name, value in (("threshold", threshold), ("decay", decay)):
        if not 0 <= value <= 1:
            raise ConfigError(f"`{name}` must be from 0 to 1, got {value}")
    if bins < 1:
        raise ConfigError(f"`bins` must be 1 or more, got {bins}")
    everyone = inputs.received.with_own(inputs.own_entry)
    outputs, labels = inputs.context.outputs(everyone)
    if labels.is_floating_point():
        raise ConfigError(
            "lightyear looks at which class models predict, and the data have no classes"
        )
    found = prediction_scores(outputs, labels, bins, confidence == "probability")
    agreement = (1 - (found - found[:, -1:]).abs()).clamp(min=0).mean(0)
    chosen = (agreement >= threshold) & (
        inputs.own_entry.ids != everyone.ids
    )  # it may have drawn itself: it counts once
    share = decay**inputs.n * chosen.double() / (1 + chosen.sum())
    share[-1] = 1 - share.sum()
    return share


def prediction_scores(
    outputs: Float[Tensor, "m n C"],
    labels: Int[Tensor, " n"],
    bins: int = 15,
    probability: bool = True,
) -> Float[Tensor, "3 m"]:
    """The accuracy of m models on n samples, their expected calibration error, and their mean confidence."""
    outputs = outputs.double()
    surest, guess = (outputs.softmax(-1) if probability else outputs).max(-1)
    right = (guess == labels).double()
    place = torch.bucketize(surest, torch.linspace(0, 1, bins + 1, dtype=surest.dtype)[1:-1])
    gap = torch.where(
        (surest > 0) & (surest <= 1), right - surest, 0.0
    )  # of an output elsewhere there is no bin
    calibration = (
        torch.zeros(len(outputs), bins, dtype=surest.dtype).scatter_add_(1, place, gap).abs().sum(1)
    )
    return torch.stack([right.mean(1), calibration / max(1, len(labels)), surest.mean(1)])
