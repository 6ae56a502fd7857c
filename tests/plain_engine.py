"""A plain engine: groups of agents with separate buffers, which exchange bytes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from fedcb2o.federated import batched_aggregation
from fedcb2o.federated.adversary import Adversary
from fedcb2o.federated.agent_group import AgentGroup, Phase
from fedcb2o.federated.decisions import Decisions, Inbox
from fedcb2o.federated.evaluation.metrics import EvaluationResult
from fedcb2o.federated.evaluation.models import evaluate_models
from fedcb2o.federated.guards.acceptance import Message, max_abs, rejection_reason
from fedcb2o.federated.local_update import plan_training_batches, train_
from fedcb2o.federated.mixing import mix_, mixing_matrix
from fedcb2o.federated.publishing import Outbox, craft_models_, deceptive_outbox, make_outbox
from fedcb2o.federated.ragged import Ragged
from fedcb2o.federated.run_spec import RunSpec
from fedcb2o.rng import stream
from tests.agents import AgentSamples, agent_group_of, initial_models


class PlainEngine:
    """Agents in groups, each with a buffer whose rows are in random order."""

    def __init__(
        self,
        spec: RunSpec,
        adversary: Adversary,
        data: AgentSamples,
        shares: Sequence[Sequence[int]],
    ) -> None:
        self.spec = spec
        self.group = agent_group_of(spec, adversary, data)  # its buffer is not used
        self.agent_groups: list[AgentGroup] = []
        self.batches: list[np.ndarray] = []
        self.members: list[tuple[int, np.ndarray]] = []  # agent group and members of each group
        theta = initial_models(spec)
        for b, agents in enumerate(shares):
            own = stream(b, "rows").permutation(2 * len(agents) + 1)[: len(agents)]
            inbox = 3 * spec.num_agents * len(agents)
            group = agent_group_of(spec, adversary, data, agents, own.tolist(), inbox=inbox)
            group.models[torch.from_numpy(group.layout.own)] = theta[list(agents)]
            self.agent_groups.append(group)
            for batch in plan_training_batches(spec, group.data.train.sizes.tolist()):
                self.members.append((b, np.array(batch)))
                self.batches.append(group.agents[batch])

    def train_(self, n: int) -> list[Any]:
        return self.map_batches(Phase(train_), n)

    def map_batches(
        self, phase: Phase, *shared: Any, arguments: Sequence[Sequence[Any]] = ()
    ) -> list[Any]:
        return [
            phase.function(
                self.agent_groups[b], members, *(values[g] for values in arguments), *shared
            )
            for g, (b, members) in enumerate(self.members)
        ]

    aggregate_ = batched_aggregation.aggregate_batches_

    def publish_(self, n: int, online: np.ndarray, sizes: np.ndarray) -> None:
        self.online = online
        self.outbox = make_outbox(self.group, online)
        self._send_all(n, lambda group: make_outbox(group, online[group.agents]))

    def craft_models_(self, n: int, finite: np.ndarray) -> dict[int, np.ndarray]:
        trained = {}
        for group in self.agent_groups:
            for j, row in zip(group.agents.tolist(), group.layout.own.tolist(), strict=True):
                trained[j] = save({"theta": group.models[row].contiguous()})

        def peek(ids: list[int]) -> Tensor:
            models = [load(trained[j])["theta"] for j in ids]
            return torch.stack(models) if models else torch.zeros(0, self.spec.dim)

        crafted = {}
        for group in self.agent_groups:
            attackers = np.flatnonzero(group.data.malicious)
            largest = craft_models_(group, attackers, n, finite, peek)
            crafted |= dict(zip(group.agents[attackers].tolist(), largest, strict=True))
        return crafted

    def replace_outbox(self, n: int, outbox: Outbox) -> None:
        def deceive(group: AgentGroup) -> Outbox:
            own = make_outbox(group, self.online[group.agents])
            return deceptive_outbox(group, own, n, {})

        self._send_all(n, deceive)

    def _send_all(self, n: int, outbox_of: Any) -> None:
        self.messages: dict[tuple[int, int], bytes] = {}
        for group in self.agent_groups:
            for k, j in enumerate(group.agents.tolist()):
                if self.online[j]:
                    self._send(group, k, n, outbox_of(group))

    def _send(self, group: AgentGroup, k: int, n: int, outbox: Outbox) -> None:
        receivers = np.arange(self.spec.num_agents)
        pairs = np.full(len(receivers), k), receivers
        sent: dict[tuple[int, float], bytes] = {}  # most senders send all receivers the same
        rows, claims = outbox.sent(*pairs)
        for receiver, row, claim in zip(
            receivers.tolist(), rows.tolist(), claims.tolist(), strict=True
        ):
            if (row, claim) not in sent:
                content = {
                    "theta": group.models[row].contiguous(),
                    "num_samples": torch.tensor(claim, dtype=torch.float64),
                    "round": torch.tensor(n),
                }
                sent[row, claim] = save(content)
            self.messages[int(group.agents[k]), receiver] = sent[row, claim]

    def exchange(self, n: int, sampled: Sequence[Ragged], deadline: float | None) -> list[Inbox]:
        slots = []
        for b, group in enumerate(self.agent_groups):
            rows = np.arange(group.layout.first_received, len(group.models))
            slots.append(list(stream(n, "slots", b).permutation(rows)))
        return [
            self._receive(n, self.agent_groups[b], agents, slots[b], peers)
            for (b, _), agents, peers in zip(self.members, self.batches, sampled, strict=True)
        ]

    def _receive(
        self, n: int, group: AgentGroup, agents: np.ndarray, slots: list[int], peers: Ragged
    ) -> Inbox:
        is_received, rows, claims = [], [], []
        for i, j in zip(peers.values.tolist(), agents[peers.list_index].tolist(), strict=True):
            message = self._message(i, j)
            if message is None or rejection_reason(message, dim=self.spec.dim, n=n):
                is_received.append(False)
                continue
            row = int(slots.pop()) if i != j else -1
            if i == j:
                row = int(group.layout.own[group.agents.tolist().index(j)])
            group.models[row] = message.theta
            is_received.append(True)
            rows.append(row)
            claims.append(message.num_samples)
        received = peers.filter(np.array(is_received, dtype=bool))
        counts = np.minimum(np.array(claims, dtype=float), self.spec.max_samples)
        return Inbox(received, np.array(rows, np.int64), counts, np.full(len(rows), n))

    def _message(self, sender: int, receiver: int) -> Message | None:
        if (sender, receiver) not in self.messages:
            return None
        content = load(self.messages[sender, receiver])
        return Message(content["theta"], float(content["num_samples"]), int(content["round"]))

    def mix_(self, decisions: Sequence[Decisions]) -> np.ndarray:
        is_finite = np.ones(self.spec.num_agents, dtype=bool)
        for b, group in enumerate(self.agent_groups):
            own = [
                decision
                for decision, (owner, _) in zip(decisions, self.members, strict=True)
                if owner == b
            ]
            layout = group.layout
            matrix = mixing_matrix(Decisions.concatenate(own), layout.own, layout.previous)
            mix_(group.models, matrix, 0, self.spec.dim)
            is_finite[group.agents] = np.isfinite(max_abs(group.models, layout.own.tolist()))
        return is_finite

    def persistent_state(self, state):
        return state

    def evaluate(self) -> EvaluationResult:
        return EvaluationResult.concatenate(
            [
                evaluate_models(group, np.flatnonzero(~group.data.malicious))
                for group in self.agent_groups
            ]
        )

    @property
    def models(self) -> Tensor:
        """The models of all agents, in the order of their ids."""
        models = torch.zeros(self.spec.num_agents, self.spec.dim)
        for group in self.agent_groups:
            models[group.agents.tolist()] = group.models[torch.from_numpy(group.layout.own)]
        return models
