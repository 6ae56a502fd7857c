"""Weights of training samples in LocalUpdate, such as for rare classes.

A function (x [n, ...], y [n, ...], *, ...) -> weights [n] gets the training samples of one agent.
Its weights are divided by their mean, so that the learning rate keeps its meaning. Validation and
tests have no weights.

>>> balanced(torch.zeros(4, 1), torch.tensor([0, 0, 0, 1])).tolist()
[1.0, 1.0, 1.0, 3.0]
"""

from collections.abc import Callable, Sequence
from typing import Annotated

import torch
from jaxtyping import Float, Int, Shaped
from pydantic import Field
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.errors import ConfigError
from fedcb2o.user_values import returned_tensor

__all__ = ["balanced", "by_class"]

SampleWeights = Callable[[Tensor, Tensor], Tensor]
"""(samples, targets) of one agent -> a weight for each sample."""


def balanced(x: Shaped[Tensor, "n *features"], y: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Weigh samples so that each class of the agent has the same sum of weights.

    Args:
        x: Samples of an agent.
        y: Classes.

    Returns:
        Weights, the largest class's is 1.

    Raises:
        ConfigError: The targets are not classes.
    """
    counts = torch.bincount(_classes(y)).float()
    return counts.max() / counts[y]


def by_class(
    x: Shaped[Tensor, "n *features"],
    y: Int[Tensor, " n"],
    *,
    weights: Sequence[Annotated[float, Field(ge=0)]],
) -> Float[Tensor, " n"]:
    """Weigh samples by their class.

    Args:
        x: Samples of an agent.
        y: Classes.
        weights: Weight of each class, in order, 0 or more.

    Returns:
        Weights.

    Raises:
        ConfigError: The targets are not classes, or a class has no weight.
    """
    highest = int(_classes(y).max())
    if highest >= len(weights):
        raise ConfigError(
            f"`weights` of by_class has {len(weights)} numbers, and there is a class {highest}: "
            "give one for each class"
        )
    return torch.tensor(list(weights), dtype=torch.float32)[y]


def relative_weights(
    weigh: SampleWeights, x: Shaped[Tensor, "n *features"], y: Shaped[Tensor, "n *target"]
) -> Float[Tensor, " n"]:
    """Return the weights of an agent's samples, checked and with mean 1."""
    name = plugins.display_name("weights", weigh)
    weights = returned_tensor(name, weigh(x.cpu().clone(), y.cpu().clone())).float()
    is_number = (weights >= 0) & weights.isfinite()
    if weights.shape != y.shape[:1] or not is_number.all() or not weights.any():
        raise ConfigError(
            f"the {name} must return a finite number from 0 for each of {len(y)} samples, not all"
            f" 0, got {weights.flatten()[:8].tolist()} of shape {tuple(weights.shape)}"
        )
    return (weights / weights.mean()).to(y.device)


def _classes(y: Tensor) -> Tensor:
    if y.is_floating_point() or y.ndim != 1:
        raise ConfigError("weights by class need classes, and the data have numbers as targets")
    return y
