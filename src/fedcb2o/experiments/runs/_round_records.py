"""The records of a round: metrics.jsonl and pairs.jsonl."""

import math
from typing import Any

import numpy as np
from jaxtyping import Bool

from fedcb2o.federated.decisions import Decisions
from fedcb2o.federated.evaluation import metrics
from fedcb2o.federated.guards.checks import TOO_FAR, TOO_NEAR, TOO_SENSITIVE
from fedcb2o.federated.ragged import Ragged
from fedcb2o.simulation.rounds import Round

MAX_PAIR_AGENTS = 10_000
"""Agents in a line of pairs.jsonl, which for M = 20 is then shorter than 10 MiB."""


def metrics_record(
    goal: metrics.AttackGoal, malicious: Bool[np.ndarray, " N"], result: Round
) -> dict[str, Any]:
    """Return the record of a round in metrics.jsonl: lists over agents by name.

    `malicious_weight` is the weight in m_j, before the mixing factor.
    """
    decisions = result.decisions
    own_loss = decisions.own_loss.tolist()
    record: dict[str, Any] = {
        "round": result.n + 1,
        "train_loss": result.train_loss.tolist(),
        "validation_loss": [loss if math.isfinite(loss) else None for loss in own_loss],
        "malicious_weight": _malicious_weights(decisions, malicious),
        "answered": decisions.received.sizes.tolist(),
    }
    if result.test_results is None:
        return record

    for name, values in metrics.compute_metrics(result.test_results, goal).items():
        column = np.full(len(malicious), np.nan)
        column[result.test_results.agents] = values
        record[name] = [None if math.isnan(value) else value for value in column.tolist()]
    return record


def _malicious_weights(
    decisions: Decisions, malicious: Bool[np.ndarray, " N"]
) -> list[float | None]:
    """Return the weight of malicious peers for each benign agent, where weights are known."""
    received = decisions.received
    weights = decisions.weights * malicious[received.values]
    sums = np.bincount(received.list_index, weights, len(decisions))
    # A reduction over coordinates has no weights.
    is_unknown = malicious | np.isnan(sums)
    return [
        None if unknown else weight
        for weight, unknown in zip(sums.tolist(), is_unknown.tolist(), strict=True)
    ]


def pairs_record(result: Round) -> dict[str, Any]:
    """Return what agents asked and received in a round, with weights, for pairs.jsonl.

    `before` is the weight of the model before the round, and `f` the number of attackers that a
    rule assumed. These and the senders that guards refused are left out where there are none. The
    record of more than `MAX_PAIR_AGENTS` agents has as many, at equal distances.
    """
    decisions = result.decisions
    record: dict[str, Any] = {"round": result.n + 1}
    if len(decisions) > MAX_PAIR_AGENTS:
        recorded = np.arange(MAX_PAIR_AGENTS) * len(decisions) // MAX_PAIR_AGENTS
        decisions = decisions.take(recorded)
        record["agents"] = decisions.agents.tolist()
    weights = np.array(_rounded(decisions.weights))
    record |= {
        "asked": decisions.asked.tolist(),
        "ids": decisions.received.tolist(),
        "weights": Ragged(weights, decisions.received.sizes).tolist(),
        "own": _rounded(decisions.own_weight),
    }
    # Most rules have neither, and the lines of a long run are many.
    if not np.isnan(decisions.previous_weight).all():
        record["before"] = np.nan_to_num(decisions.previous_weight).tolist()
    if not np.isnan(decisions.f).all():
        record["f"] = [None if math.isnan(f) else int(f) for f in decisions.f.tolist()]
    refusals = {"too_far": TOO_FAR, "too_near": TOO_NEAR, "too_sensitive": TOO_SENSITIVE}
    for key, outcome in refusals.items():
        if outcome in decisions.admission:
            record[key] = decisions.received.filter(decisions.admission == outcome).tolist()
    return record


def _rounded(values: np.ndarray) -> list[float]:
    """Round to six significant digits."""
    return [float(f"{value:.6g}") for value in values.tolist()]
