"""Bounds on the distance of the consensus point from the target, under attack.

The bounds are those of prop:QQLP and prop:attack on ensembles: García Trillos et al., "Defending
Against Diverse Attacks in Federated Learning Through Consensus-Based Bi-Level Optimization"
(arXiv 2412.02535), Section 2. Both sides of every inequality are computed; the constants of
Assumptions A1 to A6 belong to the user's L and G. Balls are closed, and `target` is theta_good.
"""
# ruff: noqa: N802, N815 (the paper's names)

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o import consensus
from fedcb2o.errors import ConfigError
from fedcb2o.particles.dynamics import Objective
from fedcb2o.particles.settings import check_positive

Number = float | int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constants:
    """The constants of Assumptions A1 to A6 (thm:main, prop:QQLP, prop:attack).

    They belong to L, G and the target.

    - A1: L_low is the minimum of L.
    - A2: L - L_low <= H_L |theta - target|^h_L within R_H_L of the target.
    - A3: dist(theta, Theta) <= (L - L_low)^nu_L / eta_L near Theta, and L - L_low > L_inf
      elsewhere.
    - A4: |G - G(target)| <= H_G |theta - target|^h_G within R_H_G.
    - A5: for r_G <= R_G there is a point p within r_G of the target such that
      |theta - p| <= (G - G(p))^nu_G / eta_G within r_G of the target, and G - G(p) > G_inf
      elsewhere within r_G of Theta.
    - A6: G - G(target) >= K_G |theta - target|^k_G beyond R_K_G of the target, within R_G of Theta.

    R_H_L, L_inf, R_H_G, R_G and G_inf may be infinite for properties that hold everywhere.

    Two remarks on the paper's text. It prints A4 without the absolute value, but prop:QQLP fails
    without it. A target near other minimisers of L does not meet A5 to the letter. If, for the r_G
    in use, the first part holds wherever the second does not, the bound of prop:QQLP may lack
    |p - target|, which is at most r_G.
    """

    L_low: Number
    H_L: Number
    h_L: Number
    R_H_L: Number
    L_inf: Number
    eta_L: Number
    nu_L: Number
    H_G: Number
    h_G: Number
    R_H_G: Number
    G_inf: Number
    R_G: Number
    eta_G: Number
    nu_G: Number
    K_G: Number
    k_G: Number
    R_K_G: Number

    def __post_init__(self) -> None:
        may_be_infinite = ("R_H_L", "L_inf", "R_H_G", "G_inf", "R_G")
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "L_low"
        }
        check_positive({name: values.pop(name) for name in may_be_infinite}, finite=False)
        check_positive(values)
        if not math.isfinite(self.L_low):
            raise ConfigError(f"`L_low` must be finite, got {self.L_low}")

    def lower_cap(self, r_G: Number) -> float:
        """Return min{L_inf, (eta_L r_G)^(1/nu_L)} (A3): up to this L, Theta is within r_G."""
        return float(min(self.L_inf, (self.eta_L * r_G) ** (1 / self.nu_L)))

    def upper_cap(self, *, attack: bool) -> float:
        """Return min{G_inf, (eta_G R_K_G)^(1/nu_G)} of prop:QQLP.

        With `attack`, K_G R_K_G^k_G counts too, as in prop:attack.
        """
        cap = min(self.G_inf, (self.eta_G * self.R_K_G) ** (1 / self.nu_G))
        if attack:
            cap = min(cap, self.K_G * self.R_K_G**self.k_G)
        return float(cap)

    def max_rise(self, r: Number) -> float:
        """Return H_G r^h_G, the largest change of G within r of the target (A4)."""
        return float(self.H_G * r**self.h_G)

    def min_alpha(self) -> float:
        """Return the alpha from which x exp(-alpha K_G x^k_G) falls beyond R_K_G (prop:attack)."""
        return float(1 / (self.k_G * self.K_G * self.R_K_G**self.k_G))


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The measure w_b rho^b + w_m rho^m (eq:dyn_macro, prop:QQLP) as two ensembles."""

    theta: Float[Tensor, "n d"]
    target: Float[Tensor, " d"]  # theta_good
    lower: Objective
    upper: Objective
    theta_m: Float[Tensor, "n_m d"] | None = None
    w_m: Number = 0.0

    def __post_init__(self) -> None:
        check_share(self.w_m)
        if self.w_m > 0 and (self.theta_m is None or not len(self.theta_m)):
            raise ConfigError(f"`w_m` = {self.w_m} needs malicious particles in `theta_m`")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The parameters that prop:QQLP and prop:attack fix."""

    alpha: Number
    beta: Number
    delta_q: Number
    r_G: Number  # radius of A5
    r: Number  # radius about the target
    u: Number  # level of G
    radius: Number = math.inf  # R of the ball B_R(0)
    r_R: Number = math.inf  # radius about the target within which all points are in B_R(0)
    # Supremum of G - G(target) within r of the target, or an upper bound on it; None for the bound
    # H_G r^h_G of A4.
    G_r: Number | None = None

    def __post_init__(self) -> None:
        names = ("alpha", "delta_q", "r_G", "r", "u")
        check_positive({name: getattr(self, name) for name in names})
        check_positive({"radius": self.radius, "r_R": self.r_R}, finite=False)
        if not 0 < self.beta < 1:
            raise ConfigError(f"`beta` must be above 0 and below 1, got {self.beta}")
        if self.G_r is not None and not 0 <= self.G_r < math.inf:
            raise ConfigError(
                f"`G_r` must be at least 0, for the target itself is in the ball, got {self.G_r}"
            )


