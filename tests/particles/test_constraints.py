"""Constraints in SciPy's form: violations, known solutions, units, several runs, ask and tell."""

import os

import numpy as np
import pytest
import torch
from scipy import optimize, sparse
from scipy.optimize import LinearConstraint, NonlinearConstraint
from tests.type_checks import VARIABLE
from torch.testing import assert_close

import fedcb2o
from fedcb2o import Paper, minimize
from fedcb2o.errors import ConfigError
from fedcb2o.particles.constraints import Constraints, parse_constraints

from .problems import double

BOX = (-3.0, 3.0)


def violation(constraints, points, **settings):
    return Constraints(parse_constraints(constraints), **settings)(double(points)).tolist()


def distance(x):
    return (x[0] - 2) ** 2 + x[1] ** 2


DISC = NonlinearConstraint(lambda x: x @ x, -np.inf, 1.0)


# ---- L ----


def test_violations_by_hand():
    """The disc is violated by 0, 3 and 1. The scale is the lower median of the positive ones, 1.

    L is the sum of squares.
    """
    assert violation(DISC, [[0, 0.5], [0, 2], [1, 1]]) == [0, 9, 1]
    ring = NonlinearConstraint(lambda x: x @ x, 1.0, 4.0)
    values = violation(ring, [[0, 0], [0, 1.5], [0, 3], [0, 3]])
    assert values == pytest.approx([0.04, 0, 1, 1])
    at_least = {"type": "ineq", "fun": lambda x, a: x[0] - a, "args": (1.0,)}
    assert violation(at_least, [[0, 0], [1, 0], [-1, 0], [3, 0]]) == [1, 0, 4, 0]
    plane = LinearConstraint([[1, 1], [1, -1]], [-np.inf, 0], [1, np.inf])
    assert violation(plane, [[1, 1], [1, 0], [0, 1], [0, 4]]) == [1, 0, 1, 9 + 16]
    box = optimize.Bounds([0, 0], [1, 1])
    assert violation(box, [[0.5, 0.5], [2, 0.5], [0.5, -4], [0.5, -4]]) == [0, 1, 1, 1]


def test_an_equality_is_met_within_the_tolerance():
    line = {"type": "eq", "fun": lambda x: x[0]}
    points = [[0.0], [0.05], [1.0], [1.0], [-1.0]]
    assert violation(line, points, tol=0.1) == pytest.approx([0, 0, 0.81, 0.81, 0.81])


@pytest.mark.parametrize("unit", [1e-9, 1e6])
def test_units_of_a_constraint_do_not_change_the_violation(unit):
    """L is the same in other units, next to another constraint and without an initial violation."""
    points = np.random.default_rng(0).uniform(-2, 2, (40, 2))
    line = LinearConstraint([[1.0, 0.0]], 0.5, 0.5)

    def with_unit(unit):
        return [NonlinearConstraint(lambda x: unit * (x @ x), -np.inf, unit), line]

    assert violation(with_unit(unit), points) == pytest.approx(violation(with_unit(1.0), points))
    scaled = Constraints(parse_constraints(with_unit(unit)[0]))
    scaled(double(points / 10))
    plain = Constraints(parse_constraints(DISC))
    plain(double(points / 10))
    assert scaled(double([[2, 0]])).item() == pytest.approx(plain(double([[2, 0]])).item())


def test_each_run_has_its_own_scale():
    constraints = Constraints(parse_constraints(DISC))
    x = double([[[0, 2], [0, 1]], [[0, 3], [0, 1]]])
    assert constraints(x).tolist() == [[1, 0], [1, 0]]
    assert constraints.for_runs(torch.tensor([1]))(x[1:] / 1.5).tolist() == [[9 / 64, 0]]


def test_constraints_come_before_the_lower_objective():
    constraints = Constraints(parse_constraints(DISC), inner=lambda x: 10 * x[..., 0])
    values = constraints(double([[0.5, 0], [-0.5, 0], [2, 0], [2, 0]]))
    assert values.tolist() == [5, -5, 20 + 1, 20 + 1]


# ---- minimize ----

