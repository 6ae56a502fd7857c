"""LIGHTYEAR: trust in models that agree with the agent's own.

Konstantin and Mukhopadhyay, "Don't reach for the stars: rethinking topology for resilient federated
learning" (arXiv 2508.05224, 2025), after the authors' released code. Of the text, only the abstract
was available.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fedcb2o.errors import ConfigError, require
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
    """Average the agent's own model and those that agree with it (LIGHTYEAR).

    The agreement is the mean of 1 - |a - a_own|, at least 0, over three scores on the agent's
    validation data: accuracy, expected calibration error, and sharpness (mean confidence). The
    average is mixed into the agent's own model with the factor decay^n in round n, so that agents
    train alone in the end (the regularisation).

    Args:
        threshold: Least agreement, from 0 to 1.
        decay: Factor per round, from 0 to 1.
        bins: Number of bins of the calibration error.
        confidence: "probability" is the largest probability. "output" is the largest output before
            the softmax, as in the released code.

    Returns:
        Weights of the received models and the agent's own, shape [m + 1].

    Raises:
        ConfigError: A parameter is out of range, or the data have no classes.
    """
    for name, value in (("threshold", threshold), ("decay", decay)):
        if not 0 <= value <= 1:
            raise ConfigError(f"`{name}` must be from 0 to 1, got {value}")
    require("bins", bins, bins >= 1, "1 or more")

    everyone = inputs.received.with_own(inputs.own_entry)
    outputs, labels = inputs.context.outputs(everyone)
    if labels.is_floating_point():
        raise ConfigError("lightyear compares predicted classes, and the data have no classes")
    scores = prediction_scores(outputs, labels, bins, confidence == "probability")
    agreement = (1 - (scores - scores[:, -1:]).abs()).clamp(min=0).mean(0)

    is_other = inputs.own_entry.ids != everyone.ids  # an agent that sampled itself counts once
    selected = (agreement >= threshold) & is_other
    # Agents train alone in the end.
    weights = decay**inputs.n * selected.double() / (1 + selected.sum())
    weights[-1] = 1 - weights.sum()
    return weights


def prediction_scores(
    outputs: Float[Tensor, "m n C"],
    labels: Int[Tensor, " n"],
    bins: int = 15,
    probability: bool = True,
) -> Float[Tensor, "3 m"]:
    """Compute accuracy, expected calibration error and mean confidence of m models.

    `outputs` are before the softmax. The confidence is the largest probability, or the largest
    output.
    """
    outputs = outputs.double()
    confidences, predictions = (outputs.softmax(-1) if probability else outputs).max(-1)
    is_right = (predictions == labels).double()

    inner_edges = torch.linspace(0, 1, bins + 1, dtype=confidences.dtype)[1:-1]
    bin_index = torch.bucketize(confidences, inner_edges)
    # An output before the softmax may be outside of (0, 1]. It has no bin.
    has_bin = (confidences > 0) & (confidences <= 1)
    gap = torch.where(has_bin, is_right - confidences, 0.0)
    gaps = torch.zeros(len(outputs), bins, dtype=confidences.dtype).scatter_add_(1, bin_index, gap)
    calibration = gaps.abs().sum(1)
    return torch.stack([is_right.mean(1), calibration / max(1, len(labels)), confidences.mean(1)])
