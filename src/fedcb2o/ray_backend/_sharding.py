"""Distribution of agents over workers, and the place of each model row among them."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from fedcb2o.federated import Adversary, AgentGroup, BufferLayout, RunSpec, plan_training_batches
from fedcb2o.parallel._executors import balance_load


def shard_agents(spec: RunSpec, costs: Sequence[int], speeds: Sequence[float]) -> list[list[int]]:
    """Distribute agents over workers so that all workers take about as long.

    Agents that train together stay together. The ids of a worker's agents ascend; a worker that
    would always be last has none.
    """
    batches = plan_training_batches(spec, costs)
    batch_costs = []
    for batch in batches:
        batch_costs.append(sum(costs[agent] for agent in batch))
    shares = balance_load(range(len(batches)), batch_costs, len(speeds), speeds)
    agents = []
    for share in shares:
        agents.append(sorted(itertools.chain(*(batches[k] for k in share))))
    return agents


def max_received(
    spec: RunSpec, adversary: Adversary, agents: Sequence[int], crafted_per_attacker: int
) -> int:
    """Return the largest number of models that agents receive from other workers in a round.

    Each model is counted once. `agents` are those of a worker.
    """
    others = spec.num_agents - len(agents)
    is_malicious = adversary.malicious
    attackers_elsewhere = int(is_malicious.sum() - is_malicious[list(agents)].sum())
    crafted = crafted_per_attacker * attackers_elsewhere
    # Each agent asks as many peers as it may, or each model of another worker arrives.
    return min(len(agents) * spec.max_asked, others + crafted)


@dataclass(frozen=True)
class Sharding:
    """The workers of all agents and of all rows of the buffer of all agents.

    The ids of a worker's agents ascend. `owner` is the worker of each row, and `row` its number in
    that worker's buffer.
    """

    agents: list[Int[np.ndarray, " _a"]]
    layouts: list[BufferLayout]
    owner: Int[np.ndarray, " rows"]
    row: Int[np.ndarray, " rows"]

    @classmethod
    def from_group(cls, group: AgentGroup, shares: Sequence[Sequence[int]]) -> "Sharding":
        """Create the sharding of a group of all agents."""
        whole = group.layout
        agents = [np.array(share) for share in shares]
        owner = np.zeros(whole.first_received, np.int64)
        row = np.zeros(whole.first_received, np.int64)
        layouts = []
        for worker, ids in enumerate(agents):
            is_malicious = group.data.malicious[ids]
            layout = BufferLayout.create(
                np.arange(len(ids)),
                len(ids),
                is_malicious,
                whole.crafted_per_attacker,
                whole.previous is not None,
            )
            owner[whole.own[ids]] = worker
            row[whole.own[ids]] = layout.own
            for k in np.flatnonzero(is_malicious).tolist():
                rows = whole.crafted_rows(int(ids[k]))
                local = layout.crafted_rows(k)
                owner[rows] = worker
                row[rows] = np.arange(local.start, local.stop)
            layouts.append(layout)
        return cls(agents, layouts, owner, row)

    def local_rows(
        self, worker: int, rows: Int[np.ndarray, " m"], received: Int[np.ndarray, " r"]
    ) -> Int[np.ndarray, " m"]:
        """Return the rows of a worker's buffer that hold given rows.

        `rows` are those of the buffer of all agents. These are the worker's own rows and received
        ones. `received` are the rows that the worker has received, in the order of its inbox.
        """
        order = received.argsort()
        position = np.zeros(len(rows), np.int64)
        if len(order):
            position = order.take(received[order].searchsorted(rows), mode="clip")
        is_own = self.owner[rows] == worker
        inbox = self.layouts[worker].first_received + position
        local: np.ndarray = np.where(is_own, self.row[rows], inbox)
        return local
