"""Differentially private LocalUpdate: DP-SGD (Abadi et al., 2016), and its epsilon.

Each step takes every sample of the agent with probability q, independently (Poisson sampling),
clips the gradient of each sample to the norm `clip`, adds noise N(0, (noise clip)^2) to their sum
and divides by the expected number of samples. q is one divided by the number of mini-batches in an
epoch, so that an epoch has as many steps as without privacy. Epsilon is for adding or removing one
training sample, by privacy loss distributions (the library dp-accounting).
"""

import functools
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedcb2o.data import Shard, features
from fedcb2o.errors import ConfigError
from fedcb2o.federated.inference import per_sample_losses
from fedcb2o.nn import batch_norm

if TYPE_CHECKING:
    from fedcb2o.federated.run_spec import Training

_MAX_GRADIENT_NUMBERS = 2**24  # gradients of single samples in memory: 64 MiB
_MAX_NOISE = 1e4
_GRID = 1e-3  # of privacy losses; rounding is upwards


def check_privacy(training: "Training", module: nn.Module) -> None:
    """Refuse a network that mixes samples, and an installation without the accountant."""
    if training.privacy is None:
        return
    if batch_norm.statistics(module, "shared", "local", "dropped"):
        raise ConfigError(
            "`training.privacy` needs a network without batch norms: their statistics depend on "
            "all samples of an agent, and no noise is added to them; take group norms"
        )
    if find_spec("dp_accounting") is None:
        raise ConfigError(
            "`training.privacy` needs the extra, of which dp_accounting is missing: pip install "
            "'fedcb2o[privacy]'"
        )


def check_delta(training: "Training", counts: Iterable[int]) -> None:
    """Warn of a delta that lets an agent, with this number of samples, publish a sample as it is.

    An algorithm that publishes one sample of n at random has epsilon 0 and delta 1 / n.
    """
    most = max(counts, default=0)
    if training.privacy is None or training.privacy.delta * most < 1:
        return
    # A power of ten that is at most a tenth of 1 / n.
    smaller = min(1e-5, 10.0 ** -(math.ceil(math.log10(most)) + 1))
    warnings.warn(
        f"`training.privacy.delta` = {training.privacy.delta:g} is no protection for an agent with"
        f" {most} training samples: publishing one of them as it is would have epsilon 0 and delta"
        f" {1 / most:.2g}. Take a delta well below {1 / most:.2g}, such as {smaller:g}",
        stacklevel=2,
    )


def num_steps(training: "Training", num_samples: int) -> int:
    """Return the number of private steps of a round, by local steps or epochs."""
    if training.local_steps is not None:
        return training.local_steps
    return training.local_epochs * _batches_per_epoch(training, num_samples)


