"""Both sides of every inequality of the theory, on problems whose constants are known by hand."""

import dataclasses
import math

import pytest
import torch
from tests.particles.problems import double

from fedcb2o import consensus
from fedcb2o.errors import ConfigError
from fedcb2o.particles import bounds, theory
from fedcb2o.particles.bounds import Constants, Mixture, Setting
from fedcb2o.rng import stream

INF = math.inf


def normal(seed, *shape):
    return torch.from_numpy(stream(seed, "test").standard_normal(shape))


# ---- problems ----

# L = (|x|^2 - 1)^2, G = |x - (2,0)|^2. Theta is the unit circle, the target (1,0).
# Let rho = |x| and v = x - target.
# A2: |rho - 1| <= |v| and rho + 1 <= 2 + |v|, so L <= 2.5^2 |v|^2 for |v| <= 0.5.
# A3: L >= (rho - 1)^2 = dist^2 everywhere.
# A4: G - 1 = |v|^2 - 2 v_1, so |G - 1| <= 2.5 |v| for |v| <= 0.5.
# A5: p = (1 + r_G, 0). On the ring |rho - 1| <= r_G, in polar coordinates,
#     G - G(p) >= 2 / (1 + r_G) |x - p|^2, so nu = 1/2, eta = sqrt(2/1.5) for r_G <= 0.5.
#     The circle continues at the target, so A5 does not hold literally. The bound still holds:
#     on the ring G - 1 >= 2 |v|^2 - 2 r_G - r_G^2, so |v| > `near` gives
#     G - 1 > 1.5 (u + G_r) + 3.75 r_G - 2 r_G - r_G^2 >= u + G_r, as the proof needs.
# A6: the same with R_G = 0.5 gives G - 1 >= 2 |v|^2 - 1.25 >= |v|^2 for |v|^2 >= 1.25.
CIRCLE = Constants(
    L_low=0, H_L=6.25, h_L=2, R_H_L=0.5, L_inf=INF, eta_L=1, nu_L=0.5,
    H_G=2.5, h_G=1, R_H_G=0.5, G_inf=INF, R_G=0.5, eta_G=math.sqrt(2 / 1.5), nu_G=0.5,
    K_G=1, k_G=2, R_K_G=math.sqrt(1.25),
)  # fmt: skip
AROUND = Setting(alpha=50, beta=0.04, delta_q=0.02, r_G=0.2, r=0.05, u=0.5, radius=10, r_R=9)


def circle(theta, theta_m=None, w_m=0.0):
    target = torch.tensor([1.0, 0.0], dtype=theta.dtype)
    return Mixture(
        theta,
        target,
        lambda x: (x.square().sum(-1) - 1).square(),
        lambda x: (x - 2 * target).square().sum(-1),
        theta_m,
        w_m,
    )


# L = ||x| - 1|, G = (x - 2)^2 on R. Theta = {-1, 1}, the target is 1; A1 to A6 hold literally.
# Let v = x - 1.
# A2, A3: L = dist <= |v|.
# A4: |v^2 - 2v| <= 2.5 |v| for |v| <= 0.5.
# A5: p = 1 + r_G and e = p - x in [0, 2 r_G]. For r_G <= 0.5,
#     G - G(p) = e (2 (1 - r_G) + e) >= e; near -1,
#     G - G(p) >= (3 - r_G)^2 - (1 - r_G)^2 = 8 - 4 r_G >= 6 > 5.9.
# A6: near -1, |v| >= 1.5 and G - 1 = |v|^2 + 2|v| >= |v|^2. Beyond R_K_G = 2.5 is no minimiser.
POINTS = Constants(
    L_low=0, H_L=1, h_L=1, R_H_L=INF, L_inf=INF, eta_L=1, nu_L=1,
    H_G=2.5, h_G=1, R_H_G=0.5, G_inf=5.9, R_G=0.5, eta_G=1, nu_G=1,
    K_G=1, k_G=2, R_K_G=1.5,
)  # fmt: skip
WIDE = dataclasses.replace(POINTS, R_K_G=2.5)  # the ball contains the attackers at -1
ON_A_LINE = Setting(alpha=20, beta=0.04, delta_q=0.1, r_G=0.2, r=0.0625, u=0.5)


def points(theta, theta_m=None, w_m=0.0):
    return Mixture(
        theta,
        torch.ones(1, dtype=theta.dtype),
        lambda x: (x[:, 0].abs() - 1).abs(),
        lambda x: (x[:, 0] - 2).square(),
        theta_m,
        w_m,
    )


