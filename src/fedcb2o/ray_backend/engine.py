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

from fedcb2o.federated.admission import is_admissible
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.batched_aggregation import local_aggregation_
from fedcb2o.federated.batched_training import plan_training_batches
from fedcb2o.federated.collusion import AdversarialEngine, decide
from fedcb2o.federated.contacts import AgentState
from fedcb2o.federated.decisions import Decisions, Inbox
from fedcb2o.federated.metrics import EvaluationResult
from fedcb2o.federated.publishing import make_outbox
from fedcb2o.federated.ragged import Ragged
from fedcb2o.federated.types import RuleState
from fedcb2o.nn.parameters import row_stride
from fedcb2o.ray_backend.actors import WorkerActors
from fedcb2o.ray_backend.sharding import Sharding
from fedcb2o.ray_backend.transfers import MAX_TRANSFER_BYTES
from fedcb2o.ray_backend.worker import AgentWorker, InitModels, MakeGroup, RemoteState, as_tensor

STREAM_BYTES = 2**26  # bytes of models that are on their way from or to a checkpoint at once


class RayEngine:
    """All agents of a run as one `block`, shared out among `actors`, each `on` some node."""

    def __init__(
        self,
        group: AgentGroup,
        shares: Sequence[Sequence[int]],
        actors: Sequence[Any],
        on: Sequence[str],
    ) -> None:
        self.group = group
        self.spec = group.spec
        self.adversary = group.adversary
        self.sharding, nodes = (
            Sharding.from_group(group, shares),
            [sorted({*on}).index(node) for node in on],
        )
        self.actors = WorkerActors(actors, self.sharding, np.array(nodes), 4 * self.spec.dim)
        costs = group.data.train.sizes.tolist()
        self.groups = [np.array(team) for team in plan_training_batches(self.spec, costs)]
        homes = self.sharding.owner[[group.layout.own[part[0]] for part in self.groups]]
        self.groups_by_worker = [
            np.flatnonzero(homes == b).tolist() for b in range(len(actors))
        ]  # which parts are each actor's
        self.is_received, self.outbox = (
            np.zeros(group.layout.first_received, dtype=bool),
            make_outbox(group, 0),
        )  # until all publish
        self.decided_rounds = 0  # rounds

    def build_groups(
        self, make: MakeGroup, data: Mapping[str, Tensor], own: Mapping[str, Sequence[str]]
    ) -> None:
        """Have the actors make their blocks, from data that each node gets once."""
        lent = [self.actors.put({name: tensor.numpy() for name, tensor in data.items()})]
        tasks = [(make, agents.tolist(), own) for agents in self.sharding.agents]
        self.actors.call(AgentWorker.build_group, tasks, [lent] * len(tasks))

    def init_models(self, first: InitModels) -> None:
        """Have the actors fill the rows of their agents with the first models."""
        self.actors.broadcast(AgentWorker.init_models, first)

    def map_groups(
        self, function: Callable[..., Any], *shared: Any, arguments: Sequence[Sequence[Any]] = ()
    ) -> list[Any]:
        """What a function finds for each part, where its agents are."""
        tasks = list[tuple[Any, ...]]()
        for mine, agents in zip(self.groups_by_worker, self.sharding.agents, strict=True):
            parts = [
                (agents.searchsorted(self.groups[g]), *(each[g] for each in arguments))
                for g in mine
            ]
            tasks.append((parts, shared) if function is decide else (function, parts, shared))
        found = self.actors.call(
            AgentWorker.decide if function is decide else AgentWorker.map_groups, tasks
        )
        done = {
            g: one
            for mine, theirs in zip(self.groups_by_worker, found, strict=True)
            for g, one in zip(mine, theirs, strict=True)
        }
        result = [done[g] for g in range(len(self.groups))]
        return (
            self._with_remote_states(result)
            if function is decide and self.spec.algorithm.is_stateful
            else result
        )

    def _with_remote_states(
        self, decided: Sequence[tuple[AgentState, Decisions]]
    ) -> list[tuple[AgentState, Decisions]]:
        """What parts decided. What their rules keep stays where they are, and comes when it is looked at, which may be
        until the next round's is there."""
        self.decided_rounds += 1
        recall = functools.cache(functools.partial(self._fetch_states, self.decided_rounds))

        def told(memory: AgentState) -> AgentState:
            states = (
                RemoteState(each.agent, recall) if isinstance(each, RemoteState) else each
                for each in memory.rule_states
            )
            return dataclasses.replace(memory, rule_states=tuple(states))

        return [(told(memory), choices) for memory, choices in decided]

    def _fetch_states(self, decided: int) -> dict[int, RuleState]:
        """What the rules of all agents keep, after so many rounds."""
        assert decided == self.decided_rounds, "what rules kept after another round"
        return {
            j: state
            for found in self.actors.broadcast(AgentWorker.rule_states)
            for j, state in found.items()
        }

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

    def publish_(
        self, n: int, online: Bool[np.ndarray, " N"], sizes: Float[np.ndarray, " N"]
    ) -> None:
        """Have the attackers craft, who are lent what they may look at; of each row, whether it is received."""
        layout = self.group.layout
        good = np.zeros(layout.first_received, dtype=bool)
        good[layout.own] = is_admissible(sizes) & online
        if self.adversary.attack.is_crafting(n):
            for j, extents in self._craft_models(n, np.isfinite(sizes)):
                good[layout.crafted_rows(j)] = is_admissible(extents) & online[j]
        self.is_received, self.outbox = good, make_outbox(self.group, n)

    def _craft_models(
        self, n: int, finite: Bool[np.ndarray, " N"]
    ) -> Iterator[tuple[int, Float[np.ndarray, " r"]]]:
        """The extents of what each attacker crafts."""
        attackers = self.adversary
        agents = self.sharding.agents
        bad = [ids[attackers.malicious[ids]] for ids in agents]
        looks = [attackers.benign_ids] * ("benign" in attackers.attack.threat.knows)
        looks += [attackers.malicious_ids] * ("fellows" in attackers.attack.threat.knows)
        seen = np.sort(np.concatenate([np.zeros(0, np.int64), *looks]))
        seen = seen[finite[seen]]
        wanted = [
            np.setdiff1d(seen, ids) if len(some) else seen[:0]
            for ids, some in zip(agents, bad, strict=True)
        ]
        lent = self.actors.loan_rows(wanted)
        tasks = [
            (n, finite, theirs.rows, theirs.places) if len(some) else None
            for some, theirs in zip(bad, lent, strict=True)
        ]
        found = self.actors.call(AgentWorker.craft_models, tasks, [each.refs for each in lent])
        for some, theirs in zip(bad, found, strict=True):
            yield from zip(some.tolist(), theirs or (), strict=True)

    def exchange(self, n: int, asked: Sequence[Ragged], deadline: float | None) -> list[Inbox]:
        """What agents receive in round n: one batch for each actor, of the rows that its agents asked others for."""
        arrived = [
            self.outbox.deliver(n, ids, part, self.is_received, self.spec.max_samples)
            for part, ids in zip(self.groups, asked, strict=True)
        ]
        wanted = [
            np.unique(np.concatenate([arrived[g].rows for g in mine]))
            for mine in self.groups_by_worker
        ]
        wanted = [rows[self.sharding.owner[rows] != b] for b, rows in enumerate(wanted)]
        lent = self.actors.loan_rows(wanted)
        self.actors.call(
            AgentWorker.import_rows, [(each.places,) for each in lent], [each.refs for each in lent]
        )
        for b, mine in enumerate(self.groups_by_worker):
            rows = Ragged.from_arrays([arrived[g].rows for g in mine])
            here = self.sharding.local_rows(
                b, rows.values, np.concatenate([wanted[b][:0], *lent[b].rows])
            )
            for g, each in zip(mine, rows.with_values(here), strict=True):
                arrived[g] = dataclasses.replace(arrived[g], rows=each)
        return arrived

    def mix_(self, decisions: Sequence[Decisions]) -> Bool[np.ndarray, " N"]:
        """theta <- W theta, by each actor for its agents."""
        finite = np.ones(self.spec.num_agents, dtype=bool)
        tasks = [
            (Decisions.concatenate([decisions[g] for g in mine]),) for mine in self.groups_by_worker
        ]
        for agents, theirs in zip(
            self.sharding.agents, self.actors.call(AgentWorker.mix, tasks), strict=True
        ):
            finite[agents] = theirs
        return finite

    def evaluate(self) -> dict[int, EvaluationResult]:
        """What each benign agent's model does in its test."""
        return {
            j: each
            for found in self.actors.broadcast(AgentWorker.evaluate)
            for j, each in found.items()
        }

    def persistent_models(self) -> Iterator[Float[Tensor, "k stride"]]:
        """The models of all agents in their order, some at a time, in whole cache lines."""
        most = max(1, MAX_TRANSFER_BYTES // self.actors.size)
        for ids in self._chunks():
            parcels = [
                (b, mine[k : k + most])
                for b in np.unique(self.sharding.owner[ids]).tolist()
                for mine in [ids[self.sharding.owner[ids] == b]]
                for k in range(0, len(mine), most)
            ]
            models = torch.zeros(len(ids), row_stride(self.spec.dim))
            for (_, mine), array in zip(
                parcels, self.actors.get(self.actors.row_refs(parcels)), strict=True
            ):
                models[torch.from_numpy(mine - ids[0]), : self.spec.dim] = as_tensor(array)
            yield models

    def load_models_(self, models: Float[Tensor, "N stride"]) -> None:
        """Give all agents these models."""
        for ids in self._chunks():
            homes = self.sharding.owner[ids]
            tasks = list[Any]()
            lent = list[Any]()
            for b, agents in enumerate(self.sharding.agents):
                mine = ids[homes == b]  # which follow each other there
                tasks.append((int(agents.searchsorted(mine[0])),) if len(mine) else None)
                content = models[torch.from_numpy(mine), : self.spec.dim]
                lent.append([self.actors.put(content.numpy())] if len(mine) else [])
            self.actors.call(AgentWorker.load_rows, tasks, lent)

    def _chunks(self) -> Iterator[Int[np.ndarray, " k"]]:
        """The ids of all agents, so many at a time as may be on their way."""
        everybody = np.arange(self.spec.num_agents)
        most = max(1, STREAM_BYTES // self.actors.size)
        for k in range(0, len(everybody), most):
            yield everybody[k : k + most]
