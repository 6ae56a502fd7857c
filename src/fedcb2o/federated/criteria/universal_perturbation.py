"""Universal perturbations: few pixels, the same in all images, that make a model take these for another class.

Moosavi-Dezfooli, Fawzi, Fawzi and Frossard, "Universal adversarial perturbations" (CVPR 2017). A backdoor is a short
way from all classes to one, so that a trigger is sought for every class, as in Wang, Yao, Shan, Li, Viswanath, Zheng
and Zhao, "Neural Cleanse" (IEEE S&P 2019); but in one step of first order or a few, since a round has little time.
"""

import functools
import itertools
import math

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from fedcb2o.errors import ConfigError
from fedcb2o.federated.inference import SAMPLES_PER_PASS
from fedcb2o.federated.types import AgentContext, Received

MAX_CANDIDATES = 12  # classes that are looked into further after the first step
MAX_SAMPLES = (
    256  # validation samples at most, on which rises are measured: enough for what triggers do
)


def loss_increases(
    context: AgentContext, models: Received, pixels: int, samples: int, steps: int, blend: float
) -> Float[Tensor, "m n"]:
    """How much the loss of each of an agent's validation samples, or of `MEASURED` of them, rises under the
    perturbation worst for each model, found on some; infinitely where a model's gradients are not finite, so that none
    can be found."""
    outputs, labels = context.outputs(models, count=MAX_SAMPLES)
    found = worst_perturbation(context, models, outputs.shape[-1], pixels, samples, steps, blend)
    after = []
    for i, ways in enumerate(found):
        losses = _cross_entropy(
            *context.outputs(models[i : i + 1], functools.partial(paint, signs=ways), MAX_SAMPLES)
        )
        after.append(losses if ways.isfinite().all() else torch.full_like(losses, torch.inf))
    return torch.cat(after) - _cross_entropy(outputs, labels)


def worst_perturbation(
    context: AgentContext,
    models: Received,
    num_classes: int,
    pixels: int,
    samples: int,
    steps: int,
    blend: float = 0.0,
) -> Float[Tensor, "m *features"]:
    """Which pixels of all images to paint, at most so many, 1 for white and -1 for black, for each model; NaN where its
    gradients are not finite. Each channel of a pixel goes its own way.

    For each class these are sought that to first order raise its output most above that of the label, in so many steps
    a part of them, each by the gradients where those before are painted. After the first step the `CANDIDATES` classes
    go on whose pixels do most to first order. Of these that one counts whose pixels raise the loss of the samples that
    they are sought on to the most; with one step, whose do most to first order. The samples are blended with a share
    `blend` of uniform noise.
    """
    x, y = context.samples(samples)
    if y.is_floating_point() or x.ndim < 3:
        raise ConfigError(
            f"the criterion looks for pixels that change the class of images, and the samples have shape "
            f"{tuple(x.shape[1:])}{' and no classes' * y.is_floating_point()}: take another"
        )
    if blend > 0:
        x = torch.lerp(x, torch.from_numpy(context.draw.random(tuple(x.shape))).to(x), blend)
    pixels = min(pixels, x.shape[-2:].numel())
    ends = sorted({math.ceil(pixels * step / steps) for step in range(1, steps + 1)})
    every = torch.arange(num_classes)
    none = torch.zeros(len(models.rows), num_classes, *x.shape[1:])
    ways, worth = _add_pixels(context, models, x, y, none, every, ends[0])
    if steps == 1:
        return ways[torch.arange(len(ways)), worth.argmax(1)]
    some = [(slice(None), every)]
    if num_classes > MAX_CANDIDATES:  # of each model its own
        best = worth.argsort(dim=1, descending=True, stable=True)[:, :MAX_CANDIDATES].sort(1).values
        some = [(slice(i, i + 1), classes) for i, classes in enumerate(best)]
    found = []
    for these, classes in some:
        candidates = ways[these, classes]
        for before, end in itertools.pairwise(ends):
            candidates, _ = _add_pixels(
                context, models[these], x, y, candidates, classes, end - before
            )
        worth = _mean_losses(context, models[these], x, y, candidates)
        found.append(candidates[torch.arange(len(candidates)), worth.argmax(1)])
    return torch.cat(found)


