"""Losses that agents minimise, and by which they evaluate models.

A configuration names a loss by a function in `__all__`: (outputs [n, ...], targets [n, ...], *,
...) -> losses [n], one for each sample, low is good. The default is the cross-entropy.

>>> squared_error(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 1.0])).tolist()
[1.0, 4.0]
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional as F

from fedcb2o.docstrings import share_entries
from fedcb2o.errors import ConfigError

__all__ = ["absolute_error", "answer_loss", "cross_entropy", "huber", "squared_error"]

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> one loss per sample."""


def cross_entropy(
    outputs: Float[Tensor, "n C"], targets: Shaped[Tensor, " n"], *, label_smoothing: float = 0.0
) -> Float[Tensor, " n"]:
    """Compute the cross-entropy of class probabilities.

    Args:
        outputs: Outputs before the softmax.
        targets: Classes.
        label_smoothing: Share of the label that is spread over all classes, in [0, 1].

    Returns:
        One loss per sample, in nats.
    """
    if not 0 <= label_smoothing <= 1:
        raise ConfigError(
            "`label_smoothing` of the loss cross_entropy must be between 0 and 1, got "
            f"{label_smoothing}"
        )
    return F.cross_entropy(outputs, targets, reduction="none", label_smoothing=label_smoothing)


def squared_error(
    outputs: Float[Tensor, "n *k"], targets: Shaped[Tensor, "n *target"]
) -> Float[Tensor, " n"]:
    """Compute the squared difference, averaged over the numbers of a sample."""
    return _mean_per_sample(_difference(outputs, targets).square())


def absolute_error(
    outputs: Float[Tensor, "n *k"], targets: Shaped[Tensor, "n *target"]
) -> Float[Tensor, " n"]:
    """Compute the absolute difference, averaged over the numbers of a sample."""
    return _mean_per_sample(_difference(outputs, targets).abs())


def huber(
    outputs: Float[Tensor, "n *k"], targets: Shaped[Tensor, "n *target"], *, delta: float = 1.0
) -> Float[Tensor, " n"]:
    """Compute the Huber loss: half the squared difference up to `delta`, linear beyond.

    Huber, "Robust Estimation of a Location Parameter" (1964).

    Args:
        delta: Difference at which the loss becomes linear, above 0.
    """
    if not delta > 0:
        raise ConfigError(f"`delta` of the loss huber must be above 0, got {delta}")
    error = _difference(outputs, targets).abs()
    linear = delta * (error - delta / 2)
    return _mean_per_sample(torch.where(error <= delta, error.square() / 2, linear))


def answer_loss(
    outputs: Float[Tensor, "n k"], targets: Shaped[Tensor, "n *target"]
) -> Float[Tensor, " n"]:
    """Compute the loss of a language model on answers: the mean of -log p over their tokens.

    Answers are a part of the samples. The labels of samples are groups, such as topics.

    Args:
        outputs: Outputs of `language_model`: mean log-probabilities come first.
        targets: Groups, which are not read.

    Returns:
        One loss per sample, in nats per token; its exponential is the perplexity.
    """
    del targets
    return -outputs[:, 0]


def is_cross_entropy(loss: Loss | None) -> bool:
    """Return whether a loss is the cross-entropy, which None stands for."""
    return getattr(loss, "func", loss) in (None, cross_entropy)


def predicts_labels(loss: Loss | None) -> bool:
    """Return whether networks predict labels, which are groups for `answer_loss`."""
    return getattr(loss, "func", loss) is not answer_loss


def _difference(outputs: Float[Tensor, "n *k"], targets: Shaped[Tensor, "n *target"]) -> Tensor:
    return outputs.reshape(targets.shape) - targets


def _mean_per_sample(differences: Float[Tensor, "n *target"]) -> Float[Tensor, " n"]:
    return differences.reshape(len(differences), -1).mean(1)


def standard_error_of_mean(differences: Float[Tensor, "*a n"]) -> Float[Tensor, "*a"]:
    """Compute the standard error of the mean; 0 for equal differences or a single one."""
    n = differences.shape[-1]
    squares = (differences - differences.mean(-1, keepdim=True)).square().sum(-1)
    return (squares / max(1, n - 1) / n).sqrt()


_ARGUMENTS = {"outputs": "Predictions.", "targets": "Targets, of as many numbers."}
for _name in __all__:
    share_entries(globals()[_name], _ARGUMENTS, "One loss per sample.")
