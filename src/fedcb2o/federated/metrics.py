"""The paper's metrics (sec:experiments, Performance Metrics) from a confusion matrix of one agent's model; and, in
`__all__`, those that a configuration may add: functions of such a matrix, whose further arguments are keywords."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

__all__ = ["balanced_accuracy", "worst_class_accuracy"]


def balanced_accuracy(confusion: Int[Tensor, "C C"]) -> float:
    """The mean over the classes that the test set holds of the share predicted as what they are."""
    counts = confusion.sum(1)
    return float((confusion.diagonal()[counts > 0] / counts[counts > 0]).mean())


def worst_class_accuracy(confusion: Int[Tensor, "C C"]) -> float:
    """The least of these shares."""
    counts = confusion.sum(1)
    return float((confusion.diagonal()[counts > 0] / counts[counts > 0]).min())


def accuracy(confusion: Int[Tensor, "C C"]) -> float:
    """Overall accuracy (sec:experiments): the share of test samples predicted as what they are, in [0, 1]."""
    return int(confusion.diagonal().sum()) / int(confusion.sum())


def source_accuracy(confusion: Int[Tensor, "C C"], source: int) -> float:
    """Source-class accuracy (sec:experiments): the share of source-class test samples predicted as that class, c_S."""
    return int(confusion[source, source]) / int(confusion[source].sum())


def attack_success_rate(confusion: Int[Tensor, "C C"], source: int, target: int) -> float:
    """Attack success rate (sec:experiments): the share of source-class test samples predicted as the target, c_T."""
    return int(confusion[source, target]) / int(confusion[source].sum())


def taken_for(confusion: Int[Tensor, "C C"], target: int) -> float:
    """The share of test samples of other classes that are predicted as c_T: with its trigger, a backdoor's success."""
    others = int(confusion.sum()) - int(confusion[target].sum())
    return (int(confusion[:, target].sum()) - int(confusion[target, target])) / others


@dataclass(frozen=True)
class Aim:
    """What an attack is after: source classes taken for the targets beside them, or all other classes for one target,
    triggered where it is a backdoor.

    An attack without sources and targets is after the overall accuracy alone.
    """

    sources: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()

    def accuracy(self, confusion: Int[Tensor, "C C"]) -> float | None:
        """Source-class accuracy, the mean over the sources; None where there is none."""
        found = [source_accuracy(confusion, source) for source in self.sources]
        return sum(found) / len(found) if found else None

    def success(self, confusion: Int[Tensor, "C C"], triggered: Int[Tensor, "C C"] | None = None) -> float | None:
        """Attack success rate: the mean over the pairs, or of all classes but the target, `triggered` for a backdoor.

        None where there is no target.
        """
        if self.targets and (triggered is not None or not self.sources):
            return taken_for(confusion if triggered is None else triggered, self.targets[0])
        pairs = zip(self.sources, self.targets, strict=False)
        found = [attack_success_rate(confusion, source, target) for source, target in pairs]
        return sum(found) / len(found) if found else None
