"""Algorithm 2, LocalAggregation, with an axis over agents, for a simulation.

The lines are those of `algorithm2`, in the order 1, 2, 3, 5, 6, 4; `mixing` has line 7. The result
of one agent does not depend on the others of its batch, except the rounding of training.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float

from fedcb2o.federated import trial, trigger_exchange
from fedcb2o.federated.agent_group import AgentGroup, Phase
from fedcb2o.federated.algorithm2 import next_likelihood, select_peers, track_own_likelihood
from fedcb2o.federated.contacts import AgentState, CandidatePeers, ContactTable
from fedcb2o.federated.decisions import Decisions, Inbox
from fedcb2o.federated.guards.checks import ADMITTED, counted_losses
from fedcb2o.federated.ragged import AgentIds, Entries, Members, Positions, Ragged
from fedcb2o.federated.run_spec import Algorithm, RunSpec
from fedcb2o.federated.selection import BATCHED_SELECTION
from fedcb2o.federated.trigger_exchange import ExchangeWeighing
from fedcb2o.federated.types import Reduction, RuleOutput, RuleState
from fedcb2o.federated.validation import RuleCall, admit, validate_batches
from fedcb2o.rng import agent_streams


@runtime_checkable
class BatchEngine(Protocol):
    """Computation of the agents in batches; transport of their models."""

    spec: RunSpec
    batches: list[AgentIds]

    def map_batches(
        self, phase: Phase, n: int, *shared: Any, arguments: Sequence[Sequence[Any]] = ()
    ) -> list[Any]:
        """Call the phase with (group, members, *arguments, n, *shared) for each batch."""

    def exchange(self, n: int, sampled: Sequence[Ragged], deadline: float | None) -> list[Inbox]:
        """Return what each batch receives from sampled peers, within `deadline` seconds."""

    def mix_(self, decisions: Sequence[Decisions]) -> Bool[np.ndarray, " N"]:
        """Compute theta <- W theta; return False for benign agents with an infinite one."""


def aggregate_batches_(
    engine: BatchEngine,
    n: int,
    states: Sequence[AgentState],
    active: Bool[np.ndarray, " N"],
    deadline: float | None = None,
    on_step: Callable[[str], None] = lambda name: None,
    sampled: Sequence[Ragged] | None = None,
    amend_: Callable[[list[Inbox], list[Decisions]], None] = lambda received, decisions: None,
    arrive: Callable[[list[Inbox]], list[Inbox]] = lambda received: received,
) -> tuple[list[AgentState], list[Decisions], Bool[np.ndarray, " N"]]:
    """Run LocalAggregation (alg:localAggregation) for all active agents of an engine.

    It is line 4 of alg:FedCB2O. `on_step` is called with "aggregate" after line 6 and with "mix"
    after line 7. A caller that decides for agents that are not active gives the `sampled` peers of
    all agents, and changes decisions by `amend_` before line 7. `arrive` returns the models that
    arrive in time. The last result is False for benign agents whose model is not finite.
    """
    if sampled is None:
        contacts = [state.contacts for state in states]
        sampled = engine.map_batches(SAMPLE, n, active, arguments=[contacts])  # line 1
    received = arrive(engine.exchange(n, sampled, deadline))  # line 2
    if engine.spec.algorithm.guards.trigger_exchange is not False:
        states = trigger_exchange.deliver(engine.batches, states, received)
    decided = engine.map_batches(  # lines 3 to 6
        DECIDE, n, active, arguments=[states, sampled, received]
    )
    states = [state for state, _ in decided]
    decisions = [decision for _, decision in decided]
    amend_(received, decisions)
    on_step("aggregate")

    finite = engine.mix_(decisions)  # line 7
    on_step("mix")
    return states, decisions, finite


def decide(
    group: AgentGroup,
    members: Members,
    state: AgentState,
    sampled: Ragged,
    inbox: Inbox,
    n: int,
    active: Bool[np.ndarray, " N"],
) -> tuple[AgentState, Decisions]:
    """Compute losses, G, weights and likelihoods of active members (lines 3, 5, 6, 4)."""
    spec, algorithm = group.spec, group.spec.algorithm
    agents = AgentIds(group.agents[members])
    rule_states = list(state.rule_states)

    positions = Positions(np.flatnonzero(active[agents]))
    left = []
    if algorithm.guards.exit_test is not False:
        for k in positions.tolist():
            rule_states[k] = trial.advance(group, int(members[k]), n, rule_states[k])
        left = [k for k in positions.tolist() if trial.has_left(rule_states[k])]
        positions = Positions(np.setdiff1d(positions, left))
    admission = admit(group, members, positions, inbox, n)
    is_admitted = admission == ADMITTED
    admitted = Entries(np.flatnonzero(is_admitted))
    decisions = Decisions.empty(agents, sampled, inbox, admission)
    for k in left:
        own_row = int(group.layout.own[members[k]])
        rule_states[k] = trial.stay_alone_(decisions, k, own_row, rule_states[k])
    L = counted_losses(admission, spec.num_classes)
    for call in validate_batches(  # line 3: L^i
        group, members, positions, state.contacts, inbox.filter(is_admitted), n
    ):
        entries = Entries(admitted[call.entries])
        mu = _weigh(algorithm, call, agents, rule_states)  # lines 5 and 6
        decisions.store_(call.positions, entries, call.inputs, mu, spec)
        if call.inputs.losses is not None:
            L[entries] = call.inputs.losses.mean.flatten().numpy()

    # Line 4 is last, because criteria read the contacts of before the round.
    contacts = update_likelihoods(  # line 4: P^i
        algorithm,
        state.contacts.take(positions),
        sampled.take(positions),
        inbox.ids.take(positions),
        L[inbox.ids.flat_index(positions)],
    )
    if algorithm.own_likelihood == "every_round":
        tracked = []
        for k, P in zip(positions.tolist(), contacts, strict=True):
            P, rule_states[k] = track_own_likelihood(
                algorithm, int(agents[k]), P, rule_states[k], float(decisions.own_loss[k])
            )
            tracked.append(P)
        contacts = ContactTable.from_contacts(tracked)
    return state.updated(positions, contacts, rule_states), decisions


def _weigh(
    algorithm: Algorithm, call: RuleCall, agents: AgentIds, rule_states: list[RuleState]
) -> RuleOutput:
    """Return the weights of a call's agents, and update their states."""
    weigh = algorithm.weigh
    if not (algorithm.is_batched and isinstance(weigh, ExchangeWeighing)):
        # A rule with memory is called for one agent at a time.
        first = call.positions[0]
        output, rule_states[first] = weigh(call.inputs, rule_states[first])
        return output

    output, _ = weigh.weigh(call.inputs, {})
    assert not isinstance(output.outcome, Reduction)  # of one agent
    weights = [*output.outcome]
    # Few agents have triggers to test: the others need no view.
    for a, k in enumerate(call.positions.tolist()):
        if weigh.has_triggers(call.inputs.n, int(agents[k]), rule_states[k]):
            weights[a], rule_states[k] = weigh.lower(call.view(a), weights[a], rule_states[k])
    return dataclasses.replace(output, outcome=torch.stack(weights))


