"""Lines 5 and 6 of Algorithm 2 for several agents: the weights of the consensus point m_j, as the algorithm's rule has
them."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from fedcb2o.errors import ConfigError
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.aggregation import sample_weights
from fedcb2o.federated.algorithm_spec import Algorithm
from fedcb2o.federated.contacts import ContactTable
from fedcb2o.federated.decisions import Decisions, Inbox
from fedcb2o.federated.plugin_outputs import validated_reduction, validated_state, validated_weights
from fedcb2o.federated.ragged import Indices
from fedcb2o.federated.types import (
    BATCHED,
    AgentContext,
    Contacts,
    Reduction,
    RuleOutput,
    RuleState,
)
from fedcb2o.federated.validation import (
    AgentBatch,
    gradients_seen_by,
    losses_seen_by,
    outputs_seen_at,
    outputs_seen_by,
    own_models,
    some_samples_of,
)
from fedcb2o.rng import stream


def assign_weights_(
    decisions: Decisions,
    group: AgentGroup,
    members: Indices,
    batch: AgentBatch,
    contacts: ContactTable,
    states: Mapping[int, RuleState],
    record: Float[np.ndarray, " m"] | None,
) -> dict[int, RuleState]:
    """Fill in what `alike` agents of a part make of what they received; what their rules keep. To the losses that go
    on `record` (eq:update_sampling_likelihood), in the order of the inbox, their criteria add, where the algorithm
    counts these."""
    algorithm = group.spec.algorithm
    judged = batch.inputs
    those = batch.members
    where = batch.inbox_index
    decisions.factor[those] = algorithm.factor(group.spec.training.gamma)
    if judged.own_losses is not None:
        decisions.own_loss[those] = judged.own_losses.mean.flatten().numpy()
    if BATCHED.get(algorithm.rule):
        decided = _as_rule_output(algorithm.rule(judged))
        _add_criterion_(record, where, decided, algorithm)
        mu, own = validated_weights(
            algorithm.rule, decided.outcome, tuple(judged.received.ids.shape)
        )
        decisions.weights[where], decisions.own_weight[those] = mu.flatten().numpy(), own.numpy()
        return {}
    kept = {}
    for row, (k, there) in enumerate(
        zip(those.tolist(), where.reshape(len(those), -1), strict=True)
    ):
        local = _agent_context(
            group, int(members[k]), judged.n, functools.partial(contacts.__getitem__, k)
        )
        view = judged.for_agent(row, losses_seen_by(group, int(members[k])), local)
        if algorithm.is_stateful:
            kept[k], decided = validated_state(algorithm.rule, algorithm.rule(states[k], view))
        else:
            decided = algorithm.rule(view)
        decided = _as_rule_output(decided)
        _add_criterion_(record, there, decided, algorithm)
        _store_output_(decisions, k, there, decided, algorithm, int(view.own_entry.rows))
    return kept


def _as_rule_output(output: Any) -> RuleOutput:
    return output if isinstance(output, RuleOutput) else RuleOutput(output)


def _add_criterion_(
    record: Float[np.ndarray, " m"] | None,
    inbox_index: Int[np.ndarray, " k"],
    output: RuleOutput,
    algorithm: Algorithm,
) -> None:
    """Add the values of the criterion, as far as they are above 0, to what goes on record of these models."""
    if (
        algorithm.likelihood == "loss+criterion"
        and record is not None
        and output.criterion_values is not None
    ):
        record[inbox_index] += output.criterion_values.clamp(min=0).flatten().numpy()


def _store_output_(
    decisions: Decisions,
    k: int,
    inbox_index: Indices,
    output: RuleOutput,
    algorithm: Algorithm,
    own_row: int,
) -> None:
    """What the agent in place k decided, whose own model is in `own_row`."""
    if output.f is not None:
        decisions.f[k] = output.f
    if isinstance(output.outcome, Reduction):
        decisions.reductions[int(decisions.agents[k])] = dataclasses.replace(
            output.outcome, reduce=validated_reduction(algorithm.rule, output.outcome.reduce)
        )
        decisions.weights[inbox_index], decisions.own_weight[k] = _recorded_weights(
            output.outcome, decisions.rows[inbox_index], own_row
        )
        return
    if output.previous_weight is not None:
        if not algorithm.keeps_previous:
            raise ConfigError(
                "the rule gave weight to the model before the round, and did not declare to look at it"
            )
        decisions.previous_weight[k] = output.previous_weight
    mu, own = validated_weights(
        algorithm.rule, output.outcome, (len(inbox_index),), rest=output.previous_weight or 0.0
    )
    decisions.weights[inbox_index], decisions.own_weight[k] = mu.numpy(), float(own)


def _recorded_weights(
    reduction: Reduction, rows: Int[np.ndarray, " m"], own: int
) -> tuple[Float[np.ndarray, " m"], float]:
    """What a reduction puts on record: the weights of received models and of the own one, or NaN."""
    if reduction.weights is None:
        return np.full(len(rows), np.nan), np.nan
    weights = dict(zip(reduction.rows.tolist(), reduction.weights.tolist(), strict=True))
    return np.array(
        [weights.get(row, 0.0) for row in rows.tolist()]
    ), 0.0 if own in rows else weights.get(own, 0.0)


def _agent_context(
    group: AgentGroup, k: int, n: int, contacts: Callable[[], Contacts]
) -> AgentContext:
    """What the agent in place k of the block knows beside what it receives."""
    terms = group.spec
    return AgentContext(
        outputs=outputs_seen_by(group, k),
        samples=some_samples_of(group, k),
        outputs_per_model=outputs_seen_at(group, k),
        input_gradients=gradients_seen_by(group, k),
        malicious_share=terms.malicious_share,
        progress=n / terms.rounds,
        last_layer=terms.last_layer,
        layer_shapes=terms.layer_shapes,
        contacts_of=contacts,
        draw_of=functools.partial(stream, terms.seed, "rule", n, int(group.agents[k])),
    )


def assign_sample_weights_(
    decisions: Decisions,
    group: AgentGroup,
    members: Indices,
    colluders: Indices,
    inbox: Inbox,
    n: int,
) -> None:
    """Fill in the weights of malicious agents in some places: by numbers of samples (sec:experiments)."""
    for those, where, received in inbox.group_by_size(colluders):
        me = own_models(group, members[those], n) if group.adversary.averages_own_model else None
        mu, own = validated_weights(
            sample_weights, sample_weights(received, me), tuple(received.ids.shape)
        )
        decisions.weights[where], decisions.own_weight[those] = mu.flatten().numpy(), own.numpy()
