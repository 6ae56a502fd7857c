"""Metrics of grids: titles, descriptions and directions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fedcb2o.records import METRICS, Metric

COMPARED_METRICS = {"accuracy": "Accuracy", "attack_success_rate": "Attack success"}
"""Metrics in which defences are compared, and their short titles."""


@dataclass(frozen=True)
class GridMetric:
    """A metric of a matrix."""

    title: str
    caption: str
    # Direction in which values become worse.
    worse_direction: Literal["low", "high", "neither"] = "neither"
    # True for a fraction of 1 that the matrix shows in percent.
    is_percent: bool = True


_SUMMARIES = {"": "", "_worst": ", worst agent", "_worst_tenth": ", worst tenth"}
_LATE_ROUNDS = "over the last fifth of the rounds"
_RECORDED = {
    name: GridMetric(metric.label, metric.caption, metric.worse_direction, metric.is_percent)
    for name, metric in METRICS.items()
    if metric.caption
}
GRID_METRICS = {
    "accuracy": _RECORDED["accuracy"],
    "attack_success_rate": _RECORDED["attack_success_rate"],
    "lost": GridMetric(
        "Accuracy lost", "The accuracy of the better of the two baselines minus this one.", "high"
    ),
    "success": GridMetric(
        "Attack success, net", "The rate minus that of the better of the two baselines.", "high"
    ),
    **_RECORDED,
    "accuracy_worst": GridMetric(
        "Overall accuracy, worst agent", "Of the benign agent with the lowest.", "low"
    ),
    "accuracy_worst_tenth": GridMetric(
        "Overall accuracy, worst tenth",
        "Mean of the tenth of the benign agents with the lowest.",
        "low",
    ),
    "attack_success_rate_worst": GridMetric(
        "Attack success rate, worst agent",
        "The rate itself, of the benign agent with the highest.",
        "high",
    ),
    "attack_success_rate_worst_tenth": GridMetric(
        "Attack success rate, worst tenth",
        "The rate itself, mean of the tenth of the agents with the highest.",
        "high",
    ),
    "malicious_received": GridMetric(
        "Malicious models among those received",
        f"Their share of the models that benign agents receive, {_LATE_ROUNDS}.",
        "high",
    ),
    "malicious_most": GridMetric(
        "Most malicious models in a round",
        "The largest number of them that a benign agent received in any round.",
        is_percent=False,
    ),
    "f_exceeded": GridMetric(
        "More malicious models than assumed",
        "The share of cases, over all rounds, in which a benign agent received more of them than "
        "its rule assumes. Rules without an assumption have none.",
        "high",
    ),
    "other_cluster_weight": GridMetric(
        "Weight of other clusters' models",
        f"Their weight in the averages of benign agents, {_LATE_ROUNDS}.",
    ),
    "other_cluster_received": GridMetric(
        "Other clusters' models among those received",
        f"Their share of the models that benign agents receive, {_LATE_ROUNDS}.",
    ),
    "own_weight": GridMetric(
        "Weight of agents' own models",
        f"The weight of their own models in the averages of benign agents, {_LATE_ROUNDS}.",
    ),
    "seconds": GridMetric(
        "Seconds a round",
        "Of one process, without evaluation and checkpoints, on the machine and under the load of "
        "the run.",
        is_percent=False,
    ),
    "megabytes": GridMetric(
        "Megabytes a round",
        "The download of a benign agent: received models times 4 bytes for each parameter, in "
        "millions.",
        is_percent=False,
    ),
}


def chosen_infos(chosen: Mapping[str, Metric]) -> dict[str, GridMetric]:
    """Describe the columns of metrics that not every grid has: those of the key `metrics`."""
    infos = {}
    for name, metric in chosen.items():
        worse = metric.worse_direction
        for suffix, title in _SUMMARIES.items():
            caption = metric.caption or "Mean over the benign agents."
            infos[name + suffix] = GridMetric(metric.label + title, caption, worse, False)
        infos[f"{name}_missing"] = GridMetric(
            f"{metric.label}, agents without a value", "Their number.", is_percent=False
        )
    return infos


def metric_info(value: str, chosen: Mapping[str, GridMetric] | None = None) -> GridMetric:
    """Return the description of a metric, also of one cluster ("accuracy_cluster_2")."""
    if chosen and value in chosen:
        return chosen[value]
    name, _, cluster = value.partition("_cluster_")
    if not cluster.isdecimal():
        return GRID_METRICS[value]
    metric = GRID_METRICS[name]
    title = f"{metric.title}, cluster {cluster}"
    return GridMetric(title, f"The same of cluster {cluster}.", metric.worse_direction)
