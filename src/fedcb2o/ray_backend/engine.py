"""The engine of a run whose agents are spread over actors.

It knows all agents as one block, whose pool is empty: a row of that is here a number for a row of some actor's pool.
Only losses and choices come to it.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fedcb2o.federated.admission import within
from fedcb2o.federated.agent_group import Block
from fedcb2o.federated.algorithm2 import decide
from fedcb2o.federated.batched_training import teams_of
from fedcb2o.federated.contacts import Memory
from fedcb2o.federated.decisions import Choices, Inbox
from fedcb2o.federated.metrics import Tested
from fedcb2o.federated.publishing import outbox
from fedcb2o.federated.ragged import Lists
from fedcb2o.federated.types import State
from fedcb2o.nn.parameters import row_stride
from fedcb2o.ray_backend.actors import Actors
from fedcb2o.ray_backend.sharding import Shares
from fedcb2o.ray_backend.transfers import PARCEL
from fedcb2o.ray_backend.worker import First, Holder, Kept, Make, tensor_of

STREAMED = 2**26  # bytes of models that are on their way from or to a checkpoint at once


class Cluster:
    """All agents of a run as one `block`, shared out among `actors`, each `on` some node."""

    def __init__(self, block: Block, shares: Sequence[Sequence[int]], actors: Sequence[Any], on: Sequence[str]) -> None:
        self.block, self.terms, self.attackers = block, block.terms, block.attackers
        self.shares, nodes = Shares.of(block, shares), [sorted({*on}).index(node) for node in on]
        self.actors = Actors(actors, self.shares, np.array(nodes), 4 * self.terms.dim)
        costs = block.holdings.train.sizes.tolist()
        self.parts = [np.array(team) for team in teams_of(self.terms, costs)]
        homes = self.shares.owner[[block.layout.own[part[0]] for part in self.parts]]
        self.at = [np.flatnonzero(homes == b).tolist() for b in range(len(actors))]  # which parts are each actor's
        self.good, self.outbox = np.zeros(block.layout.inbox, dtype=bool), outbox(block, 0)  # until all publish
        self.decided = 0  # rounds

    def begin(self, make: Make, data: Mapping[str, Tensor], own: Mapping[str, Sequence[str]]) -> None:
        """Have the actors make their blocks, from data that each node gets once."""
        lent = [self.actors.put({name: tensor.numpy() for name, tensor in data.items()})]
        tasks = [(make, agents.tolist(), own) for agents in self.shares.agents]
        self.actors.do(Holder.begin, tasks, [lent] * len(tasks))

    def begin_models(self, first: First) -> None:
        """Have the actors fill the rows of their agents with the first models."""
        self.actors.everybody(Holder.begin_models, first)

    def each(self, function: Callable[..., Any], *common: Any, own: Sequence[Sequence[Any]] = ()) -> list[Any]:
        """What a function finds for each part, where its agents are."""
        tasks = list[tuple[Any, ...]]()
        for mine, agents in zip(self.at, self.shares.agents, strict=True):
            parts = [(agents.searchsorted(self.parts[g]), *(each[g] for each in own)) for g in mine]
            tasks.append((parts, common) if function is decide else (function, parts, common))
        found = self.actors.do(Holder.decide if function is decide else Holder.each, tasks)
        done = {
            g: one for mine, theirs in zip(self.at, found, strict=True) for g, one in zip(mine, theirs, strict=True)
        }
        result = [done[g] for g in range(len(self.parts))]
        return self._kept(result) if function is decide and self.terms.algorithm.remembers else result

    def _kept(self, decided: Sequence[tuple[Memory, Choices]]) -> list[tuple[Memory, Choices]]:
        """What parts decided. What their rules keep stays where they are, and comes when it is looked at, which may be
        until the next round's is there."""
        self.decided += 1
        recall = functools.cache(functools.partial(self._states, self.decided))

        def told(memory: Memory) -> Memory:
            states = (Kept(each.agent, recall) if isinstance(each, Kept) else each for each in memory.states)
            return dataclasses.replace(memory, states=tuple(states))

        return [(told(memory), choices) for memory, choices in decided]

    def _states(self, decided: int) -> dict[int, State]:
        """What the rules of all agents keep, after so many rounds."""
        assert decided == self.decided, "what rules kept after another round"
        return {j: state for found in self.actors.everybody(Holder.kept) for j, state in found.items()}

    def publish_(self, n: int, online: Bool[np.ndarray, " N"], sizes: Float[np.ndarray, " N"]) -> None:
        """Have the attackers craft, who are lent what they may look at; of each row, whether it is received."""
        layout = self.block.layout
        good = np.zeros(layout.inbox, dtype=bool)
        good[layout.own] = within(sizes) & online
        if self.attackers.attack.crafts(n):
            for j, extents in self._crafted(n, np.isfinite(sizes)):
                good[layout.crafted(j)] = within(extents) & online[j]
        self.good, self.outbox = good, outbox(self.block, n)

    def _crafted(self, n: int, finite: Bool[np.ndarray, " N"]) -> Iterator[tuple[int, Float[np.ndarray, " r"]]]:
        """The extents of what each attacker crafts."""
        attackers, agents = self.attackers, self.shares.agents
        bad = [ids[attackers.malicious[ids]] for ids in agents]
        looks = [attackers.benign] * ("benign" in attackers.attack.threat.knows)
        looks += [attackers.ids] * ("fellows" in attackers.attack.threat.knows)
        seen = np.sort(np.concatenate([np.zeros(0, np.int64), *looks]))
        seen = seen[finite[seen]]
        wanted = [np.setdiff1d(seen, ids) if len(some) else seen[:0] for ids, some in zip(agents, bad, strict=True)]
        lent = self.actors.lend(wanted)
        tasks = [
            (n, finite, theirs.rows, theirs.places) if len(some) else None
            for some, theirs in zip(bad, lent, strict=True)
        ]
        found = self.actors.do(Holder.craft, tasks, [each.refs for each in lent])
        for some, theirs in zip(bad, found, strict=True):
            yield from zip(some.tolist(), theirs or (), strict=True)

    def exchange(self, n: int, asked: Sequence[Lists], deadline: float | None) -> list[Inbox]:
        """What agents receive in round n: one batch for each actor, of the rows that its agents asked others for."""
        arrived = [
            self.outbox.arrived(n, ids, part, self.good, self.terms.most_samples)
            for part, ids in zip(self.parts, asked, strict=True)
        ]
        wanted = [np.unique(np.concatenate([arrived[g].rows for g in mine])) for mine in self.at]
        wanted = [rows[self.shares.owner[rows] != b] for b, rows in enumerate(wanted)]
        lent = self.actors.lend(wanted)
        self.actors.do(Holder.receive, [(each.places,) for each in lent], [each.refs for each in lent])
        for b, mine in enumerate(self.at):
            rows = Lists.of([arrived[g].rows for g in mine])
            here = self.shares.here(b, rows.values, np.concatenate([wanted[b][:0], *lent[b].rows]))
            for g, each in zip(mine, rows.having(here), strict=True):
                arrived[g] = dataclasses.replace(arrived[g], rows=each)
        return arrived

    def mix_(self, choices: Sequence[Choices]) -> Bool[np.ndarray, " N"]:
        """theta <- W theta, by each actor for its agents."""
        finite = np.ones(self.terms.num_agents, dtype=bool)
        tasks = [(Choices.join([choices[g] for g in mine]),) for mine in self.at]
        for agents, theirs in zip(self.shares.agents, self.actors.do(Holder.mix, tasks), strict=True):
            finite[agents] = theirs
        return finite

    def evaluate(self) -> dict[int, Tested]:
        """What each benign agent's model does in its test."""
        return {j: each for found in self.actors.everybody(Holder.evaluate) for j, each in found.items()}

    def models(self) -> Iterator[Float[Tensor, "k stride"]]:
        """The models of all agents in their order, some at a time, in whole cache lines."""
        most = max(1, PARCEL // self.actors.size)
        for ids in self._some():
            parcels = [
                (b, mine[k : k + most])
                for b in np.unique(self.shares.owner[ids]).tolist()
                for mine in [ids[self.shares.owner[ids] == b]]
                for k in range(0, len(mine), most)
            ]
            models = torch.zeros(len(ids), row_stride(self.terms.dim))
            for (_, mine), array in zip(parcels, self.actors.get(self.actors.refs(parcels)), strict=True):
                models[torch.from_numpy(mine - ids[0]), : self.terms.dim] = tensor_of(array)
            yield models

    def fill_(self, models: Float[Tensor, "N stride"]) -> None:
        """Give all agents these models."""
        for ids in self._some():
            homes = self.shares.owner[ids]
            tasks, lent = list[Any](), list[Any]()
            for b, agents in enumerate(self.shares.agents):
                mine = ids[homes == b]  # which follow each other there
                tasks.append((int(agents.searchsorted(mine[0])),) if len(mine) else None)
                content = models[torch.from_numpy(mine), : self.terms.dim]
                lent.append([self.actors.put(content.numpy())] if len(mine) else [])
            self.actors.do(Holder.restore, tasks, lent)

    def _some(self) -> Iterator[Int[np.ndarray, " k"]]:
        """The ids of all agents, so many at a time as may be on their way."""
        everybody, most = np.arange(self.terms.num_agents), max(1, STREAMED // self.actors.size)
        for k in range(0, len(everybody), most):
            yield everybody[k : k + most]