def _add_pixels(
    context: AgentContext,
    models: Received,
    x: Float[Tensor, "n *features"],
    y: Int[Tensor, " n"],
    signs: Float[Tensor, "m c *features"],
    classes: Int[Tensor, " c"],
    num_pixels: int,
) -> tuple[Float[Tensor, "m c *features"], Float[Tensor, "m c"]]:
    """For each model and each of some classes: so many `more` pixels to paint where some are, and what these do to
    first order; NaN and infinitely where gradients are not finite."""
    side = x.shape[-2:]
    channels = tuple(range(2, x.ndim - 1))
    after = []
    worth = []
    for before, part in zip(
        torch.split(signs, _classes_per_pass(y), 1),
        torch.split(classes, _classes_per_pass(y)),
        strict=True,
    ):
        above = functools.partial(
            _margins, labels=y.repeat(len(part)), classes=part.repeat_interleave(len(y))
        )
        images = paint(x, signs=before.unsqueeze(2))  # [m, c, n, *features]
        slopes = context.input_gradients(models, images.flatten(1, 2), above).view_as(images)
        whiter = (slopes * (1 - images)).mean(2)
        blacker = (slopes * -images).mean(2)
        gains = torch.maximum(whiter, blacker).clamp(min=0)
        taken = (before != 0).amax(channels) if channels else before != 0
        by_pixel = (gains.sum(channels) if channels else gains).masked_fill(taken, 0.0).flatten(2)
        most = by_pixel.topk(num_pixels, -1)
        chosen = torch.zeros_like(by_pixel, dtype=torch.bool).scatter_(
            2, most.indices, most.values > 0
        )
        here = chosen.view(*before.shape[:2], *[1] * len(channels), *side)
        found = before + torch.where(whiter >= blacker, 1.0, -1.0) * (gains > 0) * here
        broken = ~slopes.isfinite().flatten(2).all(2)
        found[broken] = torch.nan
        after.append(found)
        worth.append(most.values.sum(-1).masked_fill(broken, torch.inf))
    return torch.cat(after, 1), torch.cat(worth, 1)


def _mean_losses(
    context: AgentContext,
    models: Received,
    x: Float[Tensor, "n *features"],
    y: Int[Tensor, " n"],
    signs: Float[Tensor, "m c *features"],
) -> Float[Tensor, "m c"]:
    """The mean loss of each model where the pixels of each class are painted, infinite where these are NaN."""
    found = []
    for part in torch.split(signs, _classes_per_pass(y), 1):
        outputs = context.outputs_per_model(models, paint(x, signs=part.unsqueeze(2)).flatten(1, 2))
        found.append(
            _cross_entropy(outputs, y.repeat(part.shape[1])).view(*part.shape[:2], len(y)).mean(2)
        )
    return torch.cat(found, 1).masked_fill(signs.isnan().flatten(2).any(2), torch.inf)


def _classes_per_pass(y: Int[Tensor, " n"]) -> int:
    """The classes whose images go through a network at once."""
    return max(1, SAMPLES_PER_PASS // max(1, len(y)))


def paint(x: Shaped[Tensor, "..."], *, signs: Float[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """Images with pixels white where the way is 1, and black where it is -1."""
    return torch.where(
        signs > 0, 255 if x.dtype == torch.uint8 else 1, torch.where(signs < 0, 0, x)
    )


def _margins(
    outputs: Float[Tensor, "k n C"], *, labels: Int[Tensor, " n"], classes: Int[Tensor, " n"]
) -> Float[Tensor, "k n"]:
    """By how much each sample's output of some class is above that of its label."""
    every = torch.arange(len(labels))
    return outputs[:, every, classes] - outputs[:, every, labels]


def _cross_entropy(
    outputs: Float[Tensor, "m n C"], labels: Int[Tensor, " n"]
) -> Float[Tensor, "m n"]:
    """The cross-entropy of each sample; what is not a number counts as infinite."""
    losses = F.cross_entropy(outputs.double().mT, labels.expand(len(outputs), -1), reduction="none")
    return losses.nan_to_num(nan=torch.inf, posinf=torch.inf)
