"""Consensus point m_{alpha,beta}: quantile, sub-level set Q_beta and weights omega_alpha.

García Trillos et al., "Defending Against Diverse Attacks in Federated Learning Through
Consensus-Based Bi-Level Optimization" (arXiv 2412.02535), eq:consensus_point, eq:Q_beta and
eq:q_beta. Both forms are here: the one of the theory, and the practical one of the text after
eq:q_beta (R infinite, plain beta-quantile).

All functions work on values, so the models stay where they are. The models are an empirical
measure: each has the mass 1/m, or the given `mass`. Malicious particles, for example, count with
the weight w_m (eq:dyn_macro).

Example:
    >>> import torch
    >>> lower = torch.tensor([0.1, 0.4, 0.2, 9.0])
    >>> mask = sublevel_mask(lower, beta=0.5)
    >>> mask.tolist()
    [True, False, True, False]
    >>> mu = weights(torch.tensor([0.0, 5.0, 0.0, 5.0]), alpha=10.0, mask=mask)
    >>> point(mu, torch.tensor([[1.0], [2.0], [3.0], [4.0]])).tolist()
    [2.0]
"""

import math
from typing import NoReturn

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedcb2o.errors import ConfigError, require

_MAX_SUM_ELEMENTS = 2**12  # ensembles below this size: a sum is faster than a matrix product
_ROUNDING = 1e-9  # tolerance of a cumulated mass, relative to the share beta
_MIN_BETA = 1e-300  # no mass is smaller, and 2 / beta is finite


def quantile(
    lower: Float[Tensor, "*a m"], beta: float, *, mass: Float[Tensor, "... m"] | None = None
) -> Float[Tensor, "*a"]:
    """Compute the beta-quantile q_beta of the lower-level values L (eq:q_beta).

    The quantile is the least value q such that at least beta of the mass has values <= q.

    Args:
        lower: Values L of m models, shape [*a, m].
        beta: Share of the mass, above 0 and at most 1.
        mass: Mass of each model, shape [..., m]; by default 1/m.

    Returns:
        One quantile per ensemble, shape [*a].

    Raises:
        ConfigError: `beta` is out of range, or there is no value.
    """
    if not (0 < beta <= 1 and lower.shape[-1]):
        _refuse_quantile(beta)
    if mass is None:
        m = lower.shape[-1]
        k = max(1, math.ceil(beta * m - _ROUNDING))  # 0.1 * 30 is 3.0000000000000004 in floats
        return lower.kthvalue(k, dim=-1).values

    ordered, mass_up_to = _mass_steps(lower, mass)
    first = (
        (mass_up_to < beta * (1 - _ROUNDING)).sum(-1, keepdim=True).clamp(max=lower.shape[-1] - 1)
    )
    return ordered.gather(-1, first).squeeze(-1)


def averaged_quantile(
    lower: Float[Tensor, "*a m"], beta: float, *, mass: Float[Tensor, "... m"] | None = None
) -> Float[Tensor, "*a"]:
    """Average the quantiles q_a over a in [beta/2, beta], the level in eq:Q_beta.

    The level is 2/beta times the integral of q_a. Because q_a is a step function of a, the integral
    is a sum, exact up to rounding. The result is between q_{beta/2} and q_beta.

    Args:
        lower: Values L of m models, shape [*a, m].
        beta: Share of the mass, above 0 and at most 1.
        mass: Mass of each model, shape [..., m]; by default 1/m.

    Returns:
        One level per ensemble, shape [*a].

    Raises:
        ConfigError: `beta` is out of range, or there is no value.
    """
    if not (0 < beta <= 1 and lower.shape[-1]):
        _refuse_quantile(beta)
    m = lower.shape[-1]
    if mass is None:
        mass = lower.new_full((m,), 1 / m)
    ordered, step_ends = _mass_steps(lower, mass)
    step_ends[..., -1] = 1.0  # the cumulated sum may round to another number

    beta = max(beta, _MIN_BETA)
    start = step_ends.new_full((*step_ends.shape[:-1], 1), beta / 2)
    width = step_ends.clamp(beta / 2, beta).diff(dim=-1, prepend=start)
    empty = width <= _ROUNDING * beta  # an infinite value of zero width must not enter the average
    level = (ordered.double() * width).masked_fill(empty, 0.0).sum(-1).mul(2 / beta)

    # Rounding must not move the average of equal values away from their value.
    least = ordered.masked_fill(empty, torch.inf).amin(-1)
    largest = ordered.masked_fill(empty, -torch.inf).amax(-1)
    return level.to(lower.dtype).clamp(least, largest)


