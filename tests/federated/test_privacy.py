"""DP-SGD: clipped and perturbed gradients, Poisson sampling, and epsilon by independent oracles."""

import math
import warnings

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn
from torch.nn import functional as F

from fedcb2o.data import Shard
from fedcb2o.errors import ConfigError
from fedcb2o.experiments.config.loading import load
from fedcb2o.federated import privacy
from fedcb2o.federated.local_update import local_update_
from fedcb2o.federated.run_spec import Training
from fedcb2o.federated.sections import Privacy
from fedcb2o.nn.parameters import bind_, flatten
from fedcb2o.records import result_settings

PRESET = "digits-fedassay"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def samples(n: int = 7) -> Shard:
    draw = torch.Generator().manual_seed(1)
    return Shard(torch.randn(n, 6, generator=draw), torch.arange(n) % 3)


def training(clip: float = 0.5, **keys) -> Training:
    settings = {"gamma": 0.1, "momentum": 0.0, "batch_size": 4, "local_epochs": 1, **keys}
    return Training(privacy=Privacy(clip=clip, noise=1.0), **settings)


def clipped_mean(module: nn.Module, shard: Shard, batch: list[int], clip: float, expected: float):
    """Return the sum of the clipped gradients over the expected batch size, sample by sample."""
    parameters = list(module.parameters())
    sums = [torch.zeros_like(p) for p in parameters]
    for i in batch:
        loss = F.cross_entropy(module(shard.x[i : i + 1]), shard.y[i : i + 1])
        gradients = torch.autograd.grad(loss, parameters)
        length = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        for total, gradient in zip(sums, gradients, strict=True):
            total += gradient * min(1.0, clip / length)
    return [total / expected for total in sums]


@pytest.mark.parametrize("size", [1, 10**9])
@pytest.mark.parametrize("clip", [0.5, 100.0])
def test_gradients_equal_clipped_gradients_of_single_samples(clip, size, monkeypatch):
    monkeypatch.setattr(privacy, "_MAX_GRADIENT_NUMBERS", size)  # one sample at a time, or all
    module, shard = network(), samples()
    batch = torch.tensor([0, 2, 3, 6])
    draw = np.random.default_rng(0)
    loss, gradients = privacy.private_gradients(module, shard, batch, training(clip), 0.0, draw)
    expected = clipped_mean(module, shard, batch.tolist(), clip, 7 / 2)
    for gradient, clipped in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, clipped, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(loss, F.cross_entropy(module(shard.x[batch]), shard.y[batch]))


def test_noise_has_the_standard_deviation_of_the_settings():
    module, shard, empty_batch = network(), samples(), torch.zeros(0, dtype=torch.int64)
    draw = np.random.default_rng(0)
    draws = []
    for _ in range(200):
        _, gradients = privacy.private_gradients(
            module, shard, empty_batch, training(0.5), 3.0, draw
        )
        draws.append(torch.cat([g.flatten() for g in gradients]))
    values = torch.stack(draws)
    assert float(values.std()) == pytest.approx(3.0 * 0.5 / 3.5, rel=0.03)
    assert abs(float(values.mean())) < 0.02


def test_a_sample_without_a_finite_gradient_counts_as_zero():
    module, shard = network(), samples()
    shard.x[2] = float("nan")
    draw = np.random.default_rng(0)
    _, gradients = privacy.private_gradients(
        module, shard, torch.tensor([0, 2]), training(), 0.0, draw
    )
    clipped = clipped_mean(module, shard, [0], 0.5, 7 / 2)
    for gradient, expected in zip(gradients, clipped, strict=True):
        torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)


def test_each_sample_is_taken_with_probability_one_over_the_batches_of_an_epoch():
    settings = training(local_epochs=500)
    batches = list(privacy.poisson_batches(10, settings, np.random.default_rng(0)))
    assert len(batches) == 500 * 3 == privacy.num_steps(settings, 10)
    counts = np.bincount(np.concatenate([batch.numpy() for (batch,) in batches]), minlength=10)
    assert np.abs(counts / 1500 - 1 / 3).max() < 0.05
    assert len({len(batch) for (batch,) in batches}) > 3  # Poisson sampling, not shuffled batches


