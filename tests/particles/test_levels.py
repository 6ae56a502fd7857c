"""Objectives in order with tolerances, one function of all, and names that `minimize` lacks."""

import math

import numpy as np
import pytest
import torch

from fedcb2o import Adaptive, ConfigError, minimize
from fedcb2o.particles.levels import Tolerance, parse_tolerance


def sphere(x):
    return (x.square().sum(-1) - 1) ** 2


def height(x):
    return x[..., 2] ** 2


def distance(x):
    return (x[..., 0] - 2) ** 2 + x[..., 1] ** 2


def test_two_objectives_in_order_are_the_bilevel_problem():
    settings = {"dim": 3, "maxfev": 2000, "seed": 3}
    ordered = minimize([sphere, distance], **settings)
    pair = minimize(sphere, distance, **settings)
    assert torch.equal(ordered.x, pair.x)
    assert torch.equal(ordered.levels, torch.stack([pair.lower, pair.upper]))
    single = minimize([sphere], **settings)
    assert torch.equal(single.levels, single.lower[None])


def test_three_objectives_in_order():
    """The sphere, on it the equator, and there the point next to (2, 0, 0)."""
    result = minimize([sphere, height, distance], dim=3, maxfev=20_000)
    assert result.x.tolist() == pytest.approx([1, 0, 0], abs=1e-3)
    assert result.levels.tolist() == pytest.approx([0, 0, 1], abs=1e-4)
    assert (result.lower, result.upper) == (result.levels[0], result.levels[2])
    assert result.nfev <= 20_000


@pytest.mark.parametrize(
    ("tolerance", "size"), [(0.3, 0.3), ("10%", 0.3), (np.float64(0.3), 0.3), (None, 0.0)]
)
def test_a_tolerance_is_absolute_or_relative(tolerance, size):
    """The first objective is 3 at 1, and the second one prefers -1."""
    result = minimize(
        [lambda x: (x[0] - 1) ** 2 + 3, lambda x: (x[0] + 1) ** 2],
        dim=1, tolerances=tolerance, maxfev=6000,
    )  # fmt: skip
    assert result.x.item() == pytest.approx(1 - math.sqrt(size), abs=1e-4)
    assert result.levels[0] == pytest.approx(3 + size, abs=1e-4)


def test_a_tolerance_in_standard_errors():
    """One standard error of four folds about 1.1, as in the one-standard-error rule."""
    folds = np.array([0.8, 1.0, 1.2, 1.4])

    def losses(x):
        return [(x[0] - fold) ** 2 for fold in folds]

    result = minimize([losses, lambda x: x[0] ** 2], dim=1, tolerances="1 se", maxfev=6000)
    error = ((1.1 - folds) ** 2).std(ddof=1) / 2
    assert result.x.item() == pytest.approx(1.1 - math.sqrt(error), abs=1e-4)
    with pytest.raises(ConfigError, match="needs several values per point"):
        minimize([lambda x: x[0] ** 2, lambda x: x[0]], dim=1, tolerances="1 se", maxfev=500)


def test_one_function_returns_all_objectives_in_one_call():
    count = 0

    def both(x):
        nonlocal count
        count += 1
        return (x @ x - 1) ** 2, (x[0] - 2) ** 2 + x[1] ** 2

    result = minimize(both, levels=2, dim=2, maxfev=500)
    # The first call also tries other forms, and three points alone.
    assert result.nfev <= count <= result.nfev + 6
    assert result.x.tolist() == pytest.approx([1, 0], abs=0.05)
    with pytest.raises(ConfigError, match="must return `levels` = 3 values per point, got 2"):
        minimize(both, levels=3, dim=2, maxfev=500)


def test_a_level_with_many_minimisers_does_not_prevent_success():
    result = minimize(
        [lambda x: (x.square().sum(-1) - 1) ** 2, lambda x: (x[..., 0] - 2) ** 2 + x[..., 1] ** 2],
        dim=2, tolerances=0.01,
    )  # fmt: skip
    assert result.success
    assert result.x.tolist() == pytest.approx([math.sqrt(1.1), 0], abs=1e-4)
    assert minimize(sphere, dim=2, dynamics=Adaptive(agree="value")).success


def test_failures_of_a_level_are_named():
    result = minimize([sphere, height, distance], dim=3, maxfev=600)
    assert not result.success
    assert result.message.startswith("level 2: ")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("5%", Tolerance(relative=0.05)),
        ("2 se", Tolerance(errors=2.0)),
        (0.5, Tolerance(absolute=0.5)),
        (None, Tolerance()),
    ],
)
def test_tolerances_are_parsed(value, expected):
    assert parse_tolerance(value) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tolerances": "5"}, '`tolerances` must be numbers, "5%" of the least value or "1 se"'),
        ({"tolerances": "x%"}, "`tolerances` must be a number"),
        ({"tolerances": -1}, "`tolerances` must be at least 0"),
        ({"tolerances": [1, 2, 3, 4]}, "one for each of the 3 but the last, got 4"),
        ({"upper": sphere}, "several objectives in `lower` are minimised in order"),
        ({"runs": 2}, "more than two, take one run each"),
        ({"clusters": True, "levels": 2}, "`clusters` need a sequence of objectives"),
        ({"workers": 2}, "no setting `workers`. Instead, a pool calls a function of one point by"),
        ({"integrality": [1]}, "no setting `integrality`. Instead, let the functions round"),
        ({"tol": 1e-3}, r"no setting `tol`. Instead, a spread .* `dynamics=fedcb2o.Adaptive"),
        ({"maxfevs": 3}, "no setting `maxfevs`. Did you mean `maxfev`?"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        minimize([sphere, height, distance], dim=3, **settings)
