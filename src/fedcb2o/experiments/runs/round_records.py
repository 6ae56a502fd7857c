"""A round as lines of records: what agents lost and score, and whom they asked, received and trusted."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool

from fedcb2o import plugins
from fedcb2o.errors import ConfigError
from fedcb2o.federated import metrics
from fedcb2o.federated.decisions import Decisions
from fedcb2o.simulation.rounds import Round


def metrics_record(
    goal: metrics.AttackGoal,
    malicious: Bool[np.ndarray, " N"],
    result: Round,
    user_metrics: Mapping[str, Callable[[torch.Tensor], Any]] | None = None,
) -> dict[str, Any]:
    """The line of a round in metrics.jsonl: what each agent lost, took in from malicious peers, and scores, by metrics
    of the experiment's `own` too.

    `malicious_weight` is in m_j, before the mixing factor: the share in the new model is that times the factor.
    """
    choices = result.decisions
    line: dict[str, Any] = {
        "round": result.n + 1,
        "train_loss": result.train_loss.tolist(),
        "validation_loss": [
            loss if math.isfinite(loss) else None for loss in choices.own_loss.tolist()
        ],
        "malicious_weight": _malicious_weights(choices, malicious),
        "answered": choices.received.sizes.tolist(),
    }
    if result.test_results is None:
        return line
    found = {j: metrics.compute_metrics(tested, goal) for j, tested in result.test_results.items()}
    for j, tested in result.test_results.items():
        for name, metric in (user_metrics or {}).items():
            confusion = tested.own.confusion
            found[j][name] = None if confusion is None else _evaluate_metric(metric, confusion)
    for name in dict.fromkeys(name for each in found.values() for name in each):
        line[name] = [found.get(j, {}).get(name) for j in range(len(malicious))]
    return line


def check_user_metrics(
    user_metrics: Mapping[str, Callable[[torch.Tensor], Any]], num_classes: int
) -> None:
    """Raises ConfigError for metrics of the experiment's own that make no number of a confusion matrix, before rounds
    are done that would end with it, or where there are no classes to confuse."""
    if user_metrics and num_classes < 2:
        raise ConfigError(
            "`metrics` look at which classes models predict, and the data have none: leave them out"
        )
    for metric in user_metrics.values():
        _evaluate_metric(metric, torch.ones(num_classes, num_classes, dtype=torch.int64))


def _evaluate_metric(
    metric: Callable[[torch.Tensor], Any], confusion: torch.Tensor
) -> float | None:
    """What a metric of the experiment's own makes of a confusion matrix; None where that is no finite number.

    Raises ConfigError where it is no number at all.
    """
    found = metric(confusion.clone())
    try:
        number = float(found)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the {plugins.display_name('metric', metric)} returned no number: {found!r:.60}"
        ) from error
    return number if math.isfinite(number) else None


def _malicious_weights(choices: Decisions, malicious: Bool[np.ndarray, " N"]) -> list[float | None]:
    """The weight that each benign agent gave to malicious peers, where weights say it."""
    received = choices.received
    sums = np.bincount(received.row_ids, choices.weights * malicious[received.values], len(choices))
    unknown = malicious | np.isnan(sums)
    return [
        None if hidden else found
        for found, hidden in zip(sums.tolist(), unknown.tolist(), strict=True)
    ]


def pairs_record(result: Round) -> dict[str, Any]:
    """The line of a round in pairs.jsonl: whom each agent asked, whose models it received, and with what weights.

    `before` is the weight of the model that an agent began the round with, and `f` the attackers that its rule assumed,
    where any has such.
    """
    choices = result.decisions
    weights, own = (
        [float(f"{w:.6g}") for w in each.tolist()] for each in (choices.weights, choices.own_weight)
    )
    line: dict[str, Any] = {
        "round": result.n + 1,
        "asked": choices.asked.tolist(),
        "ids": choices.received.tolist(),
        "weights": choices.received.with_values(np.array(weights)).tolist(),
        "own": own,
    }
    if not np.isnan(choices.previous_weight).all():
        line["before"] = np.nan_to_num(choices.previous_weight).tolist()
    if not np.isnan(choices.f).all():
        line["f"] = [None if math.isnan(f) else int(f) for f in choices.f.tolist()]
    return line
