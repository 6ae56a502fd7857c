"""Distance of a model to the agent's own model."""

import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.federated.aggregation.gram_matrix import relative_distances
from fedcb2o.federated.types import CriterionInput


def distance(inputs: CriterionInput) -> Float[Tensor, " m"]:
    """Measure relative distances to the agent's own model.

    Returns:
        Distances in units of the norm of the agent's own model, shape [m].
    """
    rows = inputs.received.with_own(inputs.own_entry).rows
    distances = relative_distances(inputs.models, rows)
    return distances.masked_fill(distances.isnan(), torch.inf)
