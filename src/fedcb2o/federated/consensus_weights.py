"""Lines 5 and 6 of Algorithm 2 for several agents: the weights of the consensus point m_j, as the algorithm's rule has
them."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from fedcb2o.errors import ConfigError
from fedcb2o.federated.agent_group import Block
from fedcb2o.federated.aggregation import by_samples
from fedcb2o.federated.algorithm_spec import Algorithm
from fedcb2o.federated.contacts import Met
from fedcb2o.federated.decisions import Choices, Inbox
from fedcb2o.federated.plugin_outputs import columns_by, state_of, weights_of
from fedcb2o.federated.ragged import Places
from fedcb2o.federated.types import TOGETHER, Contacts, Local, Reduction, State, Weighed
from fedcb2o.federated.validation import (
    Alike,
    gradients_seen_by,
    losses_seen_by,
    outputs_seen_at,
    outputs_seen_by,
    some_samples_of,
    themselves,
)
from fedcb2o.rng import stream


def weigh_(
    choices: Choices,
    block: Block,
    some: Places,
    alike: Alike,
    met: Met,
    states: Mapping[int, State],
    record: Float[np.ndarray, " m"] | None,
) -> dict[int, State]:
    """Fill in what `alike` agents of a part make of what they received; what their rules keep. To the losses that go
    on `record` (eq:update_sampling_likelihood), in the order of the inbox, their criteria add, where the algorithm
    counts these."""
    algorithm, judged, those, where = block.terms.algorithm, alike.judged, alike.those, alike.where
    choices.factor[those] = algorithm.factor(block.terms.training.gamma)
    if judged.own is not None:
        choices.own_loss[those] = judged.own.mean.flatten().numpy()
    if TOGETHER.of(algorithm.weigh):
        decided = _weighed(algorithm.weigh(judged))
        _count_(record, where, decided, algorithm)
        mu, own = weights_of(algorithm.weigh, decided.outcome, tuple(judged.received.ids.shape))
        choices.weights[where], choices.own_weight[those] = mu.flatten().numpy(), own.numpy()
        return {}
    kept = {}
    for row, (k, there) in enumerate(zip(those.tolist(), where.reshape(len(those), -1), strict=True)):
        local = _local(block, int(some[k]), judged.n, functools.partial(met.__getitem__, k))
        view = judged.one(row, losses_seen_by(block, int(some[k])), local)
        if algorithm.remembers:
            kept[k], decided = state_of(algorithm.weigh, algorithm.weigh(states[k], view))
        else:
            decided = algorithm.weigh(view)
        decided = _weighed(decided)
        _count_(record, there, decided, algorithm)
        _fill_(choices, k, there, decided, algorithm, int(view.me.rows))
    return kept


def _weighed(decided: Any) -> Weighed:
    return decided if isinstance(decided, Weighed) else Weighed(decided)


def _count_(
    record: Float[np.ndarray, " m"] | None, where: Int[np.ndarray, " k"], decided: Weighed, algorithm: Algorithm
) -> None:
    """Add the values of the criterion, as far as they are above 0, to what goes on record of these models."""
    if algorithm.likelihood == "loss+criterion" and record is not None and decided.values is not None:
        record[where] += decided.values.clamp(min=0).flatten().numpy()


def _fill_(choices: Choices, k: int, where: Places, decided: Weighed, algorithm: Algorithm, own_row: int) -> None:
    """What the agent in place k decided, whose own model is in `own_row`."""
    if decided.f is not None:
        choices.f[k] = decided.f
    if isinstance(decided.outcome, Reduction):
        choices.reductions[int(choices.agents[k])] = dataclasses.replace(
            decided.outcome, reduce=columns_by(algorithm.weigh, decided.outcome.reduce)
        )
        choices.weights[where], choices.own_weight[k] = _shown(decided.outcome, choices.rows[where], own_row)
        return
    if decided.before is not None:
        if not algorithm.keeps_before:
            raise ConfigError("the rule gave weight to the model before the round, and did not declare to look at it")
        choices.before[k] = decided.before
    mu, own = weights_of(algorithm.weigh, decided.outcome, (len(where),), rest=decided.before or 0.0)
    choices.weights[where], choices.own_weight[k] = mu.numpy(), float(own)


def _shown(made: Reduction, rows: Int[np.ndarray, " m"], own: int) -> tuple[Float[np.ndarray, " m"], float]:
    """What a reduction puts on record: the weights of received models and of the own one, or NaN."""
    if made.weights is None:
        return np.full(len(rows), np.nan), np.nan
    weights = dict(zip(made.rows.tolist(), made.weights.tolist(), strict=True))
    return np.array([weights.get(row, 0.0) for row in rows.tolist()]), 0.0 if own in rows else weights.get(own, 0.0)


def _local(block: Block, k: int, n: int, contacts: Callable[[], Contacts]) -> Local:
    """What the agent in place k of the block knows beside what it receives."""
    terms = block.terms
    return Local(
        outputs_of=outputs_seen_by(block, k),
        some_samples=some_samples_of(block, k),
        outputs_at=outputs_seen_at(block, k),
        gradients_of=gradients_seen_by(block, k),
        share=terms.share,
        progress=n / terms.rounds,
        head=terms.head,
        layers=terms.layers,
        contacts_of=contacts,
        draw_of=functools.partial(stream, terms.seed, "rule", n, int(block.agents[k])),
    )


def weigh_by_samples_(choices: Choices, block: Block, some: Places, colluders: Places, inbox: Inbox, n: int) -> None:
    """Fill in the weights of malicious agents in some places: by numbers of samples (sec:experiments)."""
    for those, where, received in inbox.alike(colluders):
        me = themselves(block, some[those], n) if block.attackers.own_model else None
        mu, own = weights_of(by_samples, by_samples(received, me), tuple(received.ids.shape))
        choices.weights[where], choices.own_weight[those] = mu.flatten().numpy(), own.numpy()
