"""Metrics of a run: name, label, direction and format of each.

Records, progress, trackers and reports read this table. It lacks the metrics that a configuration
chooses by its key `metrics`, built-in ones included: `chosen_metrics` describes them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Metric:
    """One recorded metric."""

    name: str
    # Heading in tables, figures and legends.
    label: str
    short_label: str
    # Direction in which the values of a benign agent become worse.
    worse_direction: Literal["low", "high"]
    # True for a fraction of 1 that tables show in percent.
    is_percent: bool = True
    # Description of a cell of a grid's matrix; without it grids do not show the metric.
    caption: str = ""

    def format_short(self, value: float) -> str:
        """Format a value for a line of progress, such as "accuracy 91.3%"."""
        number = f"{100 * value:.1f}%" if self.is_percent else f"{value:.4g}"
        return f"{self.short_label} {number}"


CLOCK_COLUMNS = ("hours", "bytes", "undelivered", "trained")
"""Values of a round of simulated time, equal for all agents."""

METRICS = {
    metric.name: metric
    for metric in (
        Metric(
            "accuracy",
            "Overall accuracy",
            "accuracy",
            "low",
            caption="The share of all test samples that benign agents classify correctly.",
        ),
        Metric(
            "source_accuracy",
            "Source class accuracy",
            "source",
            "low",
            caption="The share of source-class samples that are classified correctly.",
        ),
        Metric(
            "attack_success_rate",
            "Attack success rate",
            "attack",
            "high",
            caption="The share of the samples of the attack's goal that are classified as the "
            "target.",
        ),
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
        Metric(
            "malicious_weight",
            "Malicious weight",
            "malicious weight",
            "high",
            caption="The weight of malicious agents' models in the averages of benign agents, over "
            "the last fifth of the rounds. Some rules give no weights.",
        ),
    )
}
"""All metrics by name. A new metric of every run is entered here and in `compute_metrics`."""

STANDARD_METRICS = ("accuracy", "source_accuracy", "attack_success_rate")
"""The paper's metrics, in percent, which every evaluation records."""

SOURCE_METRICS = STANDARD_METRICS[1:]
"""Those that reports also show by the number of source-class samples."""

OPTIONAL_METRICS = tuple(
    name for name in METRICS if name not in (*STANDARD_METRICS, "malicious_weight")
)
"""The other metrics of an evaluation; older runs may lack them, and reports show those of a run."""

MATRIX_METRICS = tuple(name for name, metric in METRICS.items() if metric.caption)
"""Metrics that have a column in the results of a grid, and a matrix."""

_LOWER_IS_BETTER = ("calibration_error", "log_loss", "mae", "rmse")


def chosen_metrics(entries: Iterable[Any]) -> dict[str, Metric]:
    """Describe the entries of the key `metrics`, by the names of their columns."""
    found = {}
    for entry in entries:
        table = entry if isinstance(entry, dict) else {"name": entry}
        label = str(table.get("name"))
        better = "low" if label in _LOWER_IS_BETTER else "high"
        worse: Literal["low", "high"] = "low"
        if (table.get("better") or better) == "low":
            worse = "high"
        # The function's name: "recall" of "my_package.metrics:recall".
        name = str(table.get("column") or label.rpartition(":")[2].rpartition(".")[2])
        caption = "Mean over the benign agents with a value."
        found[name] = Metric(name, name, name, worse, is_percent=False, caption=caption)
    return found