def benign(problem, placement, seed):
    d = 2 if problem is circle else 1
    z, target = normal(seed, 20_000, d), torch.eye(d, dtype=torch.float64)[0]
    return {
        "near": target + 0.1 * z,
        "at large": z,
        "some near": torch.where(z[:, :1] > 0.5, target + 0.02 * z, 3 * z),
    }[placement]


def malicious(problem, placement, seed):
    """Return attackers at a far or near minimiser of L, away from all, or around them."""
    if problem is points:
        positions = {"behind": -1.0, "beside": 0.95, "nowhere": 9.0}
        return (
            torch.full((3, 1), positions[placement]).double()
            if placement in positions
            else -1 + 0.2 * normal(seed, 300, 1)
        )
    positions = {"behind": (math.pi, 1.0), "beside": (0.8, 1.0), "nowhere": (0.0, 5.0)}
    spread = (3 * normal(seed, 300), 1 + 0.02 * normal(seed + 1, 300))
    angle, rho = (double([x]) for x in positions[placement]) if placement in positions else spread
    return torch.stack([rho * angle.cos(), rho * angle.sin()], -1)


CASES = [
    pytest.param(circle, AROUND, CIRCLE, id="circle"),
    pytest.param(points, ON_A_LINE, POINTS, id="points"),
    pytest.param(points, ON_A_LINE, WIDE, id="points, wide"),
]


# ---- constants ----


@pytest.mark.parametrize(
    ("problem", "constants", "r_G"),
    [(circle, CIRCLE, 0.2), (circle, CIRCLE, 0.5), (points, POINTS, 0.2)],
)
def test_constants_satisfy_the_assumptions(problem, constants, r_G):
    x = benign(problem, "at large", 0)
    k, rho = problem(x), x.norm(dim=-1)
    L, G, v = k.lower(x), k.upper(x) - k.upper(k.target[None]), (x - k.target).norm(dim=-1)
    near_theta, rounding = (rho - 1).abs() <= r_G, 1e-12
    assert (constants.H_L * v**constants.h_L + rounding >= L)[v <= constants.R_H_L].all()
    assert ((rho - 1).abs() <= L**constants.nu_L / constants.eta_L + rounding).all()
    assert (G.abs() <= constants.H_G * v**constants.h_G + rounding)[v <= constants.R_H_G].all()
    p = k.target * (1 + r_G)
    excess = (k.upper(x) - k.upper(p[None])).clamp(min=0)
    first_part = (x - p).norm(dim=-1) <= excess**constants.nu_G / constants.eta_G + rounding
    assert (first_part | (excess > constants.G_inf))[near_theta].all()
    if problem is points:  # literally
        assert first_part[near_theta & (v <= r_G)].all()
        assert (excess > constants.G_inf)[near_theta & (v > r_G)].all()
    beyond = near_theta & (v > constants.R_K_G)
    assert beyond.any()
    assert (constants.K_G * v**constants.k_G <= G)[beyond].all()


# ---- prop:QQLP and prop:attack ----


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("placement", ["near", "at large", "some near"])
@pytest.mark.parametrize(("problem", "setting", "constants"), CASES)
def test_laplace_bound_without_attack(problem, setting, constants, placement, seed):
    mixture = problem(benign(problem, placement, seed))
    bound = bounds.laplace_bound(mixture, setting, constants)
    assert bound.applies, bound.hypotheses
    assert 0 < bound.distance <= bound.total < INF
    assert bound.inside == bound.outside == 0
    # "We furthermore have B_r(target) in Q_beta in N_{r_G}(Theta)."
    L = mixture.lower(mixture.theta)
    kept = consensus.sublevel_mask(L, setting.beta, delta_q=setting.delta_q, averaged=True)
    assert kept[(mixture.theta - mixture.target).norm(dim=-1) <= setting.r].all()
    assert ((mixture.theta.norm(dim=-1) - 1).abs()[kept] <= setting.r_G).all()


