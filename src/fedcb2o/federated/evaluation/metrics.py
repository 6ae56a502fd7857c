"""The paper's metrics (sec:experiments, Performance Metrics) of one agent's model on test samples.

`compute_metrics` returns the metrics of every run, `fedcb2o.records.METRICS` has their labels and
directions. `__all__` holds metrics that a configuration may add by its key `metrics`: functions of
a confusion matrix, whose keyword arguments are parameters. `METRICS` lacks these.

>>> import torch
>>> accuracy(torch.tensor([[3, 1], [0, 4]]))
0.875
"""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from fedcb2o.errors import ConfigError

__all__ = ["balanced_accuracy", "worst_class_accuracy"]

Confusion = Int[Tensor, "C C"]
"""Confusion matrix: number of samples of class c (row) predicted as class c' (column)."""


def balanced_accuracy(confusion: Int[Tensor, "C C"]) -> float:
    """Compute the mean of the class accuracies over the classes of the test set.

    Args:
        confusion: Confusion matrix.

    Returns:
        A share in [0, 1].

    Raises:
        ConfigError: There is no sample.
    """
    return float(_class_accuracies(confusion).mean())


def worst_class_accuracy(confusion: Int[Tensor, "C C"]) -> float:
    """Compute the lowest class accuracy over the classes of the test set.

    Args:
        confusion: Confusion matrix.

    Returns:
        A share in [0, 1].

    Raises:
        ConfigError: There is no sample.
    """
    return float(_class_accuracies(confusion).min())


def _class_accuracies(confusion: Int[Tensor, "C C"]) -> Float[Tensor, " c"]:
    """Return the accuracies of the classes with samples; raise ConfigError for none."""
    _count(confusion)
    counts = confusion.sum(1)
    return confusion.diagonal()[counts > 0] / counts[counts > 0]


def _count(confusion: Int[Tensor, "*a"], label: int | None = None) -> int:
    """Return the number of samples of a test, or of one class; raise ConfigError for none."""
    count = int(confusion.sum())
    if not count:
        kind = "" if label is None else f" of class {label}"
        raise ConfigError(f"the test has no sample{kind}, so that its share is not defined")
    return count


@dataclass(frozen=True)
class Score:
    """Result of one model on one test set.

    The confusion matrix is None for data without classes, and the loss None for the cross-entropy.
    `exact` is the share of samples to which a language model answers exactly; None for other
    models.
    """

    confusion: Confusion | None
    loss: float | None
    exact: float | None = None


@dataclass(frozen=True)
class EvaluationResult:
    """Results of one agent's model.

    `triggered` is the confusion matrix with the trigger of a backdoor. `common` is the result on
    the common test set, where agents have test sets of their own. `wanted` is the share of test
    samples that get the attacker's answer; None without an attack on text.
    """

    own: Score
    triggered: Confusion | None = None
    common: Score | None = None
    wanted: float | None = None


def accuracy(confusion: Int[Tensor, "C C"]) -> float:
    """Compute the overall accuracy, in [0, 1] (sec:experiments)."""
    return int(confusion.diagonal().sum()) / _count(confusion)


def source_accuracy(confusion: Int[Tensor, "C C"], source: int) -> float:
    """Compute the share of samples of c_S predicted as c_S (sec:experiments)."""
    return int(confusion[source, source]) / _count(confusion[source], source)


def attack_success_rate(confusion: Int[Tensor, "C C"], source: int, target: int) -> float:
    """Compute the share of samples of c_S predicted as c_T (sec:experiments)."""
    return int(confusion[source, target]) / _count(confusion[source], source)


def false_positive_share(confusion: Int[Tensor, "C C"], target: int) -> float:
    """Compute the share of other classes' samples that are predicted as the target."""
    others = int(confusion.sum()) - int(confusion[target].sum())
    if not others:
        raise ConfigError(f"the test has no sample of another class than {target}")
    return (int(confusion[:, target].sum()) - int(confusion[target, target])) / others


@dataclass(frozen=True)
class AttackGoal:
    """Goal of an attack: misclassification of source classes, or a backdoor.

    An attack without sources and targets lowers the overall accuracy. `targets` has the class of
    each source; one without sources is the target of all other classes.
    """

    sources: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()

    def source_accuracy(self, confusion: Int[Tensor, "C C"]) -> float | None:
        """Compute the mean accuracy over the sources in the test set; None without one."""
        present = [source for source in self.sources if confusion[source].any()]
        if not present:
            return None
        return sum(source_accuracy(confusion, source) for source in present) / len(present)

    def success_rate(
        self, confusion: Int[Tensor, "C C"], triggered: Int[Tensor, "C C"] | None = None
    ) -> float | None:
        """Compute the mean success rate over pairs, or of a backdoor on `triggered` samples."""
        # A backdoor, or an attack on all other classes, has one target.
        if self.targets and (triggered is not None or not self.sources):
            seen = confusion if triggered is None else triggered
            others = seen.sum() - seen[self.targets[0]].sum()
            return false_positive_share(seen, self.targets[0]) if others else None

        pairs = zip(self.sources, self.targets, strict=False)
        present = [pair for pair in pairs if confusion[pair[0]].any()]
        if not present:
            return None
        rates = [attack_success_rate(confusion, source, target) for source, target in present]
        return sum(rates) / len(rates)


def compute_metrics(result: EvaluationResult, goal: AttackGoal) -> dict[str, float | None]:
    """Compute all metrics by name; None where one does not apply, optional ones are left out."""
    own = result.own.confusion
    metrics: dict[str, float | None] = {
        "accuracy": result.own.exact,
        "source_accuracy": None,
        "attack_success_rate": result.wanted,
    }
    if own is not None:
        metrics["accuracy"] = accuracy(own)
        metrics["source_accuracy"] = goal.source_accuracy(own)
        metrics["attack_success_rate"] = goal.success_rate(own, result.triggered)

    if result.own.loss is not None:
        metrics["test_loss"] = result.own.loss
    if result.common is not None:
        if result.common.confusion is not None:
            metrics["global_accuracy"] = accuracy(result.common.confusion)
        elif result.common.exact is not None:
            metrics["global_accuracy"] = result.common.exact
        if result.common.loss is not None:
            metrics["global_loss"] = result.common.loss
    return metrics
