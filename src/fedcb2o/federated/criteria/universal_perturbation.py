"""Universal perturbations: few pixels that change a model's predictions.

The pixels are the same in all images. Moosavi-Dezfooli, Fawzi, Fawzi and Frossard, "Universal
adversarial perturbations" (CVPR 2017). A backdoor is a short way from all classes to one. So a
perturbation is computed for every class, as in Wang, Yao, Shan, Li, Viswanath, Zheng and Zhao,
"Neural Cleanse" (IEEE S&P 2019), but in one or a few first-order steps, because a round has little
time.

A perturbation is an array of `signs`: 1 for a white pixel, -1 for a black one, and 0 elsewhere.
"""

import functools
import itertools
import math

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from fedcb2o.data import ValueRange, pixel_range
from fedcb2o.errors import ConfigError
from fedcb2o.federated.inference import SAMPLES_PER_PASS
from fedcb2o.federated.types import AgentContext, Received

MAX_CANDIDATES = 12  # classes that are refined after the first step
MAX_SAMPLES = 256  # validation samples on which the loss increase is measured


def loss_increases(
    context: AgentContext, models: Received, pixels: int, samples: int, steps: int, blend: float
) -> Float[Tensor, "m n"]:
    """Measure each model's loss increases, on `MAX_SAMPLES`, under the perturbation worst for it.

    They are infinite for a model whose gradients, on other `samples`, are not finite.
    """
    outputs, labels = context.outputs(models, count=MAX_SAMPLES)
    perturbations = worst_perturbation(
        context, models, outputs.shape[-1], pixels, samples, steps, blend
    )
    perturbed = []
    # Each model has a perturbation of its own, so that it is evaluated alone.
    for i, signs in enumerate(perturbations):
        transform = functools.partial(paint, signs=signs)
        losses = _cross_entropy(*context.outputs(models[i : i + 1], transform, MAX_SAMPLES))
        if not signs.isfinite().all():
            losses = torch.full_like(losses, torch.inf)
        perturbed.append(losses)
    return torch.cat(perturbed) - _cross_entropy(outputs, labels)


def worst_perturbation(
    context: AgentContext,
    models: Received,
    num_classes: int,
    pixels: int,
    samples: int,
    steps: int,
    blend: float = 0.0,
) -> Float[Tensor, "m *features"]:
    """Compute the universal perturbation worst for each model.

    For each class, the pixels are those that to first order raise its output most above that of the
    label. Each step adds a part of the pixels, by gradients at the images with the pixels so far.
    After the first step, only the `MAX_CANDIDATES` classes with the largest first-order effect are
    refined. The worst class is the one whose pixels raise the loss on the gradient samples most;
    with one step, the one with the largest first-order effect. Each channel of a pixel has its own
    sign; NaN for gradients that are not finite.
    """
    x, y = context.samples(samples)
    if y.is_floating_point() or x.ndim < 3:
        no_classes = " and no classes" * y.is_floating_point()
        raise ConfigError(
            f"the criterion changes the class of images, and the samples have shape "
            f"{tuple(x.shape[1:])}{no_classes}: take another criterion"
        )
    if blend > 0:
        low, high = context.value_range
        noise = torch.from_numpy(context.draw.random(tuple(x.shape))).to(x)
        x = torch.lerp(x, noise * (high - low) + low, blend)
    pixels = min(pixels, x.shape[-2:].numel())
    # The number of painted pixels after each step.
    ends = sorted({math.ceil(pixels * step / steps) for step in range(1, steps + 1)})

    # 1. The first step, for all classes.
    classes = torch.arange(num_classes)
    empty = torch.zeros(len(models.rows), num_classes, *x.shape[1:])
    signs, effect = add_pixels(context, models, x, y, empty, classes, ends[0])
    if steps == 1:
        return signs[torch.arange(len(signs)), effect.argmax(1)]

    # 2. The classes to refine: all, or the best of each model.
    groups = [(slice(None), classes)]
    if num_classes > MAX_CANDIDATES:
        order = effect.argsort(dim=1, descending=True, stable=True)
        best = order[:, :MAX_CANDIDATES].sort(1).values
        groups = [(slice(i, i + 1), of_model) for i, of_model in enumerate(best)]

    # 3. The further steps, and the choice by the loss.
    perturbations = []
    for members, of_group in groups:
        candidates = signs[members, of_group]
        for start, end in itertools.pairwise(ends):
            candidates, _ = add_pixels(
                context, models[members], x, y, candidates, of_group, end - start
            )
        losses = _mean_losses(context, models[members], x, y, candidates)
        perturbations.append(candidates[torch.arange(len(candidates)), losses.argmax(1)])
    return torch.cat(perturbations)