@pytest.mark.parametrize("w_m", [0.02, 0.3, 0.9])
@pytest.mark.parametrize("attack", ["behind", "beside", "nowhere", "anywhere"])
@pytest.mark.parametrize(("problem", "setting", "constants"), CASES)
def test_bounds_under_attack(problem, setting, constants, attack, w_m):
    # beta is proportional to w_b, so that benign particles alone keep the quantile low.
    setting = dataclasses.replace(setting, beta=setting.beta * (1 - w_m))
    for seed, placement in enumerate(["near", "at large", "some near"]):
        mixture = problem(benign(problem, placement, seed), malicious(problem, attack, seed), w_m)
        bound = bounds.laplace_bound(mixture, setting, constants)
        assert bound.applies, bound.hypotheses
        assert bound.distance <= bound.total < INF
        control = bounds.attack_bounds(mixture, setting, constants)
        assert control.applies, control.hypotheses
        assert control.inside <= control.inside_bound
        assert control.outside <= control.outside_bound
        # prop:attack bounds the terms of prop:QQLP.
        factor = w_m / (1 - w_m) / bounds.ball_mass(mixture.theta, mixture.target, setting.r)
        assert bound.inside == pytest.approx(
            factor * math.exp(-setting.alpha * setting.u) * control.inside, rel=1e-9
        )
        assert bound.outside == pytest.approx(factor * control.outside, rel=1e-9)
        behind_sides = constants is WIDE, constants is not WIDE  # is -1 inside or outside R_K_G
        sides = (control.inside > 0, control.outside > 0)
        if attack != "anywhere":
            expected = {"behind": behind_sides, "beside": (True, False), "nowhere": (False, False)}[
                attack
            ]
            assert sides == expected
        else:
            assert sides == ((True, True) if problem is circle else behind_sides)


def test_attack_bounds_are_nearly_attained():
    """Attackers are on the sphere, and just outside the ball."""
    R = POINTS.R_K_G
    # u + G_r + 2.5 r_G = 1.5
    setting = dataclasses.replace(ON_A_LINE, alpha=0.5, u=0.875, G_r=0.125)
    for position, side in ((1 - R, "inside"), (1 - R - 1e-9, "outside")):
        attackers = double([[position]])
        mixture = dataclasses.replace(
            points(torch.ones(5, 1).double(), attackers, 0.5), lower=lambda x: 0 * x[:, 0]
        )
        # L = 0, so the attackers are in Q_beta
        control = bounds.attack_bounds(mixture, setting, POINTS)
        assert control.applies
        assert control.inside == (R if side == "inside" else 0)
        expected = R * math.exp(0.5 * (0.125 - R**2)) if side == "outside" else 0
        assert control.outside == pytest.approx(expected, rel=1e-6)
        assert control.outside <= control.outside_bound


def test_terms_by_hand():
    theta = double([[1.0], [1 + 1 / 32], [-1.0], [3.0]])
    attackers = double([[-1.0]])
    setting = dataclasses.replace(ON_A_LINE, alpha=2, beta=0.5)
    # L = 0, 1/32, 0, 2 and 0: the quantile is 0, the level delta_q = 0.1, and x = 3 is excluded.
    # Two of four benign particles are within r = 1/16; G_r = 2.5/16.
    weight = {
        x: mass * math.exp(-2 * (x - 2) ** 2)
        for x, mass in ((1, 0.1875), (1 + 1 / 32, 0.1875), (-1, 0.4375))
    }
    m = sum(x * w for x, w in weight.items()) / sum(weight.values())
    for constants, inside, outside in (
        (POINTS, 0, (1 / 3) / 0.5 * 2 * math.exp(2 * (2.5 / 16 - 2**2))),
        (WIDE, (1 / 3) / 0.5 * math.exp(-1) * 2, 0),
    ):
        bound = bounds.laplace_bound(points(theta, attackers, 0.25), setting, constants)
        assert bound.distance == pytest.approx(abs(m - 1), rel=1e-12)
        assert bound.near == pytest.approx(0.5 + 2.5 / 16 + 2.5 * 0.2)
        assert bound.benign == pytest.approx(math.exp(-1) / 0.5 * (1 / 32 + 2) / 4)
        assert bound.inside == pytest.approx(inside)
        assert bound.outside == pytest.approx(outside)
        assert bound.total == pytest.approx(bound.near + bound.benign + inside + outside)


