"""Criteria that read the class losses of a model alone."""

import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.federated.criteria.base import nan_to_infinity, required_losses
from fedcb2o.federated.types import CriterionInput, batched

_MIN_CLASS_LOSS = 1e-300  # makes all shares equal if all losses are 0


@batched
def average_loss(inputs: CriterionInput) -> Float[Tensor, "*a m"]:
    """Return the average validation loss L_j, the criterion of FedCBO.

    eq:fedcbo_ConsensusPoint. FedCB2O uses it before round T_G.

    Args:
        inputs: View of one or several agents.

    Returns:
        Average losses, shape [*a, m].
    """
    losses, _ = required_losses(inputs)
    return losses.mean


@batched
def worst_class_loss(inputs: CriterionInput) -> Float[Tensor, "*a m"]:
    """Return the largest class loss, the maximum over classes c of L_{j,c}.

    This is `class_loss_gap` without the agent's own model, which drifts.

    Args:
        inputs: View of one or several agents.

    Returns:
        Largest class losses, shape [*a, m].
    """
    losses, _ = required_losses(inputs)
    absent = ~losses.present.unsqueeze(-2)
    return losses.by_class.masked_fill(absent, -torch.inf).amax(-1)


@batched
def class_loss_entropy(inputs: CriterionInput) -> Float[Tensor, "*a m"]:
    """Measure how unevenly a model's loss is distributed over the classes.

    The value is log C - H(p), where p_c is the share of class c in the sum of class losses. A label
    flip concentrates the loss in one class. The value is 0 (trusted) if all classes lose the same,
    and log C if one class has all the loss. It ignores the size of the losses, so a random model is
    trusted.

    Args:
        inputs: View of one or several agents.

    Returns:
        Values, shape [*a, m].
    """
    losses, _ = required_losses(inputs)
    by_class = losses.by_class + _MIN_CLASS_LOSS * losses.present.unsqueeze(-2).double()
    shares = by_class / by_class.sum(-1, keepdim=True)
    max_entropy = losses.present.sum(-1, keepdim=True).double().log()
    values = max_entropy - torch.special.entr(shares).sum(-1)
    return nan_to_infinity(values.clamp(min=0))
