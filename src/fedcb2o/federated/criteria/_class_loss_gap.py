"""Class-loss gap: the paper's robustness criterion G_j (eq:robust_criterion_G_LF)."""

from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from fedcb2o.federated.aggregation.standard_errors import class_standard_error, excess
from fedcb2o.federated.criteria.base import MAX_LOSS, required_losses
from fedcb2o.federated.types import CriterionInput, Losses, batched


@batched
def class_loss_gap(
    inputs: CriterionInput,
    *,
    absent: Literal["masked", "zero"] = "masked",
    z: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0,
    against: Literal["own", "majority"] = "own",
) -> Float[Tensor, "*a m"]:
    """Compute the paper's G_j: the largest class-loss gap to the agent's own model.

    G_j(theta) is the maximum over classes c of L_{j,c}(theta) - L_{j,c}(theta^j)
    (eq:robust_criterion_G_LF). A model that is not finite on a class has an infinite value. If the
    agent's own loss is infinite, it counts as `MAX_LOSS`: an agent whose model is broken trusts
    others.

    `z` and `against` go beyond the paper. The largest of many noisy differences is positive for
    benign models, too; with `z` above 0 only a significant gap counts. With "majority", a loss that
    most models share is not held against any of them.

    Args:
        inputs: View of one or several agents.
        absent: Classes without validation samples are left out of the maximum, or count as a gap of
            0 ("zero", as in the authors' released code).
        z: Number of standard errors that are subtracted from each gap, down to 0.
        against: Reference of the gap: the agent's own class loss, or the median over the sub-level
            set and the agent's own model where that median is larger.

    Returns:
        Values G_j, shape [*a, m].

    Raises:
        ConfigError: No losses are evaluated, or an agent holds no validation data.
    """
    losses, own = required_losses(inputs)
    reference = own.by_class.clamp(max=MAX_LOSS)
    if against == "majority":
        median = _median_class_losses(losses, own, inputs.in_sublevel_set)
        reference = reference.fmax(median.clamp(max=MAX_LOSS))

    gap = losses.by_class - reference
    if z > 0:
        gap = excess(gap, z, class_standard_error(losses, own))
    fill = 0.0 if absent == "zero" else -torch.inf
    return gap.masked_fill(~losses.present.unsqueeze(-2), fill).amax(-1)


def _median_class_losses(
    losses: Losses, own: Losses, in_sublevel_set: Bool[Tensor, "*a m"] | None
) -> Float[Tensor, "*a 1 C"]:
    """Return median class losses over the set and the agent's model."""
    by_class = losses.by_class
    if in_sublevel_set is not None:
        by_class = by_class.masked_fill(~in_sublevel_set.unsqueeze(-1), torch.nan)
    return torch.cat([by_class, own.by_class], -2).nanmedian(-2, keepdim=True).values
