"""Algorithm 2, LocalAggregation (alg:localAggregation): its lines 1 to 7, for all agents of an engine.

Each is a function of a block and of agents in some places of it, a part of them: what one agent decides depends on no
other.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool

from fedcb2o.federated.agent_group import Block
from fedcb2o.federated.consensus_weights import weigh_, weigh_by_samples_
from fedcb2o.federated.contacts import Memory, Met
from fedcb2o.federated.decisions import Choices, Inbox
from fedcb2o.federated.peer_sampling import asked_by_benign, asked_by_colluders, known, roles
from fedcb2o.federated.ragged import Lists, Places
from fedcb2o.federated.selection import remember
from fedcb2o.federated.validation import judged_alike


@runtime_checkable
class Engine(Protocol):
    """Who holds the agents, in parts of blocks, and answers `exchange`."""

    def each(self, function: Callable[..., Any], *common: Any, own: Sequence[Sequence[Any]] = ()) -> list[Any]:
        """`function(block, places, *own, *common)` for each part of the agents, with what is its `own`."""
        ...

    def exchange(self, n: int, asked: Sequence[Lists], deadline: float | None) -> list[Inbox]:
        """What the agents of each part receive in round n of those whom they asked, within `deadline` seconds."""
        ...

    def mix_(self, choices: Sequence[Choices]) -> Bool[np.ndarray, " N"]:
        """theta <- W theta for the agents of each part; whose models of all are finite then."""
        ...


def local_aggregation_(
    engine: Engine,
    n: int,
    memory: Sequence[Memory],
    active: Bool[np.ndarray, " N"],
    deadline: float | None = None,
    lap: Callable[[str], None] = lambda name: None,
) -> tuple[list[Memory], list[Choices], Bool[np.ndarray, " N"]]:
    """LocalAggregation (alg:FedCB2O, line 4; alg:localAggregation) for all agents that are `active` in round n.

    What each part of them remembers then, what it chose, and whose models are finite in the end; `lap` hears when lines
    1 to 6, and 7, are done.
    """
    asked = engine.each(ask, n, active, own=[[each.met for each in memory]])  # line 1: A_n <- ProbSampling(P_n^j, M)
    received = engine.exchange(n, asked, deadline)  # line 2: download theta_n^i for i in A_n
    decided = engine.each(decide, n, active, own=[memory, asked, received])  # lines 3 to 6
    lap("aggregate")
    finite = engine.mix_([choices for _, choices in decided])  # line 7: theta_n^j - lambda1 gamma (theta_n^j - m_j)
    lap("mix")
    return [memory for memory, _ in decided], [choices for _, choices in decided], finite


def ask(block: Block, some: Places, met: Met, n: int, active: Bool[np.ndarray, " N"]) -> Lists:
    """Line 1 (alg:localAggregation): A_n; colluding attackers ask each other first (sec:experiments)."""
    benign, colluders = roles(block, some, active)
    parts = []
    if len(benign):
        P = known(block, met.take(benign), n)
        parts.append((benign, asked_by_benign(block, some[benign], P, n)))
    if len(colluders):
        parts.append((colluders, asked_by_colluders(block, some[colluders], n)))
    return Lists.placed(len(some), *parts)


def decide(
    block: Block, some: Places, memory: Memory, asked: Lists, inbox: Inbox, n: int, active: Bool[np.ndarray, " N"]
) -> tuple[Memory, Choices]:
    """Lines 3 to 6 (alg:localAggregation): what each agent remembers then, and how it weighs what it received."""
    algorithm, choices = block.terms.algorithm, Choices.none(block.agents[some], asked, inbox)
    benign, colluders = roles(block, some, active)
    P = known(block, memory.met, n)
    judged, L = judged_alike(block, some, benign, inbox, n)  # line 3: L_j^i, i in A_n
    states = dict(enumerate(memory.states))
    for alike in judged:  # lines 5 and 6: G^i, and m_j by the weights mu_j^i = exp(-alpha G^i)
        states |= weigh_(choices, block, some, alike, P, states, L)
    # Line 4: P_{n+1}^{j,i} <- (1 - zeta) P_n^{j,i} + zeta exp(-kappa L_j^i); after line 5, since G may count as well.
    new_P = remember(
        P.take(benign),
        asked.take(benign),
        inbox.ids.take(benign),
        None if L is None else L[inbox.ids.places(benign)],
        kappa=algorithm.kappa,
        zeta=algorithm.zeta,
        first_contact=algorithm.first_contact,
    )
    weigh_by_samples_(choices, block, some, colluders, inbox, n)
    return memory.after(benign, new_P, list(states.values())), choices
