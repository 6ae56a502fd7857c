"""The adaptive dynamics: convergence, restarts, criterion of success, best evaluated point."""

import math
import os

import numpy as np
import pytest
import torch
from scipy.optimize import NonlinearConstraint
from tests.particles.problems import G, double
from tests.type_checks import VARIABLE

from fedcb2o import Adaptive, ConfigError, Paper, minimize
from fedcb2o.particles import objectives
from fedcb2o.particles.cloud import Cloud
from fedcb2o.particles.hopping import Hopper

BUDGET = {"maxfev": 3000}
UNCHECKED = pytest.mark.skipif(VARIABLE in os.environ, reason="type checks refuse it first")


def rosenbrock(x):
    return (1 - x[..., 0]) ** 2 + 100 * (x[..., 1] - x[..., 0] ** 2) ** 2


@pytest.mark.parametrize(
    ("lower", "upper", "target"),
    [
        (objectives.circle, G, (1.0, 0.0)),
        (objectives.circle, objectives.ackley(0.6, -0.8), (0.6, -0.8)),
        (objectives.parabola, objectives.ackley(0.5, 1 / 3), (0.5427013393, 0.2945247437)),
        (rosenbrock, None, (1.0, 1.0)),
        # A feasible set with an interior, in which G falls towards a corner (1, 1).
        (lambda x: (x - 1).clamp(min=0).square().sum(-1), lambda x: -x.sum(-1), (1.0, 1.0)),
        # L is infinite on one side.
        (lambda x: torch.where(x[..., 0] < 0, torch.inf, x[..., 0]), lambda x: x[..., 1].square(), (0.0, 0.0)),
    ],
    ids=["circle", "ackley", "parabola", "rosenbrock", "corner", "one side"],
)  # fmt: skip
def test_the_result_minimises_g_among_the_minimisers_of_l(lower, upper, target):
    result = minimize(lower, upper, 2, maxfev=6000, seed=2)
    assert torch.allclose(result.x, double(target), atol=1e-3), result


def test_the_result_is_inside_a_narrow_feasible_set():
    """G falls away from the corner of four half-spaces, so feasible points come late."""
    generator = np.random.default_rng(3)
    normals = double(generator.standard_normal((4, 5)))

    def lower(x):
        return (x @ normals.T).clamp(min=0).square().sum(-1)

    def upper(x):
        return -1e3 * (x @ normals.sum(0)) + x.square().sum(-1)

    result = minimize(lower, upper, 5, maxfev=2000, bounds=(-5, 5))
    assert result.lower == 0


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_scaling_l_or_g_does_not_change_the_solution(factor):
    original = minimize(objectives.circle, G, 2, **BUDGET)
    scaled_l = minimize(lambda x: factor * objectives.circle(x), G, 2, **BUDGET)
    scaled_g = minimize(objectives.circle, lambda x: factor * G(x) + 3, 2, **BUDGET)
    for result in (original, scaled_l, scaled_g):
        assert torch.allclose(result.x, double([1.0, 0.0]), atol=1e-3)


def test_success_requires_agreement_of_independent_ensembles():
    two_levels = minimize(objectives.circle, G, 2, seed=1)
    assert two_levels.success
    assert two_levels.message == "2 of 2 independent searches ended at x"
    one_level = minimize(lambda x: x.square().sum(-1), dim=2, seed=1)
    assert one_level.success
    assert "independent searches ended at x" in one_level.message
    assert int(one_level.message.split()[0]) >= 3
    short_run = minimize(objectives.circle, G, 2, maxfev=500)
    assert not short_run.success
    assert short_run.message.endswith("0 of 0 independent searches ended at x, and 2 are needed")


def test_two_minimisers_of_equal_value_do_not_agree():
    def double_well(x):  # minimisers -1 and 1
        return (x[..., 0].square() - 1).square()

    hopper = Hopper(0, np.array([-3.0]), np.array([3.0]), 16)
    while len({round(float(end.x[0])) for end in hopper.ends}) < 2:
        points = hopper.points()
        hopper.update(points, double_well(torch.from_numpy(points)).numpy(), None)
    best = hopper.ranked_ends()[0]
    assert hopper.num_agreeing(best) < len(hopper.ends)


def test_a_run_without_a_feasible_point_fails():
    infeasible = NonlinearConstraint(lambda x: x[0] ** 2, -math.inf, -1.0)
    result = minimize(lambda x: x[0] ** 2, constraints=infeasible, dim=1, maxfev=2000)
    assert not result.success
    assert result.message.endswith("no point meets the constraints")
    assert result.constr_violation == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_batch_of_runs_equals_its_single_runs(dtype):
    settings = {"maxfev": 1500, "dtype": dtype}
    batch = minimize(objectives.circle, G, 2, runs=3, seed=4, **settings)
    single = minimize(objectives.circle, G, 2, seed=6, **settings)
    assert torch.equal(batch.x[2], single.x)
    assert (batch.nfev[2], batch.message[2]) == (single.nfev, single.message)


