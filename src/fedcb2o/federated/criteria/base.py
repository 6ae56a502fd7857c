"""What the criteria share."""

import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.federated.types import CriterionInput, Losses

MAX_LOSS = torch.finfo(torch.float32).max  # of all finite losses, which are computed in float32


def required_losses(inputs: CriterionInput) -> tuple[Losses, Losses]:
    """The losses of the received models and of the own one; raises ConfigError where there are none."""
    if inputs.losses is None or inputs.own_losses is None:
        raise ConfigError(
            "the criterion looks at losses, and the algorithm evaluates none: set `judges` = true"
        )
    holds = inputs.losses.present.any(-1)
    if not holds.all():
        raise ConfigError(
            f"the criterion looks at losses, and agent {int(inputs.own_entry.ids[~holds][0])} holds no validation data: leave "
            "it some, by a larger `agents.validation` or more `agents.benign_samples`"
        )
    return inputs.losses, inputs.own_losses


def nan_to_infinity(values: Float[Tensor, "*a m"]) -> Float[Tensor, "*a m"]:
    """The values, infinite where they are no numbers: such a model is not trusted."""
    return values.masked_fill(values.isnan(), torch.inf)