def test_without_noise_and_clipping_one_batch_is_a_step_of_gradient_descent():
    settings = training(1e6, batch_size=7)
    module, shard = network(), samples()
    theta = flatten(module)
    bind_(module, theta)
    gradients = clipped_mean(module, shard, list(range(7)), 1e6, 7)
    expected = theta - 0.1 * torch.cat([g.flatten() for g in gradients])
    loss = local_update_(theta, module, shard, settings, np.random.default_rng(0), 1e-12)
    torch.testing.assert_close(theta, expected, atol=1e-5, rtol=1e-4)
    assert math.isfinite(loss)


def gaussian_delta(epsilon: float, noise: float, steps: int) -> float:
    """Delta of composed Gaussian mechanisms (Balle and Wang, 2018, theorem 8)."""
    s = math.sqrt(steps) / noise
    return norm.cdf(s / 2 - epsilon / s) - math.exp(epsilon) * norm.cdf(-s / 2 - epsilon / s)


@pytest.mark.parametrize(("noise", "steps"), [(5.0, 10), (2.0, 3), (20.0, 400)])
def test_epsilon_of_full_batches_is_that_of_the_gaussian_mechanism(noise, steps):
    result = privacy.epsilon(noise, 1, steps, 1e-5)
    assert gaussian_delta(result, noise, steps) <= 1e-5
    assert gaussian_delta(0.995 * result, noise, steps) > 1e-5


# Opacus 1.6.0: PRVAccountant.get_epsilon(delta, eps_error=0.002), by `benchmarks/dp_opacus.py`
@pytest.mark.parametrize(
    ("noise", "batches", "steps", "delta", "opacus"),
    [
        (1.2, 3, 150, 1e-5, 24.0658),
        (1.0, 100, 5000, 1e-5, 4.2041),
        (3.0, 2, 400, 1e-5, 19.7285),
        (0.8, 12, 60, 1e-4, 6.1300),
        (6.0, 10, 1000, 1e-6, 2.4327),
    ],
)
def test_epsilon_is_that_of_opacus(noise, batches, steps, delta, opacus):
    assert privacy.epsilon(noise, batches, steps, delta) == pytest.approx(opacus, rel=0.002)


@pytest.mark.parametrize("target", [0.5, 8.0])
def test_a_target_epsilon_is_reached_after_the_last_round_and_not_exceeded(target):
    settings = training().model_copy(update={"privacy": Privacy(epsilon=target)})
    spent = [privacy.spent_epsilon(settings, 10, 20, n) for n in (0, 10, 20)]
    assert spent[0] == 0 < spent[1] < spent[2]
    assert 0.995 * target < spent[2] <= target


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training.privacy": {"noise": 1.0}}, "losses on them without noise"),
        ({"training.privacy": {"noise": 1.0, "epsilon": 1.0}}, "not both"),
        ({"training.privacy": {}}, "needs `noise`"),
        ({"training.privacy": {"noise": 1.0, "clipp": 1.0}}, "training.privacy.clip"),
        (
            {"training.privacy": {"noise": 1.0}, "algorithm": "dfedavgm", "convolution": "fourier"},
            "PyTorch's kernels",
        ),
    ],
)
def test_settings_that_would_not_be_private_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        load(PRESET, changes)


def test_batch_norms_are_refused_with_the_reason():
    module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
    with pytest.raises(ConfigError, match="batch norms: their statistics"):
        privacy.check_privacy(training(), module)


def test_a_run_with_a_target_epsilon_cannot_be_extended():
    def selected(**keys: float) -> set[str]:
        return set(result_settings({"rounds": 5, "training": {"privacy": keys}}))

    assert "rounds" in selected(epsilon=8.0)
    assert "rounds" not in selected(noise=1.0)
    assert "rounds" not in set(result_settings({"rounds": 5}))


@pytest.mark.parametrize(
    ("delta", "counts", "cure"),
    [(0.1, [4, 10], "1e-05"), (0.5, [2], "1e-05"), (1e-5, [40, 200_000], "1e-07")],
)
def test_a_delta_of_one_in_n_or_more_gives_a_warning_with_a_smaller_one(delta, counts, cure):
    with pytest.warns(UserWarning, match=f"{max(counts)} training samples.*such as {cure}$"):
        privacy.check_delta(private(delta), counts)


@pytest.mark.parametrize(("delta", "counts"), [(1e-5, [99_999]), (0.09, [10]), (1e-5, [])])
def test_a_smaller_delta_than_one_in_n_passes(delta, counts):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        privacy.check_delta(private(delta), counts)
        privacy.check_delta(Training(gamma=0.1), [10**9])


def private(delta: float) -> Training:
    return Training(gamma=0.1, privacy=Privacy(noise=1.0, delta=delta))
