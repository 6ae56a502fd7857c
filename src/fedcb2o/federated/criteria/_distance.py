"""distance."""

from jaxtyping import Float
from torch import Tensor

from fedcb2o.federated.aggregation.gram_matrix import relative_distances
from fedcb2o.federated.criteria.base import nan_to_infinity
from fedcb2o.federated.types import CriterionInput


def distance(inputs: CriterionInput) -> Float[Tensor, " m"]:
    """How far a model is from the own one, in units of the own one's norm."""
    return nan_to_infinity(
        relative_distances(inputs.models, inputs.received.with_own(inputs.own_entry).rows)
    )
