"""The paper's metrics (sec:experiments, Performance Metrics) from a confusion matrix of one agent's model."""

from jaxtyping import Int
from torch import Tensor


def accuracy(confusion: Int[Tensor, "C C"]) -> float:
    """Overall accuracy: the share of test samples predicted as what they are, in [0, 1]."""
    return int(confusion.diagonal().sum()) / int(confusion.sum())


def source_accuracy(confusion: Int[Tensor, "C C"], source: int) -> float:
    """Source-class accuracy: the share of source-class test samples predicted as the source class c_S."""
    return int(confusion[source, source]) / int(confusion[source].sum())


def attack_success_rate(confusion: Int[Tensor, "C C"], source: int, target: int) -> float:
    """Attack success rate: the share of source-class test samples predicted as the target class c_T."""
    return int(confusion[source, target]) / int(confusion[source].sum())
