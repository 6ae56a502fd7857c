"""Losses: what an agent minimises, and by what it judges models.

A configuration names a loss by a function in `__all__`: (outputs [n, ...], targets [n, ...], *, ...) -> losses [n], one
for each sample, low is good. Without one it is cross-entropy, computed at once.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional as F

from fedcb2o.errors import ConfigError
from fedcb2o.plugins import display_name

__all__ = ["absolute_error", "cross_entropy", "huber", "squared_error"]

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(
    outputs: Float[Tensor, "n C"], targets: Shaped[Tensor, " n"], *, label_smoothing: float = 0.0
) -> Float[Tensor, " n"]:
    """That of classes, with labels that are smoothed if you like."""
    return F.cross_entropy(outputs, targets, reduction="none", label_smoothing=label_smoothing)


def squared_error(
    outputs: Float[Tensor, "n *k"], targets: Shaped[Tensor, "n *target"]
) -> Float[Tensor, " n"]:
    """The squared difference, the mean over the numbers of a sample."""
    return _mean_per_sample(_difference(outputs, targets).square())


def absolute_error(
    outputs: Float[Tensor, "n *k"], targets: Shaped[Tensor, "n *target"]
) -> Float[Tensor, " n"]:
    """The absolute difference, the mean over the numbers of a sample."""
    return _mean_per_sample(_difference(outputs, targets).abs())


def huber(
    outputs: Float[Tensor, "n *k"], targets: Shaped[Tensor, "n *target"], *, delta: float = 1.0
) -> Float[Tensor, " n"]:
    """Half the squared difference up to `delta`, and linear beyond (Huber 1964): outliers count for less."""
    if not delta > 0:
        raise ConfigError(f"`delta` of the loss huber must be above 0, got {delta}")
    far = _difference(outputs, targets).abs()
    return _mean_per_sample(torch.where(far <= delta, far.square() / 2, delta * (far - delta / 2)))


def _difference(outputs: Float[Tensor, "n *k"], targets: Shaped[Tensor, "n *target"]) -> Tensor:
    return outputs.reshape(targets.shape) - targets


def _mean_per_sample(differences: Float[Tensor, "n *target"]) -> Float[Tensor, " n"]:
    return differences.reshape(len(differences), -1).mean(1)


def per_sample_losses(
    loss: Loss, outputs: Float[Tensor, "..."], targets: Shaped[Tensor, "..."], num_axes: int
) -> Float[Tensor, "..."]:
    """The loss of each sample, whose first `several` axes are those of samples; raises ConfigError unless the function
    returns one number for each."""
    shape = targets.shape[:num_axes]
    found = loss(outputs.flatten(0, num_axes - 1), targets.flatten(0, num_axes - 1))
    if (
        not isinstance(found, Tensor)
        or found.shape != (shape.numel(),)
        or not found.is_floating_point()
    ):
        got = (
            f"shape {tuple(found.shape)}"
            if isinstance(found, Tensor)
            else f"a {type(found).__name__}"
        )
        raise ConfigError(
            f"the {display_name('loss', loss)} returned {got} for {shape.numel()} samples, expected a number for each"
        )
    return found.view(shape)