def _batches_per_epoch(training: "Training", num_samples: int) -> int:
    return max(1, -(-num_samples // training.batch_size))


@functools.lru_cache(4096)
def epsilon(noise: float, batches: int, steps: int, delta: float) -> float:
    """Compute the epsilon of DP-SGD, rounded upwards; an epoch has `batches` = 1 / q."""
    if steps == 0:
        return 0.0
    return float(_step_losses(noise, batches).self_compose(steps).get_epsilon_for_delta(delta))


@functools.lru_cache(64)
def _step_losses(noise: float, batches: int) -> Any:
    """Return the privacy loss distribution of one step."""
    from dp_accounting.pld import privacy_loss_distribution as pld  # takes two seconds

    return pld.from_gaussian_mechanism(
        noise, sampling_prob=1 / batches, value_discretization_interval=_GRID
    )


@functools.lru_cache(1024)
def _noise_for(target: float, batches: int, steps: int, delta: float) -> float:
    """Return the least noise with which the steps have at most the target epsilon."""
    from scipy.optimize import brentq  # slow to import

    def excess(log_noise: float) -> float:
        return epsilon(math.exp(log_noise), batches, steps, delta) - target

    # A bracket of the root on the scale of logarithms, by factors of 2 up or of its root down.
    low = high = 0.0
    while excess(high) > 0:
        high += math.log(2)
        if high > math.log(_MAX_NOISE):
            raise ConfigError(
                f"no noise gives epsilon {target:g} in {steps} steps: take a larger "
                "`training.privacy.epsilon`, or fewer rounds"
            )
    while high == 0 and excess(low) < 0 and low > -3:
        low -= math.log(2) / 2
    if high > 0:
        low = high - math.log(2)
    if excess(low) < 0:
        return math.exp(low)
    found = brentq(excess, low, high, xtol=1e-4)
    return math.exp(found + 2e-4)  # on the safe side of the root


def noise_multiplier(training: "Training", num_samples: int, rounds: int) -> float | None:
    """Return the noise in units of `clip`, or the least for the target; None without privacy."""
    privacy = training.privacy
    if privacy is None or privacy.noise is not None:
        return None if privacy is None else privacy.noise
    assert privacy.epsilon is not None
    batches = _batches_per_epoch(training, num_samples)
    steps = rounds * num_steps(training, num_samples)
    return _noise_for(privacy.epsilon, batches, steps, privacy.delta)


def spent_epsilon(training: "Training", num_samples: int, rounds: int, trained: int) -> float:
    """Compute the epsilon of an agent that `trained` some rounds, repeated ones included."""
    assert training.privacy is not None
    noise = noise_multiplier(training, num_samples, rounds)
    assert noise is not None
    batches = _batches_per_epoch(training, num_samples)
    steps = trained * num_steps(training, num_samples)
    return epsilon(noise, batches, steps, training.privacy.delta)


def poisson_batches(
    num_samples: int, training: "Training", draw: np.random.Generator
) -> Iterator[tuple[Int[Tensor, " b"]]]:
    """Draw the samples of each private step (Poisson sampling); there may be none."""
    rate = 1 / _batches_per_epoch(training, num_samples)
    for _ in range(num_steps(training, num_samples)):
        yield (torch.from_numpy(np.flatnonzero(draw.random(num_samples) < rate)),)


def private_gradients(
    module: nn.Module,
    shard: Shard,
    batch: Int[Tensor, " b"],
    training: "Training",
    noise: float,
    draw: np.random.Generator,
) -> tuple[Float[Tensor, ""], Sequence[Tensor]]:
    """Compute the noisy mean of the clipped gradients of samples (Abadi et al., algorithm 1).

    The noise is in units of the clipping norm. The mean loss has none, for the agent alone.
    """
    assert training.privacy is not None
    clip = training.privacy.clip
    parameters = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        outputs = functional_call(module, values, (x.unsqueeze(0),))
        return per_sample_losses(training.loss, outputs, y.unsqueeze(0), 1).squeeze(0)

    per_sample = vmap(grad_and_value(loss), in_dims=(None, 0, 0), randomness="different")
    sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
    total = torch.zeros((), device=shard.x.device)
    size = max(1, _MAX_GRADIENT_NUMBERS // sum(p.numel() for p in parameters.values()))
    # The gradients of single samples take memory, so that only some are held at a time.
    for part in torch.split(batch.to(shard.x.device), size):
        if not len(part):
            continue
        gradients, losses = per_sample(parameters, features(shard.x[part]), shard.y[part])
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
        is_finite = norms.isfinite()
        factors = torch.where(is_finite, (clip / (norms + 1e-6)).clamp(max=1.0), 0.0)
        for name, gradient in gradients.items():
            if not is_finite.all():  # a sample without a finite gradient counts as zero
                gradient = gradient.nan_to_num(0.0, 0.0, 0.0)
            sums[name] += torch.tensordot(factors, gradient, 1)
        total += losses.sum()

    expected = len(shard) / _batches_per_epoch(training, len(shard))
    noisy = []
    for clipped in sums.values():
        z = torch.from_numpy(draw.standard_normal(clipped.shape, dtype=np.float32))
        noisy.append((clipped + noise * clip * z.to(clipped.device)) / expected)
    return total / max(1, len(batch)), noisy
