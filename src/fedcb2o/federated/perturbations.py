"""Universal perturbations: few pixels, the same in all images, that make a model take these for another class.

Moosavi-Dezfooli, Fawzi, Fawzi and Frossard, "Universal adversarial perturbations" (CVPR 2017). A backdoor is a short
way from all classes to one, so that a trigger is sought for every class, as in Wang, Yao, Shan, Li, Viswanath, Zheng
and Zhao, "Neural Cleanse" (IEEE S&P 2019); but in one step of first order, since a round has little time.
"""

import functools

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from fedcb2o.errors import ConfigError
from fedcb2o.federated.types import Gradients, Local, Received


def rises(local: Local, models: Received, pixels: int, samples: int) -> Float[Tensor, "m n"]:
    """How much the loss of each of an agent's validation samples rises under the perturbation worst for each model,
    found on some of them."""
    found = local.gradients_of(models, samples)
    before = _losses(*local.outputs_of(models))
    after = []
    for i, ways in enumerate(worst(found, pixels)):
        after.append(_losses(*local.outputs_of(models[i : i + 1], functools.partial(painted, ways=ways))))
    return torch.cat(after) - before


def worst(found: Gradients, pixels: int) -> Float[Tensor, "m *features"]:
    """Which pixels of all images to paint, at most so many, 1 for white and -1 for black: for each model what to first
    order raises the output of one class most above that of the label, of all classes. Each channel of a pixel goes its
    own way."""
    gradients, x, y = found
    if y.is_floating_point() or x.ndim < 3:
        raise ConfigError(
            f"the criterion looks for pixels that change the class of images, and the samples have shape "
            f"{tuple(x.shape[1:])}{' and no classes' * y.is_floating_point()}: take another"
        )
    apart = gradients - gradients[:, y, torch.arange(len(y))].unsqueeze(1)  # of z_c - z_y: 0 where c is the label y
    whiter, blacker = (apart * (1 - x)).mean(2), (apart * -x).mean(2)
    gains = torch.maximum(whiter, blacker).clamp(min=0)  # [m, C, *features]
    m, channels, side = len(gains), tuple(range(2, gains.ndim - 2)), x.shape[-2:]
    by_pixel = (gains.sum(channels) if channels else gains).flatten(2)
    most = by_pixel.topk(min(pixels, side.numel()), -1)
    best = torch.arange(m), most.values.sum(-1).argmax(1)
    chosen = torch.zeros(m, side.numel()).scatter_(1, most.indices[best], 1.0)
    ways = torch.where(whiter >= blacker, 1.0, -1.0) * (gains > 0)
    return ways[best] * chosen.view(m, *[1] * len(channels), *side)


def painted(x: Shaped[Tensor, "n *features"], *, ways: Float[Tensor, "*features"]) -> Shaped[Tensor, "n *features"]:
    """Images with pixels white where the way is 1, and black where it is -1."""
    white = torch.full_like(x, 255 if x.dtype == torch.uint8 else 1)
    return torch.where(ways > 0, white, x.masked_fill(ways < 0, 0))


def _losses(outputs: Float[Tensor, "m n C"], labels: Int[Tensor, " n"]) -> Float[Tensor, "m n"]:
    """The cross-entropy of each sample; what is not a number counts as infinite."""
    losses = F.cross_entropy(outputs.double().mT, labels.expand(len(outputs), -1), reduction="none")
    return losses.nan_to_num(nan=torch.inf, posinf=torch.inf)
