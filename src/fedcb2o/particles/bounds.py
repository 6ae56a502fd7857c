"""How far the consensus point lies from the target, under attack: the bounds of prop:QQLP and prop:attack on ensembles.

García Trillos et al., "Defending Against Diverse Attacks in Federated Learning Through Consensus-Based Bi-Level
Optimization" (arXiv 2412.02535), Section 2. Both sides of every inequality are computed; the constants of Assumptions
A1 to A6 belong to the user's L and G. Balls are closed, and `target` is theta_good.
"""
# ruff: noqa: N802, N815 (the paper's names)

import dataclasses
import math
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o import consensus
from fedcb2o.errors import ConfigError
from fedcb2o.particles.objectives import Objective

Number = float | int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constants:
    """The constants of Assumptions A1 to A6 (thm:main, prop:QQLP, prop:attack), for an L, a G and their `target`.

    A1: L_low is the minimum of L. A2: L - L_low <= H_L |theta - target|^h_L within R_H_L of the target. A3: dist(theta,
    Theta) <= (L - L_low)^nu_L / eta_L near Theta, and L - L_low > L_inf elsewhere. A4: |G - G(target)| <= H_G |theta -
    target|^h_G within R_H_G. A5: for r_G <= R_G there is a point p within r_G of the target such that |theta - p| <=
    (G - G(p))^nu_G / eta_G within r_G of the target, and G - G(p) > G_inf elsewhere within r_G of Theta. A6: G -
    G(target) >= K_G |theta - target|^k_G beyond R_K_G of the target, within R_G of Theta.

    What holds everywhere may have an infinite R_H_L, L_inf, R_H_G, R_G or G_inf. Two remarks on the paper's text. It
    prints A4 without the absolute value, but prop:QQLP fails without. And no target that other minimisers of L come
    close to meets A5 to the letter; if, for the r_G in use, the first part holds wherever the second does not, then the
    bound of prop:QQLP may lack |p - target|, which is at most r_G.
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
        """min{L_inf, (eta_L r_G)^(1/nu_L)}: where L - L_low is no larger, Theta is within r_G (A3)."""
        return float(min(self.L_inf, (self.eta_L * r_G) ** (1 / self.nu_L)))

    def upper_cap(self, *, attack: bool) -> float:
        """min{G_inf, (eta_G R_K_G)^(1/nu_G)} of prop:QQLP; for prop:attack with K_G R_K_G^k_G among them."""
        cap = min(self.G_inf, (self.eta_G * self.R_K_G) ** (1 / self.nu_G))
        return float(min(cap, self.K_G * self.R_K_G**self.k_G) if attack else cap)

    def max_rise(self, r: Number) -> float:
        """H_G r^h_G: how much G rises or falls at most within r of the target (A4)."""
        return float(self.H_G * r**self.h_G)

    def min_alpha(self) -> float:
        """1 / (k_G K_G R_K_G^k_G): from here on x exp(-alpha K_G x^k_G) falls beyond R_K_G (prop:attack)."""
        return float(1 / (self.k_G * self.K_G * self.R_K_G**self.k_G))


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The measure w_b rho^b + w_m rho^m (eq:dyn_macro, prop:QQLP) as two ensembles, with its objectives.

    `theta` are the benign particles, `theta_m` the malicious ones, which have the share w_m together; `lower` and
    `upper` are L and G, [n, d] -> [n].
    """

    theta: Float[Tensor, "n d"]
    target: Float[Tensor, " d"]
    lower: Objective
    upper: Objective
    theta_m: Float[Tensor, "n_m d"] | None = None
    w_m: Number = 0.0

    def __post_init__(self) -> None:
        check_share(self.w_m)
        if self.w_m > 0 and (self.theta_m is None or not len(self.theta_m)):
            raise ConfigError(
                f"`w_m` = {self.w_m} needs malicious particles in `theta_m`; without them, let it be 0"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What prop:QQLP and prop:attack fix: alpha, beta, delta_q, R (`radius`), the radii r_G and r, and u.

    r_R is a radius about the target within which all lies in B_R(0). G_r is the supremum of G - G(target) within r of
    the target, or an upper bound on it; None takes the bound H_G r^h_G of A4.
    """

    alpha: Number
    beta: Number
    delta_q: Number
    r_G: Number
    r: Number
    u: Number
    radius: Number = math.inf
    r_R: Number = math.inf
    G_r: Number | None = None

    def __post_init__(self) -> None:
        check_positive(
            {name: getattr(self, name) for name in ("alpha", "delta_q", "r_G", "r", "u")}
        )
        check_positive({"radius": self.radius, "r_R": self.r_R}, finite=False)
        if not 0 < self.beta < 1:
            raise ConfigError(f"`beta` must be above 0 and below 1, got {self.beta}")
        if self.G_r is not None and not 0 <= self.G_r < math.inf:
            raise ConfigError(
                f"`G_r` must be at least 0, for the target itself is in the ball, got {self.G_r}"
            )


@dataclasses.dataclass(frozen=True)
class LaplaceBound:
    """Both sides of eq:lem:laplace_LG (prop:QQLP), and which of its hypotheses hold.

    `distance` is |m_{alpha,beta} - target|, the left side. The right side is the sum `total` of `near`, what G allows
    near the target; `benign`, of benign particles; `inside` and `outside`, of malicious ones within R_K_G of the target
    and beyond. `hypotheses` are those on r_G, delta_q, beta (eq:beta_QQLP), r, u and on benign `mass` in B_r(target);
    unless all of them hold (`applies`), the sum need not bound anything.
    """

    distance: float
    near: float
    benign: float
    inside: float
    outside: float
    hypotheses: Mapping[str, bool]

    @property
    def total(self) -> float:
        """The right side."""
        return self.near + self.benign + self.inside + self.outside

    @property
    def applies(self) -> bool:
        """Whether all hypotheses hold."""
        return all(self.hypotheses.values())


@dataclasses.dataclass(frozen=True)
class AttackBounds:
    """Both sides of eq:mali_bound_inside_ball and eq:mali_bound_outside_ball (prop:attack), and its hypotheses.

    `inside` is the integral of the distance over malicious particles of Q_beta within R_K_G of the target; `outside`,
    over those beyond, each counted exp(alpha (G_r - K_G distance^k_G)) times. `hypotheses` are those on r_G, delta_q,
    beta (eq:beta_QQLP2), r, u and alpha; `applies` says whether all of them hold.
    """

    inside: float
    inside_bound: float
    outside: float
    outside_bound: float
    hypotheses: Mapping[str, bool]

    @property
    def applies(self) -> bool:
        """Whether all hypotheses hold."""
        return all(self.hypotheses.values())


def laplace_bound(mixture: Mixture, setting: Setting, constants: Constants) -> LaplaceBound:
    """The robust quantiled Laplace bound on the consensus point (prop:QQLP, eq:lem:laplace_LG), both its sides.

    Raises ConfigError where no particle of Q_beta is inside B_R(0).
    """
    terms = _integrals(mixture, setting, constants)
    G_r = _G_r(setting, constants)
    mass = ball_mass(mixture.theta, mixture.target, setting.r)
    fade = math.exp(-setting.alpha * setting.u)
    odds = mixture.w_m / (1 - mixture.w_m)

    def over_mass(x: float) -> float:
        return x / mass if mass else math.inf

    return LaplaceBound(
        distance=terms.distance,
        near=float(
            (setting.u + G_r + constants.max_rise(setting.r_G)) ** constants.nu_G / constants.eta_G
        ),
        benign=over_mass(fade * terms.benign),
        inside=over_mass(odds * fade * terms.inside) if odds else 0.0,
        outside=over_mass(odds * terms.outside) if odds else 0.0,
        hypotheses={
            **_hypotheses(terms.q, setting, constants, constants.upper_cap(attack=False)),
            "mass": mass > 0,
        },
    )


def attack_bounds(mixture: Mixture, setting: Setting, constants: Constants) -> AttackBounds:
    """How much any attack can add to the Laplace bound, and how much this one does (prop:attack).

    At most R_K_G (eq:mali_bound_inside_ball) and R_K_G exp(-alpha u) (eq:mali_bound_outside_ball). Raises ConfigError
    where no particle of Q_beta is inside B_R(0).
    """
    terms = _integrals(mixture, setting, constants)
    R = float(constants.R_K_G)
    held = _hypotheses(terms.q, setting, constants, constants.upper_cap(attack=True))
    return AttackBounds(
        inside=terms.inside,
        inside_bound=R,
        outside=terms.outside,
        outside_bound=R * math.exp(-setting.alpha * setting.u),
        hypotheses={**held, "alpha": setting.alpha >= constants.min_alpha()},
    )


@dataclasses.dataclass(frozen=True)
class _Integrals:
    """|m - target|, q_beta, and the integrals over Q_beta: benign, malicious within R_K_G and beyond."""

    distance: float
    q: float
    benign: float
    inside: float
    outside: float


def _integrals(mixture: Mixture, setting: Setting, constants: Constants) -> _Integrals:
    n = len(mixture.theta)
    models = (
        mixture.theta if mixture.theta_m is None else torch.cat([mixture.theta, mixture.theta_m])
    )
    mass = torch.full(
        (len(models),), (1 - mixture.w_m) / n, dtype=torch.float64, device=models.device
    )
    mass[n:] = mixture.w_m / max(1, len(models) - n)
    L = mixture.lower(models)
    kept = consensus.sublevel_mask(
        L, setting.beta, delta_q=float(setting.delta_q), averaged=True, mass=mass
    )
    kept = kept & (models.norm(dim=-1) <= setting.radius)
    if not (kept & (mass > 0)).any():
        raise ConfigError(
            f"no particle of Q_beta is in the ball of `radius` = {setting.radius:g} about 0: enlarge it"
        )
    m = consensus.point(
        consensus.weights(mixture.upper(models), float(setting.alpha), kept, mass=mass),
        models.double(),
    )
    far = distance(models, mixture.target)
    counted = torch.where(kept, far, 0.0)
    within = far[n:] <= constants.R_K_G
    faded = far[n:] * torch.exp(
        setting.alpha * (_G_r(setting, constants) - constants.K_G * far[n:] ** constants.k_G)
    )
    parts = (counted[n:].where(within, 0.0), faded.where(kept[n:] & ~within, 0.0))
    return _Integrals(
        float(distance(m, mixture.target)),
        float(consensus.quantile(L, setting.beta, mass=mass)),
        float(counted[:n].mean()),
        *(float(part.mean()) if len(part) else 0.0 for part in parts),
    )


def _hypotheses(q: float, setting: Setting, constants: Constants, cap: float) -> dict[str, bool]:
    """What prop:QQLP and prop:attack suppose alike, but for the cap on G."""
    s = setting
    k = constants
    lower_cap = constants.lower_cap(setting.r_G)
    return {
        "r_G": s.r_G <= min(k.R_G, k.R_H_G, k.R_K_G, (cap / (2 * k.H_G)) ** (1 / k.h_G)),
        "delta_q": s.delta_q <= lower_cap / 2,
        "beta": q + s.delta_q <= k.L_low + lower_cap,
        "r": s.r <= min(s.r_R, s.r_G, k.R_H_L, (s.delta_q / k.H_L) ** (1 / k.h_L)),
        "u": s.u + _G_r(s, k) + k.max_rise(s.r_G) <= cap,
    }


def _G_r(setting: Setting, constants: Constants) -> float:
    return constants.max_rise(setting.r) if setting.G_r is None else float(setting.G_r)


def ball_mass(theta: Float[Tensor, "n d"], target: Float[Tensor, " d"], radius: Number) -> float:
    """rho^b(B_r(target)): the share of an ensemble within r of the target, as eq:beta and eq:alpha need it."""
    return float((distance(theta, target) <= radius).double().mean())


def distance(theta: Tensor, target: Tensor) -> Tensor:
    """|theta - target| of every particle, in float64."""
    return (theta.double() - target.double()).square().sum(-1).sqrt()


def check_positive(
    values: Mapping[str, Number], *, finite: bool = True, or_zero: bool = False
) -> None:
    """Raise ConfigError for the first number that is not above 0."""
    for name, value in values.items():
        if not (value > 0 or (or_zero and value == 0)) or (finite and value == math.inf):
            bound = "at least 0" if or_zero else "above 0"
            raise ConfigError(
                f"`{name}` must be {bound}{' and finite' if finite else ''}, got {value}"
            )


def check_share(w_m: Number, name: str = "w_m") -> None:
    """Raise ConfigError unless it is a share of attackers."""
    if not 0 <= w_m < 1:
        raise ConfigError(
            f"`{name}`, the share of attackers, must be at least 0 and below 1, got {w_m}"
        )
