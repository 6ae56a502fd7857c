"""Theory of CB2O under attack: decay of V (thm:main), beta_0 and alpha_0.

García Trillos et al., "Defending Against Diverse Attacks in Federated Learning Through
Consensus-Based Bi-Level Optimization" (arXiv 2412.02535), Section 2: thm:main and the choices in
its proof. Its bounds on the consensus point are in `bounds`.

The constants of Assumptions A1 to A6 belong to the user's L and G (`Constants`). Quantities from
the paper's companion (arXiv 2411.13394) are arguments: the exponents p_eps and p_{H,eps} as `p` and
`p_H`, the radii r_R and r_eps. So is c(vartheta, lambda, sigma) as `c`; `closeness` computes it as
the proof of thm:main needs it. Balls are closed, and `target` is theta_good.

Example:
    >>> contraction_rate(lambda1=1.0, sigma1=0.5, dim=2)
    1.5
"""
# ruff: noqa: N802, N815 (the paper's names)

import dataclasses
import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o import consensus
from fedcb2o.errors import ConfigError
from fedcb2o.particles.bounds import Constants, Number, check_share
from fedcb2o.particles.dynamics import ConsensusParams
from fedcb2o.particles.settings import check_positive


def V(theta: Float[Tensor, "*a n d"], target: Float[Tensor, " d"]) -> Float[Tensor, "*a"]:
    """Compute the functional V = W_2^2(rho^b, delta_target) / 2 of an ensemble (eq:V).

    Args:
        theta: Particles [..., n, d].
        target: theta_good [d].

    Returns:
        Half the mean squared distance from the target, [...].
    """
    return (theta - target).square().sum(-1).mean(-1) / 2


def contraction_rate(
    *, lambda1: Number, sigma1: Number, dim: int, noise: str = "isotropic"
) -> float:
    """Compute the rate of V's decay with the consensus at the target (thm:main).

    It is 2 lambda - d sigma^2 for isotropic noise. For anisotropic noise it is 2 lambda - sigma^2
    in every dimension: Carrillo, Jin, Li, Zhu, "A consensus-based global optimization method for
    high dimensional machine learning problems" (2021), and Fornasier, Klock, Riedl, "Convergence of
    anisotropic consensus-based optimization in mean-field law" (2022). thm:main covers isotropic
    noise only.

    Args:
        lambda1: Drift.
        sigma1: Noise.
        dim: d.
        noise: "isotropic" or "anisotropic".

    Returns:
        The rate; at most 0 for no decay in mean square.

    Raises:
        ConfigError: `noise` is unknown.
    """
    if noise not in ("isotropic", "anisotropic"):
        raise ConfigError(f"`noise` must be isotropic or anisotropic, got {noise}")
    if noise == "anisotropic":
        dim = 1
    return float(2 * lambda1 - dim * sigma1 * sigma1)


def closeness(*, vartheta: Number, lambda1: Number, sigma1: Number, dim: int) -> float:
    """Compute c(vartheta, lambda, sigma) for isotropic noise.

    While m is within c sqrt(V) of the target (eq:endtime_T), V decays as in thm:main. The bounds on
    dV/dt in the proof of thm:main, before eq:evolution_J, have a term in |m - target| sqrt(V) and
    one in |m - target|^2. With c = min{vartheta (2 lambda - d sigma^2) / (2 sqrt(2) (lambda + d
    sigma^2)), sqrt(vartheta (2 lambda - d sigma^2) / (d sigma^2))} each term is at most vartheta/2
    times (2 lambda - d sigma^2) V. The first value is the smaller one for all lambda and sigma.
    """
    rate = contraction_rate(lambda1=lambda1, sigma1=sigma1, dim=dim)
    diffusion = dim * sigma1**2
    _check_theorem(vartheta, rate)
    linear = vartheta * rate / (2 * math.sqrt(2) * (lambda1 + diffusion))
    quadratic = math.sqrt(vartheta * rate / diffusion) if diffusion else math.inf
    return float(min(linear, quadratic))


def end_time(V0: Number, eps: Number, *, vartheta: Number, rate: Number) -> float:
    """Compute T* (eq:end_time_star_statement), by which V has decayed from V0 to eps."""
    _check_theorem(vartheta, rate, V0, eps)
    return math.log(V0 / eps) / ((1 - vartheta) * rate)


