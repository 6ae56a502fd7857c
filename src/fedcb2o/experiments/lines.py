"""A round as lines of records: what agents lost and score, and whom they asked, received and trusted."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool

from fedcb2o import plugins
from fedcb2o.errors import ConfigError
from fedcb2o.federated import metrics
from fedcb2o.federated.choices import Choices
from fedcb2o.runtime.engine import Round


def metrics_line(
    aim: metrics.Aim,
    malicious: Bool[np.ndarray, " N"],
    done: Round,
    own: Mapping[str, Callable[[torch.Tensor], Any]] | None = None,
) -> dict[str, Any]:
    """The line of a round in metrics.jsonl: what each agent lost, took in from malicious peers, and scores, by metrics
    of the experiment's `own` too.

    `malicious_weight` is in m_j, before the mixing factor: the share in the new model is that times the factor.
    """
    choices = done.choices
    line: dict[str, Any] = {
        "round": done.n + 1,
        "train_loss": done.train_loss.tolist(),
        "validation_loss": [loss if math.isfinite(loss) else None for loss in choices.own_loss.tolist()],
        "malicious_weight": _malicious_weights(choices, malicious),
        "answered": choices.received.sizes.tolist(),
    }
    if done.confusion is None:
        return line
    triggered = done.triggered or {}
    scores: dict[str, Callable[[int, torch.Tensor], float | None]] = {
        "accuracy": lambda j, c: metrics.accuracy(c),
        "source_accuracy": lambda j, c: aim.accuracy(c),
        "attack_success_rate": lambda j, c: aim.success(c, triggered.get(j)),
    }
    for name, metric in (own or {}).items():
        scores[name] = functools.partial(_scored, metric)
    for name, score in scores.items():
        line[name] = [score(j, done.confusion[j]) if j in done.confusion else None for j in range(len(malicious))]
    return line


def _scored(metric: Callable[[torch.Tensor], Any], j: int, confusion: torch.Tensor) -> float | None:
    """What a metric of the experiment's own makes of a confusion matrix; None where that is no finite number.

    Raises ConfigError where it is no number at all.
    """
    found = metric(confusion.clone())
    try:
        number = float(found)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"the {plugins.called('metric', metric)} returned no number: {found!r:.60}") from error
    return number if math.isfinite(number) else None


def _malicious_weights(choices: Choices, malicious: Bool[np.ndarray, " N"]) -> list[float | None]:
    """The weight that each benign agent gave to malicious peers, where weights say it."""
    received = choices.received
    sums = np.bincount(received.owners, choices.weights * malicious[received.values], len(choices))
    unknown = malicious | np.isnan(sums)
    return [None if hidden else found for found, hidden in zip(sums.tolist(), unknown.tolist(), strict=True)]


def pairs_line(done: Round) -> dict[str, Any]:
    """The line of a round in pairs.jsonl: whom each agent asked, whose models it received, and with what weights.

    `before` is the weight of the model that an agent began the round with, and `f` the attackers that its rule assumed,
    where any has such.
    """
    choices = done.choices
    weights, own = ([float(f"{w:.6g}") for w in each.tolist()] for each in (choices.weights, choices.own_weight))
    line: dict[str, Any] = {
        "round": done.n + 1,
        "asked": choices.asked.tolist(),
        "ids": choices.received.tolist(),
        "weights": choices.received.having(np.array(weights)).tolist(),
        "own": own,
    }
    if not np.isnan(choices.before).all():
        line["before"] = np.nan_to_num(choices.before).tolist()
    if not np.isnan(choices.f).all():
        line["f"] = [None if math.isnan(f) else int(f) for f in choices.f.tolist()]
    return line
