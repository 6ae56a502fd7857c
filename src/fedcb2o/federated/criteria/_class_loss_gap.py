"""class_loss_gap."""

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
    """The paper's G_j: max over classes c of L_{j,c}(theta) - L_{j,c}(theta^j) (eq:robust_criterion_G_LF).

    Classes that the agent holds no sample of are left out of the maximum, or with `absent="zero"` count as a
    difference of 0, as in the authors' released code. A model that is not finite on a class has an infinite value.
    Where the own model's loss is infinite, any other is less by `MOST`: an agent whose model is broken trusts others.

    Two changes go beyond the paper. With a `z` above 0 only what exceeds so many standard errors of a class counts, and
    less than 0 is 0: the largest of many noisy differences is positive for benign models too. With against="majority"
    the gap is to the median of L_{j,c} over the sub-level set and the own model, where that is more than the own one's:
    what most lose by mixing is held against nobody.
    """
    losses, own = required_losses(inputs)
    expected = own.by_class.clamp(max=MAX_LOSS)
    if against == "majority":
        expected = expected.fmax(
            _median_class_losses(losses, own, inputs.in_sublevel_set).clamp(max=MAX_LOSS)
        )
    gap = losses.by_class - expected
    if z > 0:
        gap = excess(gap, z, class_standard_error(losses, own))
    return gap.masked_fill(
        ~losses.present.unsqueeze(-2), 0.0 if absent == "zero" else -torch.inf
    ).amax(-1)


def _median_class_losses(
    losses: Losses, own: Losses, in_sublevel_set: Bool[Tensor, "*a m"] | None
) -> Float[Tensor, "*a 1 C"]:
    """The median loss of each class, the lower of two, over the models in the sub-level set and the own one."""
    theirs = (
        losses.by_class
        if in_sublevel_set is None
        else losses.by_class.masked_fill(~in_sublevel_set.unsqueeze(-1), torch.nan)
    )
    return torch.cat([theirs, own.by_class], -2).nanmedian(-2, keepdim=True).values
