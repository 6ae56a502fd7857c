"""Algorithm 2, LocalAggregation, with an axis over agents, for a simulation.

The lines are those of `algorithm2`. Every function takes an agent group and the members of a batch.
The result of one agent does not depend on the others of its batch, except the rounding of training.
Colluding attackers (sec:experiments) ask each other first and average by numbers of samples.

>>> from fedcb2o.federated import algorithms
>>> asked = Ragged.from_arrays([np.array([3, 7])])
>>> losses = np.array([0.0, np.inf])
>>> table = update_likelihoods(
...     algorithms.fedcb2o(zeta=0.5), ContactTable.empty(1), asked, asked, losses
... )
>>> table.likelihood.tolist()
[0.5, 0.0]
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int

from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.aggregation.sample_average import sample_weights
from fedcb2o.federated.algorithm2 import (
    next_likelihood,
    select_peers,
    track_own_likelihood,
)
from fedcb2o.federated.contacts import AgentState, CandidatePeers, ContactTable
from fedcb2o.federated.decisions import Decisions, Inbox
from fedcb2o.federated.guards.checks import ADMITTED, counted_losses
from fedcb2o.federated.ragged import Indices, Ragged
from fedcb2o.federated.run_spec import Algorithm, RunSpec
from fedcb2o.federated.selection import BATCHED_SELECTION, select_colluding_peers
from fedcb2o.federated.validation import admit, own_models, validate_batches
from fedcb2o.rng import agent_streams


@runtime_checkable
class Engine(Protocol):
    """Computation of the agents in batches; transport of their models."""

    def map_batches(
        self, function: Callable[..., Any], *shared: Any, arguments: Sequence[Sequence[Any]] = ()
    ) -> list[Any]:
        """Call `function(group, members, *arguments, *shared)` for each batch of agents.

        An engine may divide the work by function: few large parts for the selection of peers, and
        no writes to models that a rule or criterion reads. The first shared value is the round.
        Each list of arguments has one value per batch, and so has the result.
        """
        ...

    def exchange(self, n: int, sampled: Sequence[Ragged], deadline: float | None) -> list[Inbox]:
        """Return the models that the agents of each batch receive from the sampled peers.

        `deadline` is in seconds; None without a limit.
        """
        ...

    def mix_(self, decisions: Sequence[Decisions]) -> Bool[np.ndarray, " N"]:
        """Compute theta <- W theta; return for each agent whether its model is finite."""
        ...


def aggregate_batches_(
    engine: Engine,
    n: int,
    states: Sequence[AgentState],
    active: Bool[np.ndarray, " N"],
    deadline: float | None = None,
    on_step: Callable[[str], None] = lambda name: None,
) -> tuple[list[AgentState], list[Decisions], Bool[np.ndarray, " N"]]:
    """Run LocalAggregation (alg:localAggregation) for all active agents of an engine.

    It is line 4 of alg:FedCB2O. `deadline` is in seconds; None without a limit. `on_step` is called
    with "aggregate" after line 6 and with "mix" after line 7. Returns new states and decisions of
    each batch, and for each agent whether its model is finite.
    """
    contacts = [state.contacts for state in states]
    sampled = engine.map_batches(sample_peers, n, active, arguments=[contacts])  # line 1
    received = engine.exchange(n, sampled, deadline)  # line 2
    decided = engine.map_batches(  # lines 3 to 6
        decide, n, active, arguments=[states, sampled, received]
    )
    on_step("aggregate")

    states = [state for state, _ in decided]
    decisions = [decision for _, decision in decided]
    finite = engine.mix_(decisions)  # line 7
    on_step("mix")
    return states, decisions, finite


def decide(
    group: AgentGroup,
    members: Indices,
    state: AgentState,
    sampled: Ragged,
    inbox: Inbox,
    n: int,
    active: Bool[np.ndarray, " N"],
) -> tuple[AgentState, Decisions]:
    """Compute losses, G, weights and likelihoods of active members (lines 3, 5, 6, 4).

    Colluders average by numbers of samples instead (sec:experiments). `members` are indices into
    the group.
    """
    spec, algorithm, adversary = group.spec, group.spec.algorithm, group.adversary
    agents = group.agents[members]
    is_colluding = adversary.colluding[agents]
    # No agent has met an attacker under its new identity.
    known = state.contacts.forget(adversary.new_identities(n))
    rule_states = list(state.rule_states)

    # Positions are indices into the batch. Colluders have no guards, and do not validate.
    positions = np.flatnonzero(active[agents] & ~is_colluding)
    admission = admit(group, members, positions, inbox, n)
    is_admitted = admission == ADMITTED
    admitted_index = np.flatnonzero(is_admitted)
    decisions = Decisions.empty(agents, sampled, inbox, admission)
    L = counted_losses(admission, spec.num_classes)
    for call in validate_batches(  # line 3: L^i
        group, members, positions, known, inbox.filter(is_admitted), n
    ):
        index = admitted_index[call.index]
        # A rule with memory is called for one agent at a time.
        first = call.positions[0]
        mu, rule_states[first] = algorithm.weigh(call.inputs, rule_states[first])  # lines 5 and 6
        decisions.store_(call.positions, index, call.inputs, mu, spec)
        if call.inputs.losses is not None:
            L[index] = call.inputs.losses.mean.flatten().numpy()

    # Line 4 is last, for all members at once.
    contacts = update_likelihoods(  # line 4: P^i
        algorithm,
        known.take(positions),
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

    # Colluders average by numbers of samples.
    colluders = np.flatnonzero(active[agents] & is_colluding)
    for equal, index, received in inbox.group_by_size(colluders):
        num_received = received.ids.shape[-1]
        own = None
        if adversary.averages_own_model:
            own = own_models(group, members[equal], n)
        mu_colluders = sample_weights(received, own)
        decisions.weights[index] = mu_colluders[..., :num_received].flatten().numpy()
        decisions.own_weight[equal] = mu_colluders[..., num_received:].sum(-1).numpy()
    return state.updated(positions, contacts, rule_states), decisions


def sample_peers(
    group: AgentGroup,
    members: Indices,
    contacts: ContactTable,
    n: int,
    active: Bool[np.ndarray, " N"],
) -> Ragged:
    """Sample the peers that active members ask (alg:localAggregation, line 1).

    A member that is not active asks none. ConfigError is raised if a user's selection returned ids
    that are not among its candidates.
    """
    spec, adversary = group.spec, group.adversary
    agents = group.agents[members]
    is_colluding = adversary.colluding[agents]

    benign = np.flatnonzero(active[agents] & ~is_colluding)
    known = contacts.forget(adversary.new_identities(n)).take(benign)
    sampled = _select_peers(spec, agents[benign], known, n)

    colluders = np.flatnonzero(active[agents] & is_colluding)
    fellows, others = adversary.colluding_peers(agents[colluders], spec.neighbours)
    generators = agent_streams(spec.seed, "select", n, agents=agents[colluders].tolist())
    colluding = select_colluding_peers(fellows, others, spec.agents.budget, generators)
    return Ragged.scatter(len(members), (benign, sampled), (colluders, colluding))


def _select_peers(
    spec: RunSpec, agents: Int[np.ndarray, " a"], contacts: ContactTable, n: int
) -> Ragged:
    """Call the algorithm's selection for agents that do not collude."""
    # Without a graph all agents share one list, from which each is excluded.
    lists, list_index = [np.arange(spec.num_agents)], np.zeros_like(agents)
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
        return batched(contacts, candidates, spec.agents.budget, generators, **keywords)

    # A user's selection is called for one agent at a time.
    ids = []
    for k, (P, generator) in enumerate(zip(contacts, generators, strict=True)):
        ids.append(select_peers(spec, int(agents[k]), P, candidates.ids(k), n, generator))
    return Ragged.from_arrays(ids)


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
    known = contacts.ids.row_ids * span + contacts.ids.values
    new = sampled.row_ids * span + sampled.values
    # Only peers that were never asked become new contacts.
    if len(known):
        new = new[known.take(known.searchsorted(new), mode="clip") != new]

    ids, likelihood = contacts.ids, contacts.likelihood.copy()
    if len(new):
        known = np.concatenate([known, new])
        order = known.argsort(kind="stable")
        known = known[order]
        values = np.concatenate([ids.values, new % span])[order]
        ids = Ragged(values, ids.sizes + np.bincount(new // span, minlength=len(ids)))
        likelihood = np.concatenate([likelihood, np.full(len(new), np.nan)])[order]

    if algorithm.needs_losses:
        answered = known.searchsorted(received.row_ids * span + received.values)
        likelihood[answered] = next_likelihood(algorithm, likelihood[answered], L)
    return ContactTable(ids, likelihood)
