"""The records of a round, metrics and pairs, and their format."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool

from fedcb2o.experiments.config.prepared_seed import PreparedSeed
from fedcb2o.federated.decisions import Decisions
from fedcb2o.federated.evaluation import metrics
from fedcb2o.federated.guards.checks import TOO_FAR, TOO_NEAR, TOO_SENSITIVE
from fedcb2o.federated.ragged import Ragged
from fedcb2o.parallel._resources import format_bytes
from fedcb2o.records import (
    CHECKPOINT_FILE,
    REPRODUCIBLE_LOGS,
    has_pyarrow,
    log_checksums,
    sampled_agents,
)
from fedcb2o.simulation.rounds import Round

_LOG = logging.getLogger(__name__)

_CONTACT_BYTES = 40
"""Of a contact between rounds and as it is updated."""


def choose_columns(prepared: PreparedSeed, folder: Path) -> Sequence[str]:
    """Return the logs of a seed in Parquet, as in its checkpoint, else as configured.

    Warnings say what is recorded where the number of agents decides, and the memory of contacts.
    """
    experiment = prepared.experiment
    count = experiment.agents.num_agents
    is_large = sampled_agents(count) is not None
    is_parquet = experiment.records == "parquet"
    if (folder / CHECKPOINT_FILE).exists():
        is_parquet = "pairs.parquet" in log_checksums(folder)
    elif experiment.records is None:
        is_parquet = is_large and has_pyarrow()

    if is_large and is_parquet:
        # Three numbers of 4 bytes per contact, and a dozen columns of numbers.
        size = count * (12 * experiment.agents.budget + 100)
        _LOG.warning(
            "%s: records of all %d agents in Parquet, at most about %s a round on disk, and one "
            "round in memory.",
            *(folder, count, format_bytes(size)),
        )
    elif is_large:
        _LOG.warning(
            "%s: pairs.jsonl has 10000 of %d agents; `pip install 'fedcb2o[parquet]'` and "
            '`records` = "parquet" record all.',
            *(folder, count),
        )
    if is_large:
        neighbours = prepared.spec.neighbours
        most = count - 1 if neighbours is None else max(map(len, neighbours))
        peers = min(most, experiment.agents.budget * experiment.rounds)
        _LOG.warning(
            "%s: contacts of up to %d peers take at most %s of memory in the last round%s.",
            *(folder, peers, format_bytes(count * peers * _CONTACT_BYTES)),
            "" if neighbours is not None else "; the graph `random_view` bounds them",
        )
    return REPRODUCIBLE_LOGS if is_parquet else ()


def metrics_record(
    goal: metrics.AttackGoal, malicious: Bool[np.ndarray, " N"], result: Round
) -> dict[str, Any]:
    """Return the record of the metrics of a round: lists over agents by name.

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


def pairs_record(result: Round, *, is_parquet: bool = False) -> dict[str, Any]:
    """Return what agents asked and received in a round, with weights.

    `before` is the weight of the model before the round, and `f` the number of attackers that a
    rule assumed. These and the senders that guards refused are left out where there are none. A
    line of many agents has a sample of them. Parquet has arrays, and all agents.
    """
    decisions = result.decisions
    record: dict[str, Any] = {"round": result.n + 1}
    recorded = None if is_parquet else sampled_agents(len(decisions))
    if recorded is not None:
        decisions = decisions.take(recorded)
        record["agents"] = decisions.agents
    weights, own = decisions.weights, decisions.own_weight
    if not is_parquet:
        weights, own = _rounded(weights), _rounded(own)
    record["asked"] = decisions.asked
    record["ids"] = decisions.received
    record["weights"] = Ragged(weights, decisions.received.sizes)
    record["own"] = own
    # Most rules have neither, and the lines of a long run are many.
    if not np.isnan(decisions.previous_weight).all():
        record["before"] = np.nan_to_num(decisions.previous_weight)
    if not np.isnan(decisions.f).all():
        record["f"] = [None if math.isnan(f) else int(f) for f in decisions.f.tolist()]
    refusals = {"too_far": TOO_FAR, "too_near": TOO_NEAR, "too_sensitive": TOO_SENSITIVE}
    for key, outcome in refusals.items():
        if outcome in decisions.admission:
            record[key] = decisions.received.filter(decisions.admission == outcome)
    if is_parquet:
        return record
    return {k: v.tolist() if hasattr(v, "tolist") else v for k, v in record.items()}


def _rounded(values: np.ndarray) -> np.ndarray:
    """Round to six significant digits."""
    return np.array([float(f"{value:.6g}") for value in values.tolist()])
