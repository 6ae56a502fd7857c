"""Class-loss excess: how far a model is worse in one class than its noise and other classes say."""

from typing import Annotated

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from fedcb2o.federated.criteria.class_losses import MAX_LOSS, required_losses
from fedcb2o.federated.types import CriterionInput, batched

_LEAST_SIGMA = 1e-3  # nats; equal losses would otherwise be divided by nothing
_NORMAL_MAD = 1.4826  # standard deviation of a normal number over its median absolute deviation
_EXCUSED = 0.5, 1.0  # of the largest standard error: bounds of what other classes excuse


@batched
def class_loss_excess(
    inputs: CriterionInput,
    *,
    least_deviation: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.8,
    slack: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0,
) -> Float[Tensor, "*a m"]:
    """Measure how far a model is worse in one class than noise and its other classes explain.

    The gap d_c = L_{j,c}(theta) - L_{j,c}(theta^j) of eq:robust_criterion_G_LF is a mean over n_c
    samples. b is the median of the model's own gaps over the classes, at least 0, and its standard
    error is

        e_c^2 = sigma^2 / n_c + D^2,    D = 1.4826 median_c |d_c - median_c d_c|,

    the noise of the samples and the spread of the model's gaps over classes. b and D are at most
    those of the typical peer, from half to one of the largest sigma / sqrt(n_c). The value is

        max_c max(0, (d_c - b) / e_c - m) max(e_c, least_deviation / sqrt(n_c)).

    m is max_c (d_c - b) / e_c of the typical peer, from 0 to sqrt(2 log C) + `slack` for the C
    classes of the agent. The typical peer has medians over the better half of the received models,
    those of average loss up to the median. sigma, the standard deviation of differences within a
    class, is such a median, too.

    So a gap that noise explains, that all classes share or that the typical peer has too has the
    value 0, as the agent's own model has. Average losses judge a model that is worse everywhere.
    Where samples are memorised, all gaps are small in nats, and a standard deviation counts as
    `least_deviation`. With one class b and the spread are 0.

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
    per_sample = (1 / counts.clamp(min=1).sqrt()).unsqueeze(-2)

    noise = sigma[..., None, None] * per_sample
    most = noise.masked_fill(~losses.present.unsqueeze(-2), 0.0).amax(-1, keepdim=True)
    shared, spread = (
        values.minimum(_typical(values.squeeze(-1), is_better, most))
        for values in _centre_and_spread(gap, losses.present)
    )
    error = noise.hypot(spread)
    # Classes without samples have no gap.
    gap = (gap - shared).masked_fill(~losses.present.unsqueeze(-2), -torch.inf)
    score = (gap / error).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    # An inbox of attackers alone cannot raise the typical gap beyond what noise explains.
    bound = (2 * losses.present.sum(-1).double().log()).clamp(min=0).sqrt() + slack
    m = _median(score.amax(-1), is_better).clamp(min=0).minimum(bound)
    excess = (score - m[..., None, None]).clamp(min=0)
    return (excess * error.maximum(least_deviation * per_sample)).amax(-1)


def _centre_and_spread(
    gap: Float[Tensor, "*a m C"], present: Bool[Tensor, "*a C"]
) -> tuple[Float[Tensor, "*a m 1"], Float[Tensor, "*a m 1"]]:
    """Return a model's median gap, at least 0, and the spread of its gaps over present classes.

    The spread is the standard deviation of normal gaps with their median absolute deviation. Both
    are 0 for an agent of one class.
    """
    is_counted = present.unsqueeze(-2).expand(gap.shape)
    median = _median(gap, is_counted).unsqueeze(-1)
    deviation = _median((gap - median).abs(), is_counted).unsqueeze(-1)
    several = (present.sum(-1) > 1)[..., None, None]
    return several * median.clamp(min=0), several * _NORMAL_MAD * deviation


def _typical(
    values: Float[Tensor, "*a m"], is_better: Bool[Tensor, "*a m"], most: Float[Tensor, "*a 1 1"]
) -> Float[Tensor, "*a 1 1"]:
    """Return the typical peer's value, which attackers raise at most to one standard error."""
    least, largest = (share * most for share in _EXCUSED)
    return _median(values, is_better)[..., None, None].clamp(least, largest)


def _class_counts(labels: Int[Tensor, "*a n"], num_classes: int) -> Float[Tensor, "*a C"]:
    counts = torch.zeros(*labels.shape[:-1], num_classes, dtype=torch.float64)
    return counts.scatter_add_(-1, labels, torch.ones_like(labels, dtype=torch.float64))


def _better_half(losses: Float[Tensor, "*a m"]) -> Bool[Tensor, "*a m"]:
    """Return the models whose average loss is at most the median."""
    losses = losses.nan_to_num(nan=torch.inf, posinf=torch.inf)
    return losses <= losses.median(-1, keepdim=True).values


def _median(values: Float[Tensor, "*a m"], mask: Bool[Tensor, "*a m"]) -> Float[Tensor, "*a"]:
    """Return the lower median of the masked values that are finite; 0 if none is."""
    is_counted = mask & values.isfinite()
    # For few numbers NumPy sorts in a third of the time of PyTorch's `nanmedian`.
    ordered = np.sort(values.masked_fill(~is_counted, torch.inf).numpy(), -1)
    middle = ((is_counted.sum(-1, keepdim=True) - 1) // 2).clamp(min=0)
    median = torch.from_numpy(ordered).gather(-1, middle).squeeze(-1)
    return median.nan_to_num(posinf=0.0)


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
