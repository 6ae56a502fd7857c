"""A plain engine: agents in blocks with pools of their own, who send each other bytes through a dictionary."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from fedcb2o.federated.admission import Message, clip_claimed_samples, max_abs, rejection_reason
from fedcb2o.federated.adversary import Adversary
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.batched_training import plan_training_batches
from fedcb2o.federated.decisions import Decisions, Inbox
from fedcb2o.federated.metrics import EvaluationResult
from fedcb2o.federated.mixing import mix_, mixing_matrix
from fedcb2o.federated.publishing import craft_models_, make_outbox
from fedcb2o.federated.ragged import Ragged
from fedcb2o.federated.run_spec import RunSpec
from fedcb2o.federated.validation import evaluate_models
from fedcb2o.rng import stream
from tests.agents import Held, block_of, first_models


class Posted:
    """Blocks of the agents named, each in a pool whose rows are in random order."""

    def __init__(
        self, terms: RunSpec, attackers: Adversary, holds: Held, blocks: Sequence[Sequence[int]]
    ) -> None:
        self.terms, self.attackers, theta = terms, attackers, first_models(terms)
        self.blocks: list[AgentGroup] = []
        self.parts: list[np.ndarray] = []
        self.where: list[
            tuple[int, np.ndarray]
        ] = []  # the block of each part, and the places in it
        for b, agents in enumerate(blocks):
            rows = stream(b, "rows").permutation(2 * len(agents) + 1)[: len(agents)]
            block = block_of(
                terms,
                attackers,
                holds,
                agents,
                rows.tolist(),
                inbox=3 * terms.num_agents * len(agents),
            )
            block.models[torch.from_numpy(block.layout.own)] = theta[list(agents)]
            self.blocks.append(block)
            costs = block.data.train.sizes.tolist()
            for team in plan_training_batches(terms, costs):
                self.where.append((b, np.array(team)))
                self.parts.append(block.agents[team])

    def each(self, function: Any, *common: Any, own: Sequence[Sequence[Any]] = ()) -> list[Any]:
        return [
            function(self.blocks[b], places, *(each[g] for each in own), *common)
            for g, (b, places) in enumerate(self.where)
        ]

    def publish_(self, n: int, online: np.ndarray, sizes: np.ndarray) -> None:
        self.post: dict[tuple[int, ...], bytes] = {}
        trained = {}
        for block in self.blocks:
            for j, row in zip(block.agents.tolist(), block.layout.own.tolist(), strict=True):
                trained[j] = save({"theta": block.models[row].contiguous()})

        def look(ids: list[int]) -> Tensor:
            found = [load(trained[j])["theta"] for j in ids]
            return torch.stack(found) if found else torch.zeros(0, self.terms.dim)

        for block in self.blocks:
            bad = np.flatnonzero(block.data.malicious)
            if self.attackers.attack.is_crafting(n):
                craft_models_(block, bad, n, np.isfinite(sizes), look)
            box = make_outbox(block, n)
            for k, j in enumerate(block.agents.tolist()):
                for receiver in range(self.terms.num_agents) if online[j] else []:
                    place, to = np.array([k]), np.array([receiver])
                    row, claim = (
                        int(box.rows(place, to)[0]),
                        float(box.samples_claimed_to(place, to)[0]),
                    )
                    self.post[j, receiver] = save(
                        {
                            "theta": block.models[row].contiguous(),
                            "num_samples": torch.tensor(claim, dtype=torch.float64),
                            "round": torch.tensor(n),
                        }
                    )

    def exchange(self, n: int, asked: Sequence[Ragged], deadline: float | None) -> list[Inbox]:
        free = [
            list(
                stream(n, "slots", b).permutation(np.arange(x.layout.first_received, len(x.models)))
            )
            for b, x in enumerate(self.blocks)
        ]
        return [
            self._arrived(n, self.blocks[b], part, free[b], ids)
            for (b, _), part, ids in zip(self.where, self.parts, asked, strict=True)
        ]

    def _arrived(
        self, n: int, block: AgentGroup, part: np.ndarray, free: list[int], asked: Ragged
    ) -> Inbox:
        there, rows, claims = [], [], []
        for i, j in zip(asked.values.tolist(), part[asked.row_ids].tolist(), strict=True):
            message = self._message(i, j)
            good = message is not None and not rejection_reason(message, dim=self.terms.dim, n=n)
            there.append(good)
            if not good:
                continue
            row = (
                int(block.layout.own[block.agents.tolist().index(j)]) if i == j else int(free.pop())
            )
            block.models[row] = message.theta
            rows.append(row)
            claims.append(message.num_samples)
        received = asked.filter(np.array(there, dtype=bool))
        counts = clip_claimed_samples(np.array(claims, dtype=float), self.terms.max_samples)
        return Inbox(received, np.array(rows, np.int64), counts, np.full(len(rows), n))

    def _message(self, sender: int, receiver: int) -> Message | None:
        if (sender, receiver) not in self.post:
            return None
        content = load(self.post[sender, receiver])
        return Message(content["theta"], float(content["num_samples"]), int(content["round"]))

    def mix_(self, choices: Sequence[Decisions]) -> np.ndarray:
        finite = np.ones(self.terms.num_agents, dtype=bool)
        for b, block in enumerate(self.blocks):
            whole = Decisions.concatenate(
                [one for one, (owner, _) in zip(choices, self.where, strict=True) if owner == b]
            )
            mix_(
                block.models,
                mixing_matrix(whole, block.layout.own, block.layout.previous),
                0,
                self.terms.dim,
            )
            finite[block.agents] = np.isfinite(max_abs(block.models, block.layout.own.tolist()))
        return finite

    def evaluate(self) -> dict[int, EvaluationResult]:
        found = {}
        for block in self.blocks:
            benign = np.flatnonzero(~block.data.malicious)
            found |= dict(
                zip(block.agents[benign].tolist(), evaluate_models(block, benign), strict=True)
            )
        return found

    @property
    def models(self) -> Tensor:
        """Those of all agents, in their order."""
        found = torch.zeros(self.terms.num_agents, self.terms.dim)
        for block in self.blocks:
            found[block.agents.tolist()] = block.models[torch.from_numpy(block.layout.own)]
        return found
