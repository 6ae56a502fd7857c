"""Robustness criteria: a value for each received model, low is trusted; one that is no finite number is not at all.

A criterion is a function (judged) -> values of shape [m]; its further arguments are keywords. Losses and what comes of
them are in nats, whatever the other models are: so the agent's own model can be judged alone, and criteria combine.
"""

import functools
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Bool, Float, Shaped
from pydantic import AfterValidator, Field
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.errors import ConfigError
from fedcb2o.federated import perturbations
from fedcb2o.federated.aggregate import relative_distances
from fedcb2o.federated.paired import beyond, error_by_class, error_of
from fedcb2o.federated.returned import values_of
from fedcb2o.federated.types import TOGETHER, Criterion, Judged, Losses, together

__all__ = [
    "average_loss",
    "class_loss_entropy",
    "class_loss_gap",
    "distance",
    "largest",
    "perturbation_gap",
    "trigger_sensitivity",
    "weighted_sum",
    "worst_class_loss",
]


MOST = torch.finfo(torch.float32).max  # of all finite losses, which are computed in float32


@together
def average_loss(judged: Judged) -> Float[Tensor, "*a m"]:
    """The average validation loss L_j: the criterion of FedCBO (eq:fedcbo_ConsensusPoint), and before T_G."""
    return _losses(judged)[0].mean


@together
def class_loss_gap(
    judged: Judged,
    *,
    absent: Literal["masked", "zero"] = "masked",
    z: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0,
    against: Literal["own", "majority"] = "own",
) -> Float[Tensor, "*a m"]:
    """The paper's G_j: max over classes c of L_{j,c}(theta) - L_{j,c}(theta^j) (eq:robust_criterion_G_LF).

    Classes that the agent holds no sample of are left out of the maximum, or with `absent="zero"` count as a
    difference of 0, as in the authors' released code. A model that is not finite on a class has an infinite value.
    Where the own model's loss is infinite, any other is less by `MOST`: an agent whose model is broken trusts others.

    Two changes go beyond the paper. With a `z` above 0 only what exceeds so many standard errors of a class counts, and
    less than 0 is 0: the largest of many noisy differences is positive for benign models too. With against="majority"
    the gap is to the median of L_{j,c} over the sub-level set and the own model, where that is more than the own one's:
    what most lose by mixing is held against nobody.
    """
    losses, own = _losses(judged)
    expected = own.by_class.clamp(max=MOST)
    if against == "majority":
        expected = expected.fmax(_median(losses, own, judged.among).clamp(max=MOST))
    gap = losses.by_class - expected
    if z > 0:
        gap = beyond(gap, z, error_by_class(losses, own))
    return gap.masked_fill(~losses.present.unsqueeze(-2), 0.0 if absent == "zero" else -torch.inf).amax(-1)


def _median(losses: Losses, own: Losses, among: Bool[Tensor, "*a m"] | None) -> Float[Tensor, "*a 1 C"]:
    """The median loss of each class, the lower of two, over the models in the sub-level set and the own one."""
    theirs = losses.by_class if among is None else losses.by_class.masked_fill(~among.unsqueeze(-1), torch.nan)
    return torch.cat([theirs, own.by_class], -2).nanmedian(-2, keepdim=True).values


@together
def worst_class_loss(judged: Judged) -> Float[Tensor, "*a m"]:
    """The largest class loss, max over c of L_{j,c}: `class_loss_gap` without the own model, which drifts."""
    losses, _ = _losses(judged)
    return losses.by_class.masked_fill(~losses.present.unsqueeze(-2), -torch.inf).amax(-1)


