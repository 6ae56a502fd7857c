"""The worker of a cluster: a local engine of its group of agents, with rows received from others.

The layout of its model buffer is [own models | crafted | previous | received]. `RayEngine` sends it
calls as serialized tasks, so that errors arrive as they were raised. Models travel between workers
through Ray's store.
"""

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import ray
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fedcb2o.federated import (
    AgentGroup,
    AgentState,
    Indices,
    RuleState,
)
from fedcb2o.federated.agent_group import Phase
from fedcb2o.federated.ragged import AgentIds, Members
from fedcb2o.kernels import _onednn, devices
from fedcb2o.nn.parameters import MIN_FOREACH_SIZE, row_stride
from fedcb2o.parallel import _resources
from fedcb2o.parallel._executors import SerialExecutor
from fedcb2o.parallel._serialization import execute
from fedcb2o.ray_backend._code_shipping import extend_sys_path
from fedcb2o.ray_backend._sharding import max_received
from fedcb2o.ray_backend._transfers import MAX_TRANSFER_BYTES
from fedcb2o.simulation.local_engine import LocalEngine

MakeGroup = Callable[[Mapping[str, Tensor], Sequence[int]], AgentGroup]
"""Builds the group of some agents, with an empty model buffer, from the data and their ids."""
InitModels = Callable[[Mapping[str, Tensor], Float[Tensor, "a d"], Sequence[int]], None]
"""Fills rows with the initial models of agents, from the data, the rows and the ids."""

MAX_PINNED_BYTES = 2**28  # of rows that a worker reads from the store at once


