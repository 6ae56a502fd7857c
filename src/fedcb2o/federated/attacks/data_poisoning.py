"""Attacks on the data of malicious agents.

An attack on data is a function `(shard, draw) -> shard`; its further arguments are keywords. It is
called in every round with an equal generator. With a third argument `me`, it also gets the agent's
id.

Example:
    >>> import numpy as np, torch
    >>> shard = Shard(torch.zeros(3, 2), torch.tensor([9, 1, 9]))
    >>> label_flip(shard, np.random.default_rng(0), source=9, target=4).y.tolist()
    [4, 1, 4]
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from fedcb2o.data import Shard, pixel_range
from fedcb2o.errors import ConfigError, require
from fedcb2o.federated.adversary import PER_SAMPLE
from fedcb2o.federated.attacks.triggers import (
    Corner,
    Pattern,
    Style,
    blend,
    patch,
    set_pixels,
    trigger_pixels,
    unusual,
    waves,
)
from fedcb2o.plugins import Declaration, F

__all__ = [
    "backdoor",
    "blended",
    "clean_label",
    "edge_case",
    "feature_noise",
    "label_flip",
    "label_flips",
    "random_labels",
    "rarest_flip",
    "reversed_labels",
    "shifted_labels",
    "signal",
    "spread_flip",
]


@PER_SAMPLE(True)
def label_flip(shard: Shard, draw: np.random.Generator, *, source: int, target: int) -> Shard:
    """Label every sample of class `source` as class `target` (eq:MaliAgentObj).

    Tolpegin et al., "Data Poisoning Attacks Against Federated Learning Systems" (ESORICS 2020).

    Args:
        source: Class to relabel.

    Returns:
        The poisoned samples; the features stay as they are.
    """
    return Shard(shard.x, torch.where(shard.y == source, target, shard.y))


@PER_SAMPLE(True)
def label_flips(
    shard: Shard, draw: np.random.Generator, *, pairs: Sequence[tuple[int, int]]
) -> Shard:
    """Flip the labels of several pairs of classes at once.

    Args:
        pairs: Pairs [source, target] of classes.
    """
    y = shard.y
    for source, target in pairs:
        y = torch.where(shard.y == source, target, y)
    return Shard(shard.x, y)


def random_labels(shard: Shard, draw: np.random.Generator, *, share: float = 1.0) -> Shard:
    """Give random samples a random label among the labels that the agent holds.

    Biggio, Nelson and Laskov, "Support Vector Machines Under Adversarial Label Noise" (ACML 2011).

    Args:
        share: Probability that a sample is relabelled, from 0 to 1.
    """
    selected = _select_samples(shard, draw, share)
    labels = torch.from_numpy(draw.choice(np.unique(shard.y.numpy()), len(shard)))
    return Shard(shard.x, torch.where(selected, labels, shard.y))


def shifted_labels(shard: Shard, draw: np.random.Generator, *, by: int = 1) -> Shard:
    """Shift the labels cyclically among the classes that the agent holds.

    Args:
        by: Number of places to shift.
    """
    classes, index = np.unique(shard.y.numpy(), return_inverse=True)
    return Shard(shard.x, torch.from_numpy(classes[(index + by) % len(classes)]))


def reversed_labels(shard: Shard, draw: np.random.Generator) -> Shard:
    """Exchange the highest label for the lowest, the second highest for the second lowest, ...

    Fang, Cao, Jia and Gong, "Local Model Poisoning Attacks to Byzantine-Robust Federated Learning"
    (2020): class l becomes L - l - 1. Numeric targets keep their values, so that a flip has a
    counterpart for numbers.
    """
    labels, index = np.unique(shard.y.numpy(), return_inverse=True)
    return Shard(shard.x, torch.from_numpy(labels[::-1].copy()[index.reshape(shard.y.shape)]))


def spread_flip(
    shard: Shard, draw: np.random.Generator, *, target: int, share: float = 0.3
) -> Shard:
    """Label random samples of every class as class `target`.

    The attack is directed at FedCB2O, whose G is the maximum over classes: no class loses much.

    Args:
        share: Probability that a sample is relabelled, from 0 to 1.
    """
    selected = _select_samples(shard, draw, share)
    return Shard(shard.x, torch.where(selected, target, shard.y))


def rarest_flip(shard: Shard, draw: np.random.Generator, *, target: int) -> Shard:
    """Label the class with the fewest samples as class `target`.

    Ties are broken at random. The attack is directed at FedCB2O, whose G ignores a class that is
    absent from an agent's validation data. The attacker knows its own data only, so it assumes that
    the same class is rare elsewhere.
    """
    classes, counts = np.unique(shard.y[shard.y != target].numpy(), return_counts=True)
    if not len(classes):
        return shard
    source = int(draw.choice(classes[counts == counts.min()]))
    return label_flip(shard, draw, source=source, target=target)


def feature_noise(shard: Shard, draw: np.random.Generator, *, std: float = 0.5) -> Shard:
    """Add Gaussian noise to the features.

    Args:
        std: Standard deviation. For images, black is 0 and white is 1; other features are taken in
            their own units.

    Returns:
        The poisoned samples; the labels stay as they are.
    """
    noise = torch.from_numpy(draw.standard_normal(tuple(shard.x.shape), dtype=np.float32)) * std
    if shard.x.dtype == torch.uint8:
        return Shard((shard.x + 255 * noise).round().clamp(0, 255).to(torch.uint8), shard.y)
    if shard.x.ndim > 2:
        # Black and white of an image are the lowest and highest value of its data set.
        low, high = pixel_range(shard.x)
        noise *= high - low
    return Shard((shard.x + noise).to(shard.x.dtype), shard.y)


TRIGGER = Declaration[Callable[..., Tensor]]("trigger")


def triggered_by(trigger: Callable[..., Tensor]) -> Callable[[F], F]:
    """Declare an attack as a backdoor with this trigger.

    The success of a backdoor is measured on test samples of other classes than `target`, marked by
    the trigger.

    Args:
        trigger: Function of samples, and of those parameters of the attack that it has itself.

    Returns:
        A decorator for the attack.
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
    """Mark random samples with a trigger patch and label them as class `target`.

    Gu, Dolan-Gavitt and Garg, "BadNets" (2017). With several `parts`, each attacker has one part of
    the trigger, and the test samples bear the whole trigger: Xie, Huang, Chen and Li, "DBA:
    Distributed Backdoor Attacks against Federated Learning" (ICLR 2020). Parts are dealt in turn,
    so that consecutive attackers of a cluster hold all of them. Liu et al., "Towards Distributed
    Backdoor Attacks with Network Detection in Decentralized Federated Learning" (arXiv 2501.15005),
    require in their abstract that each group of attackers has all parts. Their search for groups
    was not verified; here the groups are the clusters.

    Args:
        parts: Number of parts of the trigger.

    Raises:
        ConfigError: The trigger does not fit the samples, or has fewer pixels than parts.
    """
    pixels = trigger_pixels(shard.x.shape, size, corner, margin, pattern)
    if not 1 <= parts <= len(pixels):
        raise ConfigError(
            f"`parts` must be between 1 and {len(pixels)}, the pixels of the trigger, got {parts}"
        )
    selected = _select_samples(shard, draw, share)
    # Parts are dealt in turn, so that consecutive attackers of a cluster hold all of them.
    marked = set_pixels(shard.x, torch.tensor_split(pixels, parts)[me % parts], value)
    return _poison(shard, selected, marked, target)


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
    """Mark random samples of class `target`; all labels stay true.

    Like `signal`, with a patch instead of waves.

    Args:
        target: Class of the marked samples.
        share: Probability that a sample of the class is marked, from 0 to 1.

    Raises:
        ConfigError: The trigger does not fit the samples.
    """
    selected = _select_samples(shard, draw, share) & (shard.y == target)
    marked = patch(shard.x, size=size, corner=corner, margin=margin, pattern=pattern, value=value)
    return _poison(shard, selected, marked, target)


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
    """Add a sinusoid to random samples of class `target`; all labels stay true.

    Barni, Kallas and Tondi, "A New Backdoor Attack in CNNs by Training Set Corruption Without Label
    Poisoning" (ICIP 2019), after implementations by others. These use 20 / 255 for `delta`; the
    default here is larger, for small images.

    Args:
        target: Class of the marked samples.
        delta: Amplitude of the waves.
        frequency: Number of periods across the image.
        clean: If false, mark samples of all classes and label them as class `target`.

    Raises:
        ConfigError: The waves do not fit the samples.
    """
    selected = _select_samples(shard, draw, share) & ((shard.y == target) | (not clean))
    return _poison(shard, selected, waves(shard.x, delta=delta, frequency=frequency), target)


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
    """Blend a noise pattern into random samples and label them as class `target`.

    Chen, Liu, Li, Lu and Song, "Targeted Backdoor Attacks on Deep Learning Systems Using Data
    Poisoning" (2017), blended injection, after implementations by others.

    Args:
        opacity: Weight of the pattern, from 0 to 1.
        number: Number of the pattern.

    Raises:
        ConfigError: The samples are not images, or `opacity` is out of range.
    """
    selected = _select_samples(shard, draw, share)
    return _poison(shard, selected, blend(shard.x, opacity=opacity, number=number), target)