ROOT = np.sqrt(0.5)
QUICK = {"num_particles": 60, "dynamics": Paper(dt=0.1), "maxiter": 200, "seed": 1}
KNOWN = {
    "disc": (distance, DISC, [1, 0]),
    "two": (
        distance,
        [DISC, LinearConstraint(sparse.csr_array([[1.0, -1.0]]), -np.inf, 0)],
        [ROOT, ROOT],
    ),
    "equality": (lambda x: x @ x, {"type": "eq", "fun": lambda x: x[0] + x[1] - 1}, [0.5, 0.5]),
    "batch": (
        lambda x: x.square().sum(-1),
        NonlinearConstraint(lambda x: x[..., :1] - 1, 0, np.inf),
        [1, 0],
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_solutions(name):
    objective, constraints, solution = KNOWN[name]
    result = minimize(objective, dim=2, bounds=BOX, constraints=constraints, **QUICK)
    assert_close(result.x, double(solution), atol=0.15, rtol=0)
    assert result.fun == result.upper
    assert result.fun.item() == pytest.approx(objective(result.x).item())
    assert result.constr_violation <= 1e-2
    worst = max(violation.max().item() for violation in result.constr)
    assert result.constr_violation == worst
    assert "constr_violation" in repr(result)


@pytest.mark.parametrize("name", ["disc", "two", "equality"])
def test_the_scipy_method_returns_the_same_result(name):
    objective, constraints, _ = KNOWN[name]
    settings = {"num_particles": 40, "maxiter": 100}
    result = optimize.minimize(
        objective, [0.0, 0.0], method=fedcb2o.cb2o, bounds=[BOX] * 2, constraints=constraints,
        options=settings,
    )  # fmt: skip
    expected = minimize(objective, x0=[0.0, 0.0], bounds=BOX, constraints=constraints, **settings)
    assert result.x == pytest.approx(expected.x.numpy())
    assert result.fun == objective(result.x)
    assert result.constr_violation == expected.constr_violation
    assert [part.tolist() for part in result.constr] == [part.tolist() for part in expected.constr]


def test_two_levels_within_the_feasible_set():
    """L is least at x[0] = 0. There G is least at x[1] = 3, but the constraint is x[1] <= 1."""
    result = minimize(
        lambda x: x[..., 0].square(), lambda x: (x[..., 1] - 3).square(), dim=2, bounds=(-4, 4),
        constraints=LinearConstraint([[0.0, 1.0]], -np.inf, 1.0), **QUICK,
    )  # fmt: skip
    assert_close(result.x, double([0, 1]), atol=0.1, rtol=0)
    assert result.fun == result.lower == result.x[0] ** 2


def test_each_run_equals_the_run_of_its_seed():
    settings = {"dim": 2, "bounds": BOX, "constraints": KNOWN["two"][1], "num_particles": 30}
    settings |= {"dynamics": Paper(dt=0.1, xtol=0.01), "maxiter": 300, "record_every": 2}
    batch = minimize(distance, runs=3, seed=5, **settings)
    assert len(set(batch.nit.tolist())) > 1  # the runs stop at different steps
    assert batch.constr[1].shape == (3, 1)
    for run, seed in enumerate(batch.seed):
        single = minimize(distance, seed=seed, **settings)
        assert torch.equal(single.x, batch.x[run])
        assert single.constr_violation == batch.constr_violation[run]


def test_local_searches_keep_the_scale_of_each_run():
    settings = {"dim": 2, "bounds": BOX, "constraints": KNOWN["two"][1], "maxfev": 300}
    many = minimize(distance, runs=3, finish=True, **settings)
    single = minimize(distance, seed=2, finish=True, **settings)
    assert torch.equal(many.x[2], single.x)
    assert (many.fun <= minimize(distance, runs=3, **settings).fun).all()


def test_keep_feasible_does_not_evaluate_infeasible_points():
    """sqrt is not defined for x[0] < 0; particles there are excluded and not evaluated."""

    def root(x):
        assert x[0] >= 0
        return (np.sqrt(x[0]) - 1) ** 2 + x[1] ** 2

    positive = LinearConstraint([[1.0, 0.0]], 0, np.inf, keep_feasible=True)
    result = minimize(root, dim=2, bounds=BOX, constraints=positive, **QUICK)
    assert_close(result.x, double([1, 0]), atol=0.05, rtol=0)
    assert result.excluded > 0


def test_search_accepts_a_measured_constraint():
    settings = {"dim": 2, "bounds": BOX, "num_particles": 30, "maxiter": 100}
    measured = NonlinearConstraint(None, -np.inf, 1.0)
    half = LinearConstraint([[0.0, 1.0]], -np.inf, 0.5)
    search = fedcb2o.Search(constraints=[half, measured], **settings)
    while not search.done:
        points = search.ask()
        search.tell(points.sum(-1), constraints=[points.square().sum(-1)])
    expected = minimize(
        lambda x: x.sum(-1), constraints=[half, NonlinearConstraint(lambda x: x.square().sum(-1), -np.inf, 1)],
        **settings,
    )  # fmt: skip
    assert torch.equal(search.result.theta, expected.theta)
    assert search.result.constr_violation == expected.constr_violation
    unmeasured = fedcb2o.Search(constraints=measured, **settings)
    with pytest.raises(ConfigError, match="constraint 1 needs a value per component and point"):
        unmeasured.tell(unmeasured.ask().sum(-1))


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ([lambda x: x], "constraint 1 must be a NonlinearConstraint or LinearConstraint"),
        ({"type": "le", "fun": distance}, 'needs the keys "type", "eq" or "ineq"'),
        (NonlinearConstraint(distance, 2, 1), "a lower end above its upper end"),
        (LinearConstraint([[1.0, 1.0, 1.0]], 0, 1), "3 columns for 2 coordinates"),
        (NonlinearConstraint(lambda x: x, [0, 0, 0], 1), "2 components and 3 ends"),
        (NonlinearConstraint(lambda x: "a", 0, 1), "accepts neither many points nor one"),
    ],
)
def test_invalid_constraints_are_refused(constraints, message):
    with pytest.raises(ConfigError, match=message):
        minimize(distance, dim=2, constraints=constraints, maxiter=3)


