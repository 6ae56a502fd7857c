"""FoolsGold: sybils that pursue one aim give themselves away, since their updates are more alike than those of others.

Fung, Yoon and Beschastnikh, "The Limitations of Federated Learning in Sybil Settings" (RAID 2020), Algorithm 1.
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
    """Weights in proportion to the learning rates alpha_i of FoolsGold, of the received models and the own one.

    It keeps the sum of the updates of each peer that it received, since the agent's model before the round, in the
    last dense layer (their indicative features). `confidence` is kappa in the logit. A peer under a new name has no
    history. That takes 4 C (h + 1) bytes for every peer that an agent ever received, for C classes and h units below
    the last layer, in memory and in each checkpoint.
    """
    everyone = inputs.received.with_own(inputs.own_entry)
    assert inputs.previous is not None
    rows = torch.cat([everyone.rows, inputs.previous.view(1)])
    layers = last_layers(inputs, rows).flatten(1)
    whose, known, there = match_history(state, inputs, everyone.ids)
    history = layers.new_zeros(len(whose), layers.shape[1])
    history[there] = state.get("sums", layers[:0])[known]
    here = torch.searchsorted(whose, everyone.ids)
    history[here] += layers[:-1] - layers[-1]
    return {"ids": whose, "sums": history}, learning_rates(history[here].double(), confidence)


def learning_rates(history: Float[Tensor, "k h"], confidence: float = 1.0) -> Float[Tensor, " k"]:
    """alpha_i of k agents from the sums of their updates, scaled to sum to 1; all 0 where nobody is unlike others."""
    alike = F.normalize(history, dim=1) @ F.normalize(history, dim=1).T  # cosine similarity
    alike = alike.fill_diagonal_(-torch.inf)
    most = alike.amax(1)
    pardon = torch.where(
        most.unsqueeze(0) > most.unsqueeze(1), most.unsqueeze(1) / most.unsqueeze(0), 1.0
    )
    alpha = (1 - (alike * pardon).amax(1)).clamp(0, 1)
    alpha = alpha / alpha.amax().clamp(min=torch.finfo(alpha.dtype).tiny)
    alpha = (
        (confidence * (alpha.logit() + 0.5)).nan_to_num(nan=0.0, posinf=1.0, neginf=0.0).clamp(0, 1)
    )
    return alpha / alpha.sum().clamp(min=torch.finfo(alpha.dtype).tiny)