def sublevel_mask(
    lower: Float[Tensor, "*a m"],
    beta: float,
    *,
    delta_q: float = 0.0,
    averaged: bool = False,
    mass: Float[Tensor, "... m"] | None = None,
) -> Bool[Tensor, "*a m"]:
    """Select the models in the sub-level set Q_beta (eq:Q_beta).

    The ball B_R(0) of eq:Q_beta is not part of this function, because it needs the models. Ties at
    the level are kept.

    Args:
        lower: Values L of m models, shape [*a, m].
        beta: Share of the mass, above 0 and at most 1.
        delta_q: Amount added to the level.
        averaged: Use the averaged quantile of eq:Q_beta as level instead of the plain q_beta.
        mass: Mass of each model, shape [..., m]; by default 1/m.

    Returns:
        Membership of each model, shape [*a, m].

    Raises:
        ConfigError: `beta` is out of range.
    """
    level_of = averaged_quantile if averaged else quantile
    level = level_of(lower, beta, mass=mass)
    return lower <= level.unsqueeze(-1) + delta_q


def weights(
    upper: Float[Tensor, "*a m"],
    alpha: float,
    mask: Bool[Tensor, "*a m"] | None = None,
    *,
    mass: Float[Tensor, "... m"] | None = None,
) -> Float[Tensor, "*a m"]:
    """Compute the normalised weights omega_alpha = exp(-alpha G) (eq:consensus_point).

    A shift of G changes nothing, and large values of G do not make all weights underflow.

    Args:
        upper: Values G of m models, shape [*a, m]. A model with NaN or an infinite value gets 0.
        alpha: Inverse temperature; with a larger alpha fewer models count.
        mask: Models that may count, shape [*a, m]; by default all.
        mass: Mass of each model, shape [..., m]; by default equal masses.

    Returns:
        Weights in float64, shape [*a, m], that sum to 1; all 0 if no model is left.
    """
    exponents = upper.double() * -alpha
    if mask is not None:
        exponents = exponents.masked_fill(~mask, -torch.inf)
    if mass is not None:
        exponents = exponents + mass.double().log()

    mu = torch.softmax(exponents, -1)  # softmax subtracts the largest exponent
    if math.isnan(mu.sum().item()):
        exact = _weights_with_infinities(upper.double(), alpha, mask, mass)
        mu = torch.where(mu[..., :1].isnan(), exact, mu)
    return mu


def point(mu: Float[Tensor, "*a m"], models: Float[Tensor, "*b m d"]) -> Float[Tensor, "*a d"]:
    """Average models under normalised weights (eq:consensus_point, eq:comp_csp).

    Args:
        mu: Normalised weights, shape [*a, m].
        models: Models, shape [m, d] if they are shared by all leading axes, else [*a, m, d].

    Returns:
        The consensus points, shape [*a, d].
    """
    mu = mu.to(models.dtype)
    if mu.ndim != 2 or models.ndim != 3:
        return (mu.unsqueeze(-2) @ models).squeeze(-2)

    # The rounding of one large product mu @ models depends on the memory layout, so it is not used.
    # The faster of two other ways is taken, as measured.
    if models.shape[1] * models.shape[2] <= _MAX_SUM_ELEMENTS:
        return (mu.unsqueeze(-1) * models).sum(1)
    # The bits of a product with models.mT would depend on the number of models.
    return torch.bmm(mu.unsqueeze(1), models).squeeze(1)


def validate_beta(beta: float) -> None:
    """Check that beta is above 0 and at most 1, a share of the mass."""
    require("beta", beta, 0 < beta <= 1, "above 0 and at most 1")


def _refuse_quantile(beta: float) -> NoReturn:
    validate_beta(beta)
    raise ConfigError("the quantile of no values is not defined: there is no model")


def _weights_with_infinities(
    upper: Tensor, alpha: float, mask: Tensor | None, mass: Tensor | None
) -> Tensor:
    """Compute the weights if a value is not finite, or alpha G overflows."""
    usable = upper.isfinite() if mask is None else upper.isfinite() & mask
    least = upper.masked_fill(~usable, torch.inf).amin(-1, keepdim=True)
    excess = (upper - least).nan_to_num()  # finite numbers may differ by infinity, and alpha be 0

    mu = torch.exp(-alpha * excess).masked_fill(~usable, 0.0)
    if mass is not None:
        mu = mu * mass.double()
    return mu / mu.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)


def _mass_steps(lower: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sorted values and the cumulated mass up to each of them."""
    ordered, order = lower.sort(-1)
    share = mass.double() / mass.double().sum(-1, keepdim=True)
    return ordered, share.expand(order.shape).gather(-1, order).cumsum(-1)
