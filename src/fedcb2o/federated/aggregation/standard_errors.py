"""How sure an agent is that it loses more by a received model than by its own: standard errors of the difference, on
the same samples."""

import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.federated.types import Losses


def standard_error(losses: Losses, own: Losses) -> Float[Tensor, "*a m"]:
    """That of L_i - L_j, by which a sub-level set (eq:clustered_csp) can be tested: the deviation of the differences
    over the samples, by the root of their number; 0 where there is only one sample, NaN for a model whose losses are
    not finite."""
    return standard_error_of_mean(losses.per_sample - own.per_sample)


def standard_error_of_mean(differences: Float[Tensor, "*a n"]) -> Float[Tensor, "*a"]:
    """That of the mean of n differences: their deviation by the root of their number, 0 for one alone."""
    n = differences.shape[-1]
    squares = (differences - differences.mean(-1, keepdim=True)).square().sum(-1)
    return (squares / max(1, n - 1) / n).sqrt()


def class_standard_error(losses: Losses, own: Losses) -> Float[Tensor, "*a m C"]:
    """That of L_{j,c}(theta_i) - L_{j,c}(theta_j), by which a gap (eq:robust_criterion_G_LF) can be tested: by a
    variance within classes that is the same in all, since an agent has few samples of each; 0 where no class has two,
    infinite where the agent holds none of a class, and NaN for a model whose losses are not finite."""
    gaps = losses.by_class - own.by_class
    labels = losses.labels.unsqueeze(-2).expand(losses.per_sample.shape)
    within = (
        (losses.per_sample - own.per_sample - gaps.gather(-1, labels))
        .square()
        .sum(-1, keepdim=True)
    )
    n = losses.per_sample.shape[-1]
    classes = losses.present.sum(-1)
    variance = within / (n - classes).clamp(min=1).unsqueeze(-1).unsqueeze(-1)
    counts = gaps.new_zeros(*losses.present.shape).scatter_add_(
        -1, losses.labels, losses.per_sample.new_ones(losses.labels.shape)
    )
    return (
        (variance / counts.unsqueeze(-2))
        .sqrt()
        .masked_fill(~losses.present.unsqueeze(-2), float("inf"))
    )


def excess(gaps: Float[Tensor, "*k"], z: float, errors: Float[Tensor, "*k"]) -> Float[Tensor, "*k"]:
    """What of the gaps exceeds `z` standard errors, at least 0; a gap whose error is not finite stays."""
    return torch.where(errors.isfinite(), (gaps - z * errors).clamp(min=0), gaps)
