"""Colluding attackers in LocalAggregation, added to the steps of benign agents (sec:experiments).

Colluders ask each other first and average what they receive by numbers of samples. An agent under a
new identity (a sybil) is unknown to everybody.
"""

import dataclasses

import numpy as np
from jaxtyping import Bool

from fedcb2o.federated import batched_aggregation
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.aggregation.sample_average import sample_weights
from fedcb2o.federated.contacts import AgentState, ContactTable
from fedcb2o.federated.decisions import Decisions, Inbox
from fedcb2o.federated.ragged import Indices, Ragged, complement
from fedcb2o.federated.selection import select_colluding_peers
from fedcb2o.federated.validation import own_models
from fedcb2o.rng import agent_streams


def sample_peers(
    group: AgentGroup,
    members: Indices,
    contacts: ContactTable,
    n: int,
    active: Bool[np.ndarray, " N"],
) -> Ragged:
    """Sample the peers that benign and colluding members ask (line 1).

    Args:
        group: Group of the agents.
        members: The batch, as positions in the group.
        contacts: Their contacts.
        n: Round.
        active: For each of the N agents, whether it is active.

    Returns:
        Ids that each member asks.
    """
    colludes = group.adversary.malicious & group.adversary.colludes
    known = _forget_new_identities(group, contacts, n)
    sampled = batched_aggregation.sample_peers(group, members, known, n, active & ~colludes)

    positions = np.flatnonzero((active & colludes)[group.agents[members]])
    if not len(positions):
        return sampled
    others = complement(positions, len(members))
    agents = group.agents[members[positions]]
    generators = agent_streams(group.spec.seed, "select", n, agents=agents.tolist())
    colluders, benign = group.adversary.colluding_peers(agents, group.spec.neighbours)
    colluding = select_colluding_peers(colluders, benign, group.spec.agents.budget, generators)
    return Ragged.scatter(len(members), (others, sampled.take(others)), (positions, colluding))


def decide(
    group: AgentGroup,
    members: Indices,
    state: AgentState,
    sampled: Ragged,
    inbox: Inbox,
    n: int,
    active: Bool[np.ndarray, " N"],
) -> tuple[AgentState, Decisions]:
    """Compute weights and likelihoods of benign and colluding members (lines 3 to 6).

    Args:
        group: Group of the agents.
        members: The batch, as positions in the group.
        state: Their state.
        sampled: Peers that they asked.
        inbox: Models that they received.
        n: Round.
        active: For each of the N agents, whether it is active.

    Returns:
        New state and decisions of the members.
    """
    colludes = group.adversary.malicious & group.adversary.colludes
    known = _forget_new_identities(group, state.contacts, n)
    is_benign = active & ~colludes
    decided, decisions = batched_aggregation.decide(
        group, members, dataclasses.replace(state, contacts=known), sampled, inbox, n, is_benign
    )
    if known is not state.contacts:
        benign = np.flatnonzero(is_benign[group.agents[members]])
        decided = state.updated(benign, decided.contacts.take(benign), decided.rule_states)

    positions = np.flatnonzero((active & colludes)[group.agents[members]])
    _assign_sample_weights_(decisions, group, members, positions, inbox, n)
    return decided, decisions


def _forget_new_identities(group: AgentGroup, contacts: ContactTable, n: int) -> ContactTable:
    """Remove the agents that come under a new identity in round n."""
    renamed = group.adversary.new_identities(n)
    return contacts.forget(renamed) if len(renamed) else contacts


def _assign_sample_weights_(
    decisions: Decisions,
    group: AgentGroup,
    members: Indices,
    positions: Indices,
    inbox: Inbox,
    n: int,
) -> None:
    """Weigh what colluders received by numbers of samples, in place."""
    for equal, index, received in inbox.group_by_size(positions):
        own = None
        if group.adversary.averages_own_model:
            own = own_models(group, members[equal], n)
        mu = sample_weights(received, own)
        num_received = received.ids.shape[-1]
        decisions.weights[index] = mu[..., :num_received].flatten().numpy()
        decisions.own_weight[equal] = mu[..., num_received:].sum(-1).numpy()
