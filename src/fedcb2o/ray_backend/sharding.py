"""Which actor holds which agents, and which row of its pool each row of all agents' is."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from fedcb2o.federated.adversary import Adversary
from fedcb2o.federated.agent_group import AgentGroup, BufferLayout
from fedcb2o.federated.batched_training import plan_training_batches
from fedcb2o.federated.run_spec import RunSpec
from fedcb2o.parallel.executors import balance_load


def shard_agents(terms: RunSpec, costs: Sequence[int], speeds: Sequence[float]) -> list[list[int]]:
    """The agents in at most a block for each of these speeds, so that all take about as long. Who trains together stays
    together, and who would be last with anybody has nobody."""
    groups = plan_training_batches(terms, costs)
    work = [sum(costs[j] for j in group) for group in groups]
    shares = balance_load(range(len(groups)), work, len(speeds), speeds)
    return [sorted(j for g in share for j in groups[g]) for share in shares]


def max_received(terms: RunSpec, attackers: Adversary, agents: Sequence[int], each: int) -> int:
    """How many models some agents receive of others in a round at most, each counted once, where every attacker crafts
    `each` so many."""
    others = terms.num_agents - len(agents)
    crafted = each * int(attackers.malicious.sum() - attackers.malicious[list(agents)].sum())
    return min(len(agents) * terms.max_asked, others + crafted)


@dataclass(frozen=True)
class Sharding:
    """Of each of several actors the ids of its `agents`, ascending, and the layout of its pool (`layouts`); of each row
    of a pool of all agents, who is its `owner`, and its `row` there."""

    agents: list[Int[np.ndarray, " _a"]]
    layouts: list[BufferLayout]
    owner: Int[np.ndarray, " rows"]
    row: Int[np.ndarray, " rows"]

    @classmethod
    def from_group(cls, block: AgentGroup, shares: Sequence[Sequence[int]]) -> "Sharding":
        """Where the rows of a block of all agents lie, when these are shared out so."""
        whole = block.layout
        agents = [np.array(share) for share in shares]
        owner = np.zeros(whole.first_received, np.int64)
        row = np.zeros(whole.first_received, np.int64)
        layouts = []
        for b, ids in enumerate(agents):
            bad = block.adversary.malicious[ids]
            mine = BufferLayout.create(
                np.arange(len(ids)),
                len(ids),
                bad,
                whole.crafted_per_attacker,
                whole.previous is not None,
            )
            owner[whole.own[ids]], row[whole.own[ids]] = b, mine.own
            for k in np.flatnonzero(bad).tolist():
                there = whole.crafted_rows(int(ids[k]))
                here = mine.crafted_rows(k)
                owner[there], row[there] = b, np.arange(here.start, here.stop)
            layouts.append(mine)
        return cls(agents, layouts, owner, row)

    def local_rows(
        self, b: int, rows: Int[np.ndarray, " m"], arrived: Int[np.ndarray, " r"]
    ) -> Int[np.ndarray, " m"]:
        """The rows in an actor's pool of some rows, where those of others have `arrived` in its inbox."""
        order = arrived.argsort()
        place = order.take(arrived[order].searchsorted(rows), mode="clip") if len(order) else 0
        found: np.ndarray = np.where(
            self.owner[rows] == b, self.row[rows], self.layouts[b].first_received + place
        )
        return found
