"""The consensus point m_{alpha,beta}: the quantile, the sub-level set Q_beta and the weights omega_alpha.

García Trillos et al., "Defending Against Diverse Attacks in Federated Learning Through Consensus-Based Bi-Level
Optimization" (arXiv 2412.02535), eq:consensus_point, eq:Q_beta, eq:q_beta, in the practical form of the text after
eq:q_beta (R infinite, the plain beta-quantile). All of it works on values, so that the models stay where they are.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedcb2o.errors import ConfigError


def quantile(lower: Float[Tensor, "*a m"], beta: float) -> Float[Tensor, "*a"]:
    """The beta-quantile q_beta of the values L (eq:q_beta): the least q with at least beta of the values <= q.

    Raises ConfigError unless 0 < beta <= 1.
    """
    if not 0 < beta <= 1:
        raise ConfigError(f"`beta` must be above 0 and at most 1, got {beta}")
    m = lower.shape[-1]
    k = max(1, math.ceil(beta * m - 1e-9))  # 0.1 * 30 is 3.0000000000000004 in floating point
    return lower.kthvalue(k, dim=-1).values


def sublevel_mask(lower: Float[Tensor, "*a m"], beta: float, *, delta_q: float = 0.0) -> Bool[Tensor, "*a m"]:
    """Membership of each of m models in Q_beta, {L <= q_beta + delta_q} (eq:Q_beta). Ties at the quantile are kept."""
    return lower <= quantile(lower, beta).unsqueeze(-1) + delta_q


def weights(
    upper: Float[Tensor, "*a m"], alpha: float, mask: Bool[Tensor, "*a m"] | None = None
) -> Float[Tensor, "*a m"]:
    """The normalised weights omega_alpha = exp(-alpha G) of m models (eq:consensus_point), in float64.

    A shift of G changes nothing and no value of G underflows all of them. Models outside `mask` and models whose
    G is NaN or plus infinity get 0; where no model is left, all weights are 0.
    """
    upper = upper.double()
    usable = upper < torch.inf if mask is None else (upper < torch.inf) & mask
    kept = upper.masked_fill(~usable, torch.inf)
    lowest = kept.sort(-1).values[..., :1]  # of nobody: nothing, where a minimum would be an error
    above = (kept - lowest).nan_to_num(nan=0.0)  # inf - inf: as good as the best
    mu = torch.exp(-alpha * above).masked_fill(~usable, 0.0)
    return mu / mu.sum(-1, keepdim=True).clamp(min=1.0)  # the best one counts 1 before this, if there is one


def point(mu: Float[Tensor, "*a m"], models: Float[Tensor, "m d"]) -> Float[Tensor, "*a d"]:
    """The consensus point: the average of m models under normalised weights (eq:consensus_point, eq:comp_csp)."""
    return mu.to(models.dtype) @ models