def test_attackers_without_mass_change_nothing():
    theta, attackers = benign(points, "at large", 3), malicious(points, "behind", 3)
    without = bounds.laplace_bound(points(theta), ON_A_LINE, POINTS)
    massless = bounds.laplace_bound(points(theta, attackers, 0.0), ON_A_LINE, POINTS)
    nearly = bounds.laplace_bound(points(theta, attackers, 1e-12), ON_A_LINE, POINTS)
    for bound in (massless, nearly):
        assert (bound.distance, bound.total) == pytest.approx(
            (without.distance, without.total), abs=1e-9
        )
    assert bounds.attack_bounds(
        points(theta, attackers, 0.0), ON_A_LINE, WIDE
    ).inside == pytest.approx(2)


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        ({"r_G": 0.45}, {"r_G", "u"}),
        ({"delta_q": 0.03}, {"delta_q"}),
        ({"beta": 0.5}, {"beta"}),
        ({"r": 0.057}, {"r"}),
        ({"r_R": 0.04}, {"r"}),
        ({"u": 1.5}, {"u"}),
        ({"G_r": 1.5}, {"u"}),
        ({"alpha": 0.39}, {"alpha"}),  # of prop:attack only: at least 1 / (2 * 1.25)
    ],
)
def test_failed_hypotheses_are_named(change, failed):
    mixture = circle(benign(circle, "at large", 0), malicious(circle, "nowhere", 0), 0.1)
    setting = dataclasses.replace(AROUND, **change)
    bound = bounds.laplace_bound(mixture, setting, CIRCLE)
    assert {name for name, held in bound.hypotheses.items() if not held} == failed - {"alpha"}
    attack_bound = bounds.attack_bounds(mixture, setting, CIRCLE)
    assert {name for name, held in attack_bound.hypotheses.items() if not held} == failed
    assert bound.applies == (failed == {"alpha"})
    assert not attack_bound.applies


def test_the_bound_is_infinite_without_mass_near_the_target():
    theta = benign(circle, "at large", 0)
    theta = theta[(theta - torch.tensor([1.0, 0.0])).norm(dim=-1) > 0.05]
    bound = bounds.laplace_bound(circle(theta), AROUND, CIRCLE)
    assert not bound.hypotheses["mass"]
    assert bound.total == INF


def test_a_large_beta_breaks_a_hypothesis_and_the_bound():
    mixture = circle(benign(circle, "at large", 0))
    bound = bounds.laplace_bound(
        mixture, dataclasses.replace(AROUND, beta=0.95, alpha=400, u=0.1), CIRCLE
    )
    assert [name for name, held in bound.hypotheses.items() if not held] == ["beta"]
    assert bound.distance > bound.total  # the consensus point is near (2,0), the minimiser of G


def test_holder_continuity_must_be_two_sided():
    """The printed A4, G - G(target) <= H_G |v|^h_G, holds for H_G = 1, and prop:QQLP is false."""
    # L = |x| on R, G = 2 - 5x right of the target 0 and 2 - x left of it; p = r_G, and G - G(p) >=
    # 3 |x - p|.
    theta = double([0.0] * 2 + [0.25] * 100 + [0.5] * 98)[:, None]
    lower = lambda x: x[:, 0].abs()  # noqa: E731
    upper = lambda x: 2 - torch.where(x[:, 0] > 0, 5.0, 1.0) * x[:, 0]  # noqa: E731
    mixture = Mixture(theta, torch.zeros(1, dtype=torch.float64), lower, upper)
    setting = Setting(alpha=1e4, beta=0.4, delta_q=0.25, r_G=0.5, r=0.01, u=0.01)
    one_sided = Constants(
        L_low=0, H_L=1, h_L=1, R_H_L=INF, L_inf=INF, eta_L=1, nu_L=1,
        H_G=1, h_G=1, R_H_G=INF, G_inf=INF, R_G=0.5, eta_G=3, nu_G=1, K_G=1, k_G=1, R_K_G=10,
    )  # fmt: skip
    bound = bounds.laplace_bound(mixture, setting, one_sided)
    assert bound.applies
    assert bound.distance == pytest.approx(0.5)
    assert bound.distance > bound.total
    two_sided = bounds.laplace_bound(mixture, setting, dataclasses.replace(one_sided, H_G=5))
    assert two_sided.applies
    assert two_sided.distance <= two_sided.total


def test_the_bound_may_be_too_small_by_the_distance_to_p():
    """`near` is a distance to p. With A5's first part beyond r_G, the bound omits |p - target|."""
    # L = |x_2| on R^2, G = |x - p| with p = (0, 0.5), the target 0, r_G = 0.5: H_G = eta_G = nu_G =
    # 1.
    theta = double([[0.0, 0.0]] * 2 + [[-3.0, 0.25]] * 120 + [[0.495, 0.5]] * 78)
    p = double([0.0, 0.5])
    mixture = Mixture(
        theta, torch.zeros(2).double(), lambda x: x[:, 1].abs(), lambda x: (x - p).norm(dim=-1)
    )
    setting = Setting(alpha=1e4, beta=0.5, delta_q=0.25, r_G=0.5, r=0.01, u=0.01)
    constants = Constants(
        L_low=0, H_L=1, h_L=1, R_H_L=INF, L_inf=INF, eta_L=1, nu_L=1,
        H_G=1, h_G=1, R_H_G=INF, G_inf=INF, R_G=0.5, eta_G=1, nu_G=1, K_G=0.9, k_G=1, R_K_G=10,
    )  # fmt: skip
    bound = bounds.laplace_bound(mixture, setting, constants)
    assert bound.applies
    assert bound.total < bound.distance <= bound.total + setting.r_G


