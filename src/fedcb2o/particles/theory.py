"""Theory of CB2O under attack: decay of V (thm:main), and beta and alpha by the share of attackers.

García Trillos et al., "Defending Against Diverse Attacks in Federated Learning Through
Consensus-Based Bi-Level Optimization" (arXiv 2412.02535), Section 2. `target` is theta_good.

Example:
    >>> contraction_rate(lambda1=1.0, sigma1=0.5, dim=2)
    1.5
"""
# ruff: noqa: N802 (the paper's names)

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o import consensus
from fedcb2o.errors import ConfigError
from fedcb2o.particles.dynamics import ConsensusParams
from fedcb2o.particles.settings import check_positive

Number = float | int


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
    _check_share(share)
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


def _check_share(share: Number) -> None:
    """Refuse a share of attackers outside [0, 1)."""
    if not 0 <= share < 1:
        raise ConfigError(
            f"`share`, the share of attackers, must be at least 0 and below 1, got {share}"
        )


def _check_theorem(
    vartheta: Number, rate: Number, V0: Number = math.inf, eps: Number = 1.0
) -> None:
    if not 0 < vartheta < 1:
        raise ConfigError(f"`vartheta` must be above 0 and below 1, got {vartheta}")
    if not rate > 0:
        raise ConfigError(f"thm:main requires `rate` = 2 lambda - d sigma^2 > 0, got {rate:g}")
    if not 0 < eps < V0:
        raise ConfigError(f"`eps` must be above 0 and below V0 = {V0:g}, got {eps:g}")
