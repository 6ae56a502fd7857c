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


def standard_error_of_mean(differences: Float[Tensor, "*a n"]) -> Float[Tensor, "*a"]:
    """Compute the standard error of the mean of n differences.

    The standard deviation is divided by the root of n; the result is 0 for n = 1.
    """
    n = differences.shape[-1]
    squares = (differences - differences.mean(-1, keepdim=True)).square().sum(-1)
    return (squares / max(1, n - 1) / n).sqrt()


def excess(gaps: Float[Tensor, "*k"], z: float, errors: Float[Tensor, "*k"]) -> Float[Tensor, "*k"]:
    """Subtract `z` standard errors from the gaps, down to 0.

    A gap whose error is not finite stays as it is.
    """
    return torch.where(errors.isfinite(), (gaps - z * errors).clamp(min=0), gaps)
