"""class_losses."""

import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.federated.criteria.base import nan_to_infinity, required_losses
from fedcb2o.federated.types import CriterionInput, batched


@batched
def average_loss(inputs: CriterionInput) -> Float[Tensor, "*a m"]:
    """The average validation loss L_j: the criterion of FedCBO (eq:fedcbo_ConsensusPoint), and before T_G."""
    return required_losses(inputs)[0].mean


@batched
def worst_class_loss(inputs: CriterionInput) -> Float[Tensor, "*a m"]:
    """The largest class loss, max over c of L_{j,c}: `class_loss_gap` without the own model, which drifts."""
    losses, _ = required_losses(inputs)
    return losses.by_class.masked_fill(~losses.present.unsqueeze(-2), -torch.inf).amax(-1)


@batched
def class_loss_entropy(inputs: CriterionInput) -> Float[Tensor, "*a m"]:
    """How unevenly a model's loss falls on the classes: log C - H(p), with p_c the share of class c in the sum.

    A label flip leaves one class with most of the loss, and H is low. So the value is 0, trusted, where all classes
    lose the same, and log C where one loses all. How large the losses are it does not see: a random model is trusted.
    """
    losses, _ = required_losses(inputs)
    by_class = (
        losses.by_class + 1e-300 * losses.present.unsqueeze(-2).double()
    )  # where all are 0, they are the same
    shares = by_class / by_class.sum(-1, keepdim=True)
    values = losses.present.sum(-1, keepdim=True).double().log() - torch.special.entr(shares).sum(
        -1
    )
    return nan_to_infinity(values.clamp(min=0))
