"""Groups of validation samples that stand for classes in criteria, such as quantiles of targets.

Criteria by class, such as `class_loss_excess`, compare the mean losses of groups of samples. Data
without classes are one group, in which a harm to a part of the samples is hard to see. A function
(x [n, ...], y [n, ...], *, bins) -> groups [n] from 0 to bins - 1 divides each agent's samples.

>>> target_quantiles(torch.zeros(5, 1), torch.tensor([0.1, 9.0, 0.3, 0.2, 7.0]), bins=2).tolist()
[0, 1, 0, 0, 1]
"""

from functools import partial
from typing import Annotated, Any

import torch
from jaxtyping import Float, Int, Shaped
from pydantic import Field
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.errors import ConfigError
from fedcb2o.user_values import returned_tensor

__all__ = ["feature_quantiles", "target_quantiles"]

_Bins = Annotated[int, Field(ge=2, le=1000)]


def target_quantiles(
    x: Shaped[Tensor, "n *features"], y: Shaped[Tensor, "n *target"], *, bins: _Bins = 4
) -> Int[Tensor, " n"]:
    """Group samples by quantiles of their targets; of several targets, by their mean.

    Args:
        x: Samples of an agent.
        y: Numbers to predict, or classes, of the same samples.
        bins: Number of groups, about equally large; equal targets are in one group.

    Returns:
        Group of each sample, from 0.
    """
    return _quantile_groups(y.double().flatten(1).mean(1) if y.ndim > 1 else y.double(), bins)


def feature_quantiles(
    x: Shaped[Tensor, "n *features"],
    y: Shaped[Tensor, "n *target"],
    *,
    feature: Annotated[int, Field(ge=0)],
    bins: _Bins = 4,
) -> Int[Tensor, " n"]:
    """Group samples by quantiles of one feature.

    Args:
        x: Samples of an agent.
        y: Numbers to predict, or classes, of the same samples.
        feature: Number of the feature, from 0, in a flattened sample.
        bins: Number of groups, about equally large; equal values are in one group.

    Returns:
        Group of each sample, from 0.

    Raises:
        ConfigError: There is no such feature.
    """
    columns = x.flatten(1)
    if feature >= columns.shape[1]:
        raise ConfigError(
            f"`feature` of the loss groups feature_quantiles must be below {columns.shape[1]}, got "
            f"{feature}"
        )
    return _quantile_groups(columns[:, feature].double(), bins)


def num_groups(groups: "partial[Any]") -> int:
    """Return the number of groups, the parameter `bins` of a function."""
    bins = plugins.parameters(groups.func).get("bins")
    if bins is None:
        name = plugins.display_name("loss groups", groups)
        raise ConfigError(f"the {name} need a parameter `bins`, the number of groups")
    return int(groups.keywords.get("bins", bins.default))


def grouped(
    groups: "partial[Any]", x: Shaped[Tensor, "a n *features"], y: Shaped[Tensor, "a n *target"]
) -> Int[Tensor, "a n"]:
    """Return the groups of the samples of several agents, on the CPU and checked."""
    name = plugins.display_name("loss groups", groups)
    bins = num_groups(groups)
    found = []
    for samples, targets in zip(x.cpu(), y.cpu(), strict=True):
        own = returned_tensor(name, groups(samples.clone(), targets.clone()))
        is_whole = own.shape == targets.shape[:1] and not own.is_floating_point()
        if not is_whole or (own < 0).any() or (own >= bins).any():
            raise ConfigError(
                f"the {name} must return a whole number from 0 to {bins - 1} for each of "
                f"{len(targets)} samples, got {own.flatten()[:8].tolist()} of shape "
                f"{tuple(own.shape)}"
            )
        found.append(own.long())
    return torch.stack(found)


def _quantile_groups(values: Float[Tensor, " n"], bins: int) -> Int[Tensor, " n"]:
    # Equal values are in the group of the first of them.
    rank = torch.searchsorted(values.sort().values, values.contiguous())
    return rank * bins // max(1, len(values))
