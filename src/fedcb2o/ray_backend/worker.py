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

from fedcb2o.federated.admission import extents
from fedcb2o.federated.agent_group import Block
from fedcb2o.federated.algorithm2 import decide
from fedcb2o.federated.contacts import Memory
from fedcb2o.federated.decisions import Choices
from fedcb2o.federated.metrics import Tested
from fedcb2o.federated.mixing import mix_, mixture
from fedcb2o.federated.publishing import craft_
from fedcb2o.federated.ragged import Places
from fedcb2o.federated.types import State
from fedcb2o.federated.validation import tested
from fedcb2o.kernels import devices, onednn
from fedcb2o.nn.parameters import SMALL, row_stride
from fedcb2o.parallel import resources
from fedcb2o.parallel.process_pool import answered
from fedcb2o.ray_backend.code_shipping import look_in
from fedcb2o.ray_backend.sharding import most_received
from fedcb2o.ray_backend.transfers import PARCEL
from fedcb2o.simulation.local_engine import on_parts
from fedcb2o.simulation.write_guard import JUDGES, only_shown

Make = Callable[[Mapping[str, Tensor], Sequence[int]], Block]
"""The data, and the ids of some agents, ascending -> these as a block, with a pool without rows. The models of these
agents are the first rows of the pool that it is to have."""
First = Callable[[Mapping[str, Tensor], Float[Tensor, "a d"], Sequence[int]], None]
"""The data, rows and ids -> the rows filled with the first models of these agents."""

AT_ONCE = 2**28  # bytes of others' models that are held in the store at once for being copied from there


class Kept(Mapping[str, Tensor]):
    """What the rule of an agent keeps, in the place of that: it can be as large as models, and stays where the agent
    is. `recall` gets the states of all agents by their ids; what is sent to another process has none."""

    def __init__(self, agent: int, recall: Callable[[], Mapping[int, State]] | None = None) -> None:
        self.agent, self.recall = agent, recall

    def __reduce__(self) -> Any:
        return Kept, (self.agent,)

    def __getitem__(self, name: str) -> Tensor:
        return self._state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    @property
    def _state(self) -> State:
        assert self.recall is not None
        return self.recall()[self.agent]


