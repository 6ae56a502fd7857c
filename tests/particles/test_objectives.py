"""Built-in problems: targets, values by hand, settings, and published success rates."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import optimize
from torch.testing import assert_close

from fedcb2o import Paper, minimize
from fedcb2o.errors import ConfigError
from fedcb2o.particles import objectives, problem, problems

NAMES = list(problems())


def value(function, point):
    return function(torch.tensor(np.array([point]), dtype=torch.float64)).item()


def per_cluster(name):
    """Return (L, G, target) of every cluster."""
    case = problem(name)
    lowers = [case.lower] if callable(case.lower) else list(case.lower)
    targets = [case.target] if callable(case.lower) else list(case.target)
    return [
        (lower, case.upper, np.array(target)) for lower, target in zip(lowers, targets, strict=True)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_objectives_accept_any_leading_axes(name):
    case = problem(name)
    x = torch.from_numpy(np.random.default_rng(0).uniform(-3, 3, (2, 5, case.dim)))
    lowers = [case.lower] if callable(case.lower) else list(case.lower)
    for function in [*lowers, *([] if case.upper is None else [case.upper])]:
        assert function(x).shape == (2, 5)
        assert_close(function(x)[1], function(x[1]))
        assert_close(function(x)[1, 3], function(x[1, 3]))
        assert function(x.float()).dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_targets_minimise_g_among_the_minimisers_of_l(name):
    """SciPy finds no smaller L near a target, and no other minimiser of L with a smaller G."""
    for lower, upper, target in per_cluster(name):
        least = value(lower, target)
        local = optimize.minimize(lambda x, lower=lower: value(lower, x), target)
        assert least == pytest.approx(local.fun, abs=1e-4)
        if upper is None:
            continue
        bound, (low, high) = value(upper, target), problem(name).box
        rng = np.random.default_rng(0)
        num_better = 0
        for _ in range(30):
            start = rng.uniform(low, high, len(target))
            end = optimize.minimize(lambda x, lower=lower: value(lower, x), start).x
            # The other minima of L are local: only the lowest count.
            if value(lower, end) <= least + 1e-9:
                num_better += value(upper, end) < bound - 1e-3
        assert num_better == 0


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
    expected = 5 - 5 * math.exp(-0.5 * math.sqrt(0.5**2 / 1 * 1)) - math.exp(-1) + math.e
    assert value(objectives.ackley(0.0, A=5.0, a=0.5, b=0.5), [1.0]) == pytest.approx(expected)


@pytest.mark.parametrize("name", NAMES)
def test_bad_minimises_l_and_lure_minimises_g(name):
    """`bad` is a minimiser of L that is bad for G; `lure` is the minimiser of G."""
    case = problem(name)
    if case.bad is not None:
        lower, upper, target = per_cluster(name)[0]
        assert value(lower, case.bad) == pytest.approx(value(lower, target), abs=2e-3)
        assert value(upper, case.bad) > value(upper, target) + 0.5
    if case.lure is not None:
        start = np.array(case.lure) + 0.01
        minimum = optimize.minimize(
            lambda x: value(case.upper, x), start, method="Nelder-Mead", options={"fatol": 1e-10}
        )
        assert minimum.x == pytest.approx(np.array(case.lure), abs=1e-3)


def test_an_unknown_problem_is_refused():
    with pytest.raises(ConfigError, match=r"there is no problem `circel`.*circle"):
        problem("circel")


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_accepted_by_minimize(name):
    case = problem(name)
    result = minimize(case.lower, case.upper, case.dim, **{**case.settings, "maxiter": 3})
    assert result.x.shape == torch.tensor(case.target).shape
    assert result.nit == 3


# ---- published rates (paper/particle-targets.md) over 1,000 runs; up to 30 s each ----

long_timeout = pytest.mark.timeout(1800)


def success_rate(name, tol, *, changes=(), **settings):
    """Return the share of runs, by default 1,000, within tol of the target in the max norm."""
    case = problem(name)
    merged = {**case.settings, "runs": 1000, "record_every": 10_000, **settings}
    merged["dynamics"] = dataclasses.replace(merged["dynamics"], **dict(changes))
    result = minimize(case.lower, case.upper, case.dim, **merged)
    rate = ((result.x - torch.tensor(case.target)).abs().amax(-1) <= tol).double().mean().item()
    print(f"{name} {changes} {settings}: {rate:.3f}")
    return rate


@long_timeout
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
    """Thresholds are the lower ends of the stated ranges; 99% without a range is relaxed by 1%.

    Two rates are close to their thresholds: over 4,000 runs their standard error is 0.7%.
    """
    assert success_rate(name, 0.01, **settings) >= least


def minus_two_errors(stated):
    """Return a rate of 100 runs, minus two binomial standard errors."""
    return stated - 2 * math.sqrt(stated * (1 - stated) / 100)


@long_timeout
@pytest.mark.slow
def test_published_rate_in_one_dimension():
    assert success_rate("waves-1d", 0.1) >= minus_two_errors(0.96)


@long_timeout
@pytest.mark.slow
@pytest.mark.parametrize(
    ("beta", "least"),
    [(0.05, minus_two_errors(0.76)), (0.10, 0.93), (0.15, minus_two_errors(0.98))],
)
def test_published_rates_in_two_dimensions(beta, least):
    """For beta = 0.10 the stated rate of 100% has no standard error; the threshold is 93%.

    A plain NumPy loop reaches 93% to 96%: other runs end at (3.17, 0), the next best minimiser.
    """
    assert success_rate("waves-2d", 0.1, changes={"beta": beta}) >= least


@long_timeout
@pytest.mark.slow
def test_a_large_beta_fails():
    """At beta = 0.25 the sub-level set holds points bad for L; the stated rate is 1%."""
    assert success_rate("waves-2d", 0.1, changes={"beta": 0.25}) <= 0.03


@long_timeout
@pytest.mark.slow
@pytest.mark.parametrize("sigma1", [0.3, 0.5])
def test_decay_in_the_mean_field_regime(sigma1):
    """The mean |x - target|^2 decays at the rate 2 lambda - d sigma^2 (thm:main), within 5%."""
    case, logs = problem("circle"), []

    def record(state):
        logs.append(
            (state.theta - state.theta.new_tensor(case.target)).square().sum(-1).mean(-1).log()
        )

    settings = {
        "dynamics": Paper(alpha=1e3, beta=0.05, sigma1=sigma1, noise="isotropic"),
        "num_particles": 10_000,
    }
    settings |= {
        "initial": lambda generator, n, d: generator.standard_normal((n, d)),
        "runs": 20,
        "maxiter": 199,
    }
    minimize(case.lower, case.upper, 2, callback=record, **settings)
    t = np.arange(len(logs)) * 0.01
    rates = -np.polyfit(t, torch.stack(logs).numpy(), 1)[0]
    print(f"sigma1 = {sigma1}: {rates.mean():.3f} (deviation over seeds {rates.std():.3f})")
    assert rates.mean() == pytest.approx(2 - 2 * sigma1**2, rel=0.05)
