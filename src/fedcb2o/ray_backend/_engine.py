"""The engine of a run whose agents are spread over the workers of a cluster.

It has the group of all agents with an empty model buffer: a row of that buffer stands for a row of
some worker's buffer. Losses and decisions are all that the workers send to it.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fedcb2o.federated.agent_group import AgentGroup, Phase
from fedcb2o.federated.contacts import AgentState
from fedcb2o.federated.decisions import Decisions, Inbox
from fedcb2o.federated.evaluation.metrics import EvaluationResult
from fedcb2o.federated.local_update import plan_training_batches
from fedcb2o.federated.publishing import Outbox
from fedcb2o.federated.ragged import AgentIds, Members, Ragged, Rows
from fedcb2o.nn.parameters import row_stride
from fedcb2o.parallel._serialization import serialize, unwrap_result
from fedcb2o.ray_backend._errors import translate_ray_errors
from fedcb2o.ray_backend._transfers import RowTransfer, plan_transfers
from fedcb2o.ray_backend._worker import AgentWorker, InitModels, MakeGroup, as_tensor
from fedcb2o.simulation.local_engine import LocalEngine

STREAM_BYTES = 2**26  # of models that are on their way from or to a checkpoint at once


@dataclass(frozen=True)
class LoanedRows:
    """Transfers that a worker may read, with their rows in the buffer of all agents."""

    refs: list[Any]
    rows: Ragged


class RayEngine:
    """The engine of all agents of a run, on the workers of a cluster.

    The model buffer of `group` is empty. `agents` has the ascending ids of each worker's agents,
    and `batches` those that one function call computes, worker after worker. `loaned_bytes` are
    those of models that workers took of each other, `moved_bytes` those of them that went from one
    node to another, and `seconds` the working time of each worker. Who reads these three resets
    them.
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
        self.handles = list(handles)
        self.agents = [AgentIds(np.array(share)) for share in shares]
        self.nodes = np.unique(node_ids, return_inverse=True)[1]
        self.row_bytes = 4 * self.spec.dim
        self.outbox: Outbox | None = None  # until the agents publish
        self.reset_traffic()

        # Agents that train together are in one worker.
        worker_of = np.zeros(self.spec.num_agents, np.int64)
        for worker, agents in enumerate(self.agents):
            worker_of[agents] = worker
        planned = plan_training_batches(self.spec, group.data.train.sizes.tolist())
        planned.sort(key=lambda batch: worker_of[batch[0]])
        self.batches = [AgentIds(np.array(batch)) for batch in planned]
        first = [worker_of[batch[0]] for batch in planned]
        ends = np.searchsorted(first, np.arange(1 + len(self.handles))).tolist()
        self.parts = [slice(*pair) for pair in itertools.pairwise(ends)]

        # Worker of each row of the buffer of all agents, and its place there.
        self.owner = np.zeros(group.layout.first_received, np.int64)
        self.row = np.zeros(group.layout.first_received, np.int64)
        self.first_received: list[int] = []

    def reset_traffic(self) -> None:
        """Begin to measure the traffic of a round."""
        self.loaned_bytes = 0
        self.moved_bytes = 0
        self.seconds = np.zeros(len(self.handles))

    def call(
        self,
        method: Callable[..., Any],
        tasks: Sequence[tuple[Any, ...]],
        refs: Sequence[Sequence[Any]] | None = None,
    ) -> list[Any]:
        """Call a method of `AgentWorker` on every worker, with its task as the arguments.

        `refs` are references that the method reads, for each worker. The error of a worker is
        raised as it was.
        """
        refs = refs or [[]] * len(tasks)
        with translate_ray_errors():
            # Serialized here, because Ray would raise errors of the work as its own.
            answers = ray.get(
                [
                    handle.execute.remote(serialize((method, task)), list(own_refs))
                    for handle, task, own_refs in zip(self.handles, tasks, refs, strict=True)
                ]
            )
            self.seconds += [seconds for _, seconds in answers]
            return [unwrap_result(content) for content, _ in answers]

    def build_groups(self, make: MakeGroup, data: Mapping[str, Tensor]) -> None:
        """Build the groups of the workers, from data that each node gets once."""
        with translate_ray_errors():
            arrays = ray.put({name: tensor.numpy() for name, tensor in data.items()})
        tasks = []
        for agents, part in zip(self.agents, self.parts, strict=True):
            members = [Members(agents.searchsorted(batch)) for batch in self.batches[part]]
            tasks.append((make, agents.tolist(), members))
        layouts = self.call(AgentWorker.build_group, tasks, [[arrays]] * len(tasks))

        whole = self.group.layout
        crafted = np.arange(whole.crafted_per_attacker)
        for worker, (agents, layout) in enumerate(zip(self.agents, layouts, strict=True)):
            attackers = np.flatnonzero(self.group.data.malicious[agents])
            crafted_rows = whole.first_crafted[agents[attackers], None] + crafted
            self.owner[whole.own[agents]] = worker
            self.owner[crafted_rows] = worker
            self.row[whole.own[agents]] = layout.own
            if whole.sent is not None:
                self.owner[whole.sent[agents]] = worker
                self.row[whole.sent[agents]] = layout.sent
            self.row[crafted_rows] = layout.first_crafted[attackers, None] + crafted
            self.first_received.append(layout.first_received)

    def init_models(self, init: InitModels) -> None:
        """Fill the rows of all agents with their initial models."""
        self.call(AgentWorker.init_models, [(init,)] * len(self.handles))

    def map_batches(
        self, phase: Phase, n: int, *shared: Any, arguments: Sequence[Sequence[Any]] = ()
    ) -> list[Any]:
        """Call `phase.function(group, members, *arguments, n, *shared)` for each batch.

        It runs in the batch's worker. Each list of `arguments` has one value per batch.
        """
        tasks = [(phase, (n, *shared), [own[part] for own in arguments]) for part in self.parts]
        return [*itertools.chain(*self.call(AgentWorker.map_batches, tasks))]

    # The functions that only call others are those of the local engine.
    train_ = LocalEngine.train_
    publish_ = LocalEngine.publish_
    replace_outbox = LocalEngine.replace_outbox
    aggregate_ = LocalEngine.aggregate_

    def exchange(self, n: int, sampled: Sequence[Ragged], deadline: float | None) -> list[Inbox]:
        """Transfer the received models to the workers that need them.

        The engine waits for every worker, so that `deadline` is not used. The inbox of a batch has
        rows of its worker's buffer.
        """
        assert self.outbox is not None, "nothing is published yet"
        # 1. The models that arrive, as rows of the buffer of all agents.
        inboxes = [
            self.outbox.deliver(n, peers, agents, self.spec.max_samples)
            for agents, peers in zip(self.batches, sampled, strict=True)
        ]

        # 2. The place of each row in the buffer of the worker that receives it.
        wanted = []
        arrivals = []
        for worker, part in enumerate(self.parts):
            rows = np.unique(np.concatenate([inbox.rows for inbox in inboxes[part]]))
            foreign = rows[self.owner[rows] != worker]
            arrival = np.full(len(self.row), -1)
            arrival[foreign] = self.first_received[worker] + np.arange(len(foreign))
            wanted.append(foreign)
            arrivals.append(arrival)

        # 3. The transfer of the rows that another worker has.
        loans = self._loan_rows(wanted)
        tasks = []
        for arrival, loan in zip(arrivals, loans, strict=True):
            tasks.append((Ragged(arrival[loan.rows.values], loan.rows.sizes),))
        self.call(AgentWorker.import_rows, tasks, [loan.refs for loan in loans])

        local = []
        for arrival, part in zip(arrivals, self.parts, strict=True):
            place = np.where(arrival < 0, self.row, arrival)
            local += [replace(inbox, rows=Rows(place[inbox.rows])) for inbox in inboxes[part]]
        return local

    def mix_(self, decisions: Sequence[Decisions]) -> Bool[np.ndarray, " N"]:
        """Compute theta <- W theta (Algorithm 2, line 7), in each worker for its agents.

        The result is False for benign agents whose model is not finite.
        """
        tasks = [(LocalEngine.mix_, decisions[part]) for part in self.parts]
        is_finite = np.ones(self.spec.num_agents, dtype=bool)
        by_worker = self.call(AgentWorker.call_engine, tasks)
        for agents, own in zip(self.agents, by_worker, strict=True):
            is_finite[agents] = own
        return is_finite

    def evaluate(self) -> EvaluationResult:
        """Return the test results of the benign agents."""
        tasks = [(LocalEngine.evaluate,)] * len(self.handles)
        return EvaluationResult.concatenate(self.call(AgentWorker.call_engine, tasks))

    def craft_models_(
        self, n: int, is_finite: Bool[np.ndarray, " N"]
    ) -> dict[int, Float[np.ndarray, " r"]]:
        """Craft the attackers' models, in the buffers of their workers.

        Returns the largest absolute values of each attacker's models, by its id.
        """
        adversary = self.group.adversary
        assert adversary is not None
        knows = adversary.attack.threat.knows
        malicious = adversary.malicious
        # Only the models that the attack declared to know travel, and only to workers with an
        # attacker.
        is_seen = np.where(malicious, "fellows" in knows, "benign" in knows) & is_finite
        wanted = []
        for agents in self.agents:
            is_wanted = is_seen & malicious[agents].any()
            is_wanted[agents] = False
            wanted.append(np.flatnonzero(is_wanted))
        loans = self._loan_rows(wanted)
        tasks = [(n, is_finite, loan.rows) for loan in loans]
        refs = [loan.refs for loan in loans]
        return functools.reduce(operator.or_, self.call(AgentWorker.craft_models, tasks, refs))

    def persistent_state(self, state: AgentState) -> AgentState:
        """Return the state of all agents with the states of their rules, which workers keep."""
        if not self.spec.algorithm.is_stateful:
            return state
        by_worker = self.call(operator.attrgetter("states"), [()] * len(self.handles))
        states = functools.reduce(operator.or_, by_worker)
        rule_states = tuple(states[agent] for agent in range(self.spec.num_agents))
        return replace(state, rule_states=rule_states)

    def persistent_models(self) -> Iterator[Float[Tensor, "k stride"]]:
        """Yield parts of the models of all agents, in whole cache lines.

        They are in the order of the agents' ids.
        """
        for ids in self._chunks():
            models = torch.zeros(len(ids), row_stride(self.spec.dim))
            # This process is the receiver of all rows.
            plan = plan_transfers(self.owner, [ids], np.zeros(1, np.int64), self.row_bytes)
            with translate_ray_errors():
                transfers, refs = zip(*self._export_rows(plan), strict=True)
                for transfer, array in zip(transfers, ray.get(list(refs)), strict=True):
                    places = torch.from_numpy(transfer.rows - ids[0])
                    models[places, : self.spec.dim] = as_tensor(array)
            yield models

    def load_models_(self, models: Float[Tensor, "N stride"]) -> None:
        """Replace the models of all agents, given in the order of their ids."""
        for ids in self._chunks():
            tasks = []
            refs = []
            for worker in range(len(self.handles)):
                own = ids[self.owner[ids] == worker]
                tasks.append((Ragged.from_arrays([self.row[own]]),))
                with translate_ray_errors():
                    content = models[torch.from_numpy(own), : self.spec.dim]
                    refs.append([ray.put(content.numpy())])
            self.call(AgentWorker.import_rows, tasks, refs)

    def _loan_rows(self, wanted: Sequence[Int[np.ndarray, " _r"]]) -> list[LoanedRows]:
        """Put rows of other workers into the store, for each worker."""
        plan = plan_transfers(self.owner, wanted, self.nodes, self.row_bytes)
        exported = list(self._export_rows(plan))
        loans = []
        for worker in range(len(self.handles)):
            own = [(transfer, ref) for transfer, ref in exported if worker in transfer.receivers]
            rows = Ragged.from_arrays([transfer.rows for transfer, _ in own])
            loans.append(LoanedRows([ref for _, ref in own], rows))

        self.loaned_bytes += self.row_bytes * sum(map(len, wanted))
        for transfer in plan:
            # The workers on one node share a store.
            nodes = set(self.nodes[transfer.receivers]) - {self.nodes[transfer.owner]}
            self.moved_bytes += self.row_bytes * len(transfer.rows) * len(nodes)
        return loans

    def _export_rows(self, plan: Sequence[RowTransfer]) -> Iterator[tuple[RowTransfer, Any]]:
        """Put the rows of transfers into the store; yield each transfer with its reference."""
        by_owner: dict[int, list[RowTransfer]] = {}
        for transfer in plan:
            by_owner.setdefault(transfer.owner, []).append(transfer)
        # One call per owner, whatever the number of its transfers.
        for owner, transfers in by_owner.items():
            export = self.handles[owner].export_rows.options(num_returns=len(transfers))
            refs = export.remote(*(self.row[transfer.rows] for transfer in transfers))
            yield from zip(transfers, refs if len(transfers) > 1 else [refs], strict=True)

    def _chunks(self) -> Iterator[Int[np.ndarray, " k"]]:
        """Yield the rows of models that outlive a round, as many as `STREAM_BYTES` allows."""
        step = max(1, STREAM_BYTES // self.row_bytes)
        count = self.spec.num_agents * (1 if self.group.layout.sent is None else 2)
        for start in range(0, count, step):
            yield np.arange(start, min(start + step, count))
