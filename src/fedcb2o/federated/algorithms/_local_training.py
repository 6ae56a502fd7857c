"""Local training."""

import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.federated import selection as _selections
from fedcb2o.federated.algorithm_spec import Algorithm
from fedcb2o.federated.types import Judged, together


def local_training() -> Algorithm:
    """No exchange: every agent trains alone."""
    return Algorithm(select=_selections.nobody_else, weigh=_keep, judges=False, lambda1=1.0, mixing_factor=1.0)


@together
def _keep(judged: Judged) -> Float[Tensor, "*a k"]:
    return torch.zeros(judged.received.ids.shape)
