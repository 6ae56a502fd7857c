"""distance."""

from jaxtyping import Float
from torch import Tensor

from fedcb2o.federated.aggregation.gram_matrix import relative_distances
from fedcb2o.federated.criteria.base import _or_infinite
from fedcb2o.federated.types import Judged


def distance(judged: Judged) -> Float[Tensor, " m"]:
    """How far a model is from the own one, in units of the own one's norm."""
    return _or_infinite(relative_distances(judged.pool, judged.received.with_own(judged.me).rows))