def sample_peers(
    group: AgentGroup,
    members: Members,
    contacts: ContactTable,
    n: int,
    active: Bool[np.ndarray, " N"],
) -> Ragged:
    """Sample the peers that active members ask (alg:localAggregation, line 1); others ask none."""
    spec = group.spec
    positions = Positions(np.flatnonzero(active[group.agents[members]]))
    agents = AgentIds(group.agents[members[positions]])
    contacts = contacts.take(positions)
    # Without a graph all agents share one list, from which each is excluded.
    lists = [np.arange(spec.num_agents)]
    list_index = np.zeros(len(agents), np.int64)
    if spec.neighbours is not None:
        lists = [spec.neighbours[j].sort().values.numpy() for j in agents.tolist()]
        list_index = np.arange(len(agents))
    candidates = CandidatePeers.from_lists(lists, list_index, excluded=agents)
    if spec.algorithm.own_candidate:
        candidates = candidates.including_self(agents)

    select = spec.algorithm.select
    generators = agent_streams(spec.seed, "select", n, agents=agents.tolist())
    batched = BATCHED_SELECTION.get(select)
    if batched is not None:
        keywords = {**getattr(select, "keywords", {}), **spec.algorithm.guards.selection_keywords}
        sampled = batched(contacts, candidates, spec.agents.budget, generators, **keywords)
    else:
        # A user's selection is called for one agent at a time.
        chosen = []
        for k, (P, generator) in enumerate(zip(contacts, generators, strict=True)):
            chosen.append(select_peers(spec, int(agents[k]), P, candidates.ids(k), n, generator))
        sampled = Ragged.from_arrays(chosen)
    return Ragged.scatter(len(members), (positions, sampled))


SAMPLE = Phase(sample_peers, is_cheap=True)
DECIDE = Phase(decide, calls_rules=True)


def update_likelihoods(
    algorithm: Algorithm,
    contacts: ContactTable,
    sampled: Ragged,
    received: Ragged,
    L: Float[np.ndarray, " m"],
) -> ContactTable:
    """Average the likelihoods of the peers that answered (eq:update_sampling_likelihood).

    The peers in `sampled` become contacts; the likelihood of a peer that never answered is NaN. L
    has the losses of the received models, in the order of `received`.
    """
    span = 1 + max(
        (int(ids.values.max()) for ids in (contacts.ids, sampled) if len(ids.values)), default=0
    )

    # One number per pair of agent and peer, ascending.
    known = contacts.ids.list_index * span + contacts.ids.values
    new = sampled.list_index * span + sampled.values
    # Only peers that were never asked become new contacts.
    if len(known):
        new = new[known.take(known.searchsorted(new), mode="clip") != new]

    ids, likelihood = contacts.ids, contacts.likelihood.copy()
    if len(new):
        known = np.concatenate([known, new])
        order = known.argsort(kind="stable")
        known = known[order]
        values = np.concatenate([ids.values, new % span]).astype(np.int32)[order]
        ids = Ragged(values, ids.sizes + np.bincount(new // span, minlength=len(ids)))
        likelihood = np.concatenate([likelihood, np.full(len(new), np.nan)])[order]

    if algorithm.needs_losses:
        answered = known.searchsorted(received.list_index * span + received.values)
        likelihood[answered] = next_likelihood(algorithm, likelihood[answered], L)
    return ContactTable(ids, likelihood)