def test_constraints_are_refused_for_several_clusters():
    with pytest.raises(ConfigError, match="`constraints` need one objective"):
        minimize([distance, distance], dim=2, constraints=DISC, clusters=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[0] >= 1,
        lambda x: bool(x[0] >= 1),
        lambda x: [x[0] - 1, x[1] >= 1],
        lambda x: x >= 1,
        lambda x: x[..., 0] >= 1,
        lambda x: x[:, 0] >= 1,
        lambda x: torch.stack([x[0] >= 1, x[1] >= 1]),
        fedcb2o.from_numpy(lambda x: x[..., 0] >= 1),
        fedcb2o.from_point(lambda x: x[0] >= 1),
        fedcb2o.from_point(lambda x: x[0] >= 1 and x[1] - 1),
        pytest.param(
            lambda x: fedcb2o.from_point(lambda point: point[0] >= 1)(x),
            marks=pytest.mark.skipif(VARIABLE in os.environ, reason="type checks refuse it first"),
        ),
    ],
    ids=[
        "one",
        "bool",
        "one of two",
        "vector",
        "many",
        "[n, d]",
        "tensor",
        "from_numpy",
        "from_point",
        "from_point at some points",
        "a function that calls from_point",
    ],
)
@pytest.mark.parametrize("errors", ["raise", "exclude"])
def test_truth_values_are_no_constraint(function, errors):
    dictionary = {"type": "ineq", "fun": function}
    for constraint in (dictionary, NonlinearConstraint(function, 0, np.inf)):
        with pytest.raises(ConfigError, match=r"truth values.*x\[0\] - 1 rather than x\[0\] >= 1"):
            minimize(double, dim=2, constraints=constraint, maxiter=2, errors=errors)


def test_a_constraint_of_from_point_may_have_several_values_and_arguments():
    function = fedcb2o.from_point(lambda point, a: [point[0] - a, point[1] - 2 * a])
    constraint = {"type": "ineq", "fun": function, "args": (1.0,)}
    result = minimize(lambda x: x.square().sum(-1), dim=2, constraints=constraint)
    assert result.x.tolist() == pytest.approx([1, 2], abs=1e-3)


@pytest.mark.parametrize("runs", [None, 3])
def test_fun_is_the_first_function_also_where_a_constraint_is_violated(runs):
    far = {"type": "ineq", "fun": lambda x: x[..., 0] - 50}
    result = minimize(
        lambda x: (x - 3).square().sum(-1), lambda x: x[..., 0], dim=2, bounds=(-2, 2),
        constraints=far, maxiter=2, runs=runs,
    )  # fmt: skip
    assert (result.constr_violation > 47) if runs is None else (result.constr_violation > 47).all()
    assert torch.allclose(result.fun, (result.x - 3).square().sum(-1))
