"""Standard errors of loss differences between received models and the agent's own.

Both models are evaluated on the same samples, so the differences are paired.

Example:
    >>> import torch
    >>> standard_error_of_mean(torch.tensor([1.0, 3.0])).item()
    1.0
"""

import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.federated.types import Losses


def standard_error_of_mean(differences: Float[Tensor, "*a n"]) -> Float[Tensor, "*a"]:
    """Compute the standard error of the mean of n differences.

    Args:
        differences: Differences, shape [*a, n].

    Returns:
        Standard deviation divided by the root of n, shape [*a]; 0 for n = 1.
    """
    n = differences.shape[-1]
    squares = (differences - differences.mean(-1, keepdim=True)).square().sum(-1)
    return (squares / max(1, n - 1) / n).sqrt()


def class_standard_error(losses: Losses, own: Losses) -> Float[Tensor, "*a m C"]:
    """Compute the standard error of each class-loss gap.

    The gaps are L_{j,c}(theta_i) - L_{j,c}(theta_j) (eq:robust_criterion_G_LF). The variance within
    classes is assumed to be the same in all classes, because an agent has few samples of each.

    Args:
        losses: Losses of the received models i.
        own: Losses of the agent's own model j.

    Returns:
        Standard errors, shape [*a, m, C]; 0 if no class has two samples, infinite for a class
        without samples, and NaN for a model whose losses are not finite.
    """
    gaps = losses.by_class - own.by_class
    labels = losses.labels.unsqueeze(-2).expand(losses.per_sample.shape)
    deviations = losses.per_sample - own.per_sample - gaps.gather(-1, labels)
    within = deviations.square().sum(-1, keepdim=True)

    n = losses.per_sample.shape[-1]
    classes = losses.present.sum(-1)
    variance = within / (n - classes).clamp(min=1).unsqueeze(-1).unsqueeze(-1)
    ones = losses.per_sample.new_ones(losses.labels.shape)
    counts = gaps.new_zeros(*losses.present.shape).scatter_add_(-1, losses.labels, ones)
    errors = (variance / counts.unsqueeze(-2)).sqrt()
    return errors.masked_fill(~losses.present.unsqueeze(-2), float("inf"))


def excess(gaps: Float[Tensor, "*k"], z: float, errors: Float[Tensor, "*k"]) -> Float[Tensor, "*k"]:
    """Subtract `z` standard errors from the gaps, down to 0.

    Args:
        gaps: Gaps, any shape.
        z: Number of standard errors.
        errors: Standard errors of the gaps, same shape.

    Returns:
        The reduced gaps; a gap whose error is not finite stays as it is.
    """
    return torch.where(errors.isfinite(), (gaps - z * errors).clamp(min=0), gaps)