def end_time_window(
    V0: Number, eps: Number, *, vartheta: Number, rate: Number
) -> tuple[float, float]:
    """Compute the window for the time T at which V = eps (eq:end_time_statement).

    Args:
        V0: V at the start.
        eps: Accuracy, in (0, V0).
        vartheta: In (0, 1).
        rate: `contraction_rate`, above 0.

    Returns:
        The ends of [(1 - vartheta) / (1 + vartheta/2) T*, T*].

    Raises:
        ConfigError: An argument is outside the hypotheses of thm:main.
    """
    latest = end_time(V0, eps, vartheta=vartheta, rate=rate)
    return (1 - vartheta) / (1 + vartheta / 2) * latest, latest


def decay_bounds(
    t: Float[Tensor, "*t"], V0: Number, *, vartheta: Number, rate: Number
) -> tuple[Float[Tensor, "*t"], Float[Tensor, "*t"]]:
    """Compute the two exponentials between which V stays until it is eps (eq:evolution_J).

    Args:
        t: Times.
        V0: V at the start.
        vartheta: In (0, 1).
        rate: `contraction_rate`, above 0.

    Returns:
        V0 exp(-(1 + vartheta/2) rate t) and V0 exp(-(1 - vartheta) rate t).

    Raises:
        ConfigError: An argument is outside the hypotheses of thm:main.
    """
    _check_theorem(vartheta, rate)
    lower = V0 * torch.exp(-(1 + vartheta / 2) * rate * t)
    upper = V0 * torch.exp(-(1 - vartheta) * rate * t)
    return lower, upper


def fit_decay_rate(t: Float[Tensor, " s"], values: Float[Tensor, "*a s"]) -> Float[Tensor, "*a"]:
    """Fit the rate of V's decay, for comparison with `contraction_rate` (eq:evolution_J).

    The rate is minus the slope of the least squares line through log V at the times t. Values that
    are zero, negative, infinite or NaN do not count.

    Args:
        t: Times [s].
        values: V at these times [..., s].

    Returns:
        Rates [...]; NaN with fewer than two times.
    """
    values = values.double()
    t = t.double()
    usable = (values > 0) & values.isfinite()
    w = usable.double()
    logs = torch.where(usable, values, 1.0).log()
    mean = (w * t).sum(-1, keepdim=True) / w.sum(-1, keepdim=True)
    slope = (w * (t - mean) * logs).sum(-1) / (w * (t - mean).square()).sum(-1)
    spread = t.where(usable, -torch.inf).amax(-1) - t.where(usable, torch.inf).amin(-1)
    return torch.where(spread > 0, -slope, torch.nan)


# ---- capture by malicious particles, measured in `paper/capture.py` ----

_MIN_BENIGN = 2  # benign particles that G needs in Q_beta to choose among


class CaptureWarning(UserWarning):
    """A warning that malicious particles may capture the consensus point."""


def benign_left(
    *, beta: float, w_m: float, num_benign: int, dim: int, averaged: bool = False
) -> int:
    """Count the benign particles in Q_beta with attackers at a minimiser of L.

    The count is for delta_q = 0.

    With the plain quantile (eq:q_beta) the count is a rank, about (beta - w_m) N, for every L. In
    the averaged one (eq:Q_beta) the attackers' q_a = min L fills the integral up to a = w_m, so the
    level depends on the benign values of L. They are taken as those of a smooth density of
    particles about an isolated minimiser, where the i-th smallest L - min L is proportional to
    i^(2/dim). Where the minimisers are a curve or a surface, at least as many particles stay.

    Args:
        beta: Share of the ensemble in Q_beta, in (0, 1].
        w_m: Share of the malicious particles, in [0, 1).
        num_benign: Number of benign particles.
        dim: d.
        averaged: Whether the level is the averaged quantile.

    Returns:
        The number of benign particles.

    Example:
        >>> benign_left(beta=0.3, w_m=0.1, num_benign=90, dim=2)
        20
    """
    ranks = torch.arange(num_benign + 1, dtype=torch.float64)  # the attackers have rank 0
    mass = torch.full_like(ranks, (1 - w_m) / num_benign)
    mass[0] = w_m
    level = ranks ** (2 / dim)
    # A small delta_q absorbs rounding.
    mask = consensus.sublevel_mask(level, beta, delta_q=1e-9, averaged=averaged, mass=mass)
    return int(mask[1:].sum())


