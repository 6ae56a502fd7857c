"""Trigger sensitivity: the loss increase under a painted tile, against backdoors."""

import functools
import itertools
from collections.abc import Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from fedcb2o.data import brightness
from fedcb2o.errors import ConfigError
from fedcb2o.federated.criteria.class_losses import MAX_LOSS, required_losses
from fedcb2o.federated.types import CriterionInput, batched


@batched
def trigger_sensitivity(
    inputs: CriterionInput,
    *,
    tiles: int = 2,
    overlap: bool = False,
    values: Sequence[float] = (1.0,),
) -> Float[Tensor, "*a m"]:
    """Compare the largest loss increase under a painted tile.

    The value is relative to the increase of the agent's own model. A backdoor's trigger is in some
    tile of the image. The images are cut into `tiles` x `tiles`, and one tile at a time is painted
    in each brightness. All models are evaluated that many times more.

    The criterion needs own_model = "judged": in a round in which all received models have the
    backdoor, the agent's own model must count more than the best of them.

    Args:
        tiles: Number of tiles per side, 1 or more.
        overlap: Tiles also start at every half tile, so that a trigger of half the size is whole in
            one of them.
        values: Brightness of the painted tiles, from 0 (black) to 1 (white).

    Raises:
        ConfigError: A parameter is out of range, or the samples are not images of enough pixels.
    """
    if tiles < 1 or not values or not all(0 <= value <= 1 for value in values):
        raise ConfigError(
            f"`tiles` must be 1 or more and `values` from 0 to 1, got {tiles} and {list(values)}"
        )
    losses, own = required_losses(inputs)
    everyone = inputs.received.with_own(inputs.own_entry)
    base = torch.cat([losses.mean, own.mean], -1)

    # In tiles; with overlap one starts at every half tile.
    step = 1 if overlap else 2
    starts = [k / 2 for k in range(0, 2 * tiles - 1, step)]
    largest = torch.full_like(losses.mean, -torch.inf)
    for i, j, value in itertools.product(starts, starts, values):
        transform = functools.partial(_paint_tile, tiles=tiles, i=i, j=j, value=value)
        increase = inputs.losses_of(everyone, transform).mean - base
        # An agent with a broken model trusts others.
        gap = increase[..., :-1] - increase[..., -1:].clamp(max=MAX_LOSS)
        largest = torch.maximum(largest, gap.masked_fill(gap.isnan(), torch.inf))
    return largest


def _paint_tile(
    x: Shaped[Tensor, "n *features"], *, tiles: int, i: float, j: float, value: float
) -> Tensor:
    """Paint the tile i tiles from the top and j from the left."""
    if x.ndim < 3 or tiles > min(x.shape[-2:]):
        raise ConfigError(
            f"`tiles` = {tiles} a side do not fit samples of shape {tuple(x.shape[1:])}: "
            "the criterion needs images of at least as many pixels"
        )
    height, width = x.shape[-2:]
    rows = slice(int(i * height / tiles), int((i + 1) * height / tiles))
    columns = slice(int(j * width / tiles), int((j + 1) * width / tiles))
    x = x.clone()
    x[..., rows, columns] = brightness(x, value)
    return x
