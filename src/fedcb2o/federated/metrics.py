"""The paper's metrics (Section "Experiments", Performance Metrics) from a confusion matrix of one agent's model."""

from jaxtyping import Int
from torch import Tensor


def accuracy(confusion: Int[Tensor, "C C"]) -> float:
    """Overall accuracy: the share of test samples predicted as what they are, in [0, 1]."""
    return float(confusion.diagonal().sum() / confusion.sum())


def source_accuracy(confusion: Int[Tensor, "C C"], source: int) -> float:
    """Source-class accuracy: the share of source-class test samples predicted as the source class c_S."""
    return float(confusion[source, source] / confusion[source].sum())


def attack_success_rate(confusion: Int[Tensor, "C C"], source: int, target: int) -> float:
    """Attack success rate: the share of source-class test samples predicted as the target class c_T."""
    return float(confusion[source, target] / confusion[source].sum())
