"""Built-in adversaries, capture of the consensus point and its cure (eq:dyn_macro, prop:attack)."""

import math
import warnings

import numpy as np
import pytest
import torch
from tests.names import steady
from tests.particles.problems import double, evaluate_objectives, minimize, with_dynamics
from torch.testing import assert_close

from fedcb2o import Adversary, CaptureWarning, ConfigError, Paper
from fedcb2o.particles import adversaries
from fedcb2o.particles.dynamics import ConsensusParams, consensus_point
from fedcb2o.particles.objectives import circle, last_coordinate, paraboloid

LURE = paraboloid(2.0, 0.0)  # G is least at (2, 0); among the minimisers of L, at (1, 0)
SETTINGS = {
    "num_particles": 60,
    "alpha": 30.0,
    "beta": 0.4,
    "delta_q": 0.1,
    "xtol": 0.0,
    "maxiter": 12,
    "record_every": 1,
}


def record_run(adversary, lower=circle, upper=LURE, **settings):
    """Return theta_m [steps + 1, n_m, d], x [steps + 1, d] and the result of a run."""
    states = []

    def record(state):
        states.append((state.theta_m.clone(), state.x.clone()))

    result = minimize(
        lower,
        upper,
        2,
        adversaries=adversary,
        callback=record,
        **with_dynamics({**SETTINGS, **settings}),
    )
    theta_m, x = zip(*states, strict=True)
    assert torch.equal(theta_m[-1], result.theta_m)
    return torch.stack(theta_m), torch.stack(x), result


# ---- built-in adversaries ----


def test_tracking_follows_the_consensus_point_with_an_offset():
    theta_m, x, _ = record_run(adversaries.tracking(4, [0.5, -1.0]))
    offset = double([0.5, -1.0])
    assert_close(theta_m[1:], (x[:-1] + offset).unsqueeze(1).expand(-1, 4, -1))


def test_oscillating_repeats_with_its_period():
    a, b = double([-1.0, 0.0]), double([1.0, 2.0])
    theta_m, _, _ = record_run(adversaries.oscillating(3, (a, b), period=0.08), maxiter=24)
    assert_close(theta_m[0], a.expand(3, 2))
    assert_close(theta_m[4], b.expand(3, 2))  # half a period of 8 steps
    assert_close(theta_m[2], ((a + b) / 2).expand(3, 2))
    assert_close(theta_m[8:], theta_m[:-8])
    share = (theta_m[:, 0, 0] + 1) / 2
    t = torch.arange(25) * 0.01
    assert_close(share, ((1 - torch.cos(2 * math.pi * t / 0.08)) / 2).double(), rtol=0, atol=1e-5)


def test_gradient_flow_takes_euler_steps():
    """For d theta = -2 rate theta dt each step multiplies theta by 1 - 2 rate dt."""
    flow = adversaries.gradient_flow(1, paraboloid(0.0, 0.0), rate=3.0, initial=[1.0, 1.0])
    theta_m, _, _ = record_run(flow)
    assert_close(theta_m[:, 0, 0], (1 - 0.06) ** torch.arange(13).double())


def test_random_diffuses():
    """After a time t the variance is sigma^2 t, within five standard errors of 1.6%."""
    start = [3.0, -1.0]
    theta_m, _, _ = record_run(
        adversaries.random(4000, sigma=1.5, initial=start, mass=0.1), maxiter=40
    )
    for n in (1, 10, 40):
        displacement = theta_m[n] - double(start)
        assert displacement.var().item() == pytest.approx(1.5**2 * n * 0.01, rel=0.08)
        assert displacement.mean().item() == pytest.approx(
            0, abs=5 * 1.5 * math.sqrt(n * 0.01 / 8000)
        )
    steps = theta_m.diff(dim=0)
    assert abs(np.corrcoef(steps[0].flatten(), steps[1].flatten())[0, 1]) < 0.05
    assert theta_m[5].unique().numel() == 8000