@together
def class_loss_entropy(judged: Judged) -> Float[Tensor, "*a m"]:
    """How unevenly a model's loss falls on the classes: log C - H(p), with p_c the share of class c in the sum.

    A label flip leaves one class with most of the loss, and H is low. So the value is 0, trusted, where all classes
    lose the same, and log C where one loses all. How large the losses are it does not see: a random model is trusted.
    """
    losses, _ = _losses(judged)
    by_class = losses.by_class + 1e-300 * losses.present.unsqueeze(-2).double()  # where all are 0, they are the same
    shares = by_class / by_class.sum(-1, keepdim=True)
    values = losses.present.sum(-1, keepdim=True).double().log() - torch.special.entr(shares).sum(-1)
    return _or_infinite(values.clamp(min=0))


@together
def trigger_sensitivity(
    judged: Judged, *, tiles: int = 2, overlap: bool = False, values: Sequence[float] = (1.0,)
) -> Float[Tensor, "*a m"]:
    """How much more than the own model's the average loss rises where a tile of the images is painted over, at most:
    for backdoors, whose triggers lie in some tile.

    The images are cut into `tiles` x `tiles`, and one after the other is painted in each brightness of `values`, from 0
    to 1: that many times more all models are evaluated. With `overlap` tiles begin at every half of one too, so that a
    trigger of half the size lies whole in one, wherever it is. It needs own_model = "judged": in a round in which all
    received models have the backdoor, the own one must be worth more than the best of them.
    """
    if tiles < 1 or not values or not all(0 <= value <= 1 for value in values):
        raise ConfigError(f"`tiles` must be 1 or more and `values` from 0 to 1, got {tiles} and {list(values)}")
    losses, own = _losses(judged)
    everyone, base = judged.received.with_own(judged.me), torch.cat([losses.mean, own.mean], -1)
    starts = [k / 2 for k in range(0, 2 * tiles - 1, 1 if overlap else 2)]
    most = torch.full_like(losses.mean, -torch.inf)
    for i, j, value in itertools.product(starts, starts, values):
        change = functools.partial(_tiled, tiles=tiles, i=i, j=j, value=value)
        rise = judged.losses_of(everyone, change).mean - base
        most = torch.maximum(most, _or_infinite(rise[..., :-1] - rise[..., -1:].clamp(max=MOST)))
    return most


def _tiled(x: Shaped[Tensor, "n *features"], *, tiles: int, i: float, j: float, value: float) -> Tensor:
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


