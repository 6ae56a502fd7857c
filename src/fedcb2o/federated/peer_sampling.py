"""Line 1 of Algorithm 2 for several agents: who is there to ask, and whom each may ask."""

import numpy as np
import torch
from jaxtyping import Bool

from fedcb2o.federated.agent_group import Block
from fedcb2o.federated.contacts import Met, Peers
from fedcb2o.federated.plugin_outputs import asked_of
from fedcb2o.federated.ragged import Lists, Places
from fedcb2o.federated.selection import AT_ONCE, also_looks_at, colluding
from fedcb2o.rng import streams


def roles(block: Block, some: Places, active: Bool[np.ndarray, " N"]) -> tuple[Places, Places]:
    """Which of agents in some places do as Algorithm 2 says, and which collude, of those `active` in the round."""
    ids, attackers = block.agents[some], block.attackers
    colludes = attackers.malicious[ids] & attackers.collude
    return np.flatnonzero(active[ids] & ~colludes), np.flatnonzero(active[ids] & colludes)


def known(block: Block, met: Met, n: int) -> Met:
    """Whom some agents have met under the names that are theirs in round n."""
    renamed = block.attackers.renamed(n)
    return met.forget(renamed) if len(renamed) else met


def asked_by_benign(block: Block, some: Places, met: Met, n: int) -> Lists:
    """Whom agents in some places ask, by the algorithm's selection; raises ConfigError where a user's chose whom they
    may not ask."""
    terms, agents = block.terms, block.agents[some]
    if terms.neighbours is None:
        peers = Peers.of([np.arange(terms.num_agents)], np.zeros_like(agents), but=agents)
    else:
        peers = Peers.of([terms.neighbours[j].sort().values.numpy() for j in agents.tolist()], but=agents)
    if terms.algorithm.own_candidate:
        peers = peers.and_(agents)
    select, budget, draws = (
        terms.algorithm.select,
        terms.budget,
        streams(terms.seed, "select", n, agents=agents.tolist()),
    )
    if (several := AT_ONCE.of(select)) is not None:
        return several(met, peers, budget, draws, **getattr(select, "keywords", {}))
    asked, names = [], also_looks_at(select)
    for k, (contacts, draw) in enumerate(zip(met, draws, strict=True)):
        more = {"n": n, "me": int(agents[k])}
        chosen = select(contacts, torch.from_numpy(peers.ids(k)), budget, draw, *(more[name] for name in names))
        asked.append(asked_of(select, chosen, peers, k, budget))
    return Lists.of(asked)


def asked_by_colluders(block: Block, some: Places, n: int) -> Lists:
    """Whom malicious agents in some places ask: fellow attackers first (sec:experiments)."""
    terms, agents = block.terms, block.agents[some]
    draws = streams(terms.seed, "select", n, agents=agents.tolist())
    return colluding(*block.attackers.peers(agents, terms.neighbours), terms.budget, draws)