def test_bounds_in_float32_and_with_an_empty_ball():
    theta = benign(points, "at large", 0)
    single, double = (
        bounds.laplace_bound(points(particles), ON_A_LINE, POINTS)
        for particles in (theta.float(), theta)
    )
    assert single.total == pytest.approx(double.total, rel=1e-2)
    with pytest.raises(ConfigError, match=r"`radius` = 0\.1"):
        bounds.laplace_bound(
            circle(benign(circle, "near", 0)), dataclasses.replace(AROUND, radius=0.1), CIRCLE
        )


# ---- thm:main ----


def test_functional_and_ball_mass_by_hand():
    theta = double([[0.0, 0.0], [3.0, 4.0]])
    assert theory.V(theta, torch.zeros(2).double()) == 6.25  # (0 + 25) / 2 / 2
    result = theory.V(torch.stack([theta, theta + 1]), torch.ones(2).double()).tolist()
    assert result == [3.75, 6.25]
    assert bounds.ball_mass(theta, torch.zeros(2).double(), 4.9) == 0.5
    assert bounds.ball_mass(theta, torch.zeros(2).double(), 5) == 1


def test_rates_and_times_by_hand():
    assert theory.contraction_rate(lambda1=1, sigma1=0.5, dim=2) == 1.5
    assert theory.contraction_rate(lambda1=1, sigma1=0.5, dim=2, noise="anisotropic") == 1.75
    assert theory.contraction_rate(lambda1=1, sigma1=1, dim=20) == -18
    assert theory.end_time(math.e**2, 1.0, vartheta=0.5, rate=2) == pytest.approx(2)
    assert theory.end_time_window(math.e**2, 1.0, vartheta=0.5, rate=2) == pytest.approx((0.8, 2))
    low, high = theory.decay_bounds(torch.tensor([0.0, 2.0]), 3.0, vartheta=0.5, rate=2)
    assert low.tolist() == pytest.approx([3, 3 * math.exp(-5)])
    assert high.tolist() == pytest.approx([3, 3 * math.exp(-2)])


def test_closeness_by_hand():
    # 2 lambda - d sigma^2 = 1.5 and lambda + d sigma^2 = 1.5; the other term is
    # sqrt(0.5 * 1.5 / 0.5) = 1.22.
    assert theory.closeness(vartheta=0.5, lambda1=1, sigma1=0.5, dim=2) == pytest.approx(
        0.25 / math.sqrt(2)
    )
    # 4 - 3 = 1 and 2 + 3 = 5.
    assert theory.closeness(vartheta=0.2, lambda1=2, sigma1=1, dim=3) == pytest.approx(
        0.02 / math.sqrt(2)
    )
    assert theory.closeness(vartheta=0.5, lambda1=7, sigma1=0, dim=3) == pytest.approx(
        0.5 / math.sqrt(2)
    )
    # The result does not depend on the unit of time.
    assert theory.closeness(vartheta=0.2, lambda1=32, sigma1=4, dim=3) == pytest.approx(
        0.02 / math.sqrt(2)
    )


def relative_decay(v, w, lambda1, sigma1):
    """Return dV/dt / V of benign particles (eq:dyn_macro); v = theta - target, w = m - target."""
    drift = -lambda1 * (v * (v - w)).sum(-1).mean()
    diffusion = v.shape[-1] * sigma1**2 / 2 * (v - w).square().sum(-1).mean()
    return (drift + diffusion) / theory.V(v, torch.zeros_like(w))


@pytest.mark.parametrize("sigma1", [0.0, 0.2, 0.5, 0.8])
@pytest.mark.parametrize("vartheta", [0.1, 0.5, 0.9])
def test_v_decays_at_the_stated_rates_within_closeness(vartheta, sigma1):
    lambda1, dim, rounding = 1.3, 3, 1e-9
    rate = theory.contraction_rate(lambda1=lambda1, sigma1=sigma1, dim=dim)
    c = theory.closeness(vartheta=vartheta, lambda1=lambda1, sigma1=sigma1, dim=dim)
    fast, slow = -(1 + vartheta / 2) * rate, -(1 - vartheta) * rate
    for spread, shift in (
        (1.0, 0.0),
        (0.3, 1.0),
        (1e-6, 1.0),
    ):  # around the target, next to it, and at one point
        v = shift + spread * normal(3, 5000, dim)
        size = theory.V(v, torch.zeros(dim).double()).sqrt()
        for direction in (*normal(4, 20, dim), v.mean(0), -v.mean(0)):
            w = c * size * direction / direction.norm()
            for share in (0.0, 0.5, 1.0):
                assert (
                    fast - rounding
                    <= relative_decay(v, share * w, lambda1, sigma1)
                    <= slow + rounding
                )
    # At one point, with w behind the target and without noise, the decay is the fastest.
    if sigma1 == 0:
        assert relative_decay(v, w, lambda1, sigma1).item() == pytest.approx(fast, rel=1e-4)
    assert not fast <= relative_decay(v, 20 * w, lambda1, sigma1) <= slow


