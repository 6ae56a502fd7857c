"""A consensus at the edge of where the particles started is no success while L, or G, is less
further out."""

import math

import numpy as np
import pytest
import torch

import fedcb2o
from fedcb2o import minimize
from fedcb2o.errors import ConfigError

FAR = "the particles agreed at the edge of where they started, and L or G is less further out: let them start in a la"


def about(*centre):
    return lambda x: (x - x.new_tensor(centre)).square().sum(-1)


QUICK = {"dt": 0.05, "xtol": 0.01}


def nothing(x):
    return 0.0 * x[..., 0]


@pytest.mark.parametrize("dim", [1, 2, 10])
@pytest.mark.parametrize("upper", [None, about(100.0)], ids=["by L", "by G"])
def test_a_minimum_far_outside_of_where_particles_start_is_no_success(dim, upper):
    lower = about(100.0) if upper is None else nothing
    found = minimize(lower, upper, dim=dim, runs=3, **QUICK)
    assert (found.spread <= 0.01).all()
    assert (found.x < 50).all()
    assert not found.success.any()
    assert all(message.startswith(FAR) for message in found.message)
    alone = minimize(lower, upper, dim=dim, seed=1, **QUICK)
    assert (alone.success, alone.message) == (False, found.message[1])
    assert torch.equal(alone.x, found.x[1])


@pytest.mark.parametrize("centre", [0.0, 2.5, 2.9, 3.0, -2.9])
def test_a_minimum_near_the_edge_is_one(centre):
    found = minimize(about(centre), dim=1, seed=2, dt=0.05)
    assert found.success
    assert found.x.item() == pytest.approx(centre, abs=0.1)
    assert found.message == "consensus: spread at most xtol = 0.0001"


def test_one_coordinate_that_goes_on_is_enough():
    """The other is where it should be, at the edge too: both further out are worse."""

    def lower(x):
        return 100 * (x[..., 0] - 2.9).square()

    found = minimize(lower, lambda x: (x[..., 1] - 40).square(), dim=2, beta=0.02, **QUICK)
    assert found.spread <= 0.01
    assert found.x[0].item() == pytest.approx(2.9, abs=0.1)
    assert not found.success


def test_the_edge_is_that_of_the_initial_ensemble():
    start = torch.linspace(-1.0, 1.0, 50, dtype=torch.float64).unsqueeze(1)
    assert not minimize(about(8.0), initial=start, **QUICK).success
    assert minimize(about(8.0), initial=8.0 * start, **QUICK).success
    assert minimize(
        about(8.0), dim=1, initial=lambda draw, n, d: draw.uniform(-9, 9, (n, d)), **QUICK
    ).success


def test_at_a_wall_a_minimum_of_what_is_allowed_is_a_success():
    assert minimize(about(100.0), dim=1, bounds=(-3, 3), **QUICK).success
    half = {"bounds": [(-math.inf, 3.0)], "initial": lambda draw, n, d: draw.uniform(-3, 3, (n, d))}
    assert minimize(about(100.0), **half, **QUICK).success
    assert not minimize(about(-100.0), **half, **QUICK).success


@pytest.mark.parametrize(("domain", "success"), [(3.0, True), (3.5, False)])
@pytest.mark.parametrize("upper", [False, True], ids=["of L", "of G"])
def test_outside_of_a_functions_domain_nothing_is_known(domain, success, upper):
    def bounded(x):
        if (x > domain).any():
            raise ValueError("outside of the domain")
        return about(100.0)(x)

    start = {
        "initial": torch.linspace(-3.0, 3.0, 100, dtype=torch.float64).unsqueeze(1),
        "sigma1": 0.1,
    }
    objectives = (nothing, bounded) if upper else (bounded, None)
    assert minimize(*objectives, **start, **QUICK).success == success


def test_every_cluster_counts():
    near, far = about(0.0, 0.0), about(0.0, 50.0)
    assert minimize([near, near], dim=2, **QUICK).success
    many = minimize([near, far], dim=2, runs=2, **QUICK)
    assert not many.success.any()


def test_delta_q_is_what_l_may_rise_by():
    def lower(x):  # rises by 0.04 on the way out, as G falls
        return 0.01 * x[..., 0].abs()

    def upper(x):
        return -x[..., 0]

    settings = {"dim": 1, "alpha": 1000.0, "beta": 0.9, "seed": 1, **QUICK}
    assert not minimize(lower, upper, delta_q=0.1, **settings).success
    strict = minimize(lower, upper, **settings)
    assert strict.success
    assert strict.x.item() == pytest.approx(2.7, abs=0.3)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"num_particles": 1, "dim": 2}, "one particle is its own consensus point"),
        ({"initial": [[0.5, 0.5]]}, "one particle is its own consensus point"),
        (
            {"initial": np.ones((5, 2))},
            "all particles start at one point, and agree before the first step",
        ),
        (
            {"initial": lambda draw, n, d: np.full((n, d), 3.0), "dim": 2},
            "all particles start at one point",
        ),
        (
            {"initial": [[3.0, 4.0], [5.0, 6.0]], "bounds": [(0, 1), (0, 1)]},
            "all particles start at one point",
        ),
    ],
)
def test_who_agrees_before_they_have_looked_is_told(settings, what):
    with pytest.raises(ConfigError, match=what):
        minimize(about(0.0), **settings)


def test_a_particle_of_each_cluster_will_do():
    assert minimize([about(0.0), about(0.0)], dim=2, num_particles=1, maxiter=5).x.shape == (2, 2)
    attacked = fedcb2o.Adversary(lambda view: (0.0, 0.0), 3, [1.0, 0.0])
    assert (
        minimize(
            about(1.0, 0.0), initial=np.zeros((5, 2)), adversaries=attacked, maxiter=5, dt=0.1
        ).nit
        == 5
    )


def test_a_function_that_fails_further_out_warns(caplog):
    def lower(x):
        if len(x) < 200 and (x.abs() > 3.1).any():  # not the particles themselves
            raise ValueError("outside of the table")
        return -x[..., 0].clamp(-2.9, 2.9)

    found = minimize(lower, dim=1, dt=0.1, xtol=0.01, sigma1=0.5)
    assert found.success
    assert caplog.text.count("further out L or G failed (ValueError('outside of the table'))") == 1
