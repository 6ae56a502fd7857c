"""The engine of a run whose agents are spread over the workers of a cluster.

It has the group of all agents with an empty model buffer: a row of that buffer stands for a row of
some worker's buffer. Losses and decisions are all that the workers send to it.
"""

import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fedcb2o.federated import (
    AgentGroup,
    AgentState,
    Decisions,
    EvaluationResult,
    Inbox,
    Outbox,
    Ragged,
    RuleState,
    plan_training_batches,
)
from fedcb2o.federated.agent_group import Phase
from fedcb2o.federated.ragged import AgentIds, Members, Rows
from fedcb2o.nn.parameters import row_stride
from fedcb2o.ray_backend._actors import WorkerActors
from fedcb2o.ray_backend._sharding import Sharding
from fedcb2o.ray_backend._transfers import MAX_TRANSFER_BYTES
from fedcb2o.ray_backend._worker import AgentWorker, InitModels, MakeGroup, as_tensor
from fedcb2o.simulation.local_engine import LocalEngine

STREAM_BYTES = 2**26  # of models that are on their way from or to a checkpoint at once


class RayEngine:
    """The engine of all agents of a run, on the workers of a cluster.

    The model buffer of `group` is empty. `batches` has the ids of the agents that one function call
    computes, and `batches_by_worker` the numbers of the batches of each worker.
    """

    def __init__(
        self,
        group: AgentGroup,
        shares: Sequence[Sequence[int]],
        handles: Sequence[Any],
        node_ids: Sequence[str],
    ) -> None:
        self.group = group
        self.spec = group.spec
        self.sharding = Sharding.from_group(group, shares)
        names = sorted(set(node_ids))
        nodes = np.array([names.index(node) for node in node_ids])
        self.actors = WorkerActors(handles, self.sharding, nodes, 4 * self.spec.dim)

        costs = group.data.train.sizes.tolist()
        self.batches = [
            AgentIds(np.array(batch)) for batch in plan_training_batches(self.spec, costs)
        ]
        owners = self.sharding.owner[[group.layout.own[agents[0]] for agents in self.batches]]
        self.batches_by_worker: list[list[int]] = [
            np.flatnonzero(owners == worker).tolist() for worker in range(len(handles))
        ]
        self.outbox: Outbox | None = None  # until the agents publish

    def build_groups(self, make: MakeGroup, data: Mapping[str, Tensor]) -> None:
        """Build the groups of the workers, from data that each node gets once."""
        loans = [self.actors.put({name: tensor.numpy() for name, tensor in data.items()})]
        tasks = []
        for numbers, agents in zip(self.batches_by_worker, self.sharding.agents, strict=True):
            members = [Members(agents.searchsorted(self.batches[g])) for g in numbers]
            tasks.append((make, agents.tolist(), members))
        self.actors.call(AgentWorker.build_group, tasks, [loans] * len(tasks))

    def init_models(self, init: InitModels) -> None:
        """Fill the rows of all agents with their initial models."""
        self.actors.broadcast(AgentWorker.init_models, init)

    def map_batches(
        self, phase: Phase, n: int, *shared: Any, arguments: Sequence[Sequence[Any]] = ()
    ) -> list[Any]:
        """Call `phase.function(group, members, *arguments, n, *shared)` for each batch.

        It runs in the batch's worker. Each list of `arguments` has one value per batch.
        """
        tasks = []
        for numbers in self.batches_by_worker:
            own = [_select(values, numbers) for values in arguments]
            tasks.append((phase, (n, *shared), own))
        by_worker = self.actors.call(AgentWorker.map_batches, tasks)

        results: list[Any] = [None] * len(self.batches)
        for numbers, own_results in zip(self.batches_by_worker, by_worker, strict=True):
            for g, result in zip(numbers, own_results, strict=True):
                results[g] = result
        return results

    train_ = LocalEngine.train_
    """Train the models of all agents (LocalUpdate)."""

    publish_ = LocalEngine.publish_
    """Publish the models of the agents that take part in the round."""

    replace_outbox = LocalEngine.replace_outbox
    """Publish other models of a round."""

    aggregate_ = LocalEngine.aggregate_
    """LocalAggregation (Algorithm 2); all workers are waited for."""

    def exchange(self, n: int, sampled: Sequence[Ragged], deadline: float | None) -> list[Inbox]:
        """Transfer the received models to the workers that need them.

        The engine waits for every worker, so that `deadline` is not used. The inbox of a group has
        rows of its worker's buffer.
        """
        assert self.outbox is not None, "nothing is published yet"
        max_samples = self.spec.max_samples
        # 1. The models that arrive, as rows of the buffer of all agents.
        inboxes = [
            self.outbox.deliver(n, peers, agents, max_samples)
            for agents, peers in zip(self.batches, sampled, strict=True)
        ]
        # 2. The transfer of those that another worker has.
        wanted = []
        # 3. Their rows in the buffer of the receiving worker.
        for worker, numbers in enumerate(self.batches_by_worker):
            rows = np.unique(np.concatenate([inboxes[g].rows for g in numbers]))
            wanted.append(rows[self.sharding.owner[rows] != worker])
        loans = self.actors.loan_rows(wanted)
        inboxes_start = [layout.first_received for layout in self.sharding.layouts]
        tasks = [(first, loan.positions) for first, loan in zip(inboxes_start, loans, strict=True)]
        self.actors.call(AgentWorker.import_rows, tasks, [loan.refs for loan in loans])

        for worker, numbers in enumerate(self.batches_by_worker):
            by_group = Ragged.from_arrays([inboxes[g].rows for g in numbers])
            received = np.concatenate([wanted[worker][:0], *loans[worker].rows])
            local = self.sharding.local_rows(worker, by_group.values, received)
            for g, rows in zip(numbers, Ragged(local, by_group.sizes), strict=True):
                inboxes[g] = dataclasses.replace(inboxes[g], rows=Rows(rows))
        return inboxes

    def mix_(self, decisions: Sequence[Decisions]) -> Bool[np.ndarray, " N"]:
        """Compute theta <- W theta (Algorithm 2, line 7), in each worker for its agents.

        The result is False for benign agents whose model is not finite.
        """
        tasks = []
        for numbers in self.batches_by_worker:
            tasks.append((LocalEngine.mix_, _select(decisions, numbers)))
        by_worker = self.actors.call(AgentWorker.call_engine, tasks)
        is_finite = np.ones(self.spec.num_agents, dtype=bool)
        for agents, own in zip(self.sharding.agents, by_worker, strict=True):
            is_finite[agents] = own
        return is_finite

    def evaluate(self) -> dict[int, EvaluationResult]:
        """Return the test result of each benign agent, by its id."""
        results: dict[int, EvaluationResult] = {}
        for own in self.actors.broadcast(AgentWorker.call_engine, LocalEngine.evaluate):
            results |= own
        return results

    def persistent_state(self, state: AgentState) -> AgentState:
        """Return the state of all agents with the states of their rules, which workers keep."""
        if not self.spec.algorithm.is_stateful:
            return state
        states: dict[int, RuleState] = {}
        for own in self.actors.broadcast(operator.attrgetter("states")):
            states |= own
        rule_states = tuple(states[agent] for agent in range(self.spec.num_agents))
        return dataclasses.replace(state, rule_states=rule_states)

    def persistent_models(self) -> Iterator[Float[Tensor, "k stride"]]:
        """Yield parts of the models of all agents, in whole cache lines.

        They are in the order of the agents' ids.
        """
        max_rows = max(1, MAX_TRANSFER_BYTES // self.actors.row_bytes)
        for ids in self._chunks():
            owners = self.sharding.owner[ids]
            # Objects of at most `MAX_TRANSFER_BYTES`.
            transfers = []
            for worker in np.unique(owners).tolist():
                own = ids[owners == worker]
                for start in range(0, len(own), max_rows):
                    transfers.append((worker, own[start : start + max_rows]))
            arrays = self.actors.get(self.actors.row_refs(transfers))
            models = torch.zeros(len(ids), row_stride(self.spec.dim))
            for (_, own), array in zip(transfers, arrays, strict=True):
                models[torch.from_numpy(own - ids[0]), : self.spec.dim] = as_tensor(array)
            yield models

    def load_models_(self, models: Float[Tensor, "N stride"]) -> None:
        """Replace the models of all agents, given in the order of their ids."""
        for ids in self._chunks():
            owners = self.sharding.owner[ids]
            tasks: list[tuple[int, list[None]] | None] = []
            loans: list[list[Any]] = []
            for worker, agents in enumerate(self.sharding.agents):
                own = ids[owners == worker]  # consecutive in the worker's buffer
                if not len(own):
                    tasks.append(None)
                    loans.append([])
                    continue
                tasks.append((int(agents.searchsorted(own[0])), [None]))
                content = models[torch.from_numpy(own), : self.spec.dim]
                loans.append([self.actors.put(content.numpy())])
            self.actors.call(AgentWorker.import_rows, tasks, loans)

    def craft_models_(
        self, n: int, is_finite: Bool[np.ndarray, " N"]
    ) -> dict[int, Float[np.ndarray, " r"]]:
        """Craft the attackers' models, in the buffers of their workers.

        Returns the largest absolute values of each attacker's models, by its id.
        """
        adversary = self.group.adversary
        assert adversary is not None
        knowledge = adversary.attack.threat.knows
        visible = [np.zeros(0, np.int64)]
        if "benign" in knowledge:
            visible.append(adversary.benign_ids)
        if "fellows" in knowledge:
            visible.append(adversary.malicious_ids)
        seen = np.sort(np.concatenate(visible))
        seen = seen[is_finite[seen]]

        attackers = [agents[adversary.malicious[agents]] for agents in self.sharding.agents]
        # Only the models that the attack declared to know travel, and only to workers with an
        # attacker.
        wanted = [
            np.setdiff1d(seen, agents) if len(own) else seen[:0]
            for agents, own in zip(self.sharding.agents, attackers, strict=True)
        ]
        loans = self.actors.loan_rows(wanted)
        tasks = [
            (n, is_finite, loan.rows, loan.positions) if len(own) else None
            for own, loan in zip(attackers, loans, strict=True)
        ]
        by_worker = self.actors.call(AgentWorker.craft_models, tasks, [loan.refs for loan in loans])
        max_abs: dict[int, Float[np.ndarray, " r"]] = {}
        for own, values in zip(attackers, by_worker, strict=True):
            max_abs.update(zip(own.tolist(), values or (), strict=True))
        return max_abs

    def _chunks(self) -> Iterator[Int[np.ndarray, " k"]]:
        """Yield the ids of all agents, as many at once as `STREAM_BYTES` allows."""
        agents = np.arange(self.spec.num_agents)
        step = max(1, STREAM_BYTES // self.actors.row_bytes)
        for start in range(0, len(agents), step):
            yield agents[start : start + step]


def _select(values: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
    """Return the values of some groups."""
    return [values[g] for g in numbers]