class Holder:
    """The agents of one actor."""

    block: Block
    rows: Float[Tensor, "rows stride"]  # the pool, in whole cache lines
    states: dict[int, State]  # what the agents' rules keep, by their ids

    def __init__(self, path: Sequence[str]) -> None:
        look_in(path)  # where users' functions lie
        torch.set_num_threads(1)
        self.lent: Sequence[Any] = ()

    def do(self, content: bytes, lent: Sequence[Any] = ()) -> tuple[bytes, float]:
        """What a packed (method, arguments) comes to, and the seconds that it took; `lent` are references to parcels of
        models of others."""
        began, self.lent = time.perf_counter(), lent
        try:
            return answered(content, self), time.perf_counter() - began
        finally:
            self.lent = ()

    def begin(self, make: Make, agents: Sequence[int], own: Mapping[str, Sequence[str]]) -> None:
        """Make the block, from the data that are lent."""
        self.tensors = {name: tensor_of(array) for name, array in ray.get(self.lent[0]).items()}
        self.own, self.block, self.states = own, make(self.tensors, agents), {}
        dim, device = self.block.terms.dim, self.block.pool.device
        self.open = contextlib.ExitStack()
        self.open.enter_context(devices.repeatable(device))
        if dim >= onednn.LARGE:
            resources.keep_memory()
        # As for a real peer, memory is taken for those rows of the inbox alone that are written to.
        inbox = most_received(self.block.terms, self.block.attackers, agents, self.block.layout.each)
        self.rows = torch.empty(self.block.layout.inbox + inbox, row_stride(dim), device=device)
        self.rows[: self.block.layout.inbox] = 0
        self.block = dataclasses.replace(self.block, pool=self.rows[:, :dim])

    def begin_models(self, first: First) -> None:
        """Fill the rows of the agents with their first models."""
        agents = self.block.agents.tolist()
        first(self.tensors, self.block.pool[: len(agents)], agents)

    def each(
        self, function: Callable[..., Any], parts: Sequence[tuple[Any, ...]], common: tuple[Any, ...]
    ) -> list[Any]:
        """What a function finds for each of some parts of the agents."""
        return on_parts(self.block, function, parts, common)

    def decide(self, parts: Sequence[tuple[Any, ...]], common: tuple[Any, ...]) -> list[tuple[Memory, Choices]]:
        """Lines 3 to 6 for each of some parts of the agents; what their rules keep stays here."""
        remembers = self.block.terms.algorithm.remembers
        if remembers:
            parts = [(some, self._recalled(memory), *more) for some, memory, *more in parts]
        with self._shown(*JUDGES):
            found = on_parts(self.block, decide, parts, common)
        if remembers:
            found = [
                (self._keeping(some, memory), choices)
                for (some, *_), (memory, choices) in zip(parts, found, strict=True)
            ]
        return found

    def _recalled(self, memory: Memory) -> Memory:
        """The same with what is kept here."""
        states = (self.states[state.agent] if isinstance(state, Kept) else state for state in memory.states)
        return dataclasses.replace(memory, states=tuple(states))

    def _keeping(self, some: Places, memory: Memory) -> Memory:
        """The same without what is kept from now on."""
        states = dict(zip(self.block.agents[some].tolist(), memory.states, strict=True))
        self.states |= states
        return dataclasses.replace(memory, states=tuple(Kept(j) if state else state for j, state in states.items()))

    def kept(self) -> dict[int, State]:
        """What the rules of the agents keep, by their ids."""
        return self.states

    def craft(
        self,
        n: int,
        finite: Bool[np.ndarray, " N"],
        ids: Sequence[Int[np.ndarray, " _k"]],
        places: Sequence[Places],
    ) -> list[Float[np.ndarray, " r"]]:
        """What the attackers here craft, who may look at what is lent: of agents elsewhere the models with these `ids`,
        in these `places` of each parcel."""
        block, attackers = self.block, np.flatnonzero(self.block.holdings.malicious)
        parcel, row = np.full((2, block.terms.num_agents), -1)  # where the model of each agent lies, -1: in the pool
        row[block.agents] = block.layout.own
        for p, (some, there) in enumerate(zip(ids, places, strict=True)):
            parcel[some], row[some] = p, there

        def look(ids: list[int]) -> Float[Tensor, "m d"]:
            found = block.pool.new_zeros(len(ids), self.rows.shape[1])[:, : block.terms.dim]
            needed = np.unique(parcel[ids]).tolist()
            lent = ray.get([self.lent[p] for p in needed if p >= 0])
            sources = [block.pool] * (-1 in needed) + [tensor_of(array) for array in lent]
            for p, source in zip(needed, sources, strict=True):
                to = np.flatnonzero(parcel[ids] == p)
                _copy_rows_(found, to, source, row[ids][to])
            return found

        with self._shown("attack", "model", crafted=attackers):
            return on_parts(block, craft_, [(attackers, n, finite, look)], ())[0]

    def lend(self, *parcels: Int[np.ndarray, " _k"]) -> Any:
        """Some rows of the pool, in parcels: one, or as many results as there are."""
        pool = self.block.pool
        found = [
            (pool[rows[0] : rows[0] + 1] if len(rows) == 1 else pool[torch.from_numpy(rows)]).cpu().numpy()
            for rows in parcels
        ]
        return found if len(found) > 1 else found[0]

    def receive(self, places: Sequence[Places]) -> None:
        """Copy what was lent, in these places of each parcel, into the inbox."""
        self._copy(self.block.layout.inbox, places)

    def restore(self, first: int) -> None:
        """Copy what was lent, whole, into the rows of the agents from a first one on."""
        self._copy(first, [None] * len(self.lent))

    def _copy(self, first: int, places: Sequence[Places | None]) -> None:
        pool = self.block.pool
        most = max(1, AT_ONCE // max(PARCEL, 4 * pool.shape[1]))
        for k in range(0, len(places), most):
            for array, some in zip(ray.get(list(self.lent[k : k + most])), places[k : k + most], strict=True):
                models = tensor_of(array)
                models = models if some is None or len(some) == len(models) else models[torch.from_numpy(some)]
                pool[first : first + len(models)] = models
                first += len(models)

    def mix(self, choices: Choices) -> Bool[np.ndarray, " a"]:
        """theta <- W theta for the agents here; whose models are finite then."""
        pool, layout = self.block.pool, self.block.layout
        mix_(pool, mixture(choices, layout.own, layout.before), 0, pool.shape[1])
        found: np.ndarray = np.isfinite(extents(pool, layout.own.tolist()))
        return found

    def evaluate(self) -> dict[int, Tested]:
        """What the models of the benign agents here do in their tests, by their ids."""
        benign = np.flatnonzero(~self.block.holdings.malicious)
        with self._shown("model"):
            (found,) = on_parts(self.block, tested, [(benign,)], ())
        return dict(zip(self.block.agents[benign].tolist(), found, strict=True))

    def _shown(self, *kinds: str, crafted: Places | None = None) -> contextlib.AbstractContextManager[None]:
        return only_shown(self.block, self.own, *kinds, crafted=crafted)


def _copy_rows_(found: Float[Tensor, "q d"], to: Places, models: Float[Tensor, "p d"], rows: Places) -> None:
    """Copy some rows of models to some rows of others."""
    if models.shape[1] < SMALL:
        found[torch.from_numpy(to)] = models[torch.from_numpy(rows)].to(found)
    else:  # without another copy of all
        torch._foreach_copy_([found[k] for k in to.tolist()], [models[k] for k in rows.tolist()])


def tensor_of(array: Any) -> Tensor:
    """An array of Ray's store as a tensor, which is not to be written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
