"""Metrics of agents' models on test samples.

`compute_metrics` returns the metrics of every run (sec:experiments, Performance Metrics), which
`fedcb2o.records.METRICS` labels. `__all__` holds those that a configuration may add by its key
`metrics`: functions of the model's outputs and the targets, whose keyword arguments are parameters.
They are equal to those of scikit-learn. NaN stands for a metric that is not defined, such as the
AUC of samples of one class. Targets of the other kind, classes or numbers, are a ConfigError.

>>> import torch
>>> outputs = torch.tensor([[2.0, 0.0], [1.0, 3.0], [0.0, 1.0], [0.5, 0.0]])
>>> auc(outputs, torch.tensor([0, 1, 0, 1]))
0.75
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike
from torch import Tensor

from fedcb2o.docstrings import share_entries
from fedcb2o.errors import ConfigError
from fedcb2o.federated.ragged import AgentIds, Indices

__all__ = [
    "auc",
    "average_precision",
    "balanced_accuracy",
    "c_index",
    "calibration_error",
    "f1",
    "log_loss",
    "mae",
    "r2",
    "rmse",
    "worst_class_accuracy",
]

Confusion = Int[np.ndarray, "*a C C"]
"""Confusion matrices: number of samples of class c (row) predicted as class c' (column)."""

Shares = Float[np.ndarray, "*a"]

_Average = Literal["macro", "weighted"]
_MAX_PAIRS = 2**22  # that are compared at once


def auc(
    outputs: Float[Tensor, "n C"],
    targets: Int[Tensor, " n"],
    *,
    average: _Average = "macro",
    label: int | None = None,
) -> float:
    """Compute the area under the ROC curve, of several classes one against the rest.

    Returns:
        A share in [0, 1]; NaN for samples of one class.
    """
    from sklearn.metrics import roc_auc_score  # slow to import

    return _one_against_rest(roc_auc_score, outputs, targets, average, label)


def average_precision(
    outputs: Float[Tensor, "n C"],
    targets: Int[Tensor, " n"],
    *,
    average: _Average = "macro",
    label: int | None = None,
) -> float:
    """Compute the average precision: of two classes that of class 1, else one against the rest.

    Returns:
        A share in [0, 1]; NaN for samples of one class.
    """
    from sklearn.metrics import average_precision_score  # slow to import

    if label is None and outputs.shape[-1] == 2:
        label = 1
    return _one_against_rest(average_precision_score, outputs, targets, average, label)


def f1(
    outputs: Float[Tensor, "n C"],
    targets: Int[Tensor, " n"],
    *,
    average: _Average = "macro",
    label: int | None = None,
) -> float:
    """Compute F1, the harmonic mean of precision and recall.

    Args:
        average: Mean over the classes of the samples and of the predictions, "weighted" by their
            numbers of samples or not.

    Returns:
        A share in [0, 1]; NaN where no sample has, or is predicted as, the class `label`.
    """
    from sklearn.metrics import f1_score  # slow to import

    _, predicted, y = _classes(outputs, targets, label)
    if label is not None:
        return float(f1_score(y, predicted, labels=[label], average="macro", zero_division=np.nan))
    return float(f1_score(y, predicted, average=average, zero_division=0.0))


def balanced_accuracy(outputs: Float[Tensor, "n C"], targets: Int[Tensor, " n"]) -> float:
    """Compute the mean of the class accuracies over the classes of the samples.

    Args:
        outputs: Outputs of a network.
    """
    return float(_class_accuracies(outputs, targets).mean())


def worst_class_accuracy(outputs: Float[Tensor, "n C"], targets: Int[Tensor, " n"]) -> float:
    """Compute the lowest class accuracy over the classes of the samples.

    Args:
        outputs: Outputs of a network.
    """
    return float(_class_accuracies(outputs, targets).min())


def calibration_error(
    outputs: Float[Tensor, "n C"], targets: Int[Tensor, " n"], *, bins: int = 15
) -> float:
    """Compute the expected calibration error of the predicted classes (Guo et al., 2017).

    It is the mean over the samples of the distance between the confidence and the accuracy of
    their bin.

    Args:
        bins: Number of bins of equal width, from 1, of the confidence.

    Returns:
        A number in [0, 1], lower is better.
    """
    if bins < 1:
        raise ConfigError(f"metric `calibration_error`: `bins` must be 1 or more, got {bins}")
    probabilities, predicted, y = _classes(outputs, targets)
    confidence = probabilities.max(1)
    # Inner edges only: a confidence of 1 belongs to the last bin.
    number = np.searchsorted(np.linspace(0, 1, bins + 1)[1:-1], confidence)
    excess = np.bincount(number, confidence - (predicted == y))
    return float(np.abs(excess).sum() / len(y))


