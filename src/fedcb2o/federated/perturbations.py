"""Universal perturbations: few pixels, the same in all images, that make a model take these for another class.

Moosavi-Dezfooli, Fawzi, Fawzi and Frossard, "Universal adversarial perturbations" (CVPR 2017). A backdoor is a short
way from all classes to one, so that a trigger is sought for every class, as in Wang, Yao, Shan, Li, Viswanath, Zheng
and Zhao, "Neural Cleanse" (IEEE S&P 2019); but in one step of first order or a few, since a round has little time.
"""

import functools
import math

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from fedcb2o.errors import ConfigError
from fedcb2o.federated.evaluate import IMAGES
from fedcb2o.federated.types import Local, Received


def rises(local: Local, models: Received, pixels: int, samples: int, steps: int, blend: float) -> Float[Tensor, "m n"]:
    """How much the loss of each of an agent's validation samples rises under the perturbation worst for each model,
    found on some of them; infinitely where a model's gradients are not finite, so that none can be found."""
    outputs, labels = local.outputs_of(models)
    found, after = worst(local, models, outputs.shape[-1], pixels, samples, steps, blend), []
    for i, ways in enumerate(found):
        losses = _losses(*local.outputs_of(models[i : i + 1], functools.partial(painted, ways=ways)))
        after.append(losses if ways.isfinite().all() else torch.full_like(losses, torch.inf))
    return torch.cat(after) - _losses(outputs, labels)


def worst(
    local: Local, models: Received, num_classes: int, pixels: int, samples: int, steps: int, blend: float = 0.0
) -> Float[Tensor, "m *features"]:
    """Which pixels of all images to paint, at most so many, 1 for white and -1 for black, for each model; NaN where its
    gradients are not finite. Each channel of a pixel goes its own way.

    For each class these are sought that to first order raise its output most above that of the label, in so many steps
    a part of them, each by the gradients where those before are painted. Of the classes that one counts whose pixels
    raise the loss of the samples that they are sought on to the most; with one step, whose do most to first order. The
    samples are blended with a share `blend` of uniform noise.
    """
    x, y = local.some_samples(samples)
    if y.is_floating_point() or x.ndim < 3:
        raise ConfigError(
            f"the criterion looks for pixels that change the class of images, and the samples have shape "
            f"{tuple(x.shape[1:])}{' and no classes' * y.is_floating_point()}: take another"
        )
    if blend > 0:
        x = torch.lerp(x, torch.from_numpy(local.draw.random(tuple(x.shape))).to(x), blend)
    at_once = max(1, IMAGES // max(1, len(y)))
    parts = torch.split(torch.arange(num_classes), at_once)
    found = [_worst_for(local, models, classes, x, y, pixels, steps) for classes in parts]
    ways, worth = (torch.cat(each, 1) for each in zip(*found, strict=True))
    return ways[torch.arange(len(ways)), worth.argmax(1)]


def _worst_for(
    local: Local,
    models: Received,
    classes: Int[Tensor, " c"],
    x: Float[Tensor, "n *features"],
    y: Int[Tensor, " n"],
    pixels: int,
    steps: int,
) -> tuple[Float[Tensor, "m c *features"], Float[Tensor, "m c"]]:
    """For each model and each of some classes: which pixels to paint, and how bad they are; NaN, and infinitely, where
    gradients are not finite."""
    m, c, n, side, channels = len(models.rows), len(classes), len(y), x.shape[-2:], tuple(range(2, x.ndim - 1))
    above = functools.partial(_above, labels=y.repeat(c), classes=classes.repeat_interleave(n))
    ways, finite = torch.zeros(m, c, *x.shape[1:]), torch.ones(m, c, dtype=torch.bool)
    chosen, worth = torch.zeros(m, c, side.numel(), dtype=torch.bool), torch.zeros(m, c, dtype=torch.float64)
    pixels = min(pixels, side.numel())
    parts = min(steps, pixels)
    for part in range(parts):
        images = painted(x, ways=ways.unsqueeze(2))  # [m, c, n, *features]
        slopes = local.gradients_of(models, images.flatten(1, 2), above).view_as(images)
        finite &= slopes.isfinite().flatten(2).all(2)
        whiter, blacker = (slopes * (1 - images)).mean(2), (slopes * -images).mean(2)
        gains = torch.maximum(whiter, blacker).clamp(min=0)
        by_pixel = (gains.sum(channels) if channels else gains).flatten(2).masked_fill(chosen, 0.0)
        most = by_pixel.topk(math.ceil(pixels * (part + 1) / parts) - math.ceil(pixels * part / parts), -1)
        new = torch.zeros_like(chosen).scatter_(2, most.indices, most.values > 0)
        chosen |= new
        here = new.view(m, c, *[1] * len(channels), *side)
        ways += torch.where(whiter >= blacker, 1.0, -1.0) * (gains > 0) * here
        worth = most.values.sum(-1).double()
    if steps > 1:
        outputs = local.outputs_at(models, painted(x, ways=ways.unsqueeze(2)).flatten(1, 2))
        worth = _losses(outputs, y.repeat(c)).view(m, c, n).mean(-1)
    ways[~finite] = torch.nan
    return ways, worth.masked_fill(~finite, torch.inf)


def painted(x: Shaped[Tensor, "..."], *, ways: Float[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """Images with pixels white where the way is 1, and black where it is -1."""
    return torch.where(ways > 0, 255 if x.dtype == torch.uint8 else 1, torch.where(ways < 0, 0, x))


def _above(
    outputs: Float[Tensor, "k n C"], *, labels: Int[Tensor, " n"], classes: Int[Tensor, " n"]
) -> Float[Tensor, "k n"]:
    """By how much each sample's output of some class is above that of its label."""
    every = torch.arange(len(labels))
    return outputs[:, every, classes] - outputs[:, every, labels]


def _losses(outputs: Float[Tensor, "m n C"], labels: Int[Tensor, " n"]) -> Float[Tensor, "m n"]:
    """The cross-entropy of each sample; what is not a number counts as infinite."""
    losses = F.cross_entropy(outputs.double().mT, labels.expand(len(outputs), -1), reduction="none")
    return losses.nan_to_num(nan=torch.inf, posinf=torch.inf)
