"""Benign particles left in Q_beta (eq:Q_beta): by hand, on ensembles, and their effect on runs."""

import dataclasses

import pytest
import torch

import fedcb2o
from fedcb2o import Paper, consensus
from fedcb2o.particles import adversaries, problem, theory
from fedcb2o.rng import stream

CIRCLE = problem("circle")
FACTS = Paper(alpha=1e3, beta=0.05, sigma1=0.5, noise="isotropic", xtol=0.0)


def attacked_errors(quantile, num_malicious, runs=5):
    """Return the errors of runs with N = 200 and `num_malicious` particles at (-1, 0)."""
    result = fedcb2o.minimize(
        CIRCLE.lower,
        CIRCLE.upper,
        2,
        num_particles=200 - num_malicious,
        dynamics=dataclasses.replace(FACTS, quantile=quantile),
        maxiter=600,
        runs=runs,
        initial=lambda generator, n, d: generator.standard_normal((n, d)),
        record_every=600,
        adversaries=adversaries.static(num_malicious, CIRCLE.bad),
    )
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
def test_capture_depends_on_the_benign_particles_left(quantile, num_malicious, error):
    """With N = 200 and beta = 0.05, Q_beta holds 10 particles; benign ones prevent capture."""
    errors = attacked_errors(quantile, num_malicious)
    assert (errors - error).abs().max() < 0.06


def test_a_single_benign_particle_is_selected_by_l_alone():
    """The result is anywhere on the circle: its median distance from the target is sqrt(2)."""
    errors = attacked_errors("plain", 9, runs=40)
    assert 1 < errors.median() < 1.8
    assert errors.min() < 0.7


def test_benign_left_by_hand():
    # Plain: the rank beta N, less the attackers. 0.1 * 30 is 3.0000000000000004 in floating point.
    assert theory.benign_left(beta=0.05, w_m=9 / 200, num_benign=191, dim=2) == 1
    assert theory.benign_left(beta=0.1, w_m=2 / 30, num_benign=28, dim=7) == 1
    assert theory.benign_left(beta=0.05, w_m=0.3, num_benign=100, dim=2) == 0
    assert theory.benign_left(beta=0.1, w_m=0.0, num_benign=100, dim=2) == 10
    # By mass: a benign particle has 0.96/60 = 0.016, so 0.01 is rounded up to one.
    assert theory.benign_left(beta=0.05, w_m=0.04, num_benign=60, dim=2) == 1

    def averaged(num_malicious, dim, num_particles=200):
        n = num_particles - num_malicious
        return theory.benign_left(
            beta=0.1, w_m=num_malicious / num_particles, num_benign=n, dim=dim, averaged=True
        )

    # In two dimensions the i-th least L is i. Ranks 11 to 20 are averaged, and the first 16 are
    # attackers: (1+2+3+4)/10.
    assert averaged(16, 2) == 1
    assert averaged(14, 2) == 2  # (1+...+6)/10 = 2.1
    assert averaged(10, 2) == 5  # (1+...+10)/10 = 5.5
    assert averaged(0, 2) == 15  # (11+...+20)/10 = 15.5
    # In one dimension it is i^2: (1+4+9+16)/10 = 3, below 2^2, and (1+...+36)/10 = 9.1, above 3^2.
    assert (averaged(16, 1), averaged(14, 1)) == (1, 3)
    # In many dimensions they are nearly equal, so one zero in the average is too many.
    assert averaged(11, 1000) == 0
    assert averaged(10, 1000) > 2


def test_benign_left_depends_on_the_codimension_of_the_minimisers():
    """Ensembles are uniform around the origin of R^6; L is the squared distance to a subspace."""
    means = []
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
        means.append(torch.stack(counts).mean().item())
        estimate = theory.benign_left(
            beta=0.1, w_m=0.06, num_benign=940, dim=codimension, averaged=True
        )
        assert means[-1] == pytest.approx(estimate, abs=2)
    assert means == sorted(means, reverse=True)
