"""What an actor does: it holds a block of agents, with a pool of its own [own models | crafted | before | inbox].

It is told everything by the engine. Models go from one actor to another through Ray's store; all else goes by pipe, as
between the processes of one machine, so that errors come back as they were raised.
"""

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import ray
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fedcb2o.federated.admission import max_abs
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.collusion import decide
from fedcb2o.federated.contacts import AgentState
from fedcb2o.federated.decisions import Decisions
from fedcb2o.federated.metrics import EvaluationResult
from fedcb2o.federated.mixing import mix_, mixing_matrix
from fedcb2o.federated.publishing import craft_models_
from fedcb2o.federated.ragged import Indices
from fedcb2o.federated.types import RuleState
from fedcb2o.federated.validation import evaluate_models
from fedcb2o.kernels import devices, onednn
from fedcb2o.nn.parameters import MIN_FOREACH_SIZE, row_stride
from fedcb2o.parallel import resources
from fedcb2o.parallel.serialization import execute
from fedcb2o.ray_backend.code_shipping import extend_sys_path
from fedcb2o.ray_backend.sharding import max_received
from fedcb2o.ray_backend.transfers import MAX_TRANSFER_BYTES
from fedcb2o.simulation.local_engine import run_on_groups
from fedcb2o.simulation.write_guard import AGGREGATION_KINDS, forbid_writes

MakeGroup = Callable[[Mapping[str, Tensor], Sequence[int]], AgentGroup]
"""The data, and the ids of some agents, ascending -> these as a block, with a pool without rows. The models of these
agents are the first rows of the pool that it is to have."""
InitModels = Callable[[Mapping[str, Tensor], Float[Tensor, "a d"], Sequence[int]], None]
"""The data, rows and ids -> the rows filled with the first models of these agents."""

MAX_PINNED_BYTES = (
    2**28
)  # bytes of others' models that are held in the store at once for being copied from there


class RemoteState(Mapping[str, Tensor]):
    """What the rule of an agent keeps, in the place of that: it can be as large as models, and stays where the agent
    is. `recall` gets the states of all agents by their ids; what is sent to another process has none."""

    def __init__(
        self, agent: int, recall: Callable[[], Mapping[int, RuleState]] | None = None
    ) -> None:
        self.agent = agent
        self.fetch = recall

    def __reduce__(self) -> Any:
        return RemoteState, (self.agent,)

    def __getitem__(self, name: str) -> Tensor:
        return self._state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    @property
    def _state(self) -> RuleState:
        assert self.fetch is not None
        return self.fetch()[self.agent]