def test_fit_is_exact_on_an_exponential():
    t = torch.linspace(0, 3, 50).double()
    values = torch.stack([2 * torch.exp(-1.5 * t), 7 * torch.exp(0.25 * t)])
    assert theory.fit_decay_rate(t, values).tolist() == pytest.approx([1.5, -0.25])
    values[0, [3, 8, 20]] = double([0.0, torch.nan, torch.inf])  # ignored
    assert theory.fit_decay_rate(t, values[0]).item() == pytest.approx(1.5)
    values[0, 1:] = torch.nan
    assert theory.fit_decay_rate(t, values).isnan().tolist() == [True, False]
    assert theory.fit_decay_rate(torch.full((3,), 0.1), torch.tensor([1.0, 2.0, 3.0])).isnan()


@pytest.mark.parametrize("noise", ["isotropic", "anisotropic"])
def test_decay_with_the_consensus_at_the_target(noise):
    """eq:dyn_micro2 with m = target = 0: d theta = -lambda theta dt + sigma D(theta) dB."""
    lambda1, sigma1, dim, dt, vartheta = 1.0, 0.4, 3, 0.01, 0.2
    rate = theory.contraction_rate(lambda1=lambda1, sigma1=sigma1, dim=dim, noise=noise)
    theta, target = normal(1, 20_000, dim), torch.zeros(dim, dtype=torch.float64)
    values = [theory.V(theta, target)]
    for n in range(150):
        D = theta.norm(dim=-1, keepdim=True) if noise == "isotropic" else theta
        theta = (
            theta - lambda1 * theta * dt + sigma1 * math.sqrt(dt) * D * normal(2 + n, 20_000, dim)
        )
        values.append(theory.V(theta, target))
    t, v = torch.arange(151).double() * dt, torch.stack(values)
    assert theory.fit_decay_rate(t, v).item() == pytest.approx(rate, rel=0.03)
    low, high = theory.decay_bounds(t, v[0].item(), vartheta=vartheta, rate=rate)
    assert (low <= v).all()
    assert (v <= high).all()
    eps = 0.15 * v[0].item()
    reached = t[v <= eps][0].item()
    earliest, latest = theory.end_time_window(v[0].item(), eps, vartheta=vartheta, rate=rate)
    assert earliest <= reached <= latest + dt


# ---- the choice of beta and alpha ----

# thm:main needs |m - target| < c sqrt(V) while V > eps, so 0.1 at V = eps
C, EPS = (0.5, 0.04)


def test_scales_by_hand():
    s = theory.scales(POINTS, c=C, eps=EPS)
    level = C * 0.2 / 3
    assert s.G_inf == 1.5  # of 5.9, 1.5 and 1.5^2
    assert (s.r_G, s.u) == pytest.approx((level / 5, level / 4))
    assert (s.delta_q, s.xi_L, s.r_H) == pytest.approx((level / 10, level / 10, level / 10))
    with_delta_q = theory.scales(POINTS, c=C, eps=EPS, delta_q=level / 50)
    assert (with_delta_q.xi_L, with_delta_q.r_H) == pytest.approx((level / 5 - level / 50,) * 2)
    capped = theory.scales(CIRCLE, c=100, eps=1)  # all values are capped
    assert (capped.G_inf, capped.r_G, capped.u) == pytest.approx((1.25, 0.25, 1.25 / 4))
    assert capped.delta_q == pytest.approx(0.25**2 / 2)
    assert capped.r_H == pytest.approx(math.sqrt(0.25**2 / 2 / 6.25))


ALPHA_0 = {
    **{"ball_mass": 0.1, "V0": 1.0, "eps": 0.01, "vartheta": 0.5},
    **{"rate": 2, "c": 0.12, "u": 0.25},
}