@dataclasses.dataclass(frozen=True)
class _Bound:
    """A bound, which need not hold where a hypothesis does not."""

    hypotheses: Mapping[str, bool]

    @property
    def applies(self) -> bool:
        """True if all hypotheses hold."""
        return all(self.hypotheses.values())


@dataclasses.dataclass(frozen=True)
class LaplaceBound(_Bound):
    """Both sides of eq:lem:laplace_LG (prop:QQLP) and its hypotheses.

    They are on r_G, delta_q, beta (eq:beta_QQLP), r, u and on the benign `mass` in B_r(target).
    """

    distance: float  # left side, |m_{alpha,beta} - target|
    near: float  # term of G near the target
    benign: float  # term of the benign particles
    inside: float  # term of the malicious particles within R_K_G of the target
    outside: float  # term of the malicious particles beyond

    @property
    def total(self) -> float:
        """The right side, the sum of the four terms."""
        return self.near + self.benign + self.inside + self.outside


@dataclasses.dataclass(frozen=True)
class AttackBounds(_Bound):
    """Both sides of eq:mali_bound_inside_ball and eq:mali_bound_outside_ball (prop:attack).

    The integrals are over the malicious particles of Q_beta: of the distance within R_K_G of the
    target, and beyond with the factor exp(alpha (G_r - K_G distance^k_G)). The hypotheses are on
    r_G, delta_q, beta (eq:beta_QQLP2), r, u and alpha.
    """

    inside: float
    inside_bound: float
    outside: float
    outside_bound: float


def laplace_bound(mixture: Mixture, setting: Setting, constants: Constants) -> LaplaceBound:
    """Compute the robust quantiled Laplace bound (prop:QQLP, eq:lem:laplace_LG)."""
    terms = _integrals(mixture, setting, constants)
    G_r = _G_r(setting, constants)
    mass = ball_mass(mixture.theta, mixture.target, setting.r)
    fade = math.exp(-setting.alpha * setting.u)
    odds = mixture.w_m / (1 - mixture.w_m)
    near = (setting.u + G_r + constants.max_rise(setting.r_G)) ** constants.nu_G / constants.eta_G
    hypotheses = _hypotheses(terms.q, setting, constants, constants.upper_cap(attack=False))
    parts = (fade * terms.benign, odds * fade * terms.inside, odds * terms.outside)
    # Without mass near the target the bound says nothing, and must not be 0 / 0.
    shares = [part / mass if mass else math.inf for part in parts]
    if not odds:
        shares[1:] = [0.0, 0.0]
    return LaplaceBound({**hypotheses, "mass": mass > 0}, terms.distance, float(near), *shares)


def attack_bounds(mixture: Mixture, setting: Setting, constants: Constants) -> AttackBounds:
    """Compute an attack's additions to the Laplace bound, and their bounds (prop:attack).

    The bounds are R_K_G (eq:mali_bound_inside_ball) and R_K_G exp(-alpha u)
    (eq:mali_bound_outside_ball).
    """
    terms = _integrals(mixture, setting, constants)
    R = float(constants.R_K_G)
    hypotheses = _hypotheses(terms.q, setting, constants, constants.upper_cap(attack=True))
    hypotheses["alpha"] = setting.alpha >= constants.min_alpha()
    outside_bound = R * math.exp(-setting.alpha * setting.u)
    return AttackBounds(hypotheses, terms.inside, R, terms.outside, outside_bound)


