"""How many benign particles attackers leave in Q_beta (eq:Q_beta), by hand and on ensembles, and
what comes of it."""

import pytest
import torch

import fedcb2o
from fedcb2o import consensus
from fedcb2o.particles import adversaries, capture_risk, problem
from fedcb2o.rng import stream

CIRCLE = problem("circle")
FACTS = {
    "alpha": 1e3,
    "beta": 0.05,
    "sigma1": 0.5,
    "noise": "isotropic",
    "maxiter": 600,
    "xtol": 0.0,
}


def border(quantile, num_malicious, runs=5):
    """The errors of runs with N = 200 in which so many stand at (-1, 0)."""
    result = fedcb2o.minimize(
        CIRCLE.lower, CIRCLE.upper, 2, num_particles=200 - num_malicious, quantile=quantile, runs=runs,
        initial=lambda generator, n, d: generator.standard_normal((n, d)), record_every=600,
        adversaries=adversaries.static(num_malicious, CIRCLE.bad), **FACTS,
    )  # fmt: skip
    return (result.x - torch.tensor(CIRCLE.target).double()).norm(dim=-1)


@pytest.mark.parametrize(
    ("quantile", "num_malicious", "error"),
    [
        ("plain", 8, 0.0),
        ("plain", 10, 2.0),
        ("averaged", 6, 0.0),
        ("averaged", 9, 2.0),
        ("averaged", 10, 2.0),
    ],
)
def test_the_border_of_capture(quantile, num_malicious, error):
    """Of N = 200 with beta = 0.05, 10 particles are in Q_beta: what attackers leave of them
    decides."""
    many = border(quantile, num_malicious)
    assert (many - error).abs().max() < 0.06


def test_one_benign_particle_left_is_chosen_by_l_alone():
    """Then the answer is anywhere on the circle, whatever G wants: its median distance is sqrt(2),
    not 0."""
    many = border("plain", 9, runs=40)
    assert 1 < many.median() < 1.8
    assert many.min() < 0.7


def test_benign_left_by_hand():
    # Plain: the rank beta N, less the attackers. 0.1 * 30 is 3.0000000000000004 in floating point.
    assert capture_risk.benign_left(beta=0.05, w_m=9 / 200, num_benign=191, dim=2) == 1
    assert capture_risk.benign_left(beta=0.1, w_m=2 / 30, num_benign=28, dim=7) == 1
    assert capture_risk.benign_left(beta=0.05, w_m=0.3, num_benign=100, dim=2) == 0
    assert capture_risk.benign_left(beta=0.1, w_m=0.0, num_benign=100, dim=2) == 10
    # By mass: a benign particle has 0.96/60 = 0.016, and 0.01 is less than one of them: rounded up.
    assert capture_risk.benign_left(beta=0.05, w_m=0.04, num_benign=60, dim=2) == 1

    def averaged(num_malicious, dim, num_particles=200):
        n = num_particles - num_malicious
        return capture_risk.benign_left(
            beta=0.1, w_m=num_malicious / num_particles, num_benign=n, dim=dim, averaged=True
        )

    # In two dimensions the i-th least L is i. Of the ranks 11 to 20 that are averaged, 16 are
    # attackers': (1+2+3+4)/10.
    assert averaged(16, 2) == 1
    assert averaged(14, 2) == 2  # (1+...+6)/10 = 2.1
    assert averaged(10, 2) == 5  # (1+...+10)/10 = 5.5
    assert averaged(0, 2) == 15  # (11+...+20)/10 = 15.5
    # In one it is i^2: (1+4+9+16)/10 = 3, below 2^2, and (1+...+36)/10 = 9.1, above 3^2.
    assert (averaged(16, 1), averaged(14, 1)) == (1, 3)
    # In many they are nearly alike, so that one zero in the average is too many.
    assert averaged(11, 1000) == 0
    assert averaged(10, 1000) > 2


def test_as_many_stay_or_more_where_the_minimisers_are_a_surface():
    """Counted on ensembles uniform about the origin of R^6, with L the squared distance from a
    subspace."""
    found = []
    for codimension in (1, 2, 4, 6):
        generator, counts = stream(0, "surface", codimension), []
        for _ in range(200):
            lower = (
                torch.from_numpy(generator.uniform(-1, 1, (1000, 6)))[:, :codimension]
                .square()
                .sum(-1)
            )
            lower[:60] = 0.0
            counts.append(consensus.sublevel_mask(lower, 0.1, averaged=True).sum() - 60.0)
        found.append(torch.stack(counts).mean().item())
        left = capture_risk.benign_left(
            beta=0.1, w_m=0.06, num_benign=940, dim=codimension, averaged=True
        )
        assert found[-1] == pytest.approx(left, abs=2)
    assert found == sorted(found, reverse=True)
