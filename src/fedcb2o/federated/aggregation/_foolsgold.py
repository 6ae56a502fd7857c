"""FoolsGold: updates of sybils are more alike than those of others.

Fung, Yoon and Beschastnikh, "The Limitations of Federated Learning in Sybil Settings" (RAID 2020),
Algorithm 1.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from fedcb2o.federated.aggregation.last_layer import last_layers
from fedcb2o.federated.contacts import match_history
from fedcb2o.federated.types import CriterionInput, RuleState, stateful

__all__ = ["foolsgold"]


@stateful(uses_previous=True)
def foolsgold(
    state: RuleState, inputs: CriterionInput, *, confidence: float = 1.0
) -> tuple[RuleState, Float[Tensor, " k"]]:
    """Weigh models by the learning rates alpha_i of FoolsGold.

    The state is the sum of the updates of each received peer in the last dense layer (the
    indicative features), counted from the agent's model before the round. A peer under a new name
    has no history. The state takes 4 C (h + 1) bytes per peer that the agent ever received, for C
    classes and h units below the last layer, in memory and in each checkpoint.

    Args:
        state: State after the agent's previous round.
        confidence: Factor kappa in the logit.
    """
    everyone = inputs.received.with_own(inputs.own_entry)
    assert inputs.previous is not None
    rows = torch.cat([everyone.rows, inputs.previous.view(1)])
    layers = last_layers(inputs, rows).flatten(1)

    ids, is_kept, position = match_history(state, inputs, everyone.ids)
    history = layers.new_zeros(len(ids), layers.shape[1])
    history[position] = state.get("sums", layers[:0])[is_kept]
    current = torch.searchsorted(ids, everyone.ids)
    history[current] += layers[:-1] - layers[-1]
    return {"ids": ids, "sums": history}, learning_rates(history[current].double(), confidence)


def learning_rates(history: Float[Tensor, "k h"], confidence: float = 1.0) -> Float[Tensor, " k"]:
    """Compute the learning rates alpha_i of summed updates, scaled to sum to 1, or all 0."""
    cosine = F.normalize(history, dim=1) @ F.normalize(history, dim=1).T
    cosine = cosine.fill_diagonal_(-torch.inf)

    # Pardoning: an agent whose largest similarity is smaller than that of another is not penalised.
    largest = cosine.amax(1)
    is_smaller = largest.unsqueeze(0) > largest.unsqueeze(1)
    pardon = torch.where(is_smaller, largest.unsqueeze(1) / largest.unsqueeze(0), 1.0)
    alpha = (1 - (cosine * pardon).amax(1)).clamp(0, 1)

    tiny = torch.finfo(alpha.dtype).tiny
    alpha = alpha / alpha.amax().clamp(min=tiny)
    # The logit spreads rates near 0 and 1; those at the ends are infinite, and are clamped below.
    alpha = confidence * (alpha.logit() + 0.5)
    alpha = alpha.nan_to_num(nan=0.0, posinf=1.0, neginf=0.0).clamp(0, 1)
    return alpha / alpha.sum().clamp(min=tiny)
