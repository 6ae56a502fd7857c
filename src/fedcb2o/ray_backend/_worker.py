"""The worker of a cluster: a local engine of its group of agents, with rows received from others.

The layout of its model buffer is [own models | crafted | previous | received].
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

from fedcb2o.federated import trigger_exchange
from fedcb2o.federated.adversary import Adversary
from fedcb2o.federated.agent_group import AgentGroup, BufferLayout, Phase
from fedcb2o.federated.contacts import AgentState
from fedcb2o.federated.ragged import Indices, Members, Ragged
from fedcb2o.federated.run_spec import RunSpec
from fedcb2o.federated.types import RuleState
from fedcb2o.kernels import _onednn, devices
from fedcb2o.nn.parameters import MIN_FOREACH_SIZE, row_stride
from fedcb2o.parallel import _resources
from fedcb2o.parallel._executors import SerialExecutor
from fedcb2o.parallel._serialization import execute
from fedcb2o.ray_backend._transfers import MAX_TRANSFER_BYTES
from fedcb2o.ray_backend._user_code import extend_sys_path
from fedcb2o.simulation.local_engine import LocalEngine

MakeGroup = Callable[[Mapping[str, Tensor], Sequence[int]], AgentGroup]
"""Builds the group of some agents, with an empty model buffer, from the data and their ids."""
InitModels = Callable[[Mapping[str, Tensor], Float[Tensor, "a d"], Sequence[int]], None]
"""Fills rows with the initial models of agents, from the data, the rows and the ids."""

MAX_PINNED_BYTES = 2**28  # of rows that a worker reads from the store at once


class AgentWorker:
    """The actor of a group of agents.

    `models` is the model buffer. `states` has the state of each agent's rule, by its id, from its
    first call on. `refs` are references to transfers of other workers' rows, during a call.
    """

    engine: LocalEngine
    models: Float[Tensor, "rows d"]
    states: dict[int, RuleState]
    refs: Sequence[Any] = ()

    def __init__(self, path: Sequence[str]) -> None:
        extend_sys_path(path)
        torch.set_num_threads(1)

    def execute(self, content: bytes, refs: Sequence[Any]) -> tuple[bytes, float]:
        """Call a method of this worker, serialized with its arguments.

        Returns the serialized outcome, and the seconds of the call.
        """
        start = time.perf_counter()
        self.refs = refs
        try:
            return execute(content, self), time.perf_counter() - start
        finally:
            # The store may drop the rows.
            self.refs = ()

    def build_group(
        self, make: MakeGroup, agents: Sequence[int], members: Sequence[Members]
    ) -> BufferLayout:
        """Build the engine of the agents, given by ascending ids, from the loaned data.

        `members` has one array per batch. Returns the layout of the model buffer.
        """
        self.tensors = {name: as_tensor(array) for name, array in ray.get(self.refs[0]).items()}
        self.states = {}
        group = make(self.tensors, agents)
        spec = group.spec
        device = group.models.device
        self._context = contextlib.ExitStack()
        self._context.enter_context(devices.deterministic(device))
        if spec.dim >= _onednn.MIN_WEIGHTS:
            _resources.retain_freed_memory()

        # The system gives memory only to those rows of the inbox that are written to.
        layout = group.layout
        assert group.adversary is not None
        received = max_received(spec, group.adversary, agents, layout.crafted_per_attacker)
        rows = torch.empty(layout.first_received + received, row_stride(spec.dim), device=device)
        rows[: layout.first_received] = 0
        self.models = rows[:, : spec.dim]
        group = dataclasses.replace(group, models=self.models)
        self.engine = LocalEngine(group, SerialExecutor(group), members=members)
        return layout

    def init_models(self, init: InitModels) -> None:
        """Fill the rows of the agents with their initial models."""
        agents = self.engine.group.agents.tolist()
        own = self.models[: len(agents)]
        init(self.tensors, own, agents)
        if self.engine.group.layout.sent is not None:
            self.models[len(agents) : 2 * len(agents)] = own

    def call_engine(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of this worker's engine."""
        return method(self.engine, *arguments)

    def map_batches(
        self, phase: Phase, shared: tuple[Any, ...], arguments: Sequence[Sequence[Any]]
    ) -> list[Any]:
        """Call `LocalEngine.map_batches`; the states of rules stay in this worker.

        Each list of `arguments` has one value per batch.
        """
        if not phase.calls_rules or not self.engine.spec.algorithm.is_stateful:
            return self.engine.map_batches(phase, *shared, arguments=arguments)
        # States of rules can be as large as all models. The driver gets the triggers in them, and
        # gives its own in the first call only: after the start, or from a checkpoint.
        states, *others = arguments
        local = []
        for agents, state in zip(self.engine.batches, states, strict=True):
            pairs = zip(agents.tolist(), state.rule_states, strict=True)
            kept = tuple(
                {**self.states.get(agent, initial), **trigger_exchange.received_part(initial)}
                for agent, initial in pairs
            )
            local.append(AgentState(state.contacts, kept))
        results = self.engine.map_batches(phase, *shared, arguments=[local, *others])
        sent = []
        for agents, (state, decisions) in zip(self.engine.batches, results, strict=True):
            self.states.update(zip(agents.tolist(), state.rule_states, strict=True))
            published = tuple(trigger_exchange.published_part(kept) for kept in state.rule_states)
            sent.append((AgentState(state.contacts, published), decisions))
        return sent

    def craft_models(
        self,
        n: int,
        is_finite: Bool[np.ndarray, " N"],
        ids: Ragged,
    ) -> dict[int, Float[np.ndarray, " r"]]:
        """Craft the models of this worker's attackers, who see models of other workers.

        `ids` are the agents of the models in each transfer. Returns the largest absolute values of
        each attacker's models, by its id.
        """
        group = self.engine.group
        transfer = np.full(group.spec.num_agents, -1)  # of each agent's model; -1: the buffer
        row = np.full(group.spec.num_agents, -1)
        row[group.agents] = group.layout.own
        transfer[ids.values] = ids.list_index
        row[ids.values] = _positions(ids)

        # Read anew for each attacker, because the models of all agents may not fit in memory.
        def peek(asked: list[int]) -> Float[Tensor, "m d"]:
            models = group.models.new_zeros(len(asked), row_stride(group.spec.dim))
            models = models[:, : group.spec.dim]
            own = np.flatnonzero(transfer[asked] < 0)
            others = np.flatnonzero(transfer[asked] >= 0)
            _copy_rows_(models, own, group.models, row[asked][own])
            self._receive_(models, others, transfer[asked][others], row[asked][others])
            return models

        max_abs = self.engine.craft_models_(n, is_finite, peek)
        return {int(group.agents[k]): values for k, values in max_abs.items()}

    def export_rows(self, *transfers: Int[np.ndarray, " _k"]) -> Any:
        """Return rows of the buffer: one array, or one per transfer."""
        arrays = []
        for rows in transfers:
            # Of one row a view, because Ray copies it into the store.
            index = slice(rows[0], rows[0] + 1) if len(rows) == 1 else torch.from_numpy(rows)
            arrays.append(self.models[index].cpu().numpy())
        return arrays if len(arrays) > 1 else arrays[0]

    def import_rows(self, rows: Ragged) -> None:
        """Copy the rows of each transfer to `rows` of the buffer; those with -1 are for others."""
        own = np.flatnonzero(rows.values >= 0)
        transfer = rows.list_index[own]
        self._receive_(self.models, rows.values[own], transfer, _positions(rows)[own])

    def _receive_(
        self, target: Float[Tensor, "q d"], rows: Indices, transfer: Indices, positions: Indices
    ) -> None:
        """Copy rows of a target from positions in transfers."""
        needed = np.unique(transfer).tolist()
        # The store keeps the rows that are being read, so that only some are read at once.
        step = max(1, MAX_PINNED_BYTES // max(MAX_TRANSFER_BYTES, 4 * target.shape[1]))
        for start in range(0, len(needed), step):
            part = needed[start : start + step]
            for index, array in zip(part, ray.get([self.refs[k] for k in part]), strict=True):
                here = np.flatnonzero(transfer == index)
                _copy_rows_(target, rows[here], as_tensor(array), positions[here])


def max_received(
    spec: RunSpec, adversary: Adversary, agents: Sequence[int], crafted_per_attacker: int
) -> int:
    """Return the largest number of models that a worker's agents receive of others in a round.

    Each model is counted once.
    """
    others = spec.num_agents - len(agents)
    is_malicious = adversary.malicious
    attackers_elsewhere = int(is_malicious.sum() - is_malicious[list(agents)].sum())
    crafted = crafted_per_attacker * attackers_elsewhere
    # Each agent asks as many peers as it may, or each model of another worker arrives.
    return min(len(agents) * spec.max_asked, others + crafted)


def _positions(lists: Ragged) -> Indices:
    """Return the position of each number in its list."""
    positions: Indices = np.arange(len(lists.values)) - lists.offsets[lists.list_index]
    return positions


def as_tensor(array: Any) -> Tensor:
    """Return a read-only array of Ray's store as a read-only tensor."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _copy_rows_(
    target: Float[Tensor, "q d"], to: Indices, source: Float[Tensor, "p d"], rows: Indices
) -> None:
    if source.shape[1] < MIN_FOREACH_SIZE or not len(rows):
        target[torch.from_numpy(to)] = source[torch.from_numpy(rows)].to(target)
        return
    torch._foreach_copy_(  # without a temporary copy of all rows
        [target[k] for k in to.tolist()], [source[k] for k in rows.tolist()]
    )
