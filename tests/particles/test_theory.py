"""The theory: decay of V against simulated particles, and numbers by hand."""

import math

import pytest
import torch
from tests.particles.problems import double

from fedcb2o.errors import ConfigError
from fedcb2o.particles import theory
from fedcb2o.rng import stream


def normal(seed, *shape):
    return torch.from_numpy(stream(seed, "test").standard_normal(shape))


# ---- thm:main ----


def test_functional_by_hand():
    theta = double([[0.0, 0.0], [3.0, 4.0]])
    assert theory.V(theta, torch.zeros(2).double()) == 6.25  # (0 + 25) / 2 / 2
    result = theory.V(torch.stack([theta, theta + 1]), torch.ones(2).double()).tolist()
    assert result == [3.75, 6.25]


def test_rates_and_times_by_hand():
    assert theory.contraction_rate(lambda1=1, sigma1=0.5, dim=2) == 1.5
    assert theory.contraction_rate(lambda1=1, sigma1=0.5, dim=2, noise="anisotropic") == 1.75
    assert theory.contraction_rate(lambda1=1, sigma1=1, dim=20) == -18
    assert theory.end_time(math.e**2, 1.0, vartheta=0.5, rate=2) == pytest.approx(2)
    assert theory.end_time_window(math.e**2, 1.0, vartheta=0.5, rate=2) == pytest.approx((0.8, 2))
    low, high = theory.decay_bounds(torch.tensor([0.0, 2.0]), 3.0, vartheta=0.5, rate=2)
    assert low.tolist() == pytest.approx([3, 3 * math.exp(-5)])
    assert high.tolist() == pytest.approx([3, 3 * math.exp(-2)])


def test_fit_is_exact_on_an_exponential():
    t = torch.linspace(0, 3, 50).double()
    values = torch.stack([2 * torch.exp(-1.5 * t), 7 * torch.exp(0.25 * t)])
    assert theory.fit_decay_rate(t, values).tolist() == pytest.approx([1.5, -0.25])
    values[0, [3, 8, 20]] = double([0.0, torch.nan, torch.inf])  # ignored
    assert theory.fit_decay_rate(t, values[0]).item() == pytest.approx(1.5)
    values[0, 1:] = torch.nan
    assert theory.fit_decay_rate(t, values).isnan().tolist() == [True, False]
    assert theory.fit_decay_rate(torch.full((3,), 0.1), torch.tensor([1.0, 2.0, 3.0])).isnan()


@pytest.mark.parametrize("noise", ["isotropic", "anisotropic"])
def test_decay_with_the_consensus_at_the_target(noise):
    """eq:dyn_micro2 with m = target = 0: d theta = -lambda theta dt + sigma D(theta) dB."""
    lambda1, sigma1, dim, dt, vartheta = 1.0, 0.4, 3, 0.01, 0.2
    rate = theory.contraction_rate(lambda1=lambda1, sigma1=sigma1, dim=dim, noise=noise)
    theta, target = normal(1, 20_000, dim), torch.zeros(dim, dtype=torch.float64)
    values = [theory.V(theta, target)]
    for n in range(150):
        D = theta.norm(dim=-1, keepdim=True) if noise == "isotropic" else theta
        theta = (
            theta - lambda1 * theta * dt + sigma1 * math.sqrt(dt) * D * normal(2 + n, 20_000, dim)
        )
        values.append(theory.V(theta, target))
    t, v = torch.arange(151).double() * dt, torch.stack(values)
    assert theory.fit_decay_rate(t, v).item() == pytest.approx(rate, rel=0.03)
    low, high = theory.decay_bounds(t, v[0].item(), vartheta=vartheta, rate=rate)
    assert (low <= v).all()
    assert (v <= high).all()
    eps = 0.15 * v[0].item()
    reached = t[v <= eps][0].item()
    earliest, latest = theory.end_time_window(v[0].item(), eps, vartheta=vartheta, rate=rate)
    assert earliest <= reached <= latest + dt


# ---- suggestions ----


def test_the_increase_of_alpha_needs_the_constants():
    suggestion = theory.suggest_parameters(0.25, beta=0.2, alpha=100)
    assert (suggestion.beta_factor, suggestion.beta) == (0.75, pytest.approx(0.15))
    assert suggestion.alpha_increase is suggestion.alpha is None
    assert any("delta_q" in note for note in suggestion.notes)
    assert any("alg:localAggregation" in note for note in suggestion.notes)


def test_alpha_grows_with_the_share_of_attackers():
    # log(0.4 / 0.6 x 1.5 / 0.1) / 0.5
    known = theory.suggest_parameters(0.4, alpha=10, R_K_G=1.5, eps=0.01, u=0.5)
    assert known.alpha_increase == pytest.approx(2 * math.log(10))
    assert known.alpha == pytest.approx(10 + 2 * math.log(10))
    few = theory.suggest_parameters(0.05, alpha=10, R_K_G=1.5, eps=0.01, u=0.5)
    assert few.alpha == 10  # log(0.05 / 0.95 x 15) is below 0


def test_suggestion_without_attackers_changes_nothing():
    suggestion = theory.suggest_parameters(0, beta=0.2, alpha=100)
    assert (suggestion.beta, suggestion.alpha, suggestion.alpha_increase) == (0.2, 100, 0)


def test_suggestion_warns_of_capture():
    assert "delta_q = 0" in theory.suggest_parameters(0.3, beta=0.1).notes[0]
    assert "0.07" in theory.suggest_parameters(0.3, beta=0.1).notes[0]
    assert len(theory.suggest_parameters(0.1, beta=0.5).notes) == len(
        theory.suggest_parameters(0.3).notes
    )


# ---- invalid settings ----


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.end_time(1.0, 0.1, vartheta=0.5, rate=-18.0), "2 lambda - d sigma^2 > 0, got -18"),
        (lambda: theory.end_time(1.0, 2.0, vartheta=0.5, rate=1), "`eps` must be above 0 and below V0 = 1, got 2"),
        (lambda: theory.contraction_rate(lambda1=1, sigma1=1, dim=1, noise="pink"), "got pink"),
        (lambda: theory.suggest_parameters(1.0), "`share`"),
    ],
)  # fmt: skip
def test_invalid_settings_are_refused(call, message):
    with pytest.raises(ConfigError) as caught:
        call()
    assert message in str(caught.value)
