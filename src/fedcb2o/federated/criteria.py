"""Robustness criteria: a value for each received model, low is trusted.

A criterion is a function (judged) -> values of shape [m]; its further arguments are keywords.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.federated.types import Judged

__all__ = ["average_loss", "class_loss_gap"]


def average_loss(judged: Judged) -> Float[Tensor, "*a m"]:
    """The average validation loss L_j: the criterion of FedCBO (eq:fedcbo_ConsensusPoint), and before T_G."""
    assert judged.losses is not None
    return judged.losses.mean


def class_loss_gap(judged: Judged, *, absent: Literal["masked", "zero"] = "masked") -> Float[Tensor, "*a m"]:
    """The paper's G_j: max over classes c of L_{j,c}(theta) - L_{j,c}(theta^j) (eq:robust_criterion_G_LF).

    Classes that the agent holds no sample of are left out of the maximum, or with `absent="zero"` count as a
    difference of 0, as in the authors' released code. A model that is not finite on a class has an infinite value.
    """
    assert judged.losses is not None
    assert judged.own is not None
    gap = judged.losses.by_class - judged.own.by_class
    gap = gap.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return gap.masked_fill(~judged.losses.present.unsqueeze(-2), 0.0 if absent == "zero" else -torch.inf).amax(-1)
