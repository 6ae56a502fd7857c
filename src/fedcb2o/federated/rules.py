"""Rules: how much each received model counts in the average m_j (Algorithm 2, lines 5-6).

A rule is a function (judged) -> normalised weights of the received models [m], or of those and, last, of the
agent's own model [m + 1]; its further arguments are keywords.
"""

import dataclasses
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o import consensus
from fedcb2o.errors import ConfigError
from fedcb2o.federated.types import Criterion, Judged

__all__ = ["by_num_samples"]

OwnModel = Literal["excluded", "judged", "trusted"]


def by_num_samples(judged: Judged, *, own_model: Literal["excluded", "judged"] = "judged") -> Float[Tensor, " k"]:
    """Weights in proportion to the samples that each model was trained on (McMahan et al. 2017; DFedAvgM, Sun et al.
    2022; the malicious agents' mixing), the agent's own included unless `own_model="excluded"`."""
    counts = judged.received.num_samples
    if own_model == "judged":
        counts = torch.cat([counts, judged.me.num_samples])
    return counts.double() / counts.sum().clamp(min=1)


def by_criterion(
    judged: Judged,
    criterion: Criterion,
    *,
    alpha: float,
    beta: float | None,
    own_model: OwnModel,
) -> Float[Tensor, " k"]:
    """The weights mu_j = exp(-alpha G), normalised, of the received models and, last, the agent's own (eq:comp_csp).

    With `beta`, only models in the sub-level set of the average loss count (eq:clustered_csp). The own model is
    `"excluded"` as in Algorithm 2, `"judged"` by the criterion like a peer's, or `"trusted"`: it counts as much as
    the most trusted peer, as in the authors' released code.
    """
    assert judged.losses is not None
    assert judged.own is not None
    values, lower = judge(criterion, judged), torch.cat([judged.losses.mean, judged.own.mean])
    itself = values.new_zeros(1)
    members = torch.ones(len(lower), dtype=torch.bool)
    if own_model == "excluded":
        members[-1] = False
    else:
        members[:-1] = judged.received.ids != judged.me.ids  # it may have drawn itself: it counts once
    counted = members.clone()
    if beta is not None and members.any():
        counted[members] = consensus.sublevel_mask(lower[members], beta)
    if own_model == "judged":
        itself = judge(criterion, dataclasses.replace(judged, losses=judged.own, received=judged.me))
    elif own_model == "trusted" and counted[:-1].any():
        itself = values[counted[:-1]].amin(-1, keepdim=True)
    return consensus.weights(torch.cat([values, itself]), alpha, counted)


def tensor_of(kind: str, values: Any) -> Tensor:
    """What a user's function returned as a tensor; raises ConfigError for what holds no numbers."""
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"the {kind} returned a {type(values).__name__}, expected a tensor") from error


def judge(criterion: Criterion, judged: Judged) -> Float[Tensor, " m"]:
    """The criterion's value for each received model, in float64; raises ConfigError where it has another shape."""
    values = tensor_of("criterion", criterion(judged))
    if values.shape != (len(judged.received.ids),):
        raise ConfigError(
            f"the criterion returned shape {tuple(values.shape)}, expected ({len(judged.received.ids)},): "
            "a value for each received model"
        )
    return values.double()
