"""The last dense layer of models, in which a flip of labels shows most."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.federated.types import CriterionInput


def last_layers(inputs: CriterionInput, rows: Int[Tensor, " k"]) -> Float[Tensor, "k C h"]:
    """The last dense layer of each model, a row for each class: its weights and, last, its bias."""
    if inputs.context.last_layer is None:
        raise ConfigError(
            "the rule looks at the last dense layer, and this model does not end in one with a bias"
        )
    classes, width = inputs.context.last_layer
    tail = inputs.models[:, -classes * (width + 1) :][rows].cpu()
    weights = tail[:, : classes * width].view(len(rows), classes, width)
    return torch.cat([weights, tail[:, classes * width :].unsqueeze(-1)], -1)
