"""Class-loss excess: the largest class-loss gap beyond the noise of few samples."""

from typing import Annotated

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from fedcb2o.federated.criteria.class_losses import MAX_LOSS, required_losses
from fedcb2o.federated.types import CriterionInput, batched

_LEAST_SIGMA = 1e-3  # nats; equal losses would otherwise be divided by nothing


@batched
def class_loss_excess(
    inputs: CriterionInput,
    *,
    least_deviation: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.8,
    slack: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0,
) -> Float[Tensor, "*a m"]:
    """Measure the largest class-loss gap beyond the noise of the samples of its class.

    The gap d_c = L_{j,c}(theta) - L_{j,c}(theta^j) of eq:robust_criterion_G_LF is a mean over n_c
    samples with the standard error s_c = sigma / sqrt(n_c). The value is

        max_c max(0, d_c - m s_c) max(1, least_deviation / sigma).

    m is the largest d_c / s_c of the typical peer, from 0 to sqrt(2 log C) + `slack` for the C
    classes of the agent: the median over the better half of the received models, those of average
    loss up to the median. sigma, the standard deviation of differences within a class, is the
    median over the same models.

    So a gap that noise explains, or that the typical peer has too, has the value 0, as the agent's
    own model has. Where samples are memorised, all gaps are small in nats, and a standard deviation
    counts as `least_deviation`. For many samples and sigma of at least that, the value is the
    paper's G where that is above 0.

    Args:
        inputs: View of one or several agents.
        least_deviation: Nats that a standard deviation of differences counts as, if it is smaller.
        slack: Standard errors in the bound of m, beyond the expected largest of C normal numbers.

    Returns:
        Values, in nats, shape [*a, m]; 0 or more.

    Raises:
        ConfigError: No losses are evaluated, or an agent holds no validation data.
    """
    losses, own = required_losses(inputs)
    if not losses.mean.shape[-1]:
        return losses.mean.new_zeros(losses.mean.shape)
    # An agent with a broken model trusts others.
    gap = losses.by_class.double() - own.by_class.double().clamp(max=MAX_LOSS)
    difference = losses.per_sample.double() - own.per_sample.double().clamp(max=MAX_LOSS)
    counts = _class_counts(losses.labels, gap.shape[-1])

    is_better = _better_half(losses.mean)
    variance = _variance_within_classes(difference, gap, losses.labels, counts)
    sigma = _median(variance, is_better).sqrt().clamp(min=_LEAST_SIGMA)
    error = (sigma.unsqueeze(-1) / counts.clamp(min=1).sqrt()).unsqueeze(-2)

    # Classes without samples have no gap.
    gap = gap.masked_fill(~losses.present.unsqueeze(-2), -torch.inf)
    gap = gap.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    # An inbox of attackers alone cannot raise the typical gap beyond what noise explains.
    bound = (2 * losses.present.sum(-1).double().log()).clamp(min=0).sqrt() + slack
    m = _median((gap / error).amax(-1), is_better).clamp(min=0).minimum(bound)
    excess = (gap - m[..., None, None] * error).amax(-1).clamp(min=0)
    return excess * (least_deviation / sigma).clamp(min=1).unsqueeze(-1)


def _class_counts(labels: Int[Tensor, "*a n"], num_classes: int) -> Float[Tensor, "*a C"]:
    counts = torch.zeros(*labels.shape[:-1], num_classes, dtype=torch.float64)
    return counts.scatter_add_(-1, labels, torch.ones_like(labels, dtype=torch.float64))


def _better_half(losses: Float[Tensor, "*a m"]) -> Bool[Tensor, "*a m"]:
    """Return the models whose average loss is at most the median."""
    losses = losses.nan_to_num(nan=torch.inf, posinf=torch.inf)
    return losses <= losses.median(-1, keepdim=True).values


def _median(values: Float[Tensor, "*a m"], mask: Bool[Tensor, "*a m"]) -> Float[Tensor, "*a"]:
    """Return the lower median of the masked values that are finite; 0 if none is."""
    masked = values.masked_fill(~(mask & values.isfinite()), torch.nan)
    return masked.nanmedian(-1).values.nan_to_num(nan=0.0)


def _variance_within_classes(
    difference: Float[Tensor, "*a m n"],
    gap: Float[Tensor, "*a m C"],
    labels: Int[Tensor, "*a n"],
    counts: Float[Tensor, "*a C"],
) -> Float[Tensor, "*a m"]:
    """Return the variance of differences about the mean of their class.

    With at most one sample in each class it is about the mean of all.
    """
    centre = gap.gather(-1, labels.unsqueeze(-2).expand(difference.shape))
    freedom = (counts - 1).clamp(min=0).sum(-1, keepdim=True)
    is_single = freedom == 0
    centre = torch.where(is_single.unsqueeze(-1), difference.mean(-1, keepdim=True), centre)
    freedom = torch.where(is_single, counts.sum(-1, keepdim=True) - 1, freedom).clamp(min=1)
    return (difference - centre).square().sum(-1) / freedom
