"""Helpers of the criteria: access to losses, and values that are not numbers.

Example:
    >>> import torch
    >>> nan_to_infinity(torch.tensor([0.5, float("nan")])).tolist()
    [0.5, inf]
"""

import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.federated.types import CriterionInput, Losses

MAX_LOSS = torch.finfo(torch.float32).max  # the largest finite loss: losses are float32


def required_losses(inputs: CriterionInput) -> tuple[Losses, Losses]:
    """Return the losses of the received models and of the agent's own model.

    Args:
        inputs: View of one or several agents.

    Returns:
        The losses of the received models, and those of the agent's own model.

    Raises:
        ConfigError: The algorithm evaluates no losses, or an agent holds no validation data.
    """
    if inputs.losses is None or inputs.own_losses is None:
        raise ConfigError(
            "the criterion reads losses, and the algorithm evaluates none: "
            "set `needs_losses` = true"
        )
    has_data = inputs.losses.present.any(-1)
    if not has_data.all():
        agent = int(inputs.own_entry.ids[~has_data][0])
        raise ConfigError(
            f"the criterion reads losses, and agent {agent} holds no validation data: "
            "leave it some, by a larger `agents.validation` or more `agents.benign_samples`"
        )
    return inputs.losses, inputs.own_losses


def nan_to_infinity(values: Float[Tensor, "*a m"]) -> Float[Tensor, "*a m"]:
    """Replace NaN by infinity, so that the model is not trusted.

    Args:
        values: Values, shape [*a, m].

    Returns:
        Values without NaN, shape [*a, m].
    """
    return values.masked_fill(values.isnan(), torch.inf)
