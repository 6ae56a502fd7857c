"""The engine of one process or of several processes that share a model buffer.

The model buffer is one tensor with a row for each model:

- the agents' models;
- the cluster models of IFCA and DFCA;
- the models that attackers craft;
- the models before the round, if a rule or the guard `min_distance` uses them;
- what each agent last sent, with the encoding `top_k`.

The agents of a phase are independent of each other, so that workers share them out. Phases are
synchronous: peers download the models of this round's LocalUpdate. A received model is a row of the
buffer, without a copy. A worker of a Ray cluster has such an engine for its share of the agents.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.federated import batched_aggregation
from fedcb2o.federated.agent_group import AgentGroup, Phase
from fedcb2o.federated.contacts import AgentState
from fedcb2o.federated.decisions import Decisions, Inbox
from fedcb2o.federated.evaluation.metrics import EvaluationResult
from fedcb2o.federated.evaluation.models import evaluate_models
from fedcb2o.federated.guards.acceptance import are_finite, is_acceptable
from fedcb2o.federated.local_update import TrainResult, plan_training_batches, train_
from fedcb2o.federated.mixing import MixingMatrix, mix_, mixing_matrix
from fedcb2o.federated.publishing import Outbox, Peek, craft_models_, encode_, make_outbox
from fedcb2o.federated.ragged import AgentIds, Indices, Members, Ragged
from fedcb2o.kernels.dispatch import use_kernels
from fedcb2o.nn.parameters import gather_rows, row_checksums, row_stride
from fedcb2o.parallel._executors import Executor, balance_load

T = TypeVar("T")

LARGE_DIM = 2**17  # parameters from which on each agent is a task of its own on the CPU

AGGREGATION_KINDS = ("criterion", "rule", "pre-step", "algorithm", "model")
"""Kinds of user functions that receive models in LocalAggregation."""

_TRAIN = Phase(train_)
_ENCODE = Phase(encode_)

_NO_AGENTS = np.zeros(0, np.int64)

_TILES_PER_WORKER = 8  # tasks of a mixing step, so that fast workers can take more of them


class LocalEngine:
    """The engine of a group of agents on one machine.

    `max_columns` columns are mixed at once in memory, for a buffer on disk. `members` are the
    agents of each batch by their indices in `group`, and `batches` the same agents by their ids.
    """

    def __init__(
        self,
        group: AgentGroup,
        executor: Executor,
        max_columns: int | None = None,
        members: Sequence[Members] | None = None,
    ) -> None:
        self.group = group
        self.executor = executor
        self.max_columns = max_columns
        self.spec = group.spec
        self.costs: list[int] = group.data.train.sizes.tolist()
        planned = plan_training_batches(self.spec, self.costs)
        self.members = [Members(np.array(batch)) for batch in members or planned]
        self.batches = [AgentIds(group.agents[batch]) for batch in self.members]
        self._benign = np.flatnonzero(~group.data.malicious).tolist()

        # On the CPU each agent with a large model is a task of its own.
        is_large = self.spec.dim >= LARGE_DIM and group.models.device.type == "cpu"
        self.max_tasks = len(self.costs) if is_large else executor.count
        costs = [group.data.train.sizes[batch].sum() for batch in self.members]
        numbers = range(len(self.members))
        self.fine_parts = balance_load(numbers, costs, self.max_tasks)
        self.coarse_parts = balance_load(numbers, costs, executor.count)  # for cheap functions
        kernels = self.spec.kernels
        self._kernels = functools.partial(use_kernels, kernels.linear, kernels.convolution)

        self.outbox: Outbox | None = None  # until the agents publish

    def map_batches(
        self, phase: Phase, n: int, *shared: Any, arguments: Sequence[Sequence[Any]] = ()
    ) -> list[Any]:
        """Call `phase.function(group, members, *arguments, n, *shared)` for each batch.

        Each list of `arguments` has one value per batch.
        """
        # A cheap function would take less time than its tasks take to send.
        parts = self.coarse_parts if phase.is_cheap else self.fine_parts
        kinds = AGGREGATION_KINDS if phase.calls_rules else ()
        tasks = [(*own, n, *shared) for own in zip(self.members, *arguments, strict=True)]
        with self._forbid_writes(*kinds):
            return self.executor.map(phase.function, tasks, parts, self._kernels)

    def map_agents(
        self, function: Callable[..., Sequence[T]], members: Sequence[int], *shared: Any
    ) -> dict[int, T]:
        """Call `function(group, members, *shared)` for some agents, divided among the workers.

        The function returns one result per member.
        """
        results: dict[int, T] = {}
        parts = balance_load(members, self.costs, self.max_tasks)
        tasks = [(np.array(part, np.int64), *shared) for part in parts]
        found = self.executor.map(function, tasks, settings=self._kernels)
        for part, values in zip(parts, found, strict=True):
            results.update(zip(part, values, strict=True))
        return results

    def craft_models_(
        self, n: int, is_finite: Bool[np.ndarray, " N"], peek: Peek | None = None
    ) -> dict[int, Float[np.ndarray, " r"]]:
        """Craft the models of the group's attackers, in place.

        `peek` returns the models of agents by their ids; by default, rows of the buffer. Returns
        the largest absolute values of each attacker's models, by its index in the group.
        """
        attackers = np.flatnonzero(self.group.data.malicious)
        with self._forbid_writes("attack", "model", crafted=attackers):
            return self.map_agents(_craft_models_, attackers.tolist(), n, is_finite, peek)

    def train_(self, n: int) -> list[TrainResult]:
        """Train the models of all agents (LocalUpdate); return the result of each batch."""
        return self.map_batches(_TRAIN, n)

    def publish_(
        self, n: int, online: Bool[np.ndarray, " N"], max_abs: Float[np.ndarray, " N"]
    ) -> None:
        """Publish the models of the agents that are online, in a group of all agents.

        `max_abs` is the largest absolute value of each trained model; not finite for a broken one.
        """
        is_sent = is_acceptable(max_abs) & online
        if self.group.layout.sent is not None:
            self.map_batches(_ENCODE, n, is_sent)
        self.outbox = make_outbox(self.group, is_sent)

    def replace_outbox(self, n: int, outbox: Outbox) -> None:
        """Publish other models of round n."""
        self.outbox = outbox

    aggregate_ = batched_aggregation.aggregate_batches_
    """LocalAggregation (Algorithm 2); no model is late."""

    def exchange(self, n: int, sampled: Sequence[Ragged], deadline: float | None) -> list[Inbox]:
        """Return the received models of each batch, which are in the buffer already.

        No model is late, so that `deadline` is not used.
        """
        pairs = zip(self.batches, sampled, strict=True)
        return [self.receive(n, peers, agents) for agents, peers in pairs]

    def receive(self, n: int, sampled: Ragged, receivers: AgentIds) -> Inbox:
        """Return the models that receivers get from their sampled peers."""
        assert self.outbox is not None, "nothing is published yet"
        return self.outbox.deliver(n, sampled, receivers, self.spec.max_samples)

    def mix_(self, decisions: Sequence[Decisions]) -> Bool[np.ndarray, " a"]:
        """Compute theta <- W theta for the group (Algorithm 2, line 7).

        The result is False for benign agents whose model is not finite.
        """
        layout = self.group.layout
        matrices = []
        for members, batch in zip(self.members, decisions, strict=True):
            previous = None if layout.previous is None else layout.previous[members]
            matrices.append(mixing_matrix(batch, layout.own[members], previous))
        self.mix_rows_(MixingMatrix.concatenate(matrices))
        # The model of an attacker may break: its own attack can do that.
        is_finite = self.group.data.malicious.copy()
        tasks = [(members,) for members in self.members]
        found = self.executor.map(_are_finite, tasks, self.fine_parts, self._kernels)
        for members, values in zip(self.members, found, strict=True):
            is_finite[members] |= values
        return is_finite

    def mix_rows_(self, matrix: MixingMatrix) -> None:
        """Mix rows of the buffer, with the columns shared out among the workers."""
        dim = self.spec.dim
        # Columns are shared out, and not rows: each new row depends on many old ones.
        tile = matrix.tile_columns
        if self.max_columns is None:
            count = self.executor.count
            step = -(-dim // (_TILES_PER_WORKER * count if count > 1 else 1))
        else:
            step = self.max_columns // tile * tile
        # Tasks consist of whole tiles.
        step = tile * max(1, -(-step // tile))
        mix = functools.partial(_mix_columns_, through_copy=self.max_columns is not None)
        tasks = [(matrix, start, min(start + step, dim)) for start in range(0, dim, step)]
        self.executor.map(mix, tasks)

    def evaluate(self) -> EvaluationResult:
        """Return the test results of the benign agents."""
        parts = balance_load(self._benign, self.costs, self.max_tasks)
        tasks = [(np.array(part, np.int64),) for part in parts]
        with self._forbid_writes("model"):
            results = self.executor.map(evaluate_models, tasks, settings=self._kernels)
        return EvaluationResult.concatenate(results)

    def persistent_state(self, state: AgentState) -> AgentState:
        """Return the state of all agents, which this process has entirely."""
        return state

    def persistent_models(self) -> Iterator[Float[Tensor, "k stride"]]:
        """Return the models that outlive a round, in whole cache lines.

        The agents' models are in the order of their ids; the cluster models, or the published ones
        where they are encoded, follow.
        """
        stride = row_stride(self.spec.dim)
        count = self.spec.num_agents
        clusters = self.spec.algorithm.clusters
        if clusters is not None:
            count += clusters.num_rows(count)
        elif self.group.layout.sent is not None:
            count += count
        yield self.group.models[:count].as_strided((count, stride), (stride, 1))

    def load_models_(self, models: Float[Tensor, "k stride"]) -> None:
        """Replace the models that outlive a round, in the order of `persistent_models`."""
        for rows in self.persistent_models():
            rows.copy_(models)

    @contextlib.contextmanager
    def _forbid_writes(self, *kinds: str, crafted: Indices = _NO_AGENTS) -> Iterator[None]:
        """Raise ConfigError if a user function of these kinds writes into models.

        Attackers may change the models that they craft.
        """
        guarded = []
        for kind in kinds:
            guarded += [f"{kind} `{name}`" for name in self.spec.user_functions.get(kind, ())]
        if not guarded:
            yield
            return

        models = self.group.models
        is_watched = np.ones(len(models), dtype=bool)
        for k in crafted.tolist():
            is_watched[self.group.layout.crafted_rows(k)] = False
        # Copies would take as much memory as all models. A checksum of each row before and after is
        # a pass at the speed of memory that no way of writing escapes.
        before = row_checksums(models)
        yield
        changed = row_checksums(models) != before
        if changed[torch.from_numpy(is_watched)].any():
            raise ConfigError(
                f"the {' or the '.join(guarded)} wrote into models that all agents share: "
                "let it write into copies, made by `.clone()`"
            )


def _craft_models_(
    group: AgentGroup,
    members: Indices,
    n: int,
    is_finite: Bool[np.ndarray, " N"],
    peek: Peek | None,
) -> list[Float[np.ndarray, " r"]]:
    """Craft models of attackers; by default they see the rows of the buffer."""

    def peek_buffer(ids: list[int]) -> Float[Tensor, "m d"]:
        return gather_rows(group.models, group.layout.own[ids].tolist())

    return craft_models_(group, members, n, is_finite, peek or peek_buffer)


def _are_finite(group: AgentGroup, members: Members) -> Bool[np.ndarray, " a"]:
    return are_finite(group.models, group.layout.own[members].tolist())


def _mix_columns_(
    group: AgentGroup, matrix: MixingMatrix, start: int, stop: int, *, through_copy: bool
) -> None:
    mix_(group.models, matrix, start, stop, through_copy=through_copy)