def log_loss(outputs: Float[Tensor, "n C"], targets: Int[Tensor, " n"]) -> float:
    """Compute the mean negative logarithm of the probability of the true class.

    Returns:
        A number from 0, lower is better.
    """
    from sklearn import metrics  # slow to import

    probabilities, _, y = _classes(outputs, targets)
    return float(metrics.log_loss(y, probabilities, labels=np.arange(probabilities.shape[1])))


def r2(outputs: Float[Tensor, "n *k"], targets: Float[Tensor, "n *t"]) -> float:
    """Compute R2, the share of the targets' variance that the outputs explain.

    Returns:
        A number up to 1, the mean over the numbers of a sample; NaN for constant targets.
    """
    from sklearn.metrics import r2_score  # slow to import

    predicted, y = _numbers(outputs, targets)
    # scikit-learn returns 0 or 1 there, which a mean over agents would count.
    if len(y) < 2 or (y == y[0]).all(0).any():
        return np.nan
    return float(r2_score(y, predicted))


def mae(outputs: Float[Tensor, "n *k"], targets: Float[Tensor, "n *t"]) -> float:
    """Compute the mean absolute error."""
    from sklearn.metrics import mean_absolute_error  # slow to import

    predicted, y = _numbers(outputs, targets)
    return float(mean_absolute_error(y, predicted))


def rmse(outputs: Float[Tensor, "n *k"], targets: Float[Tensor, "n *t"]) -> float:
    """Compute the root of the mean squared error; of several numbers a sample, the mean of them."""
    from sklearn.metrics import root_mean_squared_error  # slow to import

    predicted, y = _numbers(outputs, targets)
    return float(root_mean_squared_error(y, predicted))