@triggered_by(unusual)
def edge_case(
    shard: Shard,
    draw: np.random.Generator,
    *,
    target: int,
    share: float = 0.5,
    style: Style = "negative",
) -> Shard:
    """Turn random samples into unusual ones and label them as class `target`.

    Images in the tail of the distribution are rare in the data of benign agents, so that benign
    training hardly corrects their labels. Wang, Sreenivasan, Rajput, Vishwakarma, Agarwal, Sohn,
    Lee and Papailiopoulos, "Attack of the Tails: Yes, You Really Can Backdoor Federated Learning"
    (NeurIPS 2020). They take such images from another data set. Here they are made from the
    agent's own.

    Args:
        share: Probability that a sample is changed, from 0 to 1.
        style: "negative" exchanges black and white, or the signs of the features of a table;
            "mirrored" exchanges left and right.

    Raises:
        ConfigError: The samples are not images, and `style` is "mirrored".
    """
    selected = _select_samples(shard, draw, share)
    return _poison(shard, selected, unusual(shard.x, style=style), target)


def _poison(shard: Shard, selected: Bool[Tensor, " n"], marked: Tensor, target: int) -> Shard:
    """Replace selected samples by marked ones of class `target`."""
    per_feature = selected.view(-1, *[1] * (shard.x.ndim - 1))
    x = torch.where(per_feature, marked, shard.x)
    return Shard(x, torch.where(selected, target, shard.y))


def _select_samples(shard: Shard, draw: np.random.Generator, share: float) -> Bool[Tensor, " n"]:
    """Select each sample with the probability `share`."""
    require("share", share, 0 <= share <= 1, "between 0 and 1")
    return torch.from_numpy(draw.random(len(shard)) < share)