class AgentWorker:
    """The actor of a group of agents.

    `rows` is the model buffer, in whole cache lines. `states` has the state of each agent's rule,
    by its id. `loans` are references to transfers of other workers' rows, during a call.
    """

    engine: LocalEngine
    rows: Float[Tensor, "rows stride"]
    states: dict[int, RuleState]
    loans: Sequence[Any] = ()

    def __init__(self, path: Sequence[str], archive: bytes) -> None:
        extend_sys_path(path, archive)
        torch.set_num_threads(1)

    def execute(self, content: bytes, loans: Sequence[Any] = ()) -> tuple[bytes, float]:
        """Call a method of this worker, serialized with its arguments.

        Returns the serialized outcome, and the seconds of the call. `loans` are references to
        transfers of other workers' rows.
        """
        start = time.perf_counter()
        self.loans = loans
        try:
            return execute(content, self), time.perf_counter() - start
        finally:
            self.loans = ()

    def build_group(
        self, make: MakeGroup, agents: Sequence[int], members: Sequence[Members]
    ) -> None:
        """Build the engine of the agents, given by ascending ids, from the loaned data.

        `members` has one array per batch.
        """
        self.tensors = {name: as_tensor(array) for name, array in ray.get(self.loans[0]).items()}
        self.states = {}
        group = make(self.tensors, agents)
        spec = group.spec
        device = group.models.device
        self._context = contextlib.ExitStack()
        self._context.enter_context(devices.deterministic(device))
        if spec.dim >= _onednn.MIN_WEIGHTS:
            _resources.retain_freed_memory()

        # The system gives memory only to those rows of the inbox that are written to.
        first_received = group.layout.first_received
        crafted = group.layout.crafted_per_attacker
        assert group.adversary is not None
        received = max_received(spec, group.adversary, agents, crafted)
        shape = first_received + received, row_stride(spec.dim)
        self.rows = torch.empty(shape, device=device)
        self.rows[:first_received] = 0
        group = dataclasses.replace(group, models=self.rows[:, : spec.dim])
        executor = SerialExecutor(group)
        self.engine = LocalEngine(group, executor, members=members)

    def init_models(self, init: InitModels) -> None:
        """Fill the rows of the agents with their initial models."""
        agents = self.engine.group.agents.tolist()
        init(self.tensors, self.engine.group.models[: len(agents)], agents)

    def map_batches(
        self, phase: Phase, shared: tuple[Any, ...], arguments: Sequence[Sequence[Any]]
    ) -> list[Any]:
        """Call `LocalEngine.map_batches`; the states of rules stay in this worker.

        Each list of `arguments` has one value per batch.
        """
        if not phase.calls_rules or not self.engine.spec.algorithm.is_stateful:
            return self.engine.map_batches(phase, *shared, arguments=arguments)
        states, *others = arguments
        local = []
        for agents, state in zip(self.engine.batches, states, strict=True):
            local.append(self._with_states(agents, state))
        results = self.engine.map_batches(phase, *shared, arguments=[local, *others])
        return [
            (self._without_states(agents, state), decisions)
            for agents, (state, decisions) in zip(self.engine.batches, results, strict=True)
        ]

    def craft_models(
        self,
        n: int,
        is_finite: Bool[np.ndarray, " N"],
        ids: Sequence[Int[np.ndarray, " _k"]],
        positions: Sequence[Indices],
    ) -> list[Float[np.ndarray, " r"]]:
        """Craft the models of this worker's attackers, who see loaned rows.

        For each transfer, `ids` are the agents of other workers whose models it contains, and
        `positions` those of their models in it. Returns the largest absolute values of each
        attacker's models, in the order of their ids.
        """
        group = self.engine.group
        source = np.full(group.spec.num_agents, -1)  # the transfer of each model; -1: the buffer
        row = np.full(group.spec.num_agents, -1)
        row[group.agents] = group.layout.own
        for index, (agents, places) in enumerate(zip(ids, positions, strict=True)):
            source[agents] = index
            row[agents] = places

        def peek(ids: list[int]) -> Float[Tensor, "m d"]:
            models = group.models.new_zeros(len(ids), self.rows.shape[1])[:, : group.spec.dim]
            for index in np.unique(source[ids]).tolist():
                origin = group.models if index < 0 else as_tensor(ray.get(self.loans[index]))
                targets = np.flatnonzero(source[ids] == index)
                _copy_rows_(models, targets, origin, row[ids][targets])
            return models

        max_abs = self.engine.craft_models_(n, is_finite, peek)
        return [max_abs[k] for k in sorted(max_abs)]

    def export_rows(self, *transfers: Int[np.ndarray, " _k"]) -> Any:
        """Return rows of the buffer: one array, or one per transfer."""
        models = self.engine.group.models
        arrays = []
        for rows in transfers:
            is_single = len(rows) == 1  # a view instead of a copy
            part = models[rows[0] : rows[0] + 1] if is_single else models[torch.from_numpy(rows)]
            arrays.append(part.cpu().numpy())
        return arrays if len(arrays) > 1 else arrays[0]

    def import_rows(self, first: int, positions: Sequence[Indices | None]) -> None:
        """Copy loaned rows to consecutive rows of the buffer, from `first` on.

        `positions` are those of the rows in each transfer; None for all its rows.
        """
        models = self.engine.group.models
        # The store keeps the rows that are being read, so that only some are read at once.
        step = max(1, MAX_PINNED_BYTES // max(MAX_TRANSFER_BYTES, 4 * models.shape[1]))
        for start in range(0, len(positions), step):
            arrays = ray.get(list(self.loans[start : start + step]))
            for array, rows in zip(arrays, positions[start : start + step], strict=True):
                received = as_tensor(array)
                if rows is not None and len(rows) != len(received):
                    received = received[torch.from_numpy(rows)]
                models[first : first + len(received)] = received
                first += len(received)

    def call_engine(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of this worker's engine."""
        return method(self.engine, *arguments)

    def _with_states(self, agents: AgentIds, state: AgentState) -> AgentState:
        """Replace the states of rules by those that this worker keeps, from the second call on."""
        pairs = zip(agents.tolist(), state.rule_states, strict=True)
        rule_states = tuple(self.states.get(agent, initial) for agent, initial in pairs)
        return dataclasses.replace(state, rule_states=rule_states)

    def _without_states(self, agents: AgentIds, state: AgentState) -> AgentState:
        """Keep the states of rules, and replace them by empty ones."""
        # The states can be large, so that they do not travel in each round.
        self.states.update(zip(agents.tolist(), state.rule_states, strict=True))
        return dataclasses.replace(state, rule_states=({},) * len(agents))


def as_tensor(array: Any) -> Tensor:
    """Return a read-only array of Ray's store as a read-only tensor."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _copy_rows_(
    target: Float[Tensor, "q d"], to: Indices, source: Float[Tensor, "p d"], rows: Indices
) -> None:
    if source.shape[1] < MIN_FOREACH_SIZE:
        target[torch.from_numpy(to)] = source[torch.from_numpy(rows)].to(target)
        return
    torch._foreach_copy_(  # without a temporary copy of all rows
        [target[k] for k in to.tolist()], [source[k] for k in rows.tolist()]
    )