def perturbation_gap(
    judged: Judged,
    *,
    pixels: Annotated[int, Field(ge=1)] = 6,
    samples: Annotated[int, Field(ge=1)] = 4,
    steps: Annotated[int, Field(ge=1)] = 1,
    blend: Annotated[float, Field(ge=0, lt=1)] = 0.0,
    z: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0,
    against: Literal["own", "majority"] = "own",
) -> Float[Tensor, " m"]:
    """How much more the average loss rises under the universal perturbation that is worst for a model than the own
    model's does under the one worst for that, in place of the gap of eq:robust_criterion_G_LF: for backdoors whose
    trigger nobody knows, with own_model = "judged".

    A perturbation paints at most so many `pixels` black or white, the same in all images (`perturbations.worst`), and
    is sought for every class by gradients on so many `samples`, in so many `steps`: in one, the worst class is chosen
    to first order; in more, gradients are taken anew where pixels are painted, for the classes that promise most, and
    it is chosen by the loss. With `blend` above 0 these samples are blended with so much uniform noise: where images
    are black, as around a letter, units of a network with ReLU may all be off, and gradients 0. With against="majority"
    the rise is compared with the median one of the sub-level set and the own model, where that is more than the own
    one's: what most models rise by is held against nobody. Only what exceeds `z` standard errors of the mean difference
    over the validation samples, 256 at most, counts, and less than 0 is 0. Models are looked at whole, whatever
    `judged_at` is, since half a step dilutes a backdoor; those outside of the sub-level set, which have no weight, not
    at all: they have 0.
    """
    _losses(judged)
    seen = judged.received.rows != judged.me.rows
    if judged.among is not None:
        seen &= judged.among
    gap = torch.zeros(len(seen), dtype=torch.float64)
    if seen.any():
        some = judged.received[seen].with_own(judged.me)
        rises = perturbations.rises(judged.local, some, pixels, samples, steps, blend)
        means = rises.mean(-1)
        expected = len(means) - 1
        if against == "majority":
            middle = int(means.argsort(stable=True)[(len(means) - 1) // 2])
            expected = middle if means[-1] < means[middle] < torch.inf else expected
        above = means[:-1] - means[expected].nan_to_num(nan=MOST, posinf=MOST)
        gap[seen] = _or_infinite(beyond(above, z, error_of(rises[:-1] - rises[expected])))
    return gap


def distance(judged: Judged) -> Float[Tensor, " m"]:
    """How far a model is from the own one, in units of the own one's norm."""
    return _or_infinite(relative_distances(judged.pool, judged.received.with_own(judged.me).rows))


# Combinations


@dataclass(frozen=True)
class Part:
    """A criterion in a combination, and the factor on its values."""

    criterion: Criterion
    scale: float = 1.0


def _part(part: Any) -> Part:
    """The part that a name, a function or a table {name = ..., scale = ..., parameter = ...} means."""
    if isinstance(part, Part):
        return part
    table = dict(part) if isinstance(part, Mapping) else {"name": part}
    scale = table.pop("scale", 1.0)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not scale > 0:
        raise ConfigError(f"the `scale` of a criterion must be a number above 0, got {scale!r}")
    return Part(plugins.named("criterion", table, sys.modules[__name__]), float(scale))


def _parts(of: Sequence[Any]) -> tuple[Part, ...]:
    if not of:
        raise ConfigError('a combination needs criteria: of = ["class_loss_gap", "trigger_sensitivity"]')
    return tuple(_part(part) for part in of)


Parts = Annotated[Sequence[Any], AfterValidator(_parts)]
"""Criteria as a configuration has them, read and checked before a run."""


def judges_together(criterion: Criterion) -> bool:
    """Whether a criterion takes several agents at once: it declares so or, of a combination, all of its parts do."""
    if isinstance(criterion, functools.partial) and criterion.func in (largest, weighted_sum):
        return all(judges_together(part.criterion) for part in _parts(criterion.keywords["of"]))
    return bool(TOGETHER.of(criterion))


def largest(judged: Judged, *, of: Parts) -> Float[Tensor, "*a m"]:
    """The largest of several criteria, each times its `scale` (1): what one of them distrusts is not trusted.

    The own model should have the same value in all, as it has 0 in those that are relative to it.
    """
    return torch.stack(_values(judged, of)).amax(0)


def weighted_sum(judged: Judged, *, of: Parts) -> Float[Tensor, "*a m"]:
    """The sum of several criteria, each times its `scale` (1)."""
    return functools.reduce(torch.add, _values(judged, of))  # one after the other, for any number of agents


def _values(judged: Judged, of: Sequence[Any]) -> list[Float[Tensor, "*a m"]]:
    return [part.scale * values_of(part.criterion, judged) for part in _parts(of)]


def _losses(judged: Judged) -> tuple[Losses, Losses]:
    """The losses of the received models and of the own one; raises ConfigError where there are none."""
    if judged.losses is None or judged.own is None:
        raise ConfigError("the criterion looks at losses, and the algorithm evaluates none: set `judges` = true")
    holds = judged.losses.present.any(-1)
    if not holds.all():
        raise ConfigError(
            f"the criterion looks at losses, and agent {int(judged.me.ids[~holds][0])} holds no validation data: leave "
            "it some, by a larger `agents.validation` or more `agents.benign_samples`"
        )
    return judged.losses, judged.own


def _or_infinite(values: Float[Tensor, "*a m"]) -> Float[Tensor, "*a m"]:
    """The values, infinite where they are no numbers: such a model is not trusted."""
    return values.masked_fill(values.isnan(), torch.inf)