def test_matrix_diffusion():
    """A_t dB has the covariance A A^T dt."""
    A = double([[1.0, 0.0], [2.0, 0.5]])
    adversary = Adversary(lambda view: (0.0, A.expand(1, 5000, 2, 2)), 5000, [0.0, 0.0], 0.1)
    theta_m, _, _ = record_run(adversary, maxiter=1)
    covariance = torch.from_numpy(np.cov(theta_m[1].T.numpy()))
    assert_close(covariance, A @ A.T * 0.01, rtol=0.1, atol=0.001)
    # A vector, one value per coordinate, is a diagonal matrix.
    diagonal = double([2.0, 0.5])
    runs = [
        record_run(Adversary(lambda view, A=A: (0.0, A), 7, [0.0, 0.0]))[0]
        for A in (
            diagonal,
            diagonal.expand(1, 7, 2),
            diagonal.diag().expand(1, 7, 2, 2),
            diagonal.diag()[None, None],
        )
    ]
    for other in runs[1:]:
        assert_close(other, runs[0])


@pytest.mark.parametrize("upper", [LURE, None])
@pytest.mark.parametrize("mass", [None, 0.3])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"radius": 2.5, "quantile": "averaged"},
        {"batch": 80},  # all particles, in a random order
    ],
    ids=steady,
)
def test_adversaries_see_the_consensus_point_of_all_particles(upper, mass, settings):
    steps = []
    params = ConsensusParams(
        30.0, 0.4, 0.1, settings.get("radius", math.inf), "quantile" in settings
    )

    def m_of(theta, masses):
        return consensus_point(
            theta, evaluate_objectives(theta, circle, upper, radius=params.radius), params, masses
        )

    def move(view):
        steps.append(view.n)
        if len(steps) == 1:
            assert (view.t, view.dt) == (0, 0.01)
        n_m = view.theta_m.shape[1]
        w_m = n_m / (n_m + 60) if mass is None else mass
        masses = double([(1 - w_m) / 60] * 60 + [w_m / n_m] * n_m).unsqueeze(0)
        assert_close(view.m[:, 0], m_of(torch.cat([view.theta, view.theta_m], 1), masses))
        return 0.0, 0.0

    adversary = Adversary(move, 20, [-1.0, 0.0], mass)
    minimize(
        circle,
        upper,
        2,
        adversaries=adversary,
        runs=2,
        **with_dynamics({**SETTINGS, **settings, "maxiter": 3}),
    )
    assert steps == [0, 1, 2]


def test_masses_of_several_adversaries_add_up():
    """With alpha = 0 and beta = 1 the consensus point is the mean under the masses."""
    groups = [
        adversaries.static(3, (1.0, 0.0), mass=0.2),
        adversaries.static(5, (0.0, 1.0)),
        adversaries.static(2, (0.0, -1.0), mass=0.3),
    ]
    start = np.zeros((15, 2))
    dynamics = Paper(alpha=0.0, beta=1.0)
    result = minimize(
        circle, last_coordinate, initial=start, adversaries=groups, dynamics=dynamics, maxiter=0
    )
    # 15 benign particles at 0 and 5 malicious ones at (0, 1) share the remaining 0.5.
    assert result.x.tolist() == pytest.approx([0.2, 0.5 * 5 / 20 - 0.3])
    assert result.theta.shape == (15, 2)
    assert result.theta_m.shape == (10, 2)
    with pytest.raises(ConfigError, match=r"must add up to less than 1, got 1\.1"):
        minimize(circle, dim=2, adversaries=[adversaries.static(1, (0.0, 0.0), mass=0.55)] * 2)


def test_an_adversary_without_mass_has_no_effect():
    settings = {"num_particles": 40, "maxiter": 20, "dynamics": Paper(xtol=0.0)}
    expected = minimize(circle, LURE, 2, **settings)
    massless = adversaries.static(10, (1.0, 0.0), mass=0.0)
    attacked = minimize(circle, LURE, 2, adversaries=massless, **settings)
    assert_close(attacked.x, expected.x)
    assert_close(attacked.theta, expected.theta)


# ---- invalid adversaries ----


