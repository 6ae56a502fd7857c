"""Averages weighted by numbers of samples."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.federated.types import CriterionInput, Received, batched

__all__ = ["by_num_samples"]


@batched
def by_num_samples(
    inputs: CriterionInput, *, own_model: Literal["excluded", "judged"] = "judged"
) -> Float[Tensor, "*a k"]:
    """Weigh each model by the number of samples that it was trained on.

    McMahan et al. (2017); DFedAvgM, Sun et al. (2022). The malicious agents mix by these weights,
    too.

    Args:
        own_model: "excluded" leaves the agent's own model out of the average.

    Returns:
        Weights of the received models and, unless it is excluded, the agent's own model, shape
        [*a, m] or [*a, m + 1].
    """
    return sample_weights(inputs.received, inputs.own_entry if own_model == "judged" else None)


def sample_weights(received: Received, own_entry: Received | None) -> Float[Tensor, "*a k"]:
    """Normalise numbers of samples to weights, by default without the agent's own model."""
    everyone = received if own_entry is None else received.with_own(own_entry)
    counts = everyone.num_samples.double()
    return counts / counts.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