def c_index(
    outputs: Float[Tensor, "n *one"], targets: Float[Tensor, "n *two"], *, risk: bool = False
) -> float:
    """Compute the concordance index (Harrell et al., 1982).

    It is the share of the comparable pairs of samples that the outputs order as the targets do;
    equal outputs count half. Pairs with equal targets are not comparable. A censored sample, whose
    event came after its time, is comparable with samples whose event came up to this time.

    Args:
        outputs: One number per sample.
        targets: One number per sample, or its time and 1 for an event or 0 for a censored sample.
        risk: Whether higher outputs mean lower targets, as a risk does for times.

    Returns:
        A share in [0, 1]; NaN without a comparable pair.

    Raises:
        ConfigError: The targets are not numbers, or the shapes are others.
    """
    # The second number of a target is the event, which no output predicts.
    time = targets.flatten(1)[:, :1] if targets.ndim > 1 else targets
    if targets.is_floating_point() and targets.ndim > 1 and targets[0].numel() > 2:
        raise ConfigError(
            f"metric `c_index` needs one number, or time and event, for each sample, got targets "
            f"of shape {tuple(targets.shape)}"
        )
    predicted, y = (values[:, 0] for values in _numbers(outputs, time))
    event = np.ones(len(y), dtype=bool)
    if targets.ndim > 1 and targets[0].numel() == 2:
        event = targets.flatten(1)[:, 1].numpy() > 0
    concordant = pairs = 0.0
    # A censored sample is never the earlier one of a pair: its event is not known.
    first = np.flatnonzero(event)
    for part in np.array_split(first, -(-len(first) * len(y) // _MAX_PAIRS) or 1):
        later = (y > y[part, None]) | ((y == y[part, None]) & ~event)
        difference = predicted - predicted[part, None]
        pairs += later.sum()
        concordant += (later & (difference > 0)).sum() + 0.5 * (later & (difference == 0)).sum()
    if not pairs:
        return np.nan
    share = float(concordant / pairs)
    return 1 - share if risk else share


def _one_against_rest(
    score: object, outputs: Tensor, targets: Tensor, average: _Average, label: int | None
) -> float:
    """Average a score of binary targets over the classes of the samples."""
    assert callable(score)
    probabilities, _, y = _classes(outputs, targets, label)
    present, counts = np.unique(y, return_counts=True)
    if len(present) < 2 or (label is not None and label not in present):
        return np.nan
    if label is not None:
        return float(score(y == label, probabilities[:, label]))
    if probabilities.shape[1] == 2:
        return float(score(y, probabilities[:, 1]))
    # Classes without samples have no score, as in balanced accuracy.
    scores = [score(y == c, probabilities[:, c]) for c in present]
    return float(np.average(scores, weights=counts if average == "weighted" else None))


def _class_accuracies(
    outputs: Float[Tensor, "n C"], targets: Int[Tensor, " n"]
) -> Float[np.ndarray, " c"]:
    """Return the accuracies of the classes with samples."""
    _, predicted, y = _classes(outputs, targets)
    counts = np.bincount(y)
    correct = np.bincount(y[predicted == y], minlength=len(counts))
    return np.asarray(correct[counts > 0] / counts[counts > 0])


def _classes(
    outputs: Tensor, targets: Tensor, label: int | None = None
) -> tuple[Float[np.ndarray, "n C"], Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """Return probabilities, predicted and true classes; ConfigError for other targets."""
    if targets.is_floating_point() or targets.ndim != 1 or outputs.ndim != 2:
        raise ConfigError(
            f"the metric needs classes: an output for each class, and labels as targets; got"
            f" outputs of shape {tuple(outputs.shape)} and targets of type {targets.dtype} and"
            f" shape {tuple(targets.shape)}. Take one for numbers: r2, mae, rmse or c_index"
        )
    if label is not None and not 0 <= label < outputs.shape[1]:
        raise ConfigError(f"`label` must be between 0 and {outputs.shape[1] - 1}, got {label}")
    # float64, so that far apart outputs keep an order, on which these metrics depend.
    probabilities = outputs.double().softmax(1).numpy()
    return probabilities, outputs.argmax(1).numpy(), targets.numpy()


def _numbers(
    outputs: Tensor, targets: Tensor
) -> tuple[Float[np.ndarray, "n k"], Float[np.ndarray, "n k"]]:
    """Return predicted and true numbers in float64; ConfigError for other targets."""
    if not targets.is_floating_point() or outputs.numel() != targets.numel():
        raise ConfigError(
            f"the metric needs numbers as targets, and as many outputs: got outputs of shape"
            f" {tuple(outputs.shape)} and targets of type {targets.dtype} and shape"
            f" {tuple(targets.shape)}. Take one for classes, such as auc or f1"
        )
    shape = (len(targets), -1)
    return outputs.double().reshape(shape).numpy(), targets.double().reshape(shape).numpy()


@dataclass(frozen=True)
class Score:
    """Results of several models on one test, or on a test of each.

    The confusion matrices are None for data without classes, and the losses None for the
    cross-entropy. `exact` has the shares of samples to which language models answer exactly; None
    for other models. `chosen` has the metrics that the configuration added. NaN is no value.
    """

    confusion: Confusion | None = None
    loss: Float[np.ndarray, " a"] | None = None
    exact: Float[np.ndarray, " a"] | None = None
    chosen: dict[str, Float[np.ndarray, " a"]] = field(default_factory=dict)

    @classmethod
    def concatenate(cls, parts: "Sequence[Score]", order: Indices) -> "Score":
        """Return the results of all parts, in the order of `order`."""
        return cls(
            _concatenate([part.confusion for part in parts], order),
            _concatenate([part.loss for part in parts], order),
            _concatenate([part.exact for part in parts], order),
            {
                name: np.concatenate([part.chosen[name] for part in parts])[order]
                for name in parts[0].chosen
            },
        )


def _concatenate(columns: "Sequence[np.ndarray | None]", order: Indices) -> np.ndarray | None:
    """Return the numbers of all columns, in the order of `order`; None where there are none."""
    known = [column for column in columns if column is not None]
    return np.concatenate(known)[order] if known else None


@dataclass(frozen=True)
class EvaluationResult:
    """Results of the models of agents with ascending ids.

    `triggered` is the result with the trigger of a backdoor. `common` is the result on the common
    test set, where agents have test sets of their own. `wanted` has the exact answers that an
    attack on text wants. `validation` has the losses on the agents' validation samples, if the best
    models are kept; NaN for an agent without samples.
    """

    agents: AgentIds
    own: Score
    triggered: Score | None = None
    common: Score | None = None
    wanted: Score | None = None
    validation: Float[np.ndarray, " a"] | None = None

    @classmethod
    def concatenate(cls, parts: "Sequence[EvaluationResult]") -> "EvaluationResult":
        """Return the results of all agents of disjoint parts."""
        parts = [part for part in parts if len(part.agents)]
        agents = np.concatenate([np.zeros(0, np.int64), *(part.agents for part in parts)])
        # Parts end in the order of the processes, and rows are those of ascending agents.
        order = agents.argsort()
        scores: dict[str, Score] = {}
        for name in ("own", "triggered", "common", "wanted"):
            known = [score for part in parts if (score := getattr(part, name)) is not None]
            if known:
                scores[name] = Score.concatenate(known, order)
        validation = _concatenate([part.validation for part in parts], order)
        return cls(AgentIds(agents[order]), **{"own": Score(), **scores}, validation=validation)


def accuracy(confusion: Confusion) -> Shares:
    """Compute the overall accuracy, in [0, 1] (sec:experiments); NaN for no sample."""
    return _share(confusion.trace(axis1=-2, axis2=-1), confusion.sum((-2, -1)))


def source_accuracy(confusion: Confusion, source: int) -> Shares:
    """Compute the share of samples of c_S predicted as c_S (sec:experiments)."""
    return attack_success_rate(confusion, source, source)


def attack_success_rate(confusion: Confusion, source: int, target: int) -> Shares:
    """Compute the share of samples of c_S predicted as c_T (sec:experiments); NaN for no sample."""
    return _share(confusion[..., source, target], confusion[..., source, :].sum(-1))


def false_positive_share(confusion: Confusion, target: int) -> Shares:
    """Compute the share of other classes' samples that are predicted as the target."""
    others = confusion.sum((-2, -1)) - confusion[..., target, :].sum(-1)
    return _share(confusion[..., target].sum(-1) - confusion[..., target, target], others)


def _share(counts: ArrayLike, totals: ArrayLike) -> Shares:
    """Return counts / totals; NaN for a total of 0."""
    with np.errstate(invalid="ignore"):
        return np.asarray(np.asarray(counts) / np.asarray(totals))


@dataclass(frozen=True)
class AttackGoal:
    """Goal of an attack: misclassification of source classes, or a backdoor.

    An attack without sources and targets lowers the overall accuracy. `targets` has the class of
    each source; one without sources is the target of all other classes.
    """

    sources: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()

    def source_accuracy(self, confusion: Confusion) -> Shares:
        """Compute the mean accuracy over the sources in the test set; NaN without one."""
        return self._mean(confusion, self.sources)

    def success_rate(self, confusion: Confusion, triggered: Confusion | None = None) -> Shares:
        """Compute the mean success rate over pairs, or of a backdoor on `triggered` samples."""
        # A backdoor, or an attack on all other classes, has one target.
        if self.targets and (triggered is not None or not self.sources):
            return false_positive_share(
                confusion if triggered is None else triggered, self.targets[0]
            )
        return self._mean(confusion, self.targets)

    def _mean(self, confusion: Confusion, answers: Sequence[int]) -> Shares:
        """Average the shares of answers over the sources with samples."""
        total = np.zeros(confusion.shape[:-2])
        count = np.zeros(confusion.shape[:-2])
        for source, answer in zip(self.sources, answers, strict=False):
            share = attack_success_rate(confusion, source, answer)
            total += np.nan_to_num(share)
            count += ~np.isnan(share)
        return _share(total, count)


def compute_metrics(
    result: EvaluationResult, goal: AttackGoal
) -> dict[str, Float[np.ndarray, " a"]]:
    """Compute all metrics by name; NaN where one does not apply, optional ones are left out."""
    own, common = result.own, result.common
    absent = np.full(len(result.agents), np.nan)
    found = {
        "accuracy": own.exact,
        "source_accuracy": None,
        "attack_success_rate": None if result.wanted is None else result.wanted.exact,
    }
    if own.confusion is not None:
        found["accuracy"] = accuracy(own.confusion)
        found["source_accuracy"] = goal.source_accuracy(own.confusion)
        triggered = None if result.triggered is None else result.triggered.confusion
        found["attack_success_rate"] = goal.success_rate(own.confusion, triggered)
    metrics = {name: absent if column is None else column for name, column in found.items()}

    if own.loss is not None:
        metrics["test_loss"] = own.loss
    if common is not None:
        shares = common.exact if common.confusion is None else accuracy(common.confusion)
        if shares is not None:
            metrics["global_accuracy"] = shares
        if common.loss is not None:
            metrics["global_loss"] = common.loss
    return metrics | own.chosen


_OF_CLASSES = {
    "outputs": "Outputs of a network, before the softmax.",
    "targets": "Class of each sample.",
    "average": 'Mean over the classes of the samples, "weighted" by their numbers or not.',
    "label": "Only class, from 0, in place of the mean.",
}
_OF_NUMBERS = {"outputs": "Predicted numbers.", "targets": "True numbers."}
for _metric in (r2, mae, rmse, c_index):
    share_entries(
        _metric, _OF_NUMBERS, "A number from 0 in the units of the targets, lower is better."
    )
for _name in __all__:
    share_entries(globals()[_name], _OF_CLASSES, "A share in [0, 1].")
