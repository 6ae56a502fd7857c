"""trigger_sensitivity."""

import functools
import itertools
from collections.abc import Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.federated.criteria.base import MAX_LOSS, nan_to_infinity, required_losses
from fedcb2o.federated.types import CriterionInput, batched


@batched
def trigger_sensitivity(
    inputs: CriterionInput,
    *,
    tiles: int = 2,
    overlap: bool = False,
    values: Sequence[float] = (1.0,),
) -> Float[Tensor, "*a m"]:
    """How much more than the own model's the average loss rises where a tile of the images is painted over, at most:
    for backdoors, whose triggers lie in some tile.

    The images are cut into `tiles` x `tiles`, and one after the other is painted in each brightness of `values`, from 0
    to 1: that many times more all models are evaluated. With `overlap` tiles begin at every half of one too, so that a
    trigger of half the size lies whole in one, wherever it is. It needs own_model = "judged": in a round in which all
    received models have the backdoor, the own one must be worth more than the best of them.
    """
    if tiles < 1 or not values or not all(0 <= value <= 1 for value in values):
        raise ConfigError(
            f"`tiles` must be 1 or more and `values` from 0 to 1, got {tiles} and {list(values)}"
        )
    losses, own = required_losses(inputs)
    everyone = inputs.received.with_own(inputs.own_entry)
    base = torch.cat([losses.mean, own.mean], -1)
    starts = [k / 2 for k in range(0, 2 * tiles - 1, 1 if overlap else 2)]
    most = torch.full_like(losses.mean, -torch.inf)
    for i, j, value in itertools.product(starts, starts, values):
        change = functools.partial(_paint_tile, tiles=tiles, i=i, j=j, value=value)
        rise = inputs.losses_of(everyone, change).mean - base
        most = torch.maximum(
            most, nan_to_infinity(rise[..., :-1] - rise[..., -1:].clamp(max=MAX_LOSS))
        )
    return most


def _paint_tile(
    x: Shaped[Tensor, "n *features"], *, tiles: int, i: float, j: float, value: float
) -> Tensor:
    """Images with one brightness in the tile that begins i tiles from the top and j from the left."""
    if x.ndim < 3 or tiles > min(x.shape[-2:]):
        raise ConfigError(
            f"`tiles` = {tiles} a side do not fit samples of shape {tuple(x.shape[1:])}: the criterion needs images of "
            "at least as many pixels"
        )
    x = x.clone()
    rows, columns = (
        slice(int(k * pixels / tiles), int((k + 1) * pixels / tiles))
        for k, pixels in zip((i, j), x.shape[-2:], strict=True)
    )
    x[..., rows, columns] = round(255 * value) if x.dtype == torch.uint8 else value
    return x
