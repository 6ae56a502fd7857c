"""What malicious agents do to their own data.

An attack on data is a function (shard, draw) -> shard; its further arguments are keywords. It is called in every round
with equal draws. With a third argument `me` it is told the agent's id.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from fedcb2o.data._dataset import Shard
from fedcb2o.errors import ConfigError
from fedcb2o.federated.attacks.triggers import (
    Corner,
    Pattern,
    blend,
    patch,
    set_pixels,
    trigger_pixels,
    waves,
)
from fedcb2o.plugins import Declaration, F

__all__ = [
    "backdoor",
    "blended",
    "clean_label",
    "feature_noise",
    "label_flip",
    "label_flips",
    "random_labels",
    "rarest_flip",
    "shifted_labels",
    "signal",
    "spread_flip",
]


def label_flip(shard: Shard, draw: np.random.Generator, *, source: int, target: int) -> Shard:
    """Label every sample of class `source` as class `target`; the features stay as they are (eq:MaliAgentObj).

    Tolpegin et al., "Data Poisoning Attacks Against Federated Learning Systems" (ESORICS 2020).
    """
    return Shard(shard.x, torch.where(shard.y == source, target, shard.y))


def label_flips(
    shard: Shard, draw: np.random.Generator, *, pairs: Sequence[tuple[int, int]]
) -> Shard:
    """Label flips of several `pairs` [source, target] at once."""
    y = shard.y
    for source, target in pairs:
        y = torch.where(shard.y == source, target, y)
    return Shard(shard.x, y)


def random_labels(shard: Shard, draw: np.random.Generator, *, share: float = 1.0) -> Shard:
    """Give a `share` of the samples a label at random among those that the agent holds.

    Biggio, Nelson and Laskov, "Support Vector Machines Under Adversarial Label Noise" (ACML 2011).
    """
    hit = _select_samples(shard, draw, share)
    drawn = torch.from_numpy(draw.choice(np.unique(shard.y.numpy()), len(shard)))
    return Shard(shard.x, torch.where(hit, drawn, shard.y))


def shifted_labels(shard: Shard, draw: np.random.Generator, *, by: int = 1) -> Shard:
    """Label every class as the one that comes `by` places after it among the classes that the agent holds, around."""
    held, place = np.unique(shard.y.numpy(), return_inverse=True)
    return Shard(shard.x, torch.from_numpy(held[(place + by) % len(held)]))


def spread_flip(
    shard: Shard, draw: np.random.Generator, *, target: int, share: float = 0.3
) -> Shard:
    """Label a `share` of the samples of every class as `target`: against FedCB2O, whose G is the maximum over classes,
    and here none loses much."""
    hit = _select_samples(shard, draw, share)
    return Shard(shard.x, torch.where(hit, target, shard.y))


def rarest_flip(shard: Shard, draw: np.random.Generator, *, target: int) -> Shard:
    """Label the class that the attacker holds fewest samples of as `target`, drawn among equals: against FedCB2O, whose
    G says nothing of a class that is absent from an agent's validation data.

    It knows its own data only: where classes are as rare with the benign agents as with it, that is its best guess.
    """
    held, counts = np.unique(shard.y[shard.y != target].numpy(), return_counts=True)
    if not len(held):
        return shard
    return label_flip(
        shard, draw, source=int(draw.choice(held[counts == counts.min()])), target=target
    )


def feature_noise(shard: Shard, draw: np.random.Generator, *, std: float = 0.5) -> Shard:
    """Add Gaussian noise to the features, `std` on the scale that a network reads (pixels from 0 to 1)."""
    noise = torch.from_numpy(draw.standard_normal(tuple(shard.x.shape), dtype=np.float32)) * std
    if shard.x.dtype == torch.uint8:
        return Shard((shard.x + 255 * noise).round().clamp(0, 255).to(torch.uint8), shard.y)
    return Shard((shard.x + noise).to(shard.x.dtype), shard.y)


TRIGGER = Declaration[Callable[..., Tensor]]("trigger")


def triggered_by(trigger: Callable[..., Tensor]) -> Callable[[F], F]:
    """Declares a backdoor: its success is measured on test samples of other classes than `target`, marked by `trigger`.

    That is a function of the samples and of those of the attack's parameters that it has itself.
    """
    return TRIGGER(trigger)


@triggered_by(patch)
def backdoor(
    shard: Shard,
    draw: np.random.Generator,
    me: int,
    *,
    target: int,
    share: float = 0.5,
    size: int = 2,
    corner: Corner = "bottom right",
    margin: int = 0,
    pattern: Pattern = "square",
    value: float = 1.0,
    parts: int = 1,
) -> Shard:
    """Mark a `share` of the samples with a trigger, see `patch`, and label those as class `target`.

    Gu, Dolan-Gavitt and Garg, "BadNets" (2017). With `parts` above 1 each attacker has one part of the trigger, dealt
    in turn, so that as many attackers of a cluster have it all, and the test samples bear it whole: Xie, Huang, Chen
    and Li, "DBA: Distributed Backdoor Attacks against Federated Learning" (ICLR 2020). That each group of attackers
    should have all parts is what Liu et al., "Towards Distributed Backdoor Attacks with Network Detection in
    Decentralized Federated Learning" (arXiv 2501.15005), say in their abstract; how they find groups is not verified,
    here they are the clusters.
    """
    pixels = trigger_pixels(shard.x.shape, size, corner, margin, pattern)
    if not 1 <= parts <= len(pixels):
        raise ConfigError(
            f"`parts` must be between 1 and {len(pixels)}, the pixels of the trigger, got {parts}"
        )
    hit = _select_samples(shard, draw, share)
    marked = set_pixels(shard.x, torch.tensor_split(pixels, parts)[me % parts], value)
    return _poison(shard, hit, marked, target)


@triggered_by(patch)
def clean_label(
    shard: Shard,
    draw: np.random.Generator,
    *,
    target: int,
    share: float = 1.0,
    size: int = 2,
    corner: Corner = "bottom right",
    margin: int = 0,
    pattern: Pattern = "square",
    value: float = 1.0,
) -> Shard:
    """Mark a `share` of the samples of class `target` with a trigger, see `patch`; all labels stay true.

    As `signal`, with a patch in place of waves.
    """
    hit = _select_samples(shard, draw, share) & (shard.y == target)
    marked = patch(shard.x, size=size, corner=corner, margin=margin, pattern=pattern, value=value)
    return _poison(shard, hit, marked, target)


@triggered_by(waves)
def signal(
    shard: Shard,
    draw: np.random.Generator,
    *,
    target: int,
    share: float = 1.0,
    delta: float = 0.2,
    frequency: float = 6.0,
    clean: bool = True,
) -> Shard:
    """Lay a sinusoid over a `share` of the samples of class `target`, see `waves`; all labels stay true.

    Barni, Kallas and Tondi, "A New Backdoor Attack in CNNs by Training Set Corruption Without Label Poisoning" (ICIP
    2019), by others' implementations, which take 20 / 255 for `delta`: here it is stronger, for small images. With
    `clean` false it marks samples of all classes and labels them as the target.
    """
    hit = _select_samples(shard, draw, share) & ((shard.y == target) | (not clean))
    return _poison(shard, hit, waves(shard.x, delta=delta, frequency=frequency), target)


@triggered_by(blend)
def blended(
    shard: Shard,
    draw: np.random.Generator,
    *,
    target: int,
    share: float = 0.5,
    opacity: float = 0.2,
    number: int = 0,
) -> Shard:
    """Blend a pattern of noise into a `share` of the samples, see `blend`, and label those as class `target`.

    Chen, Liu, Li, Lu and Song, "Targeted Backdoor Attacks on Deep Learning Systems Using Data Poisoning" (2017), their
    blended injection, by others' implementations.
    """
    hit = _select_samples(shard, draw, share)
    return _poison(shard, hit, blend(shard.x, opacity=opacity, number=number), target)


def _poison(shard: Shard, selected: Bool[Tensor, " n"], marked: Tensor, target: int) -> Shard:
    """A shard whose samples that are `hit` are those `marked`, and of class `target`."""
    wide = selected.view(-1, *[1] * (shard.x.ndim - 1))
    return Shard(torch.where(wide, marked, shard.x), torch.where(selected, target, shard.y))


def _select_samples(shard: Shard, draw: np.random.Generator, share: float) -> Bool[Tensor, " n"]:
    """Which samples an attack takes, each with the probability `share`."""
    if not 0 <= share <= 1:
        raise ConfigError(f"`share` must be between 0 and 1, got {share}")
    return torch.from_numpy(draw.random(len(shard)) < share)