def add_pixels(
    context: AgentContext,
    models: Received,
    x: Float[Tensor, "n *features"],
    y: Int[Tensor, " n"],
    signs: Float[Tensor, "m c *features"],
    classes: Int[Tensor, " c"],
    num_pixels: int,
) -> tuple[Float[Tensor, "m c *features"], Float[Tensor, "m c"]]:
    """Add pixels to perturbations; NaN, with infinite effects, for gradients not finite."""
    image_size = x.shape[-2:]
    channels = tuple(range(2, x.ndim - 1))
    size = _classes_per_pass(y)
    low, high = context.value_range
    extended = []
    effects = []
    parts = zip(torch.split(signs, size, 1), torch.split(classes, size), strict=True)
    for previous, part in parts:
        # 1. The gradient of the margin of each class, at the painted images [m, c, n, *features].
        margins = functools.partial(
            _margins, labels=y.repeat(len(part)), classes=part.repeat_interleave(len(y))
        )
        images = paint(x, signs=previous.unsqueeze(2), value_range=context.value_range)
        gradients = context.input_gradients(models, images.flatten(1, 2), margins).view_as(images)

        # 2. The first-order gain of a white or a black pixel.
        white = (gradients * (high - images)).mean(2)
        black = (gradients * (low - images)).mean(2)
        gains = torch.maximum(white, black).clamp(min=0)
        # A pixel is painted once, in all of its channels.
        is_painted = previous != 0
        by_pixel = gains
        if channels:
            is_painted = is_painted.amax(channels)
            by_pixel = gains.sum(channels)
        by_pixel = by_pixel.masked_fill(is_painted, 0.0).flatten(2)

        # 3. The pixels of largest gain.
        best = by_pixel.topk(num_pixels, -1)
        mask = torch.zeros_like(by_pixel, dtype=torch.bool)
        mask = mask.scatter_(2, best.indices, best.values > 0)
        mask = mask.view(*previous.shape[:2], *[1] * len(channels), *image_size)
        current = previous + torch.where(white >= black, 1.0, -1.0) * (gains > 0) * mask

        is_broken = ~gradients.isfinite().flatten(2).all(2)
        current[is_broken] = torch.nan
        extended.append(current)
        effects.append(best.values.sum(-1).masked_fill(is_broken, torch.inf))
    return torch.cat(extended, 1), torch.cat(effects, 1)


def _mean_losses(
    context: AgentContext,
    models: Received,
    x: Float[Tensor, "n *features"],
    y: Int[Tensor, " n"],
    signs: Float[Tensor, "m c *features"],
) -> Float[Tensor, "m c"]:
    """Return mean losses under each perturbation; infinite if it is NaN."""
    means = []
    for part in torch.split(signs, _classes_per_pass(y), 1):
        images = paint(x, signs=part.unsqueeze(2), value_range=context.value_range).flatten(1, 2)
        outputs = context.outputs_per_model(models, images)
        losses = _cross_entropy(outputs, y.repeat(part.shape[1]))
        means.append(losses.view(*part.shape[:2], len(y)).mean(2))
    return torch.cat(means, 1).masked_fill(signs.isnan().flatten(2).any(2), torch.inf)


def _classes_per_pass(y: Int[Tensor, " n"]) -> int:
    """Return the number of classes whose images go through a network at once."""
    return max(1, SAMPLES_PER_PASS // max(1, len(y)))


def paint(
    x: Shaped[Tensor, "..."], *, signs: Shaped[Tensor, "..."], value_range: ValueRange | None = None
) -> Shaped[Tensor, "..."]:
    """Paint pixels white or black by the sign of `signs`, which broadcast to the images."""
    black, white = value_range or pixel_range(x)
    return torch.where(signs > 0, white, torch.where(signs < 0, black, x))


def _margins(
    outputs: Float[Tensor, "k n C"], *, labels: Int[Tensor, " n"], classes: Int[Tensor, " n"]
) -> Float[Tensor, "k n"]:
    """Return each sample's output of a class minus that of its label."""
    index = torch.arange(len(labels))
    return outputs[:, index, classes] - outputs[:, index, labels]


def _cross_entropy(
    outputs: Float[Tensor, "m n C"], labels: Int[Tensor, " n"]
) -> Float[Tensor, "m n"]:
    """Return the cross-entropy of each sample; NaN counts as infinite."""
    expanded = labels.expand(len(outputs), -1)
    losses = F.cross_entropy(outputs.double().mT, expanded, reduction="none")
    return losses.nan_to_num(nan=torch.inf, posinf=torch.inf)