@pytest.mark.parametrize(
    "answer",
    [
        (torch.zeros(3), 0.0),
        (torch.zeros(1, 5, 3), 0.0),
        (0.0, torch.zeros(1, 5, 2, 3)),
        (np.zeros((5, 2)), 0.0),
        ("left", 0.0),
        (0.0, None),
        None,
        0.0,
        (0.0, 0.0, 0.0),
    ],
    ids=steady,
)
def test_invalid_moves_are_refused(answer):
    with pytest.raises(ConfigError, match="adversary's"):
        minimize(circle, dim=2, adversaries=Adversary(lambda view: answer, 5), maxiter=2)


def test_invalid_adversaries_are_refused():
    for settings, message in (
        ({"num_particles": 0}, "`num_particles` must be a whole number, at least 1, got 0"),
        ({"num_particles": 2, "mass": -0.1}, "`mass`.*got -0.1"),
        ({"num_particles": 2, "mass": 1.0}, "`mass`.*got 1"),
        ({"num_particles": 2, "mass": math.nan}, "`mass`.*got nan"),
    ):
        with pytest.raises(ConfigError, match=message):
            Adversary(lambda view: (0.0, 0.0), **settings)
    for at in ([1.0], [1.0, 2.0, 3.0], np.zeros((4, 2)), np.zeros((1, 5, 2, 2))):
        with pytest.raises(ConfigError, match="an adversary's `initial` must be a point"):
            minimize(circle, dim=2, adversaries=adversaries.static(5, at), maxiter=0)
    with pytest.raises(ConfigError, match="`period` must be above 0"):
        adversaries.oscillating(1, ([0.0], [1.0]), period=0.0)
    for offset in ([1.0], [1.0, 2.0, 3.0]):
        with pytest.raises(ConfigError, match="offset"):
            minimize(circle, dim=2, adversaries=adversaries.tracking(5, offset), maxiter=2)
    for other in ([1.0], [1.0, 2.0, 3.0]):
        with pytest.raises(ConfigError, match="between"):
            record_run(adversaries.oscillating(5, ([1.0, 2.0], other), period=1.0))


def bounded(x):
    return 1 - torch.exp(-x.square().sum(-1)).nan_to_num(nan=0.0)


@pytest.mark.parametrize(
    ("lower", "coordinate"),
    [
        (circle, math.inf),
        (circle, math.nan),
        (circle, 1e200),
        (bounded, math.inf),
        (bounded, math.nan),
    ],
)
def test_particles_at_infinity_are_excluded(lower, coordinate):
    """Bounded objectives, which have finite values at infinity, are included."""
    adversary = Adversary(lambda view: (coordinate, 0.0), 5, [1.0, 1.0])
    result = minimize(lower, bounded, 2, adversaries=adversary, **with_dynamics(SETTINGS))
    assert result.x.isfinite().all()
    assert result.theta.isfinite().all()
    assert result.excluded == 12 * 5


# ---- facts on capture, cure and price (paper/notes.md), with N = 2,000 ----

FACTS = {
    "alpha": 1e3,
    "beta": 0.05,
    "sigma1": 0.5,
    "noise": "isotropic",
    "maxiter": 600,
    "xtol": 0.0,
}


def attacked_error(point, w_m, **settings):
    """Return the error if a share w_m of N = 2,000 particles is static at a point."""
    n_m = round(2000 * w_m)

    def normal(generator, n, d):
        return generator.standard_normal((n, d))

    result = minimize(
        circle,
        LURE,
        2,
        initial=normal,
        num_particles=2000 - n_m,
        adversaries=[adversaries.static(n_m, point)] if n_m else (),
        record_every=600,
        **with_dynamics({**FACTS, **settings}),
    )
    return (result.x - double([1.0, 0.0])).norm().item()


def test_delta_q_prevents_capture_at_a_small_error():
    """delta_q = 0.01 admits benign particles again; the error is about sqrt(delta_q) / 2."""
    assert attacked_error((-1.0, 0.0), 0.5, delta_q=0.01) == pytest.approx(0.048, abs=0.015)
    assert attacked_error((-1.0, 0.0), 0.0, delta_q=0.01) == pytest.approx(0.06, abs=0.02)


