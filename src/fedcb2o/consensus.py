"""The consensus point m_{alpha,beta}: the quantile, the sub-level set Q_beta and the weights omega_alpha.

García Trillos et al., "Defending Against Diverse Attacks in Federated Learning Through Consensus-Based Bi-Level
Optimization" (arXiv 2412.02535), eq:consensus_point, eq:Q_beta, eq:q_beta: whole, and in the practical form of the
text after eq:q_beta (R infinite, the plain beta-quantile). All of it works on values, so that the models stay where
they are. The models are an empirical measure: each has the mass 1/m, or the `mass` given, as where malicious
particles count with the weight w_m (eq:dyn_macro).
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedcb2o.errors import ConfigError

_MAX_SUM_ELEMENTS = (
    2**12
)  # numbers of an ensemble below which a sum is faster than a product of matrices


def quantile(
    lower: Float[Tensor, "*a m"], beta: float, *, mass: Float[Tensor, "... m"] | None = None
) -> Float[Tensor, "*a"]:
    """The beta-quantile q_beta of the values L (eq:q_beta): the least q with at least beta of the mass at values <= q.

    Raises ConfigError unless 0 < beta <= 1.
    """
    validate_beta(beta)
    if mass is None:
        m = lower.shape[-1]
        k = max(1, math.ceil(beta * m - 1e-9))  # 0.1 * 30 is 3.0000000000000004 in floating point
        return lower.kthvalue(k, dim=-1).values
    ordered, below = _mass_steps(lower, mass)
    first = (below < beta - 1e-9).sum(-1, keepdim=True).clamp(max=lower.shape[-1] - 1)
    return ordered.gather(-1, first).squeeze(-1)


def averaged_quantile(
    lower: Float[Tensor, "*a m"], beta: float, *, mass: Float[Tensor, "... m"] | None = None
) -> Float[Tensor, "*a"]:
    """The average 2/beta times the integral of q_a over a in [beta/2, beta], the level in eq:Q_beta.

    q_a is a step function of a, so the integral is a sum, exact to rounding. It lies between q_{beta/2} and q_beta.
    Raises ConfigError unless 0 < beta <= 1.
    """
    validate_beta(beta)
    m = lower.shape[-1]
    ordered, ends = _mass_steps(lower, lower.new_full((m,), 1 / m) if mass is None else mass)
    ends[..., -1] = 1.0  # whatever the sum rounds to
    width = ends.clamp(beta / 2, beta).diff(
        dim=-1, prepend=ends.new_full((*ends.shape[:-1], 1), beta / 2)
    )
    idle = width <= 1e-9  # rounding: an infinite value of no width is none of the average
    level = (ordered.double() * width).masked_fill(idle, 0.0).sum(-1).mul(2 / beta).to(lower.dtype)
    ends_of_it = (
        ordered.masked_fill(idle, torch.inf).amin(-1),
        ordered.masked_fill(idle, -torch.inf).amax(-1),
    )
    return level.clamp(
        *ends_of_it
    )  # whatever rounding does: the average of equal values is their value


def sublevel_mask(
    lower: Float[Tensor, "*a m"],
    beta: float,
    *,
    delta_q: float = 0.0,
    averaged: bool = False,
    mass: Float[Tensor, "... m"] | None = None,
) -> Bool[Tensor, "*a m"]:
    """Membership of each of m models in Q_beta (eq:Q_beta), its ball B_R(0) apart, which is for who knows the models.

    The level is the plain quantile q_beta, or with `averaged` the averaged one as in eq:Q_beta, plus delta_q. Ties at
    the level are kept. Raises ConfigError unless 0 < beta <= 1.
    """
    level = (
        averaged_quantile(lower, beta, mass=mass) if averaged else quantile(lower, beta, mass=mass)
    )
    return lower <= level.unsqueeze(-1) + delta_q


def weights(
    upper: Float[Tensor, "*a m"],
    alpha: float,
    mask: Bool[Tensor, "*a m"] | None = None,
    *,
    mass: Float[Tensor, "... m"] | None = None,
) -> Float[Tensor, "*a m"]:
    """The normalised weights omega_alpha = exp(-alpha G) of m models (eq:consensus_point), in float64.

    A shift of G changes nothing and no value of G underflows all of them. Models outside `mask` and models whose
    G is no finite number, be it NaN or an infinity of either sign, get 0; where no model is left, all weights are 0.
    """
    exponents = upper.double() * -alpha
    if mask is not None:
        exponents = exponents.masked_fill(~mask, -torch.inf)
    if mass is not None:
        exponents = exponents + mass.double().log()
    mu = torch.softmax(exponents, -1)  # it subtracts the largest
    if math.isnan(mu.sum().item()):
        rest = _weights_with_infinities(upper.double(), alpha, mask, mass)
        mu = torch.where(mu[..., :1].isnan(), rest, mu)
    return mu


def point(mu: Float[Tensor, "*a m"], models: Float[Tensor, "*b m d"]) -> Float[Tensor, "*a d"]:
    """The consensus point: the average of m models under normalised weights (eq:consensus_point, eq:comp_csp).

    The models may be the same for all leading axes, [m, d], or each has its own, [*a, m, d].
    """
    mu = mu.to(models.dtype)
    if mu.ndim == 2 and models.ndim == 3:
        # A product of matrices mu by models would round by where each lies in memory. Which is fastest else: measured.
        if models.shape[1] * models.shape[2] <= _MAX_SUM_ELEMENTS:
            return (mu.unsqueeze(-1) * models).sum(1)
        return torch.bmm(mu.unsqueeze(1), models).squeeze(
            1
        )  # for models.mT bits depend on how many there are
    return (mu.unsqueeze(-2) @ models).squeeze(-2)


def _weights_with_infinities(
    upper: Tensor, alpha: float, mask: Tensor | None, mass: Tensor | None
) -> Tensor:
    """The weights where a value is infinite or NaN, or alpha G overflows, or no model is left."""
    usable = upper.isfinite() if mask is None else upper.isfinite() & mask
    lowest = upper.masked_fill(~usable, torch.inf).amin(-1, keepdim=True)
    above = (
        upper - lowest
    ).nan_to_num()  # a difference of finite numbers may overflow, and alpha be 0
    mu = torch.exp(-alpha * above).masked_fill(~usable, 0.0)
    if mass is not None:
        mu = mu * mass.double()
    return mu / mu.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)


def _mass_steps(lower: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """The values in order, and the mass up to each of them."""
    ordered, order = lower.sort(-1)
    share = mass.double() / mass.double().sum(-1, keepdim=True)
    return ordered, share.expand(order.shape).gather(-1, order).cumsum(-1)


def validate_beta(beta: float) -> None:
    """Raise ConfigError unless 0 < beta <= 1."""
    if not 0 < beta <= 1:
        raise ConfigError(f"`beta` must be above 0 and at most 1, got {beta}")