class _Integrals(NamedTuple):
    """The values |m - target| and q_beta, and the integrals over Q_beta.

    The integrals are over benign particles, and malicious ones within R_K_G and beyond.
    """

    distance: float
    q: float
    benign: float
    inside: float
    outside: float


def _integrals(mixture: Mixture, setting: Setting, constants: Constants) -> _Integrals:
    # 1. The measure of both ensembles.
    n = len(mixture.theta)
    parts = [part for part in (mixture.theta, mixture.theta_m) if part is not None]
    models = torch.cat(parts)
    # Equal shares within an ensemble, whatever the sizes of the two.
    share = (1 - mixture.w_m) / n
    mass = torch.full((len(models),), share, dtype=torch.float64, device=models.device)
    mass[n:] = mixture.w_m / max(1, len(models) - n)

    # 2. The consensus point.
    L = mixture.lower(models)
    kept = consensus.sublevel_mask(
        L, setting.beta, delta_q=float(setting.delta_q), averaged=True, mass=mass
    )
    kept = kept & (models.norm(dim=-1) <= setting.radius)
    if not (kept & (mass > 0)).any():
        raise ConfigError(f"no particle of Q_beta is in the ball of `radius` = {setting.radius:g}")
    mu = consensus.weights(mixture.upper(models), float(setting.alpha), kept, mass=mass)
    m = consensus.point(mu, models.double())

    # 3. The integrals of the distance from the target.
    far = distance(models, mixture.target)
    counted = torch.where(kept, far, 0.0)
    far_m = far[n:]
    within = far_m <= constants.R_K_G
    exponent = setting.alpha * (_G_r(setting, constants) - constants.K_G * far_m**constants.k_G)
    faded = far_m * torch.exp(exponent)
    # The factor counts outside of the ball only, as in eq:mali_bound_outside_ball.
    ends = (counted[n:].where(within, 0.0), faded.where(kept[n:] & ~within, 0.0))
    return _Integrals(
        float(distance(m, mixture.target)),
        float(consensus.quantile(L, setting.beta, mass=mass)),
        float(counted[:n].mean()),
        *(float(values.sum()) / max(1, len(values)) for values in ends),
    )


def _hypotheses(q: float, setting: Setting, constants: Constants, cap: float) -> dict[str, bool]:
    """Check the common hypotheses of prop:QQLP and prop:attack.

    The cap on G differs.
    """
    s = setting
    k = constants
    # Each hypothesis has the name of the parameter that a user would change.
    lower_cap = k.lower_cap(s.r_G)
    return {
        "r_G": s.r_G <= min(k.R_G, k.R_H_G, k.R_K_G, (cap / (2 * k.H_G)) ** (1 / k.h_G)),
        "delta_q": s.delta_q <= lower_cap / 2,
        "beta": q + s.delta_q <= k.L_low + lower_cap,
        "r": s.r <= min(s.r_R, s.r_G, k.R_H_L, (s.delta_q / k.H_L) ** (1 / k.h_L)),
        "u": s.u + _G_r(s, k) + k.max_rise(s.r_G) <= cap,
    }


def _G_r(setting: Setting, constants: Constants) -> float:
    if setting.G_r is None:
        return constants.max_rise(setting.r)
    return float(setting.G_r)


def ball_mass(theta: Float[Tensor, "n d"], target: Float[Tensor, " d"], radius: Number) -> float:
    """Return rho^b(B_r(target)), as eq:beta and eq:alpha need it."""
    return float((distance(theta, target) <= radius).double().mean())


def distance(theta: Tensor, target: Tensor) -> Tensor:
    """Return |theta - target| of every particle in float64."""
    return (theta.double() - target.double()).square().sum(-1).sqrt()


def check_share(w_m: Number, name: str = "w_m") -> None:
    """Refuse a share of attackers outside [0, 1)."""
    if not 0 <= w_m < 1:
        raise ConfigError(
            f"`{name}`, the share of attackers, must be at least 0 and below 1, got {w_m}"
        )
