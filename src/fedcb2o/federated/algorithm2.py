"""Algorithm 2, LocalAggregation (alg:localAggregation): its lines 1 to 7, for all agents of an engine.

Each is a function of a block and of agents in some places of it, a part of them: what one agent decides depends on no
other.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool

from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.consensus_weights import assign_sample_weights_, assign_weights_
from fedcb2o.federated.contacts import AgentState, ContactTable
from fedcb2o.federated.decisions import Decisions, Inbox
from fedcb2o.federated.peer_sampling import (
    forget_renamed,
    sample_benign_peers,
    sample_colluding_peers,
    split_by_role,
)
from fedcb2o.federated.ragged import Indices, Ragged
from fedcb2o.federated.selection import update_likelihoods
from fedcb2o.federated.validation import validate_batches


@runtime_checkable
class Engine(Protocol):
    """Who holds the agents, in parts of blocks, and answers `exchange`."""

    def map_groups(
        self, function: Callable[..., Any], *shared: Any, arguments: Sequence[Sequence[Any]] = ()
    ) -> list[Any]:
        """`function(block, places, *own, *common)` for each part of the agents, with what is its `own`."""
        ...

    def exchange(self, n: int, asked: Sequence[Ragged], deadline: float | None) -> list[Inbox]:
        """What the agents of each part receive in round n of those whom they asked, within `deadline` seconds."""
        ...

    def mix_(self, decisions: Sequence[Decisions]) -> Bool[np.ndarray, " N"]:
        """theta <- W theta for the agents of each part; whose models of all are finite then."""
        ...


def local_aggregation_(
    engine: Engine,
    n: int,
    states: Sequence[AgentState],
    active: Bool[np.ndarray, " N"],
    deadline: float | None = None,
    on_step: Callable[[str], None] = lambda name: None,
) -> tuple[list[AgentState], list[Decisions], Bool[np.ndarray, " N"]]:
    """LocalAggregation (alg:FedCB2O, line 4; alg:localAggregation) for all agents that are `active` in round n.

    What each part of them remembers then, what it chose, and whose models are finite in the end; `lap` hears when lines
    1 to 6, and 7, are done.
    """
    asked = engine.map_groups(
        sample_peers, n, active, arguments=[[each.contacts for each in states]]
    )  # line 1: A_n <- ProbSampling(P_n^j, M)
    received = engine.exchange(n, asked, deadline)  # line 2: download theta_n^i for i in A_n
    decided = engine.map_groups(
        decide, n, active, arguments=[states, asked, received]
    )  # lines 3 to 6
    on_step("aggregate")
    finite = engine.mix_(
        [choices for _, choices in decided]
    )  # line 7: theta_n^j - lambda1 gamma (theta_n^j - m_j)
    on_step("mix")
    return [memory for memory, _ in decided], [choices for _, choices in decided], finite


def sample_peers(
    group: AgentGroup,
    members: Indices,
    contacts: ContactTable,
    n: int,
    active: Bool[np.ndarray, " N"],
) -> Ragged:
    """Line 1 (alg:localAggregation): A_n; colluding attackers ask each other first (sec:experiments)."""
    benign, colluders = split_by_role(group, members, active)
    parts = []
    if len(benign):
        P = forget_renamed(group, contacts.take(benign), n)
        parts.append((benign, sample_benign_peers(group, members[benign], P, n)))
    if len(colluders):
        parts.append((colluders, sample_colluding_peers(group, members[colluders], n)))
    return Ragged.scatter(len(members), *parts)


def decide(
    group: AgentGroup,
    members: Indices,
    state: AgentState,
    asked: Ragged,
    inbox: Inbox,
    n: int,
    active: Bool[np.ndarray, " N"],
) -> tuple[AgentState, Decisions]:
    """Lines 3 to 6 (alg:localAggregation): what each agent remembers then, and how it weighs what it received."""
    algorithm = group.spec.algorithm
    choices = Decisions.empty(group.agents[members], asked, inbox)
    benign, colluders = split_by_role(group, members, active)
    P = forget_renamed(group, state.contacts, n)
    judged, L = validate_batches(group, members, benign, inbox, n)  # line 3: L_j^i, i in A_n
    states = dict(enumerate(state.rule_states))
    for alike in judged:  # lines 5 and 6: G^i, and m_j by the weights mu_j^i = exp(-alpha G^i)
        states |= assign_weights_(choices, group, members, alike, P, states, L)
    # Line 4: P_{n+1}^{j,i} <- (1 - zeta) P_n^{j,i} + zeta exp(-kappa L_j^i); after line 5, since G may count as well.
    new_P = update_likelihoods(
        P.take(benign),
        asked.take(benign),
        inbox.ids.take(benign),
        None if L is None else L[inbox.ids.flat_index(benign)],
        kappa=algorithm.kappa,
        zeta=algorithm.zeta,
        first_contact=algorithm.first_contact,
    )
    assign_sample_weights_(choices, group, members, colluders, inbox, n)
    return state.updated(benign, new_P, list(states.values())), choices