def explain_capture(params: ConsensusParams, w_m: float, num_benign: int, dim: int) -> list[str]:
    """Describe the risk of capture, with its cure, where too few benign particles are left."""
    left = benign_left(
        beta=params.beta, w_m=w_m, num_benign=num_benign, dim=dim, averaged=params.averaged
    )
    if left >= _MIN_BENIGN:
        return []
    room = f"{'about ' if params.averaged and left else ''}{left or 'no'} benign particle"
    return [
        f"delta_q = 0 and malicious particles have the share w_m = {w_m:.3g}: on a minimiser of L"
        f" they leave room for {room} in the sub-level set of beta = {params.beta:g}, and G needs"
        f" at least {_MIN_BENIGN} to choose among; they can capture the consensus point, however"
        " bad their G is: take delta_q > 0 (eq:Q_beta), which costs accuracy, or a larger beta, or"
        " more particles"
    ]


# ---- the choice of beta and alpha (proof of thm:main) ----


@dataclasses.dataclass(frozen=True)
class Scales:
    """Lengths and levels behind beta and alpha at an accuracy eps (eq:beta, eq:alpha)."""

    G_inf: float  # with a tilde
    r_G: float  # r_{G,eps}
    delta_q: float
    xi_L: float  # xi_{L,eps}
    r_H: float  # r_{H,eps}
    u: float  # u_eps


def scales(
    constants: Constants, *, c: Number, eps: Number, delta_q: Number | None = None
) -> Scales:
    """Compute the scales of eq:beta and eq:alpha.

    Without delta_q it is the largest one in the proof of thm:main.
    """
    check_positive({"c": c, "eps": eps})
    G_inf = constants.upper_cap(attack=True)
    level = (constants.eta_G * c * math.sqrt(eps) / 3) ** (1 / constants.nu_G)
    r_G = min(
        (min(level, G_inf) / (2 * constants.H_G)) ** (1 / constants.h_G),
        constants.R_G,
        constants.R_H_G,
        constants.R_K_G,
    )
    cap = constants.lower_cap(r_G)
    if delta_q is None:
        delta_q = cap / 2
    if not 0 < delta_q <= cap / 2:
        raise ConfigError(
            "`delta_q` must be above 0 and, with these constants, c and eps, at most"
            f" {cap / 2:.6g}, got {delta_q}"
        )
    xi_L = cap - delta_q
    r_H = min(constants.R_H_L, (xi_L / constants.H_L) ** (1 / constants.h_L))
    u = min(level, G_inf) / 4
    return Scales(G_inf, float(r_G), float(delta_q), float(xi_L), float(r_H), u)


def beta_0(*, w_m: Number, ball_mass: Number, p_H: Number, end_time: Number) -> float:
    """Compute the upper bound on beta (eq:beta), which is proportional to w_b = 1 - w_m.

    `ball_mass` is rho_0^b(B_{r_H/2}(target)), `p_H` is p_{H,eps}, and `end_time` is T*.
    """
    check_share(w_m)
    _check_mass(ball_mass)
    check_positive({"p_H": p_H, "end_time": end_time}, or_zero=True)
    return (1 - w_m) * ball_mass * math.exp(-p_H * end_time) / 2


def alpha_0(
    constants: Constants,
    *,
    w_m: Number,
    ball_mass: Number,
    V0: Number,
    eps: Number,
    vartheta: Number,
    rate: Number,
    c: Number,
    u: Number,
    p: Number,
) -> float:
    """Compute the lower bound on alpha (eq:alpha), which grows with w_m.

    `ball_mass` is rho_0^b(B_{r/2}(target)) for r = r_eps, c is `closeness`, u is u_eps (`scales`)
    and p is p_eps.
    """
    _check_theorem(vartheta, rate, V0, eps)
    check_share(w_m)
    _check_mass(ball_mass)
    check_positive({"c": c, "u": u})
    check_positive({"p": p}, or_zero=True)
    exponent = max(0.5, p / ((1 - vartheta) * rate))
    logs = math.log(12 / c) - math.log(ball_mass) + exponent * math.log(V0 / eps)
    return max(constants.min_alpha(), (logs + _attack_part(w_m, constants.R_K_G, eps)) / u)


