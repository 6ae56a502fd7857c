"""Evidence behind `success`, budgets, ties, local searches, and the fields of a result."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.optimize import NonlinearConstraint
from tests.particles.problems import G, double

from fedcb2o import ConfigError, Paper, minimize
from fedcb2o.particles import objectives
from fedcb2o.particles.adversaries import static
from fedcb2o.particles.dynamics import EvaluationRequest
from fedcb2o.particles.hopping import Hopper
from fedcb2o.particles.local_search import Found, search_locally

BOX = [(-5, 5)] * 2


def narrow_basin(x):
    """Return the reader's function: a wide basin of 0, and one of -1 in 0.3% of the box."""
    return torch.minimum(x.square().sum(-1), 200 * (x - 3).square().sum(-1) - 1)


def rosenbrock(x):
    return (1 - x[..., 0]) ** 2 + 100 * (x[..., 1] - x[..., 0] ** 2) ** 2


@pytest.mark.parametrize("seed", range(6))
def test_a_better_basin_that_is_narrow_is_found(seed):
    result = minimize(narrow_basin, bounds=BOX, seed=seed)
    assert result.success
    assert result.x.tolist() == pytest.approx([3, 3], abs=1e-6)
    other = result.runners_up[0]
    assert other.x.tolist() == pytest.approx([0, 0], abs=1e-3)
    assert (other.lower, other.searches > 0) == (pytest.approx(0, abs=1e-6), True)


def test_success_needs_uniform_points():
    """Searches agree after 700 evaluations, and 2,000 uniform points are needed."""
    result = minimize(lambda x: x.square().sum(-1), dim=2, maxfev=1000)
    assert (result.success, result.status) == (False, "maxfev")
    assert "of 2000 uniform points" in result.message


def test_x0_is_evaluated():
    """f(x0) = 0.093."""
    start = [1.01, 1.05]
    seen = []

    def f(x):
        seen.append(x.clone())
        return rosenbrock(x)

    minimize(f, x0=start, maxfev=100)
    assert (seen[0][0] == double(start)).all()
    result = minimize(rosenbrock, x0=start, maxfev=100, finish=False)
    assert result.lower <= rosenbrock(double(start))


@pytest.mark.parametrize(("dim", "maxfev"), [(2, 40), (3, 60), (3, 159), (2, 400)])
@pytest.mark.parametrize("finish", [False, True])
def test_budgets_are_kept_and_used(dim, maxfev, finish):
    count = 0

    def f(x):
        nonlocal count
        count += len(x)
        return objectives.rastrigin(x)

    result = minimize(f, dim=dim, maxfev=maxfev, finish=finish)
    assert result.nfev == count - 3  # the first call also tries three points alone
    assert result.nfev <= maxfev
    assert result.nfev >= maxfev - 7 - (dim + 1)


def test_a_budget_below_the_first_ensemble_is_refused():
    with pytest.raises(ConfigError, match="`maxfev` = 10 is too small: the first ensemble and x"):
        minimize(objectives.circle, dim=2, num_particles=20, maxfev=10)


@pytest.mark.parametrize("maxfev", [24, 60, 501])
@pytest.mark.parametrize(
    ("settings", "num_benign"),
    [
        ({"dynamics": Paper()}, {24: 11, 60: 29, 501: 200}),
        ({"dynamics": Paper(batch=5)}, {24: 6, 60: 24, 501: 200}),
        ({"adversaries": static(5, at=(-1.0, 0.0))}, {24: 6, 60: 24, 501: 24}),
    ],
)
def test_a_small_budget_has_room_for_a_step(maxfev, settings, num_benign):
    result = minimize(objectives.circle, G, 2, maxfev=maxfev, **settings)
    assert result.nit > 0
    assert maxfev / 3 < result.nfev <= maxfev
    assert len(result.theta) == num_benign[maxfev]


def test_clusters_share_a_small_budget():
    """Each of two objectives is evaluated at all particles: 2 (2 x 14 x 2 + 1) = 114."""
    lowers = [objectives.circle, objectives.parabola]
    result = minimize(lowers, G, 2, clusters=True, maxfev=120)
    assert (result.nit, result.nfev, len(result.theta)) == (1, 114, 28)
    with pytest.raises(ConfigError, match="two ensembles and x need 18 evaluations"):
        minimize(lowers, G, 2, clusters=True, maxfev=17)


def test_minimisers_at_walls_and_inside_are_ties():
    """L is 1e-31 at the corners and 1e-16 next to minimisers inside; G decides."""
    centre = double([0.6, -0.4])
    result = minimize(
        lambda x: torch.sin(math.pi * x).square().sum(-1),
        lambda x: (x - centre).square().sum(-1),
        bounds=BOX,
    )
    assert result.upper == pytest.approx(0.32, abs=1e-4)


def circle_until_ctrl_c():
    """Return the circle, interrupted in its call number 40."""
    calls = itertools.count(1)

    def f(x):
        if next(calls) == 40:
            raise KeyboardInterrupt
        return objectives.circle(x)

    return f


