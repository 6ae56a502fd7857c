"""Line 1 of Algorithm 2 for several agents: who is there to ask, and whom each may ask."""

import numpy as np
import torch
from jaxtyping import Bool

from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.contacts import CandidatePeers, ContactTable
from fedcb2o.federated.plugin_outputs import validated_selection
from fedcb2o.federated.ragged import Indices, Ragged
from fedcb2o.federated.selection import BATCHED_SELECTION, extra_inputs, select_colluding_peers
from fedcb2o.rng import agent_streams


def split_by_role(
    group: AgentGroup, members: Indices, active: Bool[np.ndarray, " N"]
) -> tuple[Indices, Indices]:
    """Which of agents in some places do as Algorithm 2 says, and which collude, of those `active` in the round."""
    ids = group.agents[members]
    attackers = group.adversary
    colludes = attackers.malicious[ids] & attackers.colludes
    return np.flatnonzero(active[ids] & ~colludes), np.flatnonzero(active[ids] & colludes)


def forget_renamed(group: AgentGroup, contacts: ContactTable, n: int) -> ContactTable:
    """Whom some agents have met under the names that are theirs in round n."""
    renamed = group.adversary.new_identities(n)
    return contacts.forget(renamed) if len(renamed) else contacts


def sample_benign_peers(
    group: AgentGroup, members: Indices, contacts: ContactTable, n: int
) -> Ragged:
    """Whom agents in some places ask, by the algorithm's selection; raises ConfigError where a user's chose whom they
    may not ask."""
    terms = group.spec
    agents = group.agents[members]
    if terms.neighbours is None:
        peers = CandidatePeers.from_lists(
            [np.arange(terms.num_agents)], np.zeros_like(agents), excluded=agents
        )
    else:
        peers = CandidatePeers.from_lists(
            [terms.neighbours[j].sort().values.numpy() for j in agents.tolist()], excluded=agents
        )
    if terms.algorithm.own_candidate:
        peers = peers.including_self(agents)
    select = terms.algorithm.select
    budget = terms.budget
    draws = agent_streams(terms.seed, "select", n, agents=agents.tolist())
    if (several := BATCHED_SELECTION.get(select)) is not None:
        return several(contacts, peers, budget, draws, **getattr(select, "keywords", {}))
    asked = []
    names = extra_inputs(select)
    for k, (known, draw) in enumerate(zip(contacts, draws, strict=True)):
        more = {"n": n, "me": int(agents[k])}
        chosen = select(
            known, torch.from_numpy(peers.ids(k)), budget, draw, *(more[name] for name in names)
        )
        asked.append(validated_selection(select, chosen, peers, k, budget))
    return Ragged.from_arrays(asked)


def sample_colluding_peers(group: AgentGroup, members: Indices, n: int) -> Ragged:
    """Whom malicious agents in some places ask: fellow attackers first (sec:experiments)."""
    terms = group.spec
    agents = group.agents[members]
    draws = agent_streams(terms.seed, "select", n, agents=agents.tolist())
    return select_colluding_peers(
        *group.adversary.colluding_peers(agents, terms.neighbours), terms.budget, draws
    )