class Suggestion(NamedTuple):
    """Changes of beta and alpha for a share of attackers (eq:beta, eq:alpha).

    Attributes:
        beta_factor: Factor of beta, w_b = 1 - w_m.
        alpha_increase: Increase of alpha; None without `R_K_G`, `eps` and `u`.
        beta: The attack-free beta, scaled; None without it.
        alpha: The attack-free alpha, increased; None without it, or with an unknown increase.
        notes: Limits of the theory.
    """

    beta_factor: float
    alpha_increase: float | None
    beta: float | None
    alpha: float | None
    notes: tuple[str, ...]


def suggest_parameters(
    share: Number,
    *,
    beta: Number | None = None,
    alpha: Number | None = None,
    R_K_G: Number | None = None,
    eps: Number | None = None,
    u: Number | None = None,
) -> Suggestion:
    """Scale beta and alpha for an expected share w_m of attackers (eq:beta, eq:alpha).

    beta is multiplied by w_b = 1 - w_m. alpha grows by
    max{0, log(w_m/w_b R_K_G / sqrt(eps))} / u_eps, as in eq:alpha (the text after thm:main drops
    1/u_eps).

    Args:
        share: w_m, in [0, 1).
        beta: Attack-free beta.
        alpha: Attack-free alpha.
        R_K_G: Constant of A6.
        eps: Accuracy.
        u: u_eps.

    Returns:
        The changes, applied to the attack-free values where these are given.

    Raises:
        ConfigError: An argument is out of range.
    """
    check_share(share, "share")
    numbers = {"alpha": alpha, "R_K_G": R_K_G, "eps": eps, "u": u}
    check_positive({name: value for name, value in numbers.items() if value is not None})
    if beta is not None and not 0 < beta <= 1:
        raise ConfigError(f"`beta` must be above 0 and at most 1, got {beta}")

    increase = 0.0 if share == 0 else None
    if share and R_K_G is not None and eps is not None and u is not None:
        increase = _attack_part(share, R_K_G, eps) / u
    scaled = None if beta is None else float(beta * (1 - share))
    raised = None
    if alpha is not None and increase is not None:
        raised = float(alpha + increase)

    notes: tuple[str, ...] = _NOT_COVERED
    if scaled is not None and 0 < scaled <= share:
        risk = (
            f"beta = {scaled:.4g} is not above w_m = {share:.4g}: with delta_q = 0 the capture"
            " below is possible"
        )
        notes = (risk, *notes)
    return Suggestion(float(1 - share), increase, scaled, raised, notes)


_NOT_COVERED = (
    "delta_q > 0 is supposed: with delta_q = 0, attackers at a minimiser of L that is bad for G"
    " capture the consensus point as soon as w_m leaves room for fewer than two benign particles"
    " below beta",
    "the scaled quantities are the sufficient bounds beta_0 and alpha_0, for attack-free values"
    " that meet theirs; they are not sharp, and a smaller beta needs more particles",
    "the theorem is on the mean-field limit in continuous time with isotropic noise,"
    " 2 lambda > d sigma^2, the averaged quantile and a ball B_R(0)",
    "L and G are the same for all particles: the theorem covers neither several clusters nor"
    " alg:localAggregation, which judges by a moving, personal G, samples its peers and does not"
    " read beta",
)


def _attack_part(w_m: Number, R_K_G: Number, eps: Number) -> float:
    """Compute max{0, log(w_m/w_b R_K_G / sqrt(eps))}, the last term of eq:alpha."""
    if w_m == 0:
        return 0.0
    return max(0.0, math.log(w_m / (1 - w_m) * R_K_G / math.sqrt(eps)))


def _check_mass(mass: Number) -> None:
    if not 0 < mass <= 1:
        raise ConfigError(f"`ball_mass` must be above 0 and at most 1, got {mass}")


def _check_theorem(
    vartheta: Number, rate: Number, V0: Number = math.inf, eps: Number = 1.0
) -> None:
    if not 0 < vartheta < 1:
        raise ConfigError(f"`vartheta` must be above 0 and below 1, got {vartheta}")
    if not rate > 0:
        raise ConfigError(f"thm:main requires `rate` = 2 lambda - d sigma^2 > 0, got {rate:g}")
    if not 0 < eps < V0:
        raise ConfigError(f"`eps` must be above 0 and below V0 = {V0:g}, got {eps:g}")
