"""The built-in problems have the answers that they say, wrapped functions fit, and published rates are reached."""

import math

import numpy as np
import pytest
import torch
from scipy import optimize
from torch.testing import assert_close

from fedcb2o import minimize
from fedcb2o.errors import ConfigError
from fedcb2o.particles import objectives, problem, problems

NAMES = list(problems())


def value(function, point):
    return function(torch.tensor(np.array([point]), dtype=torch.float64)).item()


def per_cluster(name):
    """(L, target) of every cluster."""
    one = problem(name)
    lowers = [one.lower] if callable(one.lower) else list(one.lower)
    targets = [one.target] if callable(one.lower) else list(one.target)
    return [
        (lower, one.upper, np.array(target)) for lower, target in zip(lowers, targets, strict=True)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_objectives_take_any_leading_axes(name):
    one = problem(name)
    x = torch.from_numpy(np.random.default_rng(0).uniform(-3, 3, (2, 5, one.dim)))
    lowers = [one.lower] if callable(one.lower) else list(one.lower)
    for function in [*lowers, *([] if one.upper is None else [one.upper])]:
        assert function(x).shape == (2, 5)
        assert_close(function(x)[1], function(x[1]))
        assert_close(function(x)[1, 3], function(x[1, 3]))
        assert function(x.float()).dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_targets_minimise_l_and_among_those_g(name):
    """Locally by SciPy; globally, no random minimiser of L that it finds is better by G."""
    for lower, upper, target in per_cluster(name):
        least = value(lower, target)
        found = optimize.minimize(lambda x, lower=lower: value(lower, x), target)
        assert least == pytest.approx(found.fun, abs=1e-4)
        if upper is None:
            continue
        bound, (low, high) = value(upper, target), problem(name).box
        rng = np.random.default_rng(0)
        better = 0
        for _ in range(30):
            start = rng.uniform(low, high, len(target))
            end = optimize.minimize(lambda x, lower=lower: value(lower, x), start).x
            # waves-1d: an arithmetic of minima, of which only the lowest count.
            if value(lower, end) <= least + 1e-9:
                better += value(upper, end) < bound - 1e-3
        assert better == 0


def test_values_by_hand():
    assert value(objectives.circle, [1.0, 2.0]) == 16
    assert value(objectives.circle_about(1.0, 1.0), [1.0, 2.0]) == 0
    assert value(objectives.parabola, [2.0, 1.0]) == 9
    assert value(objectives.paraboloid(2.0, 0.0), [0.0, 1.0]) == 5
    assert value(objectives.norm, [3.0, -4.0]) == 5
    assert value(objectives.last_coordinate, [3.0, -4.0]) == -4
    assert value(objectives.waves_1d, [0.5]) == pytest.approx((math.sin(1.5) + math.cos(-0.5)) / 2)
    assert value(objectives.waves_2d, [1.1, 2.0]) == pytest.approx(
        math.sin(0.5) + math.cos(2 - math.pi)
    )
    assert value(objectives.rastrigin, [0.5, 1.0]) == pytest.approx(0.25 + 20 + 1)
    assert value(objectives.rastrigin, [0.0] * 5) == 0
    assert value(objectives.ackley(0.5, 1 / 3), [0.5, 1 / 3]) == pytest.approx(0, abs=1e-12)
    # -20 exp(-0.2 sqrt(9/2 * 2)) - exp(cos(6 pi)) + e + 20
    assert value(objectives.ackley(0.0, 0.0), [1.0, 1.0]) == pytest.approx(20 - 20 * math.exp(-0.6))
    wanted = 5 - 5 * math.exp(-0.5 * math.sqrt(0.5**2 / 1 * 1)) - math.exp(-1) + math.e
    assert value(objectives.ackley(0.0, A=5.0, a=0.5, b=0.5), [1.0]) == pytest.approx(wanted)


@pytest.mark.parametrize("name", NAMES)
def test_where_attackers_stand(name):
    """`bad` is a minimiser of L that is bad for G; `lure` is the minimiser of G."""
    one = problem(name)
    if one.bad is not None:
        lower, upper, target = per_cluster(name)[0]
        assert value(lower, one.bad) == pytest.approx(value(lower, target), abs=2e-3)
        assert value(upper, one.bad) > value(upper, target) + 0.5
    if one.lure is not None:
        start = np.array(one.lure) + 0.01
        found = optimize.minimize(
            lambda x: value(one.upper, x), start, method="Nelder-Mead", options={"fatol": 1e-10}
        )
        assert found.x == pytest.approx(np.array(one.lure), abs=1e-3)


def test_unknown_problem():
    with pytest.raises(ConfigError, match=r"there is no problem `circel`.*circle"):
        problem("circel")


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_those_of_minimize(name):
    one = problem(name)
    result = minimize(one.lower, one.upper, one.dim, **{**one.settings, "maxiter": 3})
    assert result.x.shape == torch.tensor(one.target).shape
    assert result.nit == 3


# ---- published rates (paper/particle-targets.md), over 1,000 pooled runs; up to 30 s each where nothing else runs ----

busy = pytest.mark.timeout(1800)


def success(name, tol, **settings):
    """The share of the runs, 1,000 unless more are asked for, that end within tol of the target, in the max norm."""
    one = problem(name)
    merged = {**one.settings, "runs": 1000, "record_every": 10_000, **settings}
    result = minimize(one.lower, one.upper, one.dim, **merged)
    rate = ((result.x - torch.tensor(one.target)).abs().amax(-1) <= tol).double().mean().item()
    print(f"{name} {settings}: {rate:.3f}")
    return rate


@busy
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least", "settings"),
    [
        ("circle-ackley", 0.77, {"runs": 4000}),
        ("circle-ackley-inside", 0.68, {"runs": 4000}),
        ("circle-ackley-inside", 0.98, {"num_particles": 200, "maxiter": 1000}),
        ("parabola-ackley", 0.72, {"runs": 4000}),
    ],
)
def test_published_rates_with_ackley(name, least, settings):
    """The lower ends of the stated ranges over seeds; of the 99% without a range, 1% is taken for sampling.

    Two rates are near their lower ends: 4,000 runs know them to 0.7%.
    """
    assert success(name, 0.01, **settings) >= least