def test_a_small_beta_filters_attackers_at_the_minimiser_of_g():
    """L is large at the attackers, but with a large beta the sub-level set includes them."""
    errors = [attacked_error((2.0, 0.0), 0.3, beta=beta, maxiter=500) for beta in (0.05, 0.3, 0.6)]
    assert errors[0] < 5e-3
    assert errors[1] == pytest.approx(0.058, abs=0.03)
    assert errors[2] == pytest.approx(0.75, abs=0.1)


def test_mass_decides_capture_not_the_number_of_attackers():
    """10 attackers with w_m = 0.3 capture the run; 600 with w_m = 0.01 do not."""
    few = adversaries.static(10, (-1.0, 0.0), mass=0.3)
    many = adversaries.static(600, (-1.0, 0.0), mass=0.01)
    settings = {**FACTS, "num_particles": 500, "maxiter": 200}
    for adversary, error in ((few, 2.0), (many, 0.0)):
        for quantile in ("plain", "averaged"):
            result = minimize(
                circle,
                LURE,
                2,
                adversaries=adversary,
                **with_dynamics({**settings, "quantile": quantile}),
            )
            assert (result.x - double([1.0, 0.0])).norm().item() == pytest.approx(error, abs=0.1)


@pytest.mark.parametrize(
    ("num_benign", "num_malicious", "settings", "warned"),
    [
        (90, 10, {"beta": 0.2}, False),
        (90, 10, {"beta": 0.12}, False),
        (90, 10, {"beta": 0.11}, True),  # one benign particle is left
        (90, 10, {"beta": 0.1}, True),  # w_m reaches beta: 1 - 90/100 is 0.09999999999999998
        (60, 40, {"beta": 0.25, "delta_q": 0.01}, False),
        (60, 40, {"beta": 0.3, "delta_q": 0.01}, True),  # w_b / 2
        (60, 40, {"beta": 0.05, "mass": 0.03}, False),  # a benign particle has 0.97/60
        (60, 40, {"beta": 0.05, "mass": 0.04}, True),
        # docs/particles.md: with these settings every run is captured, or none is.
        (191, 9, {"beta": 0.05}, True),
        (191, 9, {"beta": 0.05, "quantile": "averaged"}, True),
        (182, 18, {"beta": 0.1, "quantile": "averaged"}, True),
        (9002, 998, {"beta": 0.1, "quantile": "averaged", "delta_q": 0.01}, False),
        (192, 8, {"beta": 0.05}, False),
        (194, 6, {"beta": 0.05, "quantile": "averaged"}, False),
        (186, 14, {"beta": 0.1, "quantile": "averaged"}, False),
        (9050, 950, {"beta": 0.1, "quantile": "averaged"}, False),
        # A random batch leaves the same number of benign particles.
        (1920, 80, {"beta": 0.05, "batch": 200}, False),
        (1910, 90, {"beta": 0.05, "batch": 200}, True),
        (1930, 70, {"beta": 0.05, "batch": 200, "quantile": "averaged"}, True),
        (1950, 50, {"beta": 0.05, "batch": 200, "quantile": "averaged"}, False),
        (60, 7, {"beta": 0.3, "mass": 0.3}, True),
        (60, 7, {"beta": 0.3, "mass": 0.0}, False),
        (60, 0, {"beta": 0.9}, False),
        (60, 40, {"beta": 0.05, "upper": None}, False),  # CBO has no sub-level set
    ],
)
def test_capture_warning_depends_on_the_benign_particles_left(
    num_benign, num_malicious, settings, warned
):
    settings = with_dynamics({"upper": LURE, "mass": None, **settings})
    mass = settings.pop("mass")
    group = [adversaries.static(num_malicious, (-1.0, 0.0), mass=mass)] if num_malicious else ()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = minimize(
            circle, dim=2, num_particles=num_benign, adversaries=group, maxiter=0, **settings
        )
    assert [warning.category for warning in caught if warning.category is not CaptureWarning] == []
    assert bool(caught) == warned
    assert bool(result.notes) == warned
    assert all(str(warning.message) in result.notes for warning in caught)