class AgentWorker:
    """The agents of one actor."""

    group: AgentGroup
    rows: Float[Tensor, "rows stride"]  # the pool, in whole cache lines
    states: dict[int, RuleState]  # what the agents' rules keep, by their ids

    def __init__(self, path: Sequence[str]) -> None:
        extend_sys_path(path)  # where users' functions lie
        torch.set_num_threads(1)
        self.loans: Sequence[Any] = ()

    def execute(self, content: bytes, loans: Sequence[Any] = ()) -> tuple[bytes, float]:
        """What a packed (method, arguments) comes to, and the seconds that it took; `lent` are references to parcels of
        models of others."""
        began = time.perf_counter()
        self.loans = loans
        try:
            return execute(content, self), time.perf_counter() - began
        finally:
            self.loans = ()

    def build_group(
        self, make: MakeGroup, agents: Sequence[int], own: Mapping[str, Sequence[str]]
    ) -> None:
        """Make the block, from the data that are lent."""
        self.tensors = {name: as_tensor(array) for name, array in ray.get(self.loans[0]).items()}
        self.user_functions, self.group, self.states = own, make(self.tensors, agents), {}
        dim = self.group.spec.dim
        device = self.group.models.device
        self.open = contextlib.ExitStack()
        self.open.enter_context(devices.deterministic(device))
        if dim >= onednn.MIN_WEIGHTS:
            resources.retain_freed_memory()
        # As for a real peer, memory is taken for those rows of the inbox alone that are written to.
        inbox = max_received(
            self.group.spec, self.group.adversary, agents, self.group.layout.crafted_per_attacker
        )
        self.rows = torch.empty(
            self.group.layout.first_received + inbox, row_stride(dim), device=device
        )
        self.rows[: self.group.layout.first_received] = 0
        self.group = dataclasses.replace(self.group, models=self.rows[:, :dim])

    def init_models(self, first: InitModels) -> None:
        """Fill the rows of the agents with their first models."""
        agents = self.group.agents.tolist()
        first(self.tensors, self.group.models[: len(agents)], agents)

    def map_groups(
        self,
        function: Callable[..., Any],
        parts: Sequence[tuple[Any, ...]],
        common: tuple[Any, ...],
    ) -> list[Any]:
        """What a function finds for each of some parts of the agents."""
        return run_on_groups(self.group, function, parts, common)

    def decide(
        self, parts: Sequence[tuple[Any, ...]], common: tuple[Any, ...]
    ) -> list[tuple[AgentState, Decisions]]:
        """Lines 3 to 6 for each of some parts of the agents; what their rules keep stays here."""
        remembers = self.group.spec.algorithm.is_stateful
        if remembers:
            parts = [(some, self._with_states(memory), *more) for some, memory, *more in parts]
        with self._guard(*AGGREGATION_KINDS):
            found = run_on_groups(self.group, decide, parts, common)
        if remembers:
            found = [
                (self._without_states(some, memory), choices)
                for (some, *_), (memory, choices) in zip(parts, found, strict=True)
            ]
        return found

    def _with_states(self, memory: AgentState) -> AgentState:
        """The same with what is kept here."""
        states = (
            self.states[state.agent] if isinstance(state, RemoteState) else state
            for state in memory.rule_states
        )
        return dataclasses.replace(memory, rule_states=tuple(states))

    def _without_states(self, some: Indices, memory: AgentState) -> AgentState:
        """The same without what is kept from now on."""
        states = dict(zip(self.group.agents[some].tolist(), memory.rule_states, strict=True))
        self.states |= states
        return dataclasses.replace(
            memory,
            rule_states=tuple(RemoteState(j) if state else state for j, state in states.items()),
        )

    def rule_states(self) -> dict[int, RuleState]:
        """What the rules of the agents keep, by their ids."""
        return self.states

    def craft_models(
        self,
        n: int,
        finite: Bool[np.ndarray, " N"],
        ids: Sequence[Int[np.ndarray, " _k"]],
        places: Sequence[Indices],
    ) -> list[Float[np.ndarray, " r"]]:
        """What the attackers here craft, who may look at what is lent: of agents elsewhere the models with these `ids`,
        in these `places` of each parcel."""
        block = self.group
        attackers = np.flatnonzero(self.group.data.malicious)
        parcel, row = np.full(
            (2, block.spec.num_agents), -1
        )  # where the model of each agent lies, -1: in the pool
        row[block.agents] = block.layout.own
        for p, (some, there) in enumerate(zip(ids, places, strict=True)):
            parcel[some], row[some] = p, there

        def look(ids: list[int]) -> Float[Tensor, "m d"]:
            found = block.models.new_zeros(len(ids), self.rows.shape[1])[:, : block.spec.dim]
            needed = np.unique(parcel[ids]).tolist()
            lent = ray.get([self.loans[p] for p in needed if p >= 0])
            sources = [block.models] * (-1 in needed) + [as_tensor(array) for array in lent]
            for p, source in zip(needed, sources, strict=True):
                to = np.flatnonzero(parcel[ids] == p)
                _copy_rows_(found, to, source, row[ids][to])
            return found

        with self._guard("attack", "model", crafted=attackers):
            return run_on_groups(block, craft_models_, [(attackers, n, finite, look)], ())[0]

    def export_rows(self, *parcels: Int[np.ndarray, " _k"]) -> Any:
        """Some rows of the pool, in parcels: one, or as many results as there are."""
        pool = self.group.models
        found = [
            (pool[rows[0] : rows[0] + 1] if len(rows) == 1 else pool[torch.from_numpy(rows)])
            .cpu()
            .numpy()
            for rows in parcels
        ]
        return found if len(found) > 1 else found[0]

    def import_rows(self, places: Sequence[Indices]) -> None:
        """Copy what was lent, in these places of each parcel, into the inbox."""
        self._copy_loans(self.group.layout.first_received, places)

    def load_rows(self, first: int) -> None:
        """Copy what was lent, whole, into the rows of the agents from a first one on."""
        self._copy_loans(first, [None] * len(self.loans))

    def _copy_loans(self, first: int, places: Sequence[Indices | None]) -> None:
        pool = self.group.models
        most = max(1, MAX_PINNED_BYTES // max(MAX_TRANSFER_BYTES, 4 * pool.shape[1]))
        for k in range(0, len(places), most):
            for array, some in zip(
                ray.get(list(self.loans[k : k + most])), places[k : k + most], strict=True
            ):
                models = as_tensor(array)
                models = (
                    models
                    if some is None or len(some) == len(models)
                    else models[torch.from_numpy(some)]
                )
                pool[first : first + len(models)] = models
                first += len(models)

    def mix(self, choices: Decisions) -> Bool[np.ndarray, " a"]:
        """theta <- W theta for the agents here; whose models are finite then."""
        pool = self.group.models
        layout = self.group.layout
        mix_(pool, mixing_matrix(choices, layout.own, layout.previous), 0, pool.shape[1])
        found: np.ndarray = np.isfinite(max_abs(pool, layout.own.tolist()))
        return found

    def evaluate(self) -> dict[int, EvaluationResult]:
        """What the models of the benign agents here do in their tests, by their ids."""
        benign = np.flatnonzero(~self.group.data.malicious)
        with self._guard("model"):
            (found,) = run_on_groups(self.group, evaluate_models, [(benign,)], ())
        return dict(zip(self.group.agents[benign].tolist(), found, strict=True))

    def _guard(
        self, *kinds: str, crafted: Indices | None = None
    ) -> contextlib.AbstractContextManager[None]:
        return forbid_writes(self.group, self.user_functions, *kinds, crafted=crafted)


def _copy_rows_(
    found: Float[Tensor, "q d"], to: Indices, models: Float[Tensor, "p d"], rows: Indices
) -> None:
    """Copy some rows of models to some rows of others."""
    if models.shape[1] < MIN_FOREACH_SIZE:
        found[torch.from_numpy(to)] = models[torch.from_numpy(rows)].to(found)
    else:  # without another copy of all
        torch._foreach_copy_([found[k] for k in to.tolist()], [models[k] for k in rows.tolist()])


def as_tensor(array: Any) -> Tensor:
    """An array of Ray's store as a tensor, which is not to be written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
