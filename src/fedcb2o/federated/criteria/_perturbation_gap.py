"""Perturbation gap: the loss increase under the worst universal perturbation, against backdoors."""

from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from fedcb2o.federated.criteria import universal_perturbation
from fedcb2o.federated.criteria.class_losses import MAX_LOSS, required_losses
from fedcb2o.federated.losses import standard_error_of_mean
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
    """Compare the loss increases of models, each under its own worst universal perturbation.

    The value replaces the gap of eq:robust_criterion_G_LF: the average loss increase of a model
    under the perturbation worst for it, minus that of the agent's own model. It finds backdoors
    with an unknown trigger, and needs own_model = "judged".

    A perturbation paints some pixels black or white, the same in all images
    (`universal_perturbation.worst_perturbation`). It is computed for every class by gradients. With
    one step, the worst class is chosen to first order. With more steps, gradients are recomputed
    with the painted pixels for the most promising classes, and the worst is chosen by the loss.

    Models are evaluated as received, for any `interpolation`, because half a step dilutes a
    backdoor. Models outside of the sub-level set have no weight; they are not evaluated and have
    the value 0.

    Args:
        pixels: Largest number of painted pixels.
        samples: Number of validation samples for the gradients.
        steps: Number of gradient steps.
        blend: Share of uniform noise mixed into these samples, at least 0 and below 1. In black
            image regions, for example around a letter, all ReLU units may be off, and gradients 0.
        z: Number of standard errors that are subtracted from the mean difference, down to 0. At
            most `universal_perturbation.MAX_SAMPLES` validation samples are used.
        against: Reference: the agent's own model, or the model of median increase in the sub-level
            set and the agent's own model where that is larger. An increase that most models share
            is not held against any of them.

    Raises:
        ConfigError: No losses are evaluated, or the samples are not images with classes.
    """
    required_losses(inputs)
    is_evaluated = inputs.received.rows != inputs.own_entry.rows
    if inputs.in_sublevel_set is not None:
        is_evaluated &= inputs.in_sublevel_set
    gap = torch.zeros(len(is_evaluated), dtype=torch.float64)
    if not is_evaluated.any():
        return gap

    models = inputs.received[is_evaluated].with_own(inputs.own_entry)
    increases = universal_perturbation.loss_increases(
        inputs.context, models, pixels, samples, steps, blend
    )
    means = increases.mean(-1)
    reference = len(means) - 1
    if against == "majority":
        median = int(means.argsort(stable=True)[(len(means) - 1) // 2])
        if means[-1] < means[median] < torch.inf:
            reference = median

    difference = means[:-1] - means[reference].nan_to_num(nan=MAX_LOSS, posinf=MAX_LOSS)
    errors = standard_error_of_mean(increases[:-1] - increases[reference])
    values = _excess(difference, z, errors)
    gap[is_evaluated] = values.masked_fill(values.isnan(), torch.inf)
    return gap


def _excess(
    gaps: Float[Tensor, "*k"], z: float, errors: Float[Tensor, "*k"]
) -> Float[Tensor, "*k"]:
    """Subtract `z` standard errors, if they are finite, from the gaps, down to 0."""
    return torch.where(errors.isfinite(), (gaps - z * errors).clamp(min=0), gaps)
