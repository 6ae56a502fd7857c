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
from fedcb2o.federated.types import Local, Received


def rises(local: Local, models: Received, pixels: int, samples: int, steps: int) -> Float[Tensor, "m n"]:
    """How much the loss of each of an agent's validation samples rises under the perturbation worst for each model,
    found on some of them."""
    outputs, labels = local.outputs_of(models)
    found, after = worst(local, models, outputs.shape[-1], pixels, samples, steps), []
    for i, ways in enumerate(found):
        after.append(_losses(*local.outputs_of(models[i : i + 1], functools.partial(painted, ways=ways))))
    return torch.cat(after) - _losses(outputs, labels)


def worst(
    local: Local, models: Received, num_classes: int, pixels: int, samples: int, steps: int
) -> Float[Tensor, "m *features"]:
    """Which pixels of all images to paint, at most so many, 1 for white and -1 for black, for each model. Each channel
    of a pixel goes its own way.

    For each class these are sought that to first order raise its output most above that of the label, in so many steps
    a part of them, each by the gradients where those before are painted. Of the classes the one counts whose pixels
    raise the loss most of the samples that they are sought on, with one step to first order.
    """
    x, y = local.samples_of(samples)
    if y.is_floating_point() or x.ndim < 3:
        raise ConfigError(
            f"the criterion looks for pixels that change the class of images, and the samples have shape "
            f"{tuple(x.shape[1:])}{' and no classes' * y.is_floating_point()}: take another"
        )
    m, n, side, channels = len(models.rows), len(y), x.shape[-2:], tuple(range(2, x.ndim - 1))
    pixels, labels = min(pixels, side.numel()), y.repeat(num_classes)
    above = functools.partial(_above, labels=labels, classes=torch.arange(num_classes).repeat_interleave(n))
    ways = torch.zeros(m, num_classes, *x.shape[1:])
    chosen = torch.zeros(m, num_classes, side.numel(), dtype=torch.bool)
    for step in range(steps):
        images = painted(x, ways=ways.unsqueeze(2))  # [m, C, n, *features]
        _, slopes = local.gradients_of(models, images.flatten(1, 2), above)
        assert slopes is not None
        slopes = slopes.view_as(images)
        whiter, blacker = (slopes * (1 - images)).mean(2), (slopes * -images).mean(2)
        gains = torch.maximum(whiter, blacker).clamp(min=0)
        by_pixel = (gains.sum(channels) if channels else gains).flatten(2).masked_fill(chosen, 0.0)
        most = by_pixel.topk(math.ceil(pixels * (step + 1) / steps) - math.ceil(pixels * step / steps), -1)
        new = torch.zeros_like(chosen).scatter_(2, most.indices, most.values > 0)
        chosen |= new
        here = new.view(m, num_classes, *[1] * len(channels), *side)
        ways += torch.where(whiter >= blacker, 1.0, -1.0) * (gains > 0) * here
    if steps == 1:
        worth = most.values.sum(-1)
    else:
        outputs, _ = local.gradients_of(models, painted(x, ways=ways.unsqueeze(2)).flatten(1, 2))
        worth = _losses(outputs, labels).view(m, num_classes, n).mean(-1)
    return ways[torch.arange(m), worth.argmax(1)]


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
