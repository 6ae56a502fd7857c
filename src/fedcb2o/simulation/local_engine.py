"""All agents on one machine: one block, whose pool the workers share.

The models are rows of one tensor: those of the N agents, those of the clusters of IFCA and DFCA, the P that
attackers craft and publish in the agents' stead, where they do, and what the agents began the round with, where a rule
looks at that. Agents of a phase are independent of each other, so that workers share them out; the phases are
synchronous: what peers download is the model after this round's LocalUpdate. Nothing is copied: a received model is a
row of the pool.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fedcb2o.federated.admission import extents, within
from fedcb2o.federated.agent_group import Block
from fedcb2o.federated.algorithm2 import ask, decide
from fedcb2o.federated.batched_training import teams_of
from fedcb2o.federated.decisions import Choices, Inbox
from fedcb2o.federated.metrics import Tested
from fedcb2o.federated.mixing import Mixture, mix_, mixture
from fedcb2o.federated.publishing import craft_, outbox
from fedcb2o.federated.ragged import Lists, Places
from fedcb2o.federated.validation import tested
from fedcb2o.kernels import dispatch
from fedcb2o.nn.parameters import row_stride, rows_of
from fedcb2o.parallel.executors import Workers, blocks
from fedcb2o.simulation.write_guard import JUDGES, only_shown

T = TypeVar("T")

LARGE = 2**17  # from this many parameters on, each agent is a task of its own on the CPU


class Shared:
    """The engine of one machine. Models on a disk are mixed so many `columns` at a time, in memory. `own` names the
    users' functions that are shown models, by kind."""

    def __init__(
        self, block: Block, workers: Workers, columns: int | None = None, own: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self.block, self.workers, self.columns, self.own = block, workers, columns, own or {}
        self.terms, self.attackers = block.terms, block.attackers
        self.costs = block.holdings.train.sizes.tolist()
        alone = self.terms.dim >= LARGE and block.pool.device.type == "cpu"
        self.tasks = len(self.costs) if alone else workers.count  # no more of them at once
        self.parts = [np.array(team) for team in teams_of(self.terms, self.costs)]
        costs = [sum(self.costs[j] for j in part.tolist()) for part in self.parts]
        self.shares = blocks(range(len(self.parts)), costs, self.tasks)
        self.few = blocks(range(len(self.parts)), costs, workers.count)  # for what takes less than a task's way
        self.good, self.outbox = np.zeros(len(block.pool), dtype=bool), outbox(block, 0)  # until all publish

    def each(self, function: Callable[..., T], *common: Any, own: Sequence[Sequence[Any]] = ()) -> list[T]:
        """What a function finds for each part, the parts shared out among the workers."""
        shares = self.few if function is ask else self.shares
        tasks = [(function, [(self.parts[g], *(each[g] for each in own)) for g in share], common) for share in shares]
        with only_shown(self.block, self.own, *JUDGES) if function is decide else contextlib.nullcontext():
            parts = dict(_in_order(shares, self.workers.map(on_parts, tasks)))
        return [parts[g] for g in range(len(self.parts))]

    def each_agent(self, function: Callable[..., Sequence[T]], agents: Sequence[int], *common: Any) -> dict[int, T]:
        """What a function finds for each of some agents, these shared out among the workers."""
        parts = blocks(agents, self.costs, self.tasks)
        found = self.workers.map(on_parts, [(function, [(np.array(some),)], common) for some in parts])
        return dict(_in_order(parts, [each for (each,) in found]))

    def publish_(self, n: int, online: Bool[np.ndarray, " N"], sizes: Float[np.ndarray, " N"]) -> None:
        """Have the attackers craft; of each row of the pool, whether it is received, which is the same for all."""
        layout, attackers = self.block.layout, self.attackers
        good = np.zeros(len(self.block.pool), dtype=bool)
        good[layout.own] = within(sizes) & online
        if attackers.attack.crafts(n):
            with only_shown(self.block, self.own, "attack", "model", crafted=attackers.ids):
                crafted = self.each_agent(_crafted_here, attackers.ids.tolist(), n, np.isfinite(sizes))
            for j, theirs in crafted.items():
                good[layout.crafted(j)] = within(theirs) & online[j]
        self.good, self.outbox = good, outbox(self.block, n)

    def models(self) -> Iterator[Float[Tensor, "k stride"]]:
        """The models that outlive a round, in whole cache lines: the agents', in their order, then clusters'."""
        clusters, stride, count = self.terms.algorithm.clusters, row_stride(self.terms.dim), self.terms.num_agents
        count += 0 if clusters is None else clusters.rows(count)
        yield self.block.pool[:count].as_strided((count, stride), (stride, 1))

    def fill_(self, models: Float[Tensor, "k stride"]) -> None:
        """Have the models that outlive a round be these."""
        for kept in self.models():
            kept.copy_(models)

    def exchange(self, n: int, asked: Sequence[Lists], deadline: float | None) -> list[Inbox]:
        """What agents receive lies in the pool already: nobody is late."""
        return [self.arrived(n, ids, part) for part, ids in zip(self.parts, asked, strict=True)]

    def arrived(self, n: int, asked: Lists, receivers: Int[np.ndarray, " a"]) -> Inbox:
        """What some agents receive of those whom they asked."""
        return self.outbox.arrived(n, asked, receivers, self.good, self.terms.most_samples)

    def mix_(self, choices: Sequence[Choices]) -> Bool[np.ndarray, " N"]:
        """theta <- W theta for all agents, by columns of all rows."""
        layout, benign = self.block.layout, self.attackers.benign.tolist()
        self.mix_rows_(mixture(Choices.join(choices), layout.own, layout.before))
        finite = np.ones(len(self.costs), dtype=bool)
        finite[benign] = [np.isfinite(size) for _, size in sorted(self.each_agent(_extents, benign).items())]
        return finite

    def mix_rows_(self, mixture: Mixture) -> None:
        """Mix rows of the pool, the columns shared out among the workers."""
        dim, tile = self.terms.dim, mixture.tile
        step = -(-dim // (8 * self.workers.count)) if self.columns is None else self.columns // tile * tile
        step = tile * max(1, -(-step // tile))
        mix = functools.partial(_mix_, copied=self.columns is not None)
        self.workers.map(mix, [(mixture, a, min(a + step, dim)) for a in range(0, dim, step)])

    def evaluate(self) -> dict[int, Tested]:
        """What each benign agent's model does in its test."""
        with only_shown(self.block, self.own, "model"):
            return self.each_agent(tested, self.attackers.benign.tolist())


def on_parts(
    block: Block, function: Callable[..., T], parts: Sequence[tuple[Any, ...]], common: tuple[Any, ...]
) -> list[T]:
    """What a function of the block finds for each part, its products by the run's choice."""
    with dispatch.by(block.terms.primitives.linear, block.terms.primitives.convolution):
        return [function(block, *part, *common) for part in parts]


def _crafted_here(block: Block, some: Places, n: int, finite: Bool[np.ndarray, " N"]) -> list[Float[np.ndarray, " r"]]:
    """What attackers craft, to whom all models are at hand."""

    def look(ids: list[int]) -> Float[Tensor, "m d"]:
        return rows_of(block.pool, block.layout.own[ids].tolist())

    return craft_(block, some, n, finite, look)


def _extents(block: Block, some: Places) -> list[float]:
    found: list[float] = extents(block.pool, block.layout.own[some].tolist()).tolist()
    return found


def _mix_(block: Block, mixture: Mixture, start: int, stop: int, *, copied: bool) -> None:
    mix_(block.pool, mixture, start, stop, copied=copied)


def _in_order(parts: Sequence[Sequence[int]], results: Sequence[Sequence[T]]) -> Iterator[tuple[int, T]]:
    """Each number in the parts, and its result."""
    for some, found in zip(parts, results, strict=True):
        yield from zip(some, found, strict=True)
