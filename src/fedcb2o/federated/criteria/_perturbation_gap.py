"""perturbation_gap."""

from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from fedcb2o.federated.aggregation.standard_errors import excess, standard_error_of_mean
from fedcb2o.federated.criteria import universal_perturbation
from fedcb2o.federated.criteria.base import MAX_LOSS, nan_to_infinity, required_losses
from fedcb2o.federated.types import CriterionInput


def perturbation_gap(
    inputs: CriterionInput,
    *,
    pixels: Annotated[int, Field(ge=1)] = 6,
    samples: Annotated[int, Field(ge=1)] = 4,
    steps: Annotated[int, Field(ge=1)] = 1,
    blend: Annotated[float, Field(ge=0, lt=1)] = 0.0,
    z: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0,
    against: Literal["own", "majority"] = "own",
) -> Float[Tensor, " m"]:
    """How much more the average loss rises under the universal perturbation that is worst for a model than the own
    model's does under the one worst for that, in place of the gap of eq:robust_criterion_G_LF: for backdoors whose
    trigger nobody knows, with own_model = "judged".

    A perturbation paints at most so many `pixels` black or white, the same in all images (`perturbations.worst`), and
    is sought for every class by gradients on so many `samples`, in so many `steps`: in one, the worst class is chosen
    to first order; in more, gradients are taken anew where pixels are painted, for the classes that promise most, and
    it is chosen by the loss. With `blend` above 0 these samples are blended with so much uniform noise: where images
    are black, as around a letter, units of a network with ReLU may all be off, and gradients 0. With against="majority"
    the rise is compared with the median one of the sub-level set and the own model, where that is more than the own
    one's: what most models rise by is held against nobody. Only what exceeds `z` standard errors of the mean difference
    over the validation samples, 256 at most, counts, and less than 0 is 0. Models are looked at whole, whatever
    `judged_at` is, since half a step dilutes a backdoor; those outside of the sub-level set, which have no weight, not
    at all: they have 0.
    """
    required_losses(inputs)
    seen = inputs.received.rows != inputs.own_entry.rows
    if inputs.in_sublevel_set is not None:
        seen &= inputs.in_sublevel_set
    gap = torch.zeros(len(seen), dtype=torch.float64)
    if seen.any():
        some = inputs.received[seen].with_own(inputs.own_entry)
        rises = universal_perturbation.loss_increases(
            inputs.context, some, pixels, samples, steps, blend
        )
        means = rises.mean(-1)
        expected = len(means) - 1
        if against == "majority":
            middle = int(means.argsort(stable=True)[(len(means) - 1) // 2])
            expected = middle if means[-1] < means[middle] < torch.inf else expected
        above = means[:-1] - means[expected].nan_to_num(nan=MAX_LOSS, posinf=MAX_LOSS)
        gap[seen] = nan_to_infinity(
            excess(above, z, standard_error_of_mean(rises[:-1] - rises[expected]))
        )
    return gap
