"""The paper's metrics (sec:experiments, Performance Metrics) from what one agent's model did on test samples; and, in
`__all__`, those that a configuration may add: functions of a confusion matrix, whose further arguments are keywords."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

__all__ = ["balanced_accuracy", "worst_class_accuracy"]

Confusion = Int[Tensor, "C C"]
"""How often a model took samples of class c (row) for class c' (column)."""


def balanced_accuracy(confusion: Int[Tensor, "C C"]) -> float:
    """The mean over the classes that the test set holds of the share predicted as what they are."""
    counts = confusion.sum(1)
    return float((confusion.diagonal()[counts > 0] / counts[counts > 0]).mean())


def worst_class_accuracy(confusion: Int[Tensor, "C C"]) -> float:
    """The least of these shares."""
    counts = confusion.sum(1)
    return float((confusion.diagonal()[counts > 0] / counts[counts > 0]).min())


@dataclass(frozen=True)
class Score:
    """What one model did on test samples: for what classes it took them, None where there are no classes, and its mean
    `loss`, None where that is the cross-entropy."""

    confusion: Confusion | None
    loss: float | None


@dataclass(frozen=True)
class EvaluationResult:
    """What an agent's model did in its test; for what classes it took the same samples with the trigger of a backdoor;
    and what it did on those that test everybody, where agents have their own."""

    own: Score
    triggered: Confusion | None = None
    common: Score | None = None


def accuracy(confusion: Int[Tensor, "C C"]) -> float:
    """Overall accuracy (sec:experiments): the share of test samples predicted as what they are, in [0, 1]."""
    return int(confusion.diagonal().sum()) / int(confusion.sum())


def source_accuracy(confusion: Int[Tensor, "C C"], source: int) -> float:
    """Source-class accuracy (sec:experiments): the share of source-class test samples predicted as that class, c_S."""
    return int(confusion[source, source]) / int(confusion[source].sum())


def attack_success_rate(confusion: Int[Tensor, "C C"], source: int, target: int) -> float:
    """Attack success rate (sec:experiments): the share of source-class test samples predicted as the target, c_T."""
    return int(confusion[source, target]) / int(confusion[source].sum())


def false_positive_share(confusion: Int[Tensor, "C C"], target: int) -> float:
    """The share of test samples of other classes that are predicted as c_T: with its trigger, a backdoor's success."""
    others = int(confusion.sum()) - int(confusion[target].sum())
    return (int(confusion[:, target].sum()) - int(confusion[target, target])) / others


@dataclass(frozen=True)
class AttackGoal:
    """What an attack is after: source classes taken for the targets beside them, or all other classes for one target,
    triggered where it is a backdoor.

    An attack without sources and targets is after the overall accuracy alone.
    """

    sources: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()

    def source_accuracy(self, confusion: Int[Tensor, "C C"]) -> float | None:
        """Source-class accuracy, the mean over the sources that were tested; None where there is none."""
        found = [
            source_accuracy(confusion, source) for source in self.sources if confusion[source].any()
        ]
        return sum(found) / len(found) if found else None

    def success_rate(
        self, confusion: Int[Tensor, "C C"], triggered: Int[Tensor, "C C"] | None = None
    ) -> float | None:
        """Attack success rate: the mean over the pairs, or of all classes but the target, `triggered` for a backdoor.

        None where there is no target, or none of the classes that are to be taken for it was tested.
        """
        if self.targets and (triggered is not None or not self.sources):
            seen = confusion if triggered is None else triggered
            others = seen.sum() - seen[self.targets[0]].sum()
            return false_positive_share(seen, self.targets[0]) if others else None
        pairs = [
            pair
            for pair in zip(self.sources, self.targets, strict=False)
            if confusion[pair[0]].any()
        ]
        found = [attack_success_rate(confusion, source, target) for source, target in pairs]
        return sum(found) / len(found) if found else None


def compute_metrics(result: EvaluationResult, goal: AttackGoal) -> dict[str, float | None]:
    """All metrics of one agent's model by their names, None where one does not apply; those that are not there for
    every kind of data only where they are."""
    own = result.own.confusion
    common = result.common
    found = {
        "accuracy": None if own is None else accuracy(own),
        "source_accuracy": None if own is None else goal.source_accuracy(own),
        "attack_success_rate": None if own is None else goal.success_rate(own, result.triggered),
    }
    others: dict[str, float | None] = {"test_loss": result.own.loss}
    if common is not None:
        confused = common.confusion
        others |= {
            "global_accuracy": None if confused is None else accuracy(confused),
            "global_loss": common.loss,
        }
    return found | {name: value for name, value in others.items() if value is not None}
