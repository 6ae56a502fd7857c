"""Ask and tell: the bits of `minimize`, and validation of the values passed to `tell`."""

import concurrent.futures
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import optimize
from tests.particles.problems import with_dynamics
from tests.type_checks import VARIABLE
from torch.testing import assert_close

import fedcb2o
from fedcb2o import Paper
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.particles import adversaries
from fedcb2o.particles.objectives import circle, last_coordinate, paraboloid

G = paraboloid(2.0, 0.0)


def slope(x):
    return 4 * (x.square().sum(-1, keepdim=True) - 1) * x


def nan_right_of_one(x):
    return torch.where(x[..., 0] > 1, torch.nan, circle(x))


def far(x):
    return (x - 9).square().sum(-1)


def run_search(lower, upper, **settings):
    """Run a search with the values of these functions; return its result and number of calls."""
    search = fedcb2o.Search(upper=upper is not None, **settings)
    num_calls = 0
    while not search.done:
        x, num_calls = search.ask(), num_calls + 1
        # the answer, the last request, needs no gradient
        has_gradient = settings["dynamics"].needs_gradient and x.shape[-2] > 3
        search.tell(
            lower(x), None if upper is None else upper(x), slope(x) if has_gradient else None
        )
    return search.result, num_calls


CASES = {
    "one run": (circle, G, {}),
    "cbo": (circle, None, {}),
    "runs that stop at different steps": (circle, G, {"runs": 3, "xtol": 0.3, "record_every": 1}),
    "batches": (circle, G, {"batch": 13, "update": "all"}),
    "bounds and schedules": (circle, G, {"bounds": [(-1, 2), (0, None)], "alpha": lambda n: 10.0 + n}),
    "float32": (circle, G, {"dtype": torch.float32, "noise": "isotropic", "sigma1": 0.5}),
    "gradient": (circle, G, {"lambda2": 0.1, "sigma2": 0.01}),
    "attacked": (
        circle, G,
        {"adversaries": [adversaries.static(3, (-1.0, 0.0), mass=0.1), adversaries.random(4)], "radius": 9.0},
    ),
    "excluded": (nan_right_of_one, G, {"sigma1": 2.0}),
    "at the edge": (far, None, {"dt": 0.1, "xtol": 0.01, "maxiter": 500}),
    "maxfev": (circle, G, {"maxfev": 500}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_search_returns_the_bits_of_minimize(case):
    lower, upper, settings = CASES[case]
    settings = {"dim": 2, "num_particles": 40, "beta": 0.2, "maxiter": 40, "seed": 3, **settings}
    settings = with_dynamics(settings)
    if "gradient" in case:
        settings["gradient"] = slope
    expected = fedcb2o.minimize(lower, upper, **settings)
    settings.pop("gradient", None)
    result, num_calls = run_search(lower, upper, **settings)
    assert num_calls > 10
    assert dict(result).keys() == dict(expected).keys()
    for name in ("x", "lower", "upper", "spread", "theta", "theta_m"):
        assert (result[name] is None) == (expected[name] is None)
        if expected[name] is not None:
            assert_close(result[name], expected[name], rtol=0, atol=0, equal_nan=True)
    assert_close(result.history.x, expected.history.x, rtol=0, atol=0, equal_nan=True)
    for name in ("message", "notes", "seed"):
        assert result[name] == expected[name]
    for name in ("success", "nit", "nfev", "excluded"):
        assert torch.equal(torch.as_tensor(result[name]), torch.as_tensor(expected[name]))
    if case == "at the edge":
        assert not result.success
        assert "further out" in result.message


def test_values_may_come_from_a_thread_pool():
    """`tell` accepts a list of numbers, computed from NumPy points."""
    search = fedcb2o.Search(
        x0=[0.0, 0.0], upper=True, num_particles=20, maxiter=6, dynamics=Paper(dt=0.01)
    )
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        while not search.done:
            points = search.ask().numpy()
            lower = list(pool.map(lambda x: float(((x**2).sum() - 1) ** 2), points))
            search.tell(lower, points[:, 1])
    expected = fedcb2o.minimize(
        circle, last_coordinate, x0=[0.0, 0.0], num_particles=20, maxiter=6, dynamics=Paper(dt=0.01)
    )
    assert_close(search.result.x, expected.x)


def test_a_replayed_log_restores_the_search():
    log, settings = [], {"dim": 2, "num_particles": 20, "maxiter": 10, "seed": 5}
    original = fedcb2o.Search(**settings)
    for _ in range(6):
        log.append(circle(original.ask()).tolist())
        original.tell(log[-1])
    replayed = fedcb2o.Search(**settings)
    for values in log:
        replayed.tell(values)
    assert torch.equal(replayed.ask(), original.ask())


def test_requested_points_are_copies():
    search = fedcb2o.Search(2, num_particles=20)
    before = search.ask()
    search.ask().zero_()
    assert torch.equal(search.ask(), before)
    assert torch.is_grad_enabled()
    assert search.result is None


def test_invalid_values_are_refused_and_can_be_corrected():
    search = fedcb2o.Search(2, num_particles=20, maxiter=0, dynamics="paper")
    for invalid in (np.zeros(19), np.zeros((1, 20)), 0.0, ["x"] * 20, None):
        with pytest.raises(ConfigError, match=r"`lower` (must|holds words)"):
            search.tell(invalid)
    with pytest.raises(ConfigError, match=r"`upper` was not requested.*upper=True"):
        search.tell(np.zeros(20), np.zeros(20))
    with pytest.raises(ConfigError, match="`gradient` was not requested"):
        search.tell(np.zeros(20), gradient=np.zeros((20, 2)))
    search.tell(range(20))
    search.tell([math.nan])  # L of the answer is unknown
    assert search.done
    assert search.result.lower.isnan() or search.result.lower.isinf()
    for call in (search.ask, lambda: search.tell([0.0])):
        with pytest.raises(RunError, match="this search has ended: its answer is `result`"):
            call()
    with pytest.raises(ConfigError, match="`lower` is for functions, which Search has none of"):
        fedcb2o.Search(2, lower=torch.sum)
    with pytest.raises(ConfigError, match="`upper` must be given, in the shape"):
        fedcb2o.Search(2, upper=True).tell(np.zeros(24))
    with pytest.raises(ConfigError, match=r"`gradient` must be given, in the shape \[20, 2\]"):
        fedcb2o.Search(2, dynamics=Paper(lambda2=1.0), num_particles=20).tell(np.zeros(20))


@pytest.mark.parametrize(
    "missing", [np.ma.masked, None, float("nan")], ids=["masked", "None", "NaN"]
)
def test_missing_values_of_any_type_are_excluded(missing):
    """A point without a value is excluded; the number under its mask is ignored."""
    values = [9.0, 8.0, missing, 7.0]
    forms = [values, np.array(values, dtype=object)]
    if missing is np.ma.masked:
        forms = [values, np.ma.array([9.0, 8.0, -99.0, 7.0], mask=[0, 0, 1, 0])]
        forms.append(np.ma.array([9, 8, -99, 7], mask=[0, 0, 1, 0]).astype(">i4"))
    for form in forms:
        search = fedcb2o.Search(2, num_particles=4, maxiter=0)
        points = search.ask()
        search.tell(form)
        assert torch.equal(search.ask(), points[3:])
        search.tell([7.0])
        assert search.result.excluded == 1


def test_values_are_copied():
    search = fedcb2o.Search(2, num_particles=4, maxiter=1, dtype=torch.float32, dynamics="paper")
    buffer = np.array([4, 3, 2, 1])
    search.tell(buffer)
    buffer[:] = 0
    search.tell(buffer)
    with pytest.raises(ConfigError, match="`lower` holds complex numbers: take the real part"):
        search.tell(np.array([1j]))
    with pytest.raises(ConfigError, match="`lower` holds a dict, expected an array of numbers"):
        search.tell({"value": 1.0})
    search.tell([True])
    assert search.result.lower.item() == 1.0


def test_only_nan_values_are_a_run_error():
    search = fedcb2o.Search(2, num_particles=20)
    for _ in range(4):  # the first ensemble has five steps
        search.tell([math.nan] * 20)
    with pytest.raises(RunError, match="all 100 particles have NaN"):
        search.tell([math.nan] * 20)
    with pytest.raises(RunError, match="this search has failed"):
        search.ask()


# ---- single points, workers, files ----


def honest(points):
    return circle(points).tolist(), G(points).tolist()


def run_parts(search, workers, limit=20_000):
    """Let workers take turns, one point each, until the end of the search.

    A worker is a function of a point, or None for one that died with its point.
    """
    count = 0
    while not search.done and count < limit:
        for name, worker in workers.items():
            points = search.ask(1, name)
            if len(points) and worker is not None and not search.done:
                count += 1
                lower, upper = worker(points)
                search.tell(lower, upper, points=points, worker=name)
                if search.done:
                    break
    assert count < limit
    return count


PARTS = {"upper": True, "maxfev": 400, "seed": 3}


def test_single_points_in_any_order_equal_whole_steps():
    whole = fedcb2o.Search(2, **PARTS)
    parts = fedcb2o.Search(2, **PARTS)
    generator = np.random.default_rng(0)
    while not whole.done:
        points = whole.ask()
        whole.tell(*honest(points))
        assert torch.equal(parts.ask(), points)
        lower, upper = honest(points)
        told = set()
        for row in generator.permutation(len(points)):
            if points[row].numpy().tobytes() not in told:  # ends may be at one point
                parts.tell(lower[row], upper[row], points=points[row].numpy())
            told.add(points[row].numpy().tobytes())
    assert torch.equal(parts.result.x, whole.result.x)
    assert torch.equal(parts.result.theta, whole.result.theta)
    assert parts.best.x.tolist() == whole.best.x.tolist()


def test_the_best_point_is_known_at_any_time():
    search = fedcb2o.Search(2, upper=True, maxfev=400)
    assert search.best is None
    points = search.ask()
    search.tell(circle(points), G(points))
    row = circle(points).argmin()
    assert search.best.x.tolist() == points[row].tolist()
    assert search.best.lower == circle(points)[row]
    assert search.best.upper == G(points)[row]

    # Single points count at once, and so do points of the user's own.
    better = search.ask()[:2]
    search.tell([1e-3, 1e-4], [0.0, 2.0], points=better)
    assert (search.best.x.tolist(), search.best.upper) == (better[1].tolist(), 2.0)
    search.tell(1e-5, 3.0, points=[0.0, -1.0])
    assert (search.best.x.tolist(), search.best.lower) == ([0.0, -1.0], 1e-5)


def test_single_points_need_the_scales_of_constraints_to_be_judged():
    """The scale is the median violation of the first ensemble."""
    measured = optimize.NonlinearConstraint(None, -np.inf, 1.0)
    search = fedcb2o.Search(2, constraints=measured, num_particles=4)
    points = search.ask()
    search.tell([(7.0, 0.5)], points=points[0])
    assert search.best is None
    search.tell([(5.0, 3.0), (4.0, 2.0), (3.0, 4.0)], points=points[1:])
    assert (search.best.lower, search.best.upper) == (0.0, 7.0)
    search.tell([(6.0, 1.0)], points=[0.1, 0.1])
    assert search.best.upper == 6.0


def test_workers_that_die_and_lie_do_not_change_the_result():
    generator = np.random.default_rng(0)

    def liar(points):
        lower, upper = honest(points)
        if generator.random() < 0.4:
            return [-1.0], [-5.0]  # better than every true value
        return lower, upper

    alone = fedcb2o.Search(2, **PARTS)
    run_parts(alone, {"one": honest})
    search = fedcb2o.Search(2, **PARTS)
    workers = {"dead": None, "one": honest, "two": honest, "liar": liar, "three": honest}
    count = run_parts(search, workers)
    assert torch.equal(search.result.x, alone.result.x)
    assert count < 3 * 400
    assert search.suspicion("liar") > 0.25 > search.suspicion("one")
    assert search.suspicion("nobody") == pytest.approx(0.05)


def test_the_last_worker_is_believed():
    """One value waits for a second worker, which is gone."""
    search = fedcb2o.Search(2, num_particles=2, maxiter=0, finish=False)
    first, second = search.ask(1, "a"), search.ask(1, "b")
    search.tell([1.0], points=first, worker="a")
    assert len(search.ask(1, "a")) == 1  # that of b
    search.tell([2.0], points=second, worker="a")
    assert not len(search.ask(1, "a"))
    search.drop("b")
    assert torch.equal(search.ask(), first)  # the solution


def test_a_search_can_be_pickled_and_kept_in_a_file(tmp_path):
    file = tmp_path / "search.jsonl"
    search = fedcb2o.Search(2, file=file, **PARTS)
    for _ in range(3):
        search.tell(*honest(search.ask()))
    point = search.ask()[1]
    search.tell(*honest(point[None]), points=point[None], worker="one")
    copies = [
        pickle.loads(pickle.dumps(search)),
        fedcb2o.Search(2, file=file, **PARTS),
    ]
    for copy in (search, *copies):
        copy._file = None
        while not copy.done:
            copy.tell(*honest(copy.ask()))
    for copy in copies:
        assert torch.equal(copy.result.theta, search.result.theta)
    with pytest.raises(ConfigError, match="a search with other settings or another seed"):
        fedcb2o.Search(3, file=file, **PARTS)


def test_a_point_of_the_users_own_counts():
    own = np.array([1.0, 0.0])
    search = fedcb2o.Search(2, upper=True, maxfev=60)
    search.tell(0.0, 1.0, points=own)
    while not search.done:
        search.tell(*honest(search.ask()))
    assert search.result.x.tolist() == search.best.x.tolist() == [1.0, 0.0]
    assert search.result.nfev <= 60


def test_one_call_returns_objective_and_constraints():
    """The least x1 + x2 in the unit disc, with 40 d evaluations."""
    measured = optimize.NonlinearConstraint(None, -np.inf, 1.0)
    search = fedcb2o.Search(2, bounds=(-3, 3), constraints=measured, maxfev=80)
    while not search.done:
        points = search.ask()
        search.tell([(float(x.sum()), float(x @ x)) for x in points])
    assert search.result.fun == pytest.approx(-math.sqrt(2), abs=1e-6)
    assert search.result.nfev <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"points": [[0.0, 0.0, 0.0]]}, r"`points` must be \[n, 2\] or one point"),
        pytest.param(
            {"points": [[0.0, 0.0]], "worker": 1.5},
            "`worker` must be a word or a whole number",
            marks=pytest.mark.skipif(VARIABLE in os.environ, reason="type checks refuse it first"),
        ),
    ],
)
def test_invalid_parts_are_refused(arguments, message):
    search = fedcb2o.Search(2)
    with pytest.raises(ConfigError, match=message):
        search.tell([1.0], **arguments)


@pytest.mark.slow
def test_the_example_with_a_dead_and_a_lying_worker_finds_the_optimum(tmp_path):
    script = Path(__file__).parents[2] / "examples" / "expensive.py"
    command = [sys.executable, script, "--maxfev", "200"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "bob died" in done.stdout
    assert "mass 0.1000 (the least is 0.1000)" in done.stdout
    assert len((tmp_path / "expensive.jsonl").read_text().splitlines()) > 100
