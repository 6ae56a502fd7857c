"""A consensus at the edge of the initial region is no success if L or G is smaller further out."""

import dataclasses
import math

import numpy as np
import pytest
import torch

import fedcb2o
from fedcb2o import Paper, minimize
from fedcb2o.errors import ConfigError

FAR = "the particles agreed at the edge of where they started, and L or G is less further out: let them start in a la"


def squared_distance_to(*centre):
    return lambda x: (x - x.new_tensor(centre)).square().sum(-1)


QUICK = {"dynamics": Paper(dt=0.05, xtol=0.01)}


def zero(x):
    return 0.0 * x[..., 0]


@pytest.mark.parametrize("dim", [1, 2, 10])
@pytest.mark.parametrize("upper", [None, squared_distance_to(100.0)], ids=["by L", "by G"])
def test_a_minimum_far_outside_the_initial_region_is_no_success(dim, upper):
    lower = squared_distance_to(100.0) if upper is None else zero
    batch = minimize(lower, upper, dim=dim, runs=3, **QUICK)
    assert (batch.spread <= 0.01).all()
    assert (batch.x < 50).all()
    assert not batch.success.any()
    assert all(message.startswith(FAR) for message in batch.message)
    single = minimize(lower, upper, dim=dim, seed=1, **QUICK)
    assert (single.success, single.message) == (False, batch.message[1])
    assert torch.equal(single.x, batch.x[1])


@pytest.mark.parametrize("centre", [0.0, 2.5, 2.9, 3.0, -2.9])
def test_a_minimum_near_the_edge_is_a_success(centre):
    result = minimize(squared_distance_to(centre), dim=1, seed=2, dynamics=Paper(dt=0.05))
    assert result.success
    assert result.x.item() == pytest.approx(centre, abs=0.1)
    assert result.message == "consensus: spread at most xtol = 0.0001"


def test_one_improving_coordinate_prevents_success():
    """The other coordinate is optimal at the edge; moving both further out is worse."""

    def lower(x):
        return 100 * (x[..., 0] - 2.9).square()

    dynamics = Paper(dt=0.05, xtol=0.01, beta=0.02)
    result = minimize(lower, lambda x: (x[..., 1] - 40).square(), dim=2, dynamics=dynamics)
    assert result.spread <= 0.01
    assert result.x[0].item() == pytest.approx(2.9, abs=0.1)
    assert not result.success


def test_the_edge_is_taken_from_the_initial_ensemble():
    start = torch.linspace(-1.0, 1.0, 50, dtype=torch.float64).unsqueeze(1)
    assert not minimize(squared_distance_to(8.0), initial=start, **QUICK).success
    assert minimize(squared_distance_to(8.0), initial=8.0 * start, **QUICK).success
    assert minimize(
        squared_distance_to(8.0),
        dim=1,
        initial=lambda draw, n, d: draw.uniform(-9, 9, (n, d)),
        **QUICK,
    ).success


def test_a_minimum_at_a_bound_is_a_success():
    assert minimize(squared_distance_to(100.0), dim=1, bounds=(-3, 3), **QUICK).success
    half = {"bounds": [(-math.inf, 3.0)], "initial": lambda draw, n, d: draw.uniform(-3, 3, (n, d))}
    assert minimize(squared_distance_to(100.0), **half, **QUICK).success
    assert not minimize(squared_distance_to(-100.0), **half, **QUICK).success


@pytest.mark.parametrize(("domain", "success"), [(3.0, True), (3.5, False)])
@pytest.mark.parametrize("upper", [False, True], ids=["of L", "of G"])
def test_an_error_outside_the_domain_does_not_prevent_success(domain, success, upper):
    def bounded(x):
        if (x > domain).any():
            raise ValueError("outside of the domain")
        return squared_distance_to(100.0)(x)

    start = torch.linspace(-3.0, 3.0, 100, dtype=torch.float64).unsqueeze(1)
    objectives = (zero, bounded) if upper else (bounded, None)
    dynamics = Paper(dt=0.05, xtol=0.01, sigma1=0.1)
    assert minimize(*objectives, initial=start, dynamics=dynamics).success == success


def test_success_requires_every_cluster():
    near, far = squared_distance_to(0.0, 0.0), squared_distance_to(0.0, 50.0)
    assert minimize([near, near], dim=2, clusters=True, **QUICK).success
    batch = minimize([near, far], dim=2, runs=2, clusters=True, **QUICK)
    assert not batch.success.any()


def test_delta_q_is_the_tolerated_rise_of_l():
    def lower(x):  # rises by 0.04 on the way out, as G falls
        return 0.01 * x[..., 0].abs()

    def upper(x):
        return -x[..., 0]

    strict_dynamics = Paper(beta=0.9, dt=0.05, xtol=0.01)
    tolerant_dynamics = dataclasses.replace(strict_dynamics, delta_q=0.1)
    assert not minimize(lower, upper, 1, seed=1, dynamics=tolerant_dynamics).success
    strict = minimize(lower, upper, 1, seed=1, dynamics=strict_dynamics)
    assert strict.success
    assert strict.x.item() == pytest.approx(2.7, abs=0.3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_particles": 1, "dim": 2}, "one is its own consensus point"),
        ({"initial": [[0.5, 0.5]]}, "one is its own consensus point"),
        ({"initial": np.ones((5, 2))}, "all particles start at one point, and agree before the first step"),
        ({"initial": lambda draw, n, d: np.full((n, d), 3.0), "dim": 2}, "all particles start at one point"),
        ({"initial": [[3.0, 4.0], [5.0, 6.0]], "bounds": [(0, 1), (0, 1)]}, "all particles start at one point"),
    ],
)  # fmt: skip
def test_agreement_before_the_first_step_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        minimize(squared_distance_to(0.0), **settings)


def test_one_particle_per_cluster_is_enough():
    pair = [squared_distance_to(0.0), squared_distance_to(0.0)]
    assert minimize(pair, dim=2, clusters=True, num_particles=1, maxiter=5).x.shape == (2, 2)
    attacked = fedcb2o.Adversary(lambda view: (0.0, 0.0), 3, [1.0, 0.0])
    result = minimize(
        squared_distance_to(1.0, 0.0),
        initial=np.zeros((5, 2)),
        adversaries=attacked,
        maxiter=5,
        dynamics=Paper(dt=0.1),
    ).nit
    assert result == 5


def test_a_function_that_fails_further_out_warns(caplog):
    def lower(x):
        if len(x) < 200 and (x.abs() > 3.1).any():  # not the ensemble itself
            raise ValueError("outside of the table")
        return -x[..., 0].clamp(-2.9, 2.9)

    result = minimize(lower, dim=1, dynamics=Paper(dt=0.1, xtol=0.01, sigma1=0.5))
    assert result.success
    assert caplog.text.count("further out L or G failed (ValueError('outside of the table'))") == 1