def test_beta_0_and_alpha_0_by_hand():
    assert theory.beta_0(w_m=0.25, ball_mass=0.2, p_H=0.5, end_time=2) == pytest.approx(
        0.375 * 0.2 * math.exp(-1)
    )
    # log(12/0.12) + log 10 + max(1/2, p / 1) log 100 + max(0, log(w_m/w_b 1.5 / 0.1)), over u.
    assert theory.alpha_0(POINTS, w_m=0, p=0, **ALPHA_0) == pytest.approx(4 * math.log(1e4))
    assert theory.alpha_0(POINTS, w_m=0, p=2, **ALPHA_0) == pytest.approx(4 * math.log(1e7))
    assert theory.alpha_0(POINTS, w_m=0.4, p=0, **ALPHA_0) == pytest.approx(4 * math.log(1e5))
    assert theory.alpha_0(POINTS, w_m=0.05, p=0, **ALPHA_0) == theory.alpha_0(
        POINTS, w_m=0, p=0, **ALPHA_0
    )
    # The other term of the maximum: 1 / (2 * 1 * 1.5^2).
    assert theory.alpha_0(POINTS, w_m=0.4, p=0, **{**ALPHA_0, "u": 1e3}) == pytest.approx(1 / 4.5)


def test_alpha_0_grows_and_beta_0_falls_with_the_share_of_attackers():
    settings = {**ALPHA_0, "p": 1.0}
    shares = [0.0, 1e-12, 0.01, 0.1, 0.3, 0.6, 0.9, 0.99]
    alphas = [theory.alpha_0(POINTS, w_m=w_m, **settings) for w_m in shares]
    assert alphas == sorted(alphas)
    assert alphas[1] == alphas[0] < alphas[-1]
    betas = [theory.beta_0(w_m=w_m, ball_mass=0.1, p_H=0.3, end_time=2) for w_m in shares]
    assert betas == pytest.approx([(1 - w_m) * betas[0] for w_m in shares])


@pytest.mark.parametrize("w_m", [0.0, 0.3, 0.9])
def test_the_quantile_is_low_below_beta_0(w_m):
    """beta < beta_0 gives q_beta[rho_0] <= L_low + xi_L for every attack."""
    s = theory.scales(POINTS, c=C, eps=EPS)
    mixture = points(1 + 0.5 * normal(0, 20_000, 1))
    mass = bounds.ball_mass(mixture.theta, mixture.target, s.r_H / 2)
    beta = 0.999 * theory.beta_0(w_m=w_m, ball_mass=mass, p_H=0, end_time=2)
    L = mixture.lower(mixture.theta)
    values = torch.cat([L, torch.full((1,), 1e9)])  # the worst attack on the quantile
    shares = torch.cat([torch.full((20_000,), (1 - w_m) / 20_000), torch.tensor([w_m])]).double()
    assert consensus.quantile(values, beta, mass=shares) <= s.xi_L
    # The bound fails once beta exceeds the benign mass with a low L.
    too_much = float((s.xi_L >= L).double().mean()) * (1 - w_m) + 1e-6
    assert consensus.quantile(values, too_much, mass=shares) > s.xi_L