def two_errors(stated):
    """A rate stated of 100 runs, less two binomial standard errors of 100 runs."""
    return stated - 2 * math.sqrt(stated * (1 - stated) / 100)


@busy
@pytest.mark.slow
def test_published_rate_in_one_dimension():
    assert success("waves-1d", 0.1) >= two_errors(0.96)


@busy
@pytest.mark.slow
@pytest.mark.parametrize(
    ("beta", "least"), [(0.05, two_errors(0.76)), (0.10, 0.93), (0.15, two_errors(0.98))]
)
def test_published_rates_in_two_dimensions(beta, least):
    """At beta = 0.10, 100 of 100 are stated, which leaves no standard error.

    A plain NumPy loop of this setting reaches 93% to 96% of 500 runs, depending on how batches are drawn: the others
    end at (3.17, 0), the next best minimiser of L. So 93% is asked for.
    """
    assert success("waves-2d", 0.1, beta=beta) >= least


@busy
@pytest.mark.slow
def test_beta_has_a_window():
    """At beta = 0.25 the sub-level set holds what is bad for L: 1% is stated, of 100 runs."""
    assert success("waves-2d", 0.1, beta=0.25) <= 0.03


@busy
@pytest.mark.slow
@pytest.mark.parametrize("sigma1", [0.3, 0.5])
def test_decay_in_the_mean_field_regime(sigma1):
    """mean |x - target|^2 falls with the rate 2 lambda - d sigma^2 (thm:main), within 5%; N = 10^4, t < 2."""
    one, logs = problem("circle"), []

    def watch(state):
        logs.append(
            (state.theta - state.theta.new_tensor(one.target)).square().sum(-1).mean(-1).log()
        )

    settings = {
        "alpha": 1e3,
        "beta": 0.05,
        "sigma1": sigma1,
        "noise": "isotropic",
        "num_particles": 10_000,
    }
    settings |= {
        "initial": lambda generator, n, d: generator.standard_normal((n, d)),
        "runs": 20,
        "maxiter": 199,
    }
    minimize(one.lower, one.upper, 2, callback=watch, **settings)
    t = np.arange(len(logs)) * 0.01
    rates = -np.polyfit(t, torch.stack(logs).numpy(), 1)[0]
    print(f"sigma1 = {sigma1}: {rates.mean():.3f} (deviation over seeds {rates.std():.3f})")
    assert rates.mean() == pytest.approx(2 - 2 * sigma1**2, rel=0.05)
