"""Steps and consensus point of an ensemble: known solutions, values by hand, invariances."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests import reference
from tests.particles.problems import double, evaluate_objectives
from torch.testing import assert_close

from fedcb2o.errors import ConfigError, RunError
from fedcb2o.particles.dynamics import (
    ConsensusParams,
    Values,
    consensus_point,
    consensus_step_,
    consensus_weights,
    gradient_step_,
)
from fedcb2o.particles.objectives import circle, paraboloid

INF = math.inf
G = paraboloid(2.0, 0.0)


def values(lower, upper, **rest):
    return Values(double([lower]), double([upper]), **rest)


def ensemble(*points):
    return double([points])


# ---- the step ----


def final_error(normals, dt, *, lambda1=1.0, sigma1=1.0):
    """Return the mean |X_1 - exact| of geometric Brownian motions around m driven by `normals`."""
    steps, paths, dim = normals.shape
    merged = round(dt * steps)
    m = double([[3.0, -5.0]])
    theta = (m + torch.tensor([1.0, -2.0])).expand(1, paths, dim).clone()
    exact = (theta - m) * torch.exp(
        -(lambda1 + sigma1**2 / 2) + sigma1 * normals.sum(0) / math.sqrt(steps)
    ) + m
    for increments in normals.reshape(steps // merged, merged, paths, dim).sum(1) / math.sqrt(
        merged
    ):
        consensus_step_(
            theta,
            m,
            increments.unsqueeze(0),
            lambda1=lambda1,
            sigma1=sigma1,
            dt=dt,
            noise="anisotropic",
        )
    return (theta - exact).abs().mean().item()


def test_a_step_has_strong_order_one_half():
    """dX = -lambda X dt + sigma X dB has X = X_0 exp(-(lambda + sigma^2/2) t + sigma B_t).

    The slope is 0.533 (deviation 0.007); the error of order dt lifts it above 1/2. It would be 0
    for a wrong limit and 1 for additive noise.
    """
    normals = torch.from_numpy(np.random.default_rng(0).standard_normal((512, 4000, 2)))
    dts = [2.0**-k for k in range(5, 10)]
    errors = [final_error(normals, dt) for dt in dts]
    order = np.polyfit(np.log(dts), np.log(errors), 1)[0]
    assert 0.45 < order < 0.58
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize(("noise", "share"), [("isotropic", 3), ("anisotropic", 1)])
def test_moments_of_a_step(noise, share):
    """A step has mean X - lambda X dt and variance sigma^2 dt |X|^2 or sigma^2 dt X_k^2.

    400,000 draws determine the mean square of a step to 0.4%.
    """
    n, dt, lambda1, sigma1 = 400_000, 0.1, 2.0, 0.7
    m, start = double([[1.0, 2.0, 3.0]]), double([0.5, 0.5, 0.5])
    theta = (m + start).expand(1, n, 3).clone()
    normals = torch.from_numpy(np.random.default_rng(1).standard_normal((1, n, 3)))
    consensus_step_(theta, m, normals, lambda1=lambda1, sigma1=sigma1, dt=dt, noise=noise)
    displacement = (theta - m)[0]
    assert_close(displacement.mean(0), start * (1 - lambda1 * dt), rtol=0, atol=0.005)
    var = sigma1**2 * dt * 0.25 * share
    assert_close(displacement.var(0), torch.full((3,), var).double(), rtol=0.015, atol=0)


def test_four_terms_of_a_step_by_hand():
    theta, m = ensemble([3.0, 4.0]), torch.zeros(1, 2, dtype=torch.float64)
    consensus_step_(
        theta, m, ensemble([1.0, -1.0]), lambda1=2.0, sigma1=0.5, dt=0.25, noise="isotropic"
    )
    # 3 - 2 * 3 / 4 + 0.5 * 5 * 1 / 2, and 4 - 2 * 4 / 4 - 0.5 * 5 / 2
    assert theta.tolist() == [[[2.75, 0.75]]]
    consensus_step_(
        theta, m, ensemble([1.0, -1.0]), lambda1=0.0, sigma1=2.0, dt=0.25, noise="anisotropic"
    )
    assert theta.tolist() == [[[5.5, 0.0]]]
    gradient_step_(
        theta, ensemble([3.0, -4.0]), ensemble([2.0, 1.0]), lambda2=2.0, sigma2=0.2, dt=0.25
    )
    # 5.5 - 2 * 3 / 4 + 0.2 * 5 * 2 / 2, and 0 + 2 * 4 / 4 + 0.2 * 5 * 1 / 2
    assert theta.tolist() == pytest.approx(np.array([[[5.0, 2.5]]]))
    gradient_step_(theta, ensemble([1.0, 0.0]), None, lambda2=1.0, sigma2=9.0, dt=0.5)
    consensus_step_(theta, m, None, lambda1=1.0, sigma1=9.0, dt=0.5, noise="isotropic")
    assert theta.tolist() == pytest.approx(np.array([[[2.25, 1.25]]]))


# ---- the consensus point ----


def test_consensus_point_by_hand():
    theta = ensemble([0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [9.0, 9.0])
    log2 = math.log(2)
    v = values([1.0, 1.0, 2.0, 3.0], [0.0, log2, 0.0, -9.0])
    # q_{1/2} = 1 keeps two, with the weights 1 and 1/2.
    assert consensus_point(theta, v, ConsensusParams(1.0, 0.5))[0].tolist() == pytest.approx(
        [4 / 3, 0]
    )
    # alpha = 2: 1 and 1/4.
    assert consensus_point(theta, v, ConsensusParams(2.0, 0.5))[0].tolist() == pytest.approx(
        [4 / 5, 0]
    )
    # delta_q = 1 keeps the third: 1, 1/2, 1.
    assert consensus_point(theta, v, ConsensusParams(1.0, 0.5, 1.0))[0].tolist() == pytest.approx(
        [4 / 5, 8 / 5]
    )
    # q_{3/4} = 2; the averaged level is (1 * (1/2 - 3/8) + 2 * (3/4 - 1/2)) / (3/8) = 5/3 and keeps
    # two.
    assert consensus_point(theta, v, ConsensusParams(1.0, 0.75))[0].tolist() == pytest.approx(
        [4 / 5, 8 / 5]
    )
    params = ConsensusParams(1.0, 0.75, averaged=True)
    assert consensus_point(theta, v, params)[0].tolist() == pytest.approx([4 / 3, 0])
    # delta_q slightly above 1/3 raises this level to 2.
    params = ConsensusParams(1.0, 0.75, 0.334, averaged=True)
    assert consensus_point(theta, v, params)[0].tolist() == pytest.approx([4 / 5, 8 / 5])


def test_consensus_point_with_masses_by_hand():
    theta = ensemble([0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [9.0, 9.0])
    v = values([1.0, 1.0, 2.0, 3.0], [0.0, math.log(2), 0.0, -9.0])
    mass = double([[0.1, 0.2, 0.3, 0.4]])
    # rho(L <= 1) = 0.3, rho(L <= 2) = 0.6; the weights are 0.1, 0.2 / 2 and 0.3.
    assert consensus_point(theta, v, ConsensusParams(1.0, 0.3), mass)[0].tolist() == pytest.approx(
        [2, 0]
    )
    assert consensus_point(theta, v, ConsensusParams(1.0, 0.31), mass)[0].tolist() == pytest.approx(
        [0.8, 2.4]
    )
    # beta = 0.5: (1 * (0.3 - 0.25) + 2 * (0.5 - 0.3)) / 0.25 = 1.8, which is below 2.
    assert consensus_point(theta, v, ConsensusParams(1.0, 0.5, averaged=True), mass)[
        0
    ].tolist() == pytest.approx([2, 0])
    assert consensus_point(theta, v, ConsensusParams(1.0, 0.5, 0.21, averaged=True), mass)[
        0
    ].tolist() == pytest.approx([0.8, 2.4])
    # Without G all particles count (eq:fedcbo_ConsensusPoint): 0.1, 0.2, 0.3 e^-1, 0.4 e^-2.
    weights = double([0.1, 0.2, 0.3 / math.e, 0.4 / math.e**2])
    expected = (weights / weights.sum()) @ theta[0]
    result = consensus_point(theta, Values(v.lower, None), ConsensusParams(1.0, 0.1), mass)[0]
    assert_close(result, expected)


def test_ties_at_the_quantile_are_kept():
    theta = torch.arange(6.0, dtype=torch.float64).view(1, 6, 1)
    v = values([2.0, 1.0, 1.0, 1.0, 1.0, 2.0], [0.0] * 6)
    for averaged in (False, True):
        mu = consensus_weights(v, ConsensusParams(1.0, 0.2, averaged=averaged))
        assert mu[0].tolist() == pytest.approx([0, 0.25, 0.25, 0.25, 0.25, 0])
        assert consensus_point(
            theta, v, ConsensusParams(1.0, 0.2, averaged=averaged)
        ).item() == pytest.approx(2.5)


def test_the_ball_restricts_the_sublevel_set_but_not_its_level():
    theta = ensemble([5.0], [1.0], [2.0], [3.0])
    v = evaluate_objectives(theta, lambda x: -x[..., 0], lambda x: x[..., 0] * 0, radius=2.5)
    assert v.in_ball.tolist() == [[False, True, True, False]]
    assert consensus_point(theta, v, ConsensusParams(1.0, 0.75, radius=2.5)).item() == 2.0
    for alpha in (0.0, 5.0):
        with pytest.raises(RunError, match=r"`radius` = 2\.5"):
            consensus_point(theta, v, ConsensusParams(alpha, 0.5, radius=2.5))
    on_the_sphere = evaluate_objectives(ensemble([3.0, 4.0]), circle, G, radius=5.0)
    assert on_the_sphere.in_ball.item()  # B_R is closed here


def test_a_ball_with_only_excluded_particles_is_an_error():
    """The level is infinite, so Q_beta holds all; the particle inside the ball is excluded."""
    theta = ensemble([0.0], [3.0], [4.0])
    v = evaluate_objectives(
        theta,
        lambda x: torch.where(x[..., 0] < 1, torch.nan, x[..., 0]),
        lambda x: x[..., 0],
        radius=1.0,
    )
    with pytest.raises(RunError, match="`radius` = 1"):
        consensus_point(theta, v, ConsensusParams(1.0, 1.0, radius=1.0))


def test_a_ball_without_mass_is_an_error():
    theta = ensemble([0.0], [3.0], [4.0])
    v = evaluate_objectives(theta, lambda x: x[..., 0], lambda x: x[..., 0], radius=1.0)
    mass = double([[0.0, 0.5, 0.5]])
    with pytest.raises(RunError, match="`radius` = 1"):
        consensus_point(theta, v, ConsensusParams(1.0, 0.5, radius=1.0), mass)


@pytest.mark.parametrize("alpha", [1.0, 1e3])
def test_weights_never_underflow(alpha):
    theta = ensemble([1.0], [2.0], [3.0])
    v = values([0.0, 0.0, 0.0], [1e300, 2e300, 3e300])
    assert consensus_point(theta, v, ConsensusParams(alpha, 0.5)).item() == 1.0
    v = values([0.0, 0.0, 0.0], [1e300, 1e300, -1e300])
    assert consensus_point(theta, v, ConsensusParams(alpha, 0.5)).item() == 3.0
    assert consensus_point(theta, Values(v.upper, None), ConsensusParams(alpha, 0.5)).item() == 3.0


ensembles = st.integers(0, 2**32 - 1).map(np.random.default_rng)
filters = st.builds(
    ConsensusParams,
    alpha=st.sampled_from([0.0, 0.5, 8.0]),
    beta=st.sampled_from([0.05, 0.1, 0.3, 0.5, 0.8, 1.0]),
    delta_q=st.sampled_from([0.0, 0.5]),
    averaged=st.booleans(),
)


def random_ensemble(rng, *, exact=False):
    """Return an ensemble with L, G and masses; L has ties, or is `exact` under shifts."""
    n, d = int(rng.integers(1, 13)), int(rng.integers(1, 4))
    theta = torch.from_numpy(rng.standard_normal((1, n, d)))
    lower = (
        rng.integers(-12, 12, (1, n)) / 8 if exact else rng.choice(rng.standard_normal(6), (1, n))
    )
    lower = torch.from_numpy(lower)
    upper = torch.from_numpy(rng.integers(-40, 40, (1, n)) / 8)
    mass = torch.from_numpy(rng.dirichlet(np.ones(n), 1)) if rng.random() < 0.5 else None
    return theta, lower, upper, mass


@given(ensembles, filters)
def test_the_consensus_point_does_not_depend_on_the_order(rng, params):
    theta, lower, upper, mass = random_ensemble(rng)
    order = rng.permutation(theta.shape[1])
    m = consensus_point(theta, Values(lower, upper), params, mass)
    mass = None if mass is None else mass[:, order]
    other = consensus_point(theta[:, order], Values(lower[:, order], upper[:, order]), params, mass)
    assert_close(other, m)


@given(
    ensembles,
    filters,
    st.sampled_from([-1e5, -0.5, 3.0, 1e6]),
    st.sampled_from([-64.0, 0.25, 1024.0]),
)
def test_the_consensus_point_ignores_shifts_of_l_or_g_and_scales_of_mass(
    rng, params, shift, other_shift
):
    theta, lower, upper, mass = random_ensemble(rng, exact=True)
    m = consensus_point(theta, Values(lower, upper), params, mass)
    assert_close(consensus_point(theta, Values(lower, upper + shift), params, mass), m)
    if not params.averaged:  # a mean of shifted numbers rounds anew
        assert_close(consensus_point(theta, Values(lower + other_shift, upper), params, mass), m)
    if mass is not None:
        assert_close(consensus_point(theta, Values(lower, upper), params, mass * 4), m)


@given(ensembles, filters, st.floats(-1e3, 1e3))
def test_the_consensus_point_moves_with_the_ensemble(rng, params, shift):
    theta, lower, upper, mass = random_ensemble(rng)
    m = consensus_point(theta, Values(lower, upper), params, mass)
    moved = consensus_point(theta + shift, Values(lower, upper), params, mass)
    assert_close(moved, m + shift, rtol=1e-10, atol=1e-10)
    hull = (theta.amin(1) - 1e-12 <= m) & (m <= theta.amax(1) + 1e-12)
    assert hull.all()


@given(ensembles, filters)
def test_the_consensus_point_equals_the_reference(rng, params):
    theta, lower, upper, mass = random_ensemble(rng)
    shares = [1.0] * theta.shape[1] if mass is None else mass[0].tolist()
    # The reference evaluates points; the first coordinate, almost surely unique, names a point.
    rows = {point[0]: i for i, point in enumerate(theta[0].tolist())}
    cluster = reference.Cluster(
        lambda x: lower[0, rows[x[0]]].item(), list, lambda x: upper[0, rows[x[0]]].item()
    )
    particles = [reference.Particle(p, w) for p, w in zip(theta[0].tolist(), shares, strict=True)]
    sde = reference.SDE(
        alpha=params.alpha, beta=params.beta, delta_q=params.delta_q, averaged=params.averaged
    )
    expected = reference.consensus_point(particles, cluster, sde)
    assert consensus_point(theta, Values(lower, upper), params, mass)[0].tolist() == pytest.approx(
        expected, abs=1e-9
    )


@given(st.floats(-1e3, 1e3), st.sampled_from([0.05, 0.1, 0.3, 0.7, 1.0]))
@example(51.0, 0.7)  # 2/beta * beta/2 * 51 is less than 51
def test_equal_values_have_equal_weights(value, beta):
    """Every particle ties at the level, for any rounding of the averaged level."""
    theta = torch.ones(1, 7, 2, dtype=torch.float64)
    lower = torch.full((1, 7), value, dtype=torch.float64)
    for averaged in (False, True):
        mu = consensus_weights(
            Values(lower, lower * 0), ConsensusParams(3.0, beta, averaged=averaged)
        )
        assert mu[0].tolist() == pytest.approx([1 / 7] * 7)
        point = consensus_point(
            theta, Values(lower, lower * 0), ConsensusParams(3.0, beta, averaged=averaged)
        )
        assert point[0].tolist() == pytest.approx([1.0, 1.0])


# ---- evaluation ----


def test_non_finite_values_are_excluded():
    theta = ensemble([1.0], [2.0], [3.0], [4.0])
    bad = {1.0: torch.nan, 2.0: torch.inf, 3.0: 0.5, 4.0: 0.25}
    v = evaluate_objectives(
        theta, lambda x: x[..., 0].clone().apply_(bad.get), lambda x: x[..., 0] * 0
    )
    assert v.excluded.tolist() == [[True, True, False, False]]
    assert consensus_point(theta, v, ConsensusParams(1.0, 1.0)).item() == pytest.approx(3.5)
    v = evaluate_objectives(theta, lambda x: x[..., 0], lambda x: x[..., 0].clone().apply_(bad.get))
    assert v.excluded.tolist() == [[True, True, False, False]]
    minus = evaluate_objectives(
        theta, lambda x: torch.where(x[..., 0] < 2, -torch.inf, x[..., 0]), None
    )
    assert minus.excluded.tolist() == [[True, False, False, False]]
    with pytest.raises(RunError, match="all 4 particles have NaN or infinite objectives"):
        consensus_point(
            theta,
            evaluate_objectives(theta, lambda x: x[..., 0] * torch.nan, None),
            ConsensusParams(1.0, 0.5),
        )


def test_values_whose_sum_overflows_are_finite():
    theta = ensemble([1.0], [2.0])
    v = evaluate_objectives(theta, lambda x: x[..., 0] * 0 + 1.5e308, lambda x: x[..., 0])
    assert v.excluded is None or not v.excluded.any()
    assert consensus_point(theta, v, ConsensusParams(0.0, 0.5)).item() == 1.5


@pytest.mark.parametrize("coordinate", [torch.inf, -torch.inf, torch.nan])
def test_non_finite_coordinates_do_not_affect_the_consensus_point(coordinate):
    theta = ensemble([1.0, 1.0], [coordinate, 2.0], [3.0, 3.0])
    v = evaluate_objectives(theta, circle, G)
    m = consensus_point(theta, v, ConsensusParams(0.0, 1.0))
    assert m[0].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("coordinate", [torch.inf, torch.nan])
def test_non_finite_coordinates_are_excluded_with_bounded_objectives(coordinate):
    """A non-finite particle is excluded even if its objectives are finite."""
    theta = ensemble([1.0, 1.0], [coordinate, 2.0], [1.0, 1.0])

    def bounded(x):
        return torch.exp(-x.square().sum(-1)).nan_to_num(nan=1.0)

    for lower in (bounded, lambda x: -bounded(x)):
        for params in (ConsensusParams(0.0, 0.4), ConsensusParams(5.0, 1.0)):
            assert consensus_point(theta, evaluate_objectives(theta, lower, bounded), params)[
                0
            ].tolist() == pytest.approx([1.0, 1.0])


def test_gradients_by_autograd_and_by_a_function():
    theta = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 5, 3)))
    expected = 4 * (theta.square().sum(-1, keepdim=True) - 1) * theta
    v = evaluate_objectives(theta, circle, None, gradient=True)
    assert_close(v.gradient, expected)
    assert not v.lower.requires_grad
    explicit = evaluate_objectives(
        theta, circle, None, gradient=lambda x: 4 * (x.square().sum(-1, keepdim=True) - 1) * x
    )
    assert_close(explicit.gradient, expected)
    flat = evaluate_objectives(theta[:1], circle, None, flat=True, gradient=True)
    assert_close(flat.gradient, expected[:1])
    assert evaluate_objectives(theta, circle, None).gradient is None


def test_invalid_objectives_are_refused():
    theta = torch.ones(1, 4, 2)
    for lower, message in (
        (lambda x: x, r"`lower` must return one value a particle: shape \[1, 4\].*got \[1, 4, 2\]"),
        (lambda x: x.sum(), r"`lower` must return one value a particle.*got \[\]"),
        (lambda x: x.sum(-1).tolist(), "`lower` must return a tensor, got a list"),
        (lambda x: x.sum(-1).numpy(), "`lower` must return a tensor, got a ndarray"),
        (lambda x: x.sum(-1) * 1j, "`lower` must return real numbers, got torch.complex64"),
        (
            lambda x: x.sum(-1).to_sparse(),
            "`lower` must return a dense tensor on cpu, got a sparse",
        ),
        (lambda x: next(iter([])), "`lower` raised StopIteration, as an exhausted iterator does"),
        (lambda x: None, "`lower` must return a tensor, got None"),
    ):
        with pytest.raises(ConfigError, match=message):
            evaluate_objectives(theta, lower, None)
        with pytest.raises(ConfigError, match=message.replace("lower", "upper")):
            evaluate_objectives(theta, circle, lower)
    with pytest.raises(ConfigError, match="`gradient` must return a tensor of shape"):
        evaluate_objectives(theta, circle, None, gradient=lambda x: x.sum(-1))
    with pytest.raises(ConfigError, match="`lower` has no gradient by autograd"):
        evaluate_objectives(theta, lambda x: circle(x.detach()), None, gradient=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float16])
def test_values_of_other_types_are_converted_to_float64(dtype):
    theta = torch.tensor([[[0.0], [1.0], [3.0]]], dtype=torch.float64)
    values = evaluate_objectives(theta, lambda x: x[..., 0].to(dtype), None)
    assert values.lower.dtype == torch.float64
    assert values.lower.tolist() == [[0.0, 1.0, 1.0 if dtype == torch.bool else 3.0]]
    slope = evaluate_objectives(theta, circle, None, gradient=lambda x: x.to(dtype)).gradient
    assert slope.dtype == torch.float64


def test_one_output_buffer_for_both_objectives_is_refused():
    theta = torch.ones(1, 4, 2)
    buffer = torch.zeros(1, 4)

    def into_buffer(x):
        return buffer.copy_(x.sum(-1))

    with pytest.raises(ConfigError, match="`upper` writes into the values that `lower` returned"):
        evaluate_objectives(theta, into_buffer, into_buffer)
