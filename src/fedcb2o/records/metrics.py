"""Metrics of a run: name, label, direction and format of each.

Records, progress, trackers and reports read this table. It lacks the metrics that a configuration
chooses by its key `metrics`, built-in ones included: their columns and labels are their names.

    >>> METRICS["attack_success_rate"].label
    'Attack success rate'
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """One recorded metric.

    Attributes:
        name: Column of the records.
        label: Heading in tables, figures and legends.
        short_label: Word in lines of progress.
        worse_direction: Direction in which the values of a benign agent become worse.
        is_percent: True for a fraction of 1 that tables show in percent.
    """

    name: str
    label: str
    short_label: str
    worse_direction: Literal["low", "high"]
    is_percent: bool = True


STANDARD_METRICS = ("accuracy", "source_accuracy", "attack_success_rate")
"""The paper's metrics, in percent, which every evaluation records."""

SOURCE_METRICS = STANDARD_METRICS[1:]
"""Those that reports also show by the number of source-class samples."""

CONDITIONAL_METRICS = ("test_loss", "global_accuracy", "global_loss", "epsilon")
"""All other metrics; reports show those that a run has.

A new metric of every run belongs here, since older runs lack it.
"""

METRICS = {
    metric.name: metric
    for metric in (
        Metric("accuracy", "Overall accuracy", "accuracy", "low"),
        Metric("source_accuracy", "Source class accuracy", "source", "low"),
        Metric("attack_success_rate", "Attack success rate", "attack", "high"),
        Metric("test_loss", "Test loss", "loss", "high", is_percent=False),
        Metric("global_accuracy", "Accuracy, global test set", "on the global test set", "low"),
        Metric(
            "global_loss",
            "Loss, global test set",
            "loss on the global test set",
            "high",
            is_percent=False,
        ),
        Metric("epsilon", "Privacy loss epsilon", "epsilon", "high", is_percent=False),
        Metric("malicious_weight", "Malicious weight", "malicious weight", "high"),
    )
}
"""The standard and conditional metrics, and the weight of malicious peers, by name."""
