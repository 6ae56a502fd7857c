"""One agent among real peers as an engine: a block of one, whose `exchange` is the network (alg:localAggregation).

The pool is [own | crafted | before | inbox]. A model that arrived lies in a row of the inbox until the round has mixed.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedcb2o.federated import algorithm2, batched_aggregation
from fedcb2o.federated.admission import clip_claimed_samples, max_abs
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.batched_training import train_
from fedcb2o.federated.collusion import AdversarialEngine, sample_peers
from fedcb2o.federated.contacts import AgentState
from fedcb2o.federated.decisions import Decisions, Inbox
from fedcb2o.federated.metrics import EvaluationResult
from fedcb2o.federated.mixing import mix_, mixing_matrix
from fedcb2o.federated.publishing import craft_models_, make_outbox
from fedcb2o.federated.ragged import Ragged
from fedcb2o.federated.validation import evaluate_models
from fedcb2o.kernels import dispatch
from fedcb2o.peer.node.publisher import ModelPublisher
from fedcb2o.peer.wire.client import Arrival, PeerClient

_T = TypeVar("_T")

_ONLY_AGENT = np.zeros(1, np.int64)  # the place of the only agent


class PeerEngine:
    """The engine of one agent, whose model was the `first` before all rounds. `may_ask(n)` are the ids of those whom it
    may ask now; it `offers` its models by one part, and gets others' by `downloads`. `arrivals` and `failures` tell how
    the last exchange went, by peer, and `seconds` how long it took."""

    def __init__(
        self,
        block: AgentGroup,
        offers: ModelPublisher,
        downloads: PeerClient,
        may_ask: Callable[[int], Sequence[int]],
        first: Float[Tensor, " d"],
    ) -> None:
        self.group = block
        self.publisher = offers
        self.client = downloads
        self.reachable_peers = may_ask
        self.initial_model = first
        self.spec = block.spec
        self.adversary = block.adversary
        self.agent_id = int(block.agents[0])
        self.groups = [block.agents]
        self.arrivals: Mapping[int, Arrival] = {}
        self.failures: Mapping[int, str] = {}
        self.exchange_seconds = 0.0

    def map_groups(
        self, function: Callable[..., _T], *shared: Any, arguments: Sequence[Sequence[Any]] = ()
    ) -> list[_T]:
        """What a function finds for the agent; whom it asks, among those that are there."""
        block = (
            self._with_candidates(self.reachable_peers(int(shared[0])))
            if function is sample_peers
            else self.group
        )
        with dispatch.use_kernels(self.spec.kernels.linear, self.spec.kernels.convolution):
            call = functools.partial(
                function, block, _ONLY_AGENT, *(each[0] for each in arguments), *shared
            )
            found: Any = call()
            if function is train_ and self._has_diverged(int(shared[0]), *found):
                self._row(int(block.layout.own[0])).copy_(self.initial_model)
                found = call()
            return [found]

    def _has_diverged(
        self, n: int, losses: Float[np.ndarray, " 1"], sizes: Float[np.ndarray, " 1"]
    ) -> bool:
        """Whether training led nowhere, as it may from an average with a model that was made for this: a peer ends
        nobody. In a simulation of such models it is their success."""
        if (np.isfinite(losses) & np.isfinite(sizes)).all() or self.adversary.attack.is_crafting(n):
            return False
        self.publisher.notify(
            f"training diverged in round {n + 1}: it begins again with the initial model; are the data on the agreed "
            "scale?"
        )
        return True

    def _with_candidates(self, there: Sequence[int]) -> AgentGroup:
        """The same block where the agent may ask only those that are there."""
        near = self.spec.neighbours
        wanted = set(there) if near is None else set(there) & set(near[self.agent_id].tolist())
        nobody = torch.zeros(0, dtype=torch.int64)
        lists = [nobody] * self.spec.num_agents
        lists[self.agent_id] = torch.tensor(sorted(wanted), dtype=torch.int64)
        return dataclasses.replace(
            self.group, spec=dataclasses.replace(self.spec, neighbours=tuple(lists))
        )

    def local_aggregation_(
        self,
        n: int,
        states: Sequence[AgentState],
        active: Bool[np.ndarray, " N"],
        deadline: float | None,
        on_step: Callable[[str], None],
    ) -> tuple[list[AgentState], list[Decisions], Bool[np.ndarray, " N"]]:
        """Run Algorithm 2 for the agent; a simulated attacker colludes instead."""
        colludes = self.adversary.colludes and self.adversary.malicious[self.agent_id]
        if colludes or not active[self.agent_id]:
            engine = AdversarialEngine(self)
            return batched_aggregation.local_aggregation_(
                engine, n, states, active, deadline, on_step
            )

        agent = self._with_candidates(self.reachable_peers(n))
        contacts = states[0].contacts.forget(self.adversary.new_identities(n))
        state = AgentState(contacts, states[0].rule_states)
        with dispatch.use_kernels(self.spec.kernels.linear, self.spec.kernels.convolution):
            state, decisions = algorithm2.local_aggregation_(
                agent, n, state, lambda ids: self.exchange(n, [ids], deadline)[0], on_step
            )
        return [state], [decisions], self._is_finite()

    def publish_(
        self, n: int, online: Bool[np.ndarray, " N"], sizes: Float[np.ndarray, " N"]
    ) -> None:
        """Offer the model that the agent trained; an attacker of a simulation crafts first, from what it downloads."""
        block = self.group
        layout = self.group.layout
        box = make_outbox(self.group, n)
        num_samples = int(box.num_samples[0])
        claims = int(box.claimed_samples[0])
        theta = self._row(int(layout.own[0]))
        deceived = self.adversary.benign_ids
        if not box.is_attacking[0] and claims == num_samples:
            self.publisher.publish(n, theta, num_samples)
            return
        if box.is_attacking[0]:  # fellows look at what each trained
            self.publisher.publish_attack(
                n, theta, num_samples, dict.fromkeys(deceived.tolist()), claims
            )
            craft_models_(
                block, _ONLY_AGENT, n, np.ones(self.spec.num_agents, dtype=bool), self._peek(n)
            )
        rows = box.rows(np.zeros(len(deceived), np.int64), deceived).tolist()
        crafted = {to: self._row(row) for to, row in zip(deceived.tolist(), rows, strict=True)}
        self.publisher.publish_attack(n, theta, num_samples, crafted, claims)

    def _peek(self, n: int) -> Callable[[list[int]], Float[Tensor, "m d"]]:
        """What an attacker may see: its own model and those of others that it downloads now; where one does not come
        it takes its own for it."""

        def look(ids: list[int]) -> Float[Tensor, "m d"]:
            seen = self.client.peek(n, [i for i in ids if i != self.agent_id])
            own = self._row(int(self.group.layout.own[0]))
            return (
                torch.stack([seen.get(i, own) for i in ids])
                if ids
                else torch.zeros(0, self.spec.dim)
            )

        return look

    def exchange(self, n: int, asked: Sequence[Ragged], deadline: float | None) -> list[Inbox]:
        """Download, in one go, what the asked peers offer; who has not answered by the deadline is missed."""
        ids = asked[0].values.tolist()
        own = int(self.group.layout.own[0])
        slots = {
            i: self.group.layout.first_received + k
            for k, i in enumerate(i for i in ids if i != self.agent_id)
        }
        rows = {i: self._row(row) for i, row in slots.items()}
        began = time.monotonic()
        self.arrivals, self.failures = self.client.fetch(n, rows, deadline)
        self.exchange_seconds = time.monotonic() - began
        there = np.array([i == self.agent_id or i in self.arrivals for i in ids], dtype=bool)
        kept = [i for i in ids if i == self.agent_id or i in self.arrivals]
        mine = self.group.data.train.sizes.astype(float)[0]
        claims = np.array(
            [mine if i == self.agent_id else self.arrivals[i].num_samples for i in kept],
            dtype=float,
        )
        rounds = np.array(
            [n if i == self.agent_id else self.arrivals[i].round for i in kept], np.int64
        )
        places = np.array([own if i == self.agent_id else slots[i] for i in kept], np.int64)
        return [
            Inbox(
                asked[0].filter(there),
                places,
                clip_claimed_samples(claims, self.spec.max_samples),
                rounds,
            )
        ]

    def mix_(self, decisions: Sequence[Decisions]) -> Bool[np.ndarray, " N"]:
        """theta <- W theta for the agent; whether it is finite then, of all others True."""
        layout = self.group.layout
        mix_(
            self.group.models,
            mixing_matrix(decisions[0], layout.own, layout.previous),
            0,
            self.spec.dim,
        )
        return self._is_finite()

    def _is_finite(self) -> Bool[np.ndarray, " N"]:
        layout = self.group.layout
        finite = np.ones(self.spec.num_agents, dtype=bool)
        finite[self.agent_id] = np.isfinite(max_abs(self.group.models, layout.own.tolist())).all()
        return finite

    def evaluate(self) -> dict[int, EvaluationResult]:
        """What the agent's model does on its own test samples."""
        return dict(zip([self.agent_id], evaluate_models(self.group, _ONLY_AGENT), strict=True))

    def _row(self, row: int) -> Float[Tensor, " d"]:
        return self.group.models[row]