@pytest.mark.parametrize("w_m", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("constants", [POINTS, WIDE], ids=["attackers outside", "attackers inside"])
def test_the_consensus_point_is_near_the_target_above_alpha_0(constants, w_m):
    """alpha > alpha_0, beta < beta_0: |m - target| <= total <= c sqrt(eps) (eq:proof:lapl1)."""
    s = theory.scales(constants, c=C, eps=EPS)
    r = 0.99 * min(s.r_G, s.delta_q / constants.H_L, s.u / constants.H_G)  # so that G_r <= u
    attackers = torch.full((1, 1), -1.0, dtype=torch.float64) if w_m else None
    mixture = points(1 + 0.5 * normal(0, 20_000, 1), attackers, w_m)
    mass = bounds.ball_mass(mixture.theta, mixture.target, r / 2)
    V0 = theory.V(mixture.theta, mixture.target).item()
    alpha = theory.alpha_0(
        constants, w_m=w_m, ball_mass=mass, V0=V0, eps=EPS, vartheta=0.5, rate=1.5, c=C, u=s.u, p=0
    )
    mass_H = bounds.ball_mass(mixture.theta, mixture.target, s.r_H / 2)
    beta = 0.999 * theory.beta_0(w_m=w_m, ball_mass=mass_H, p_H=0, end_time=2)
    setting = Setting(alpha=alpha, beta=beta, delta_q=s.delta_q, r_G=s.r_G, r=r, u=s.u)
    bound = bounds.laplace_bound(mixture, setting, constants)
    assert bound.applies, bound.hypotheses
    assert bounds.attack_bounds(mixture, setting, constants).applies
    assert bound.distance <= bound.total <= C * math.sqrt(EPS)
    if constants is WIDE and w_m == 0.9:  # with alpha / 2 the attackers' term is too large
        weak = bounds.laplace_bound(
            mixture, dataclasses.replace(setting, alpha=alpha / 2), constants
        )
        assert weak.total > C * math.sqrt(EPS)


# ---- suggestions ----


def test_the_increase_of_alpha_needs_the_constants():
    suggestion = theory.suggest_parameters(0.25, beta=0.2, alpha=100)
    assert (suggestion.beta_factor, suggestion.beta) == (0.75, pytest.approx(0.15))
    assert suggestion.alpha_increase is suggestion.alpha is None
    assert any("delta_q" in note for note in suggestion.notes)
    assert any("alg:localAggregation" in note for note in suggestion.notes)


def test_suggestion_agrees_with_alpha_0_and_beta_0():
    settings = {"ball_mass": 0.1, "V0": 1.0, "vartheta": 0.5, "rate": 2, "c": 0.12, "p": 1.0}
    for share in (0.0, 0.05, 0.4, 0.9):
        unattacked = theory.alpha_0(POINTS, w_m=0, eps=0.01, u=0.25, **settings)
        suggestion = theory.suggest_parameters(
            share, alpha=unattacked, R_K_G=POINTS.R_K_G, eps=0.01, u=0.25
        )
        assert suggestion.alpha == pytest.approx(
            theory.alpha_0(POINTS, w_m=share, eps=0.01, u=0.25, **settings)
        )
    # log(0.4 / 0.6 x 1.5 / 0.1) / 0.5
    known = theory.suggest_parameters(0.4, alpha=10, R_K_G=1.5, eps=0.01, u=0.5)
    assert known.alpha_increase == pytest.approx(2 * math.log(10))


def test_suggestion_without_attackers_changes_nothing():
    suggestion = theory.suggest_parameters(0, beta=0.2, alpha=100)
    assert (suggestion.beta, suggestion.alpha, suggestion.alpha_increase) == (0.2, 100, 0)


def test_suggestion_warns_of_capture():
    assert "delta_q = 0" in theory.suggest_parameters(0.3, beta=0.1).notes[0]
    assert "0.07" in theory.suggest_parameters(0.3, beta=0.1).notes[0]
    assert len(theory.suggest_parameters(0.1, beta=0.5).notes) == len(
        theory.suggest_parameters(0.3).notes
    )


# ---- invalid settings ----


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.end_time(1.0, 0.1, vartheta=0.5, rate=-18.0), "2 lambda - d sigma^2 > 0, got -18"),
        (lambda: theory.end_time(1.0, 2.0, vartheta=0.5, rate=1), "`eps` must be above 0 and below V0 = 1, got 2"),
        (lambda: theory.closeness(vartheta=0.5, lambda1=1, sigma1=1, dim=2), "2 lambda - d sigma^2 > 0, got 0"),
        (lambda: theory.beta_0(w_m=1.0, ball_mass=0.1, p_H=1, end_time=1), "`w_m`"),
        (lambda: theory.beta_0(w_m=0.1, ball_mass=0.0, p_H=1, end_time=1), "`ball_mass` must be above 0"),
        (lambda: theory.beta_0(w_m=0.1, ball_mass=0.1, p_H=-1, end_time=1), "`p_H` must be at least 0"),
        (lambda: theory.contraction_rate(lambda1=1, sigma1=1, dim=1, noise="pink"), "got pink"),
        (lambda: theory.scales(POINTS, c=C, eps=EPS, delta_q=1.0), "at most 0.00333333, got 1.0"),
        (lambda: dataclasses.replace(POINTS, eta_G=0), "`eta_G` must be above 0 and finite, got 0"),
        (lambda: dataclasses.replace(POINTS, G_inf=math.nan), "`G_inf`"),
        (lambda: dataclasses.replace(POINTS, L_low=-INF), "`L_low`"),
        (lambda: dataclasses.replace(AROUND, beta=1.0), "`beta`"),
        (lambda: dataclasses.replace(AROUND, G_r=-1.0), "`G_r`"),
        (lambda: points(torch.zeros(3, 1), None, 0.2), "`theta_m`"),
        (lambda: theory.suggest_parameters(1.0), "`share`"),
    ],
)  # fmt: skip
def test_invalid_settings_are_refused(call, message):
    with pytest.raises(ConfigError) as caught:
        call()
    assert message in str(caught.value)
