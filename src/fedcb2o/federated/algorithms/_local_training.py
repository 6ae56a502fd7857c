"""Local training: the baseline without communication."""

import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.federated import selection as _selections
from fedcb2o.federated.algorithm2 import RuleWeighing
from fedcb2o.federated.run_spec import Algorithm
from fedcb2o.federated.types import CriterionInput, batched


def local_training() -> Algorithm:
    """Train every agent alone, without any exchange."""
    return Algorithm(
        select=_selections.no_peers,
        weigh=RuleWeighing(_keep_own_model),
        needs_losses=False,
        lambda1=1.0,
        mixing_factor=1.0,
    )


@batched
def _keep_own_model(inputs: CriterionInput) -> Float[Tensor, "*a k"]:
    return torch.zeros(inputs.received.ids.shape)
