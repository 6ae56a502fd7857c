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

from fedcb2o.federated.admission import is_admissible, max_abs
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.batched_aggregation import local_aggregation_
from fedcb2o.federated.batched_training import plan_training_batches
from fedcb2o.federated.collusion import AdversarialEngine, decide, sample_peers
from fedcb2o.federated.contacts import AgentState
from fedcb2o.federated.decisions import Decisions, Inbox
from fedcb2o.federated.metrics import EvaluationResult
from fedcb2o.federated.mixing import MixingMatrix, mix_, mixing_matrix
from fedcb2o.federated.publishing import craft_models_, make_outbox
from fedcb2o.federated.ragged import Indices, Ragged
from fedcb2o.federated.validation import evaluate_models
from fedcb2o.kernels import dispatch
from fedcb2o.nn.parameters import gather_rows, row_stride
from fedcb2o.parallel.executors import Executor, balance_load
from fedcb2o.simulation.write_guard import AGGREGATION_KINDS, forbid_writes

T = TypeVar("T")

LARGE_DIM = 2**17  # from this many parameters on, each agent is a task of its own on the CPU


class LocalEngine:
    """The engine of one machine. Models on a disk are mixed so many `columns` at a time, in memory. `own` names the
    users' functions that are shown models, by kind."""

    def __init__(
        self,
        group: AgentGroup,
        executor: Executor,
        max_columns: int | None = None,
        user_functions: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.group = group
        self.executor = executor
        self.max_columns = max_columns
        self.user_functions = user_functions or {}
        self.spec = group.spec
        self.adversary = group.adversary
        self.costs = group.data.train.sizes.tolist()
        alone = self.spec.dim >= LARGE_DIM and group.models.device.type == "cpu"
        self.max_tasks = len(self.costs) if alone else executor.count  # no more of them at once
        self.groups = [np.array(team) for team in plan_training_batches(self.spec, self.costs)]
        costs = [sum(self.costs[j] for j in part.tolist()) for part in self.groups]
        self.fine_tasks = balance_load(range(len(self.groups)), costs, self.max_tasks)
        self.coarse_tasks = balance_load(
            range(len(self.groups)), costs, executor.count
        )  # for what takes less than a task's way
        self.is_received, self.outbox = (
            np.zeros(len(group.models), dtype=bool),
            make_outbox(group, 0),
        )  # until all publish

    def map_groups(
        self, function: Callable[..., T], *shared: Any, arguments: Sequence[Sequence[Any]] = ()
    ) -> list[T]:
        """What a function finds for each part, the parts shared out among the workers."""
        shares = self.coarse_tasks if function is sample_peers else self.fine_tasks
        tasks = [
            (function, [(self.groups[g], *(each[g] for each in arguments)) for g in share], shared)
            for share in shares
        ]
        with (
            forbid_writes(self.group, self.user_functions, *AGGREGATION_KINDS)
            if function is decide
            else contextlib.nullcontext()
        ):
            parts = dict(_pair_results(shares, self.executor.map(run_on_groups, tasks)))
        return [parts[g] for g in range(len(self.groups))]

    def local_aggregation_(
        self,
        n: int,
        states: Sequence[AgentState],
        active: Bool[np.ndarray, " N"],
        deadline: float | None,
        on_step: Callable[[str], None],
    ) -> tuple[list[AgentState], list[Decisions], Bool[np.ndarray, " N"]]:
        """Run LocalAggregation (Algorithm 2) for the active agents of round n."""
        engine = AdversarialEngine(self)
        return local_aggregation_(engine, n, states, active, deadline, on_step)

    def map_agents(
        self, function: Callable[..., Sequence[T]], agents: Sequence[int], *common: Any
    ) -> dict[int, T]:
        """What a function finds for each of some agents, these shared out among the workers."""
        parts = balance_load(agents, self.costs, self.max_tasks)
        found = self.executor.map(
            run_on_groups, [(function, [(np.array(some),)], common) for some in parts]
        )
        return dict(_pair_results(parts, [each for (each,) in found]))

    def publish_(
        self, n: int, online: Bool[np.ndarray, " N"], sizes: Float[np.ndarray, " N"]
    ) -> None:
        """Have the attackers craft; of each row of the pool, whether it is received, which is the same for all."""
        layout = self.group.layout
        attackers = self.adversary
        good = np.zeros(len(self.group.models), dtype=bool)
        good[layout.own] = is_admissible(sizes) & online
        if attackers.attack.is_crafting(n):
            with forbid_writes(
                self.group, self.user_functions, "attack", "model", crafted=attackers.malicious_ids
            ):
                crafted = self.map_agents(
                    _craft_models_, attackers.malicious_ids.tolist(), n, np.isfinite(sizes)
                )
            for j, theirs in crafted.items():
                good[layout.crafted_rows(j)] = is_admissible(theirs) & online[j]
        self.is_received, self.outbox = good, make_outbox(self.group, n)

    def persistent_models(self) -> Iterator[Float[Tensor, "k stride"]]:
        """The models that outlive a round, in whole cache lines: the agents', in their order, then clusters'."""
        clusters = self.spec.algorithm.clusters
        stride = row_stride(self.spec.dim)
        count = self.spec.num_agents
        count += 0 if clusters is None else clusters.num_rows(count)
        yield self.group.models[:count].as_strided((count, stride), (stride, 1))

    def load_models_(self, models: Float[Tensor, "k stride"]) -> None:
        """Have the models that outlive a round be these."""
        for kept in self.persistent_models():
            kept.copy_(models)

    def exchange(self, n: int, asked: Sequence[Ragged], deadline: float | None) -> list[Inbox]:
        """What agents receive lies in the pool already: nobody is late."""
        return [self.receive(n, ids, part) for part, ids in zip(self.groups, asked, strict=True)]

    def receive(self, n: int, asked: Ragged, receivers: Int[np.ndarray, " a"]) -> Inbox:
        """What some agents receive of those whom they asked."""
        return self.outbox.deliver(n, asked, receivers, self.is_received, self.spec.max_samples)

    def mix_(self, decisions: Sequence[Decisions]) -> Bool[np.ndarray, " N"]:
        """theta <- W theta for all agents, by columns of all rows."""
        layout = self.group.layout
        benign = self.adversary.benign_ids.tolist()
        self.mix_rows_(mixing_matrix(Decisions.concatenate(decisions), layout.own, layout.previous))
        finite = np.ones(len(self.costs), dtype=bool)
        finite[benign] = [
            np.isfinite(size) for _, size in sorted(self.map_agents(_max_abs, benign).items())
        ]
        return finite

    def mix_rows_(self, mixture: MixingMatrix) -> None:
        """Mix rows of the pool, the columns shared out among the workers."""
        dim = self.spec.dim
        tile = mixture.tile_columns
        step = (
            -(-dim // (8 * self.executor.count))
            if self.max_columns is None
            else self.max_columns // tile * tile
        )
        step = tile * max(1, -(-step // tile))
        mix = functools.partial(_mix_columns_, copied=self.max_columns is not None)
        self.executor.map(mix, [(mixture, a, min(a + step, dim)) for a in range(0, dim, step)])

    def evaluate(self) -> dict[int, EvaluationResult]:
        """What each benign agent's model does in its test."""
        with forbid_writes(self.group, self.user_functions, "model"):
            return self.map_agents(evaluate_models, self.adversary.benign_ids.tolist())


def run_on_groups(
    block: AgentGroup,
    function: Callable[..., T],
    parts: Sequence[tuple[Any, ...]],
    common: tuple[Any, ...],
) -> list[T]:
    """What a function of the block finds for each part, its products by the run's choice."""
    with dispatch.use_kernels(block.spec.kernels.linear, block.spec.kernels.convolution):
        return [function(block, *part, *common) for part in parts]


def _craft_models_(
    block: AgentGroup, some: Indices, n: int, finite: Bool[np.ndarray, " N"]
) -> list[Float[np.ndarray, " r"]]:
    """What attackers craft, to whom all models are at hand."""

    def look(ids: list[int]) -> Float[Tensor, "m d"]:
        return gather_rows(block.models, block.layout.own[ids].tolist())

    return craft_models_(block, some, n, finite, look)


def _max_abs(block: AgentGroup, some: Indices) -> list[float]:
    found: list[float] = max_abs(block.models, block.layout.own[some].tolist()).tolist()
    return found


def _mix_columns_(
    block: AgentGroup, mixture: MixingMatrix, start: int, stop: int, *, copied: bool
) -> None:
    mix_(block.models, mixture, start, stop, through_copy=copied)


def _pair_results(
    parts: Sequence[Sequence[int]], results: Sequence[Sequence[T]]
) -> Iterator[tuple[int, T]]:
    """Each number in the parts, and its result."""
    for some, found in zip(parts, results, strict=True):
        yield from zip(some, found, strict=True)
