"""Criteria that read the losses L_j and L_{j,c} of a model alone.

`class_loss_gap` is the paper's robustness criterion, and `average_loss` that of FedCBO.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.federated.types import CriterionInput, Losses, batched

MAX_LOSS = torch.finfo(torch.float32).max
"""Largest finite loss: losses are float32."""

_MIN_CLASS_LOSS = 1e-300  # makes all shares equal if all losses are 0


@batched
def class_loss_gap(
    inputs: CriterionInput, *, absent: Literal["masked", "zero"] = "masked"
) -> Float[Tensor, "*a m"]:
    """Compute the paper's G_j: the largest class-loss gap to the agent's own model.

    G_j(theta) is the maximum over classes c of L_{j,c}(theta) - L_{j,c}(theta^j)
    (eq:robust_criterion_G_LF). A model that is not finite on a class has an infinite value. If the
    agent's own loss is infinite, it counts as `MAX_LOSS`: an agent whose model is broken trusts
    others.

    Args:
        absent: Classes without validation samples are left out of the maximum, or count as a gap of
            0 ("zero", as in the authors' released code).

    Returns:
        Values G_j, shape [*a, m].

    Raises:
        ConfigError: No losses are evaluated, or an agent holds no validation data.
    """
    losses, own = required_losses(inputs)
    # An agent with a broken model trusts others.
    reference = own.by_class.clamp(max=MAX_LOSS)
    gap = losses.by_class - reference
    fill = 0.0 if absent == "zero" else -torch.inf
    return gap.masked_fill(~losses.present.unsqueeze(-2), fill).amax(-1)


@batched
def average_loss(inputs: CriterionInput) -> Float[Tensor, "*a m"]:
    """Return the average validation loss L_j, the criterion of FedCBO.

    eq:fedcbo_ConsensusPoint. FedCB2O uses it before round T_G.

    Returns:
        Average losses, shape [*a, m].
    """
    losses, _ = required_losses(inputs)
    return losses.mean


@batched
def worst_class_loss(inputs: CriterionInput) -> Float[Tensor, "*a m"]:
    """Return the largest class loss, the maximum over classes c of L_{j,c}.

    This is `class_loss_gap` without the agent's own model, which drifts.

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
    """
    losses, _ = required_losses(inputs)
    by_class = losses.by_class + _MIN_CLASS_LOSS * losses.present.unsqueeze(-2).double()
    shares = by_class / by_class.sum(-1, keepdim=True)
    max_entropy = losses.present.sum(-1, keepdim=True).double().log()
    values: Tensor = (max_entropy - torch.special.entr(shares).sum(-1)).clamp(min=0)
    return values.masked_fill(values.isnan(), torch.inf)


def required_losses(inputs: CriterionInput) -> tuple[Losses, Losses]:
    """Return losses of received models and the agent's own model, or raise ConfigError."""
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
