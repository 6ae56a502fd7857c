"""Averages weighted by numbers of samples."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.federated.types import CriterionInput, Received, batched


@batched
def by_num_samples(
    inputs: CriterionInput, *, own_model: Literal["excluded", "judged"] = "judged"
) -> Float[Tensor, "*a k"]:
    """Weights in proportion to the samples that each model was trained on (McMahan et al. 2017; DFedAvgM, Sun et al.
    2022; the malicious agents' mixing), the agent's own included unless `own_model="excluded"`."""
    return sample_weights(inputs.received, inputs.own_entry if own_model == "judged" else None)


def sample_weights(received: Received, own_entry: Received | None) -> Float[Tensor, "*a k"]:
    """Weights in proportion to the numbers of samples of received models and, where it counts, of the own one."""
    counts = (received if own_entry is None else received.with_own(own_entry)).num_samples
    counts = counts.double()
    return counts / counts.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
