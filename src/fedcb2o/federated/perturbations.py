"""Universal perturbations: the same few pixels of all images changed so that a model takes these for another class.

Moosavi-Dezfooli, Fawzi, Fawzi and Frossard, "Universal adversarial perturbations" (CVPR 2017). A backdoor is a short
way to one class from all others, so the trigger is sought class by class, as Neural Cleanse does (Wang, Yao, Shan, Li,
Viswanath, Zheng and Zhao, IEEE S&P 2019); but by one step of first order, since there is little time in a round.
"""

import functools

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from fedcb2o.errors import ConfigError
from fedcb2o.federated.triggers import painted
from fedcb2o.federated.types import Local, Received, Slopes


def rises(
    local: Local, models: Received, *, pixels: int, strength: float, samples: int
) -> Float[Tensor, "m n"]:
    """How much the loss of each of an agent's validation samples rises under the perturbation worst for each model."""
    slopes, x, y = local.slopes_of(models, samples)
    if y.is_floating_point() or slopes.shape[1] < 2 or x.ndim < 3:
        raise ConfigError(
            f"the criterion perturbs images of classes, and the samples have shape {tuple(x.shape[1:])} and "
            f"{slopes.shape[1]} outputs: take another"
        )
    before = _losses(*local.outputs_of(models))
    after = []
    for i, change in enumerate(worst((slopes, x, y), pixels, strength)):
        one = Received(*(column[i : i + 1] for column in models.columns))
        after.append(_losses(*local.outputs_of(one, functools.partial(perturbed, change=change))))
    return torch.cat(after) - before


def worst(seen: Slopes, pixels: int, strength: float) -> Float[Tensor, "m *features"]:
    """The change of so many pixels, by at most `strength`, that to first order raises a class above that of the
    label most, over all classes; of a pixel's channels each goes its own way."""
    slopes, x, y = seen
    to_class = slopes - slopes[:, y, torch.arange(len(y))].unsqueeze(1)  # of z_c - z_y, 0 where c is y
    up, down = ((to_class * ((x + way).clamp(0, 1) - x)).mean(2) for way in (strength, -strength))
    gains = torch.maximum(up, down).clamp(min=0)  # [m, C, ..., height, width]
    of_pixels = gains.flatten(2, -3).sum(2) if gains.ndim > 4 else gains
    most = of_pixels.flatten(2).topk(min(pixels, of_pixels[0, 0].numel()), -1)
    target = most.values.sum(-1).argmax(1)
    each = torch.arange(len(target))
    chosen = torch.zeros(len(target), of_pixels[0, 0].numel()).scatter_(1, most.indices[each, target], 1.0)
    signs = torch.where(up >= down, strength, -strength)[each, target] * (gains[each, target] > 0)
    return signs * chosen.view(-1, *[1] * (signs.ndim - 3), *x.shape[-2:])


def perturbed(x: Shaped[Tensor, "n *features"], *, change: Float[Tensor, "*features"]) -> Shaped[Tensor, "n *features"]:
    """Images to whose pixels a change was added, cut off at black and white."""
    return painted(x, lambda pixels: pixels + change.to(pixels.device))


def _losses(outputs: Float[Tensor, "m n C"], labels: Int[Tensor, " n"]) -> Float[Tensor, "m n"]:
    """The cross-entropy of each sample; what is not a number counts as infinite."""
    losses = F.cross_entropy(outputs.double().transpose(1, 2), labels.expand(len(outputs), -1), reduction="none")
    return losses.nan_to_num(nan=torch.inf, posinf=torch.inf)