@pytest.mark.parametrize("dynamics", ["adaptive", "paper"])
def test_ctrl_c_returns_the_best_so_far(dynamics):
    result = minimize(circle_until_ctrl_c(), G, 2, dynamics=dynamics)
    assert (result.success, result.status) == (False, "interrupted")
    assert result.nit > 10
    assert result.lower < 0.1

    def at_once(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        minimize(at_once, dim=2)


def test_ctrl_c_in_a_level_ends_all_levels():
    levels = [circle_until_ctrl_c(), lambda x: x[..., 0].square(), lambda x: x[..., 1]]
    result = minimize(levels, dim=2, maxfev=5000)
    assert (result.status, result.nfev < 1700) == ("interrupted", True)
    assert len(result.levels) == 3


def test_the_status_names_the_reason():
    assert minimize(objectives.circle, G, 2).status == "success"
    assert minimize(objectives.circle, G, 2, maxiter=3).status == "maxiter"
    assert minimize(objectives.circle, G, 2, callback=lambda state: True).status == "callback"
    never = NonlinearConstraint(lambda x: x[0] ** 2, -math.inf, -1.0)
    assert minimize(lambda x: x[0], constraints=never, dim=1, maxfev=300).status == "infeasible"
    many = minimize(objectives.circle, G, 2, runs=2, maxiter=2)
    assert many.status == ["maxiter", "maxiter"]


def test_the_history_has_the_values_of_l_and_g():
    result = minimize(objectives.circle, G, 2, maxfev=3000)
    history = result.history
    assert history.lower.shape == history.upper.shape == history.n.shape
    assert history.lower[-1] == pytest.approx(float(result.lower), abs=1e-12)
    assert history.upper[-1] == pytest.approx(float(result.upper), abs=1e-9)
    paper = minimize(objectives.circle, G, 2, dynamics="paper", maxiter=20)
    first = minimize(objectives.circle, G, 2, dynamics="paper", maxiter=0)
    values = objectives.circle(first.theta)
    assert paper.history.lower[0] == values.min()
    assert paper.history.upper[0] == G(first.theta[values.argmin()])


def test_the_plot_draws_l_g_and_the_spread():
    ax = minimize(objectives.circle, G, 2, maxfev=1000).plot()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["lower", "upper", "spread"]
    one = minimize(objectives.circle, None, 2, runs=2, maxfev=1000).plot()
    assert len(one.lines) == 4


def test_local_searches_find_the_last_digits_within_the_constraints():
    """The solution is tangential: x1 + x2 least in the unit disc."""
    disc = NonlinearConstraint(lambda x: x[0] ** 2 + x[1] ** 2, -np.inf, 1.0)
    settings = {"constraints": disc, "bounds": BOX, "maxfev": 400}
    result = minimize(lambda x: x[0] + x[1], **settings)
    assert result.constr_violation == 0
    assert result.fun == pytest.approx(-math.sqrt(2), abs=1e-9)
    without = minimize(lambda x: x[0] + x[1], **settings, finish=False)
    assert abs(without.fun + math.sqrt(2)) > 1e-9


def test_local_searches_end_where_more_constraints_than_coordinates_are_active():
    """The solution is the apex of a cone with 30 curved faces."""
    generator = np.random.default_rng(0)
    apex = generator.uniform(-1, 1, 4)
    faces = generator.normal(size=(30, 4))
    faces[:, 3] = -abs(faces[:, 3]) - 0.1
    cone = NonlinearConstraint(lambda x: np.expm1(faces @ (np.asarray(x) - apex)), -np.inf, 0.0)
    result = minimize(lambda x: x[3], bounds=[(-3, 3)] * 4, constraints=cone, maxfev=200)
    assert result.constr_violation == 0
    assert result.fun == pytest.approx(apex[3], abs=1e-8)


def test_a_local_search_from_a_uniform_point_does_not_end_an_ensemble():
    hopper = Hopper(0, np.full(2, -3.0), np.full(2, 3.0), 24, can_search=True)
    for _ in range(4):
        points = hopper.points()
        hopper.update(points, np.square(points).sum(1), None)
    x, value = points[:1], np.ones(1)
    hopper.add_search(Found(x[0], 1.0, 1.0, True, False, x, value, value))
    assert hopper.num_ensembles == 0
    assert (hopper.points()[0] == hopper.m).all()


def test_functions_that_are_not_smooth_end_local_searches():
    """Each of three searches costs d + 1 evaluations at most twice."""
    calls = []

    def steps(x):
        calls.append(len(x))
        return (10 * x).round().square().sum(-1)

    minimize(steps, dim=2, maxfev=3000)
    assert sum(size == 2 for size in calls) <= 6


def test_a_local_search_keeps_its_limit_and_its_walls():
    request = EvaluationRequest(torch.zeros(1, 1, 2, dtype=torch.float64), rosenbrock, None)
    low, high = np.full(2, -2.0), np.full(2, 0.5)
    steps = search_locally(request, low, low, high, (low, high), 30)
    points = []

    def recorded():
        asked = next(steps)
        while True:
            points.append(asked.theta[0])
            asked = steps.send(asked.evaluate())

    with pytest.raises(StopIteration) as end:
        recorded()
    found = end.value.value
    seen = torch.cat(points).numpy()
    assert np.array_equal(found.points, seen)
    assert len(seen) <= 30
    assert ((seen >= low) & (seen <= high)).all()
    assert found.lower == found.lowers.min() < 2


def test_searches_at_points_of_their_own_are_doubts():
    """Three local searches of Rastrigin's function end at the second best of 1,000 minima."""

    def rastrigin(x):
        return (x.square() - 10 * torch.cos(2 * math.pi * x) + 10).sum(-1)

    result = minimize(rastrigin, bounds=[(-5.12, 4.0)] * 3, maxfev=12_000, seed=0)
    assert not (result.success and result.fun > 0.01)
