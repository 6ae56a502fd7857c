"""Sensitivity of a model's classes to noise, against backdoors (guard `max_sensitivity`).

A trigger is a change of the image that raises the output of one class. So noise that has parts of
many triggers moves the output of that class more than those of the others, whatever the trigger is.
The sensitivity of a class is the standard deviation of its output over images of noise, divided by
the median over classes. The images are drawn anew for each agent and round, and need no data.
"""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.data import ValueRange

IMAGES = 64
"""Images of noise; the second half has blocks in place of single pixels."""

_BLOCKS = 4  # per side
_MIN_MOVEMENT = 0.05  # nats, where the agent's own model hardly changes


def noise_images(
    shape: torch.Size, value_range: ValueRange, draw: np.random.Generator
) -> Float[Tensor, "n *features"]:
    """Draw `IMAGES` samples whose pixels or blocks are black or white."""
    black, white = value_range
    is_white = torch.from_numpy(draw.random((IMAGES, *shape)) < 0.5)
    # The second half has blocks in place of single pixels.
    if len(shape) >= 2:
        row, column = (torch.arange(side) * _BLOCKS // side for side in shape[-2:])
        blocks = is_white[IMAGES // 2 :, ..., :_BLOCKS, :_BLOCKS]
        is_white[IMAGES // 2 :] = blocks[..., row[:, None], column]
    return torch.where(is_white, float(white), float(black))


def class_sensitivities(outputs: Float[Tensor, "m n C"]) -> Float[Tensor, "m C"]:
    """Compute the logarithm of each class's sensitivity, about 0; not finite without any."""
    outputs = outputs.double()
    outputs = outputs - outputs.mean(-1, keepdim=True)
    # Pixels and blocks count alike: the second half of the images has blocks.
    halves = [half.std(1) for half in outputs.chunk(2, 1)]
    deviations = halves[0] + halves[1]
    return (deviations / deviations.median(1, keepdim=True).values).log()


def rises(
    received: Float[Tensor, "m C"], own: Float[Tensor, "1 C"], previous: Float[Tensor, "1 C"]
) -> Float[Tensor, " m"]:
    """Return the largest rise of a class's logarithmic sensitivity above the agent's own models.

    The unit is the root mean square change by this round's LocalUpdate, from `previous` to `own`.
    It bounds the received models, as the ball in eq:Q_beta does.
    """
    movement = (own - previous).square().mean().sqrt().clamp(min=_MIN_MOVEMENT)
    return (received - torch.maximum(own, previous)).amax(1) / movement