@pytest.mark.parametrize("budget", [9, 40, 100, 333])
def test_nfev_counts_the_evaluations_and_is_at_most_maxfev(budget):
    counts = []

    def lower(x):
        counts.append(len(x))
        return objectives.circle(x)

    result = minimize(lower, G, 2, maxfev=budget)
    assert result.nfev == sum(counts) - 3  # the first call also tries three points alone
    assert budget - 7 <= result.nfev <= budget  # 7 are reserved for a second evaluation of ends
    assert result.lower.isfinite()


def test_an_evaluation_that_does_not_repeat_is_not_the_result():
    """One wrong evaluation of G returns the smallest value."""
    count = 0

    def upper(x):
        nonlocal count
        values = G(x)
        if count == 30:
            values[3] = -100.0
        count += 1
        return values

    result = minimize(objectives.circle, upper, 2, **BUDGET)
    assert torch.allclose(result.x, double([1.0, 0.0]), atol=0.05)


def test_dynamics_by_name_have_the_default_parameters():
    named = minimize(objectives.circle, G, 2, maxiter=5, dynamics="paper")
    explicit = minimize(objectives.circle, G, 2, maxiter=5, dynamics=Paper(alpha=1000.0))
    assert torch.equal(named.theta, explicit.theta)
    assert torch.equal(named.x, named.consensus)
    default = minimize(objectives.circle, G, 2, maxiter=5)
    expected = minimize(objectives.circle, G, 2, maxiter=5, dynamics=Adaptive()).theta
    assert torch.equal(default.theta, expected)
    assert not torch.equal(default.theta, named.theta[:24])
    clusters = [objectives.circle] * 2
    implied = minimize(clusters, G, 2, maxiter=3, clusters=True)
    assert torch.equal(
        implied.theta, minimize(clusters, G, 2, maxiter=3, clusters=True, dynamics=Paper()).theta
    )


@pytest.mark.parametrize(
    ("lower", "dynamics", "message"),
    [
        ([objectives.circle] * 2, "adaptive", "several clusters need `dynamics` = 'paper'"),
        ([objectives.circle] * 2, Adaptive(), "several clusters need `dynamics` = 'paper'"),
        (objectives.circle, "papper", "`dynamics` must be .*, got 'papper'"),
        pytest.param(objectives.circle, Paper, "`dynamics` must be .*, got <class", marks=UNCHECKED),
        pytest.param(objectives.circle, {"alpha": 3.0}, "`dynamics` must be .*, got {'al", marks=UNCHECKED),
    ],
)  # fmt: skip
def test_invalid_dynamics_are_refused(lower, dynamics, message):
    with pytest.raises(ConfigError, match=message):
        minimize(lower, G, 2, dynamics=dynamics, clusters=not callable(lower))


def test_particles_respect_bounds_and_fixed_coordinates():
    settings = {"bounds": [(0.5, 2.0), (0.25, 0.25), (-1.0, None)], "maxfev": 2000}
    result = minimize(
        lambda x: x.square().sum(-1), callback=lambda state: assert_inside_bounds(state), **settings
    )
    assert result.x.tolist() == pytest.approx([0.5, 0.25, 0.0], abs=1e-5)


def assert_inside_bounds(state):
    low, high = double([0.5, 0.25, -1.0]), double([2.0, 0.25, math.inf])
    assert (state.theta >= low).all()
    assert (state.theta <= high).all()


def test_a_cloud_learns_the_shape_of_a_valley():
    """On x^2 + 10^4 y^2 the standard deviations approach the ratio 100."""
    cloud = Cloud(2, 12)
    generator = np.random.default_rng(0)
    m = np.array([1.0, 1.0])
    for _ in range(60):
        offsets = cloud.stretch(generator.standard_normal((24, 2)))
        values = np.square((m + offsets) * [1, 100]).sum(1)
        m = m + cloud.update(offsets[values.argsort()[:12]])
    spread = cloud.stretch(generator.standard_normal((5000, 2))).std(0)
    assert 30 < spread[0] / spread[1] < 300


def test_ensembles_search_for_a_smaller_g_before_they_agree():
    """L has 36 equal minimisers in the box, and G decides among them."""
    waves = objectives.problem("waves-2d")
    result = minimize(waves.lower, waves.upper, 2, bounds=waves.box, seed=1)
    assert result.success
    assert result.x.tolist() == pytest.approx([0.1 - math.sqrt(3 * math.pi), 0.0], abs=1e-4)


def test_a_smaller_l_where_g_is_infinite_prevents_success():
    """The only minimiser of L = -x is x = 1, where G is infinite (Mitsos and Barton, 3.2)."""

    def upper(x):
        return torch.where(x[..., 0] <= 0, x[..., 0], torch.inf)

    result = minimize(lambda x: -x[..., 0], upper, bounds=[(-1, 1)], maxfev=3000)
    assert not result.success
    assert result.message.startswith("L is smaller at points where G is infinite")
