"""A malicious agent of a simulation among real peers.

`simulation.AdversarialEngine` plays it. Benign nodes do not import this module.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedcb2o.federated.agent_group import Phase
from fedcb2o.federated.decisions import Decisions, Inbox
from fedcb2o.federated.mixing import mix_, mixing_matrix
from fedcb2o.federated.publishing import Outbox, craft_models_, make_outbox
from fedcb2o.federated.ragged import AgentIds, Members, Ragged
from fedcb2o.peer._denormals import flush_denormals
from fedcb2o.peer.node.engine import PeerEngine
from fedcb2o.peer.wire.server import Snapshot

_ONLY_MEMBER = Members(np.zeros(1, np.int64))


class AttackingPeer(PeerEngine):
    """Engine of a peer that signs without a journal, and offers benign peers other models.

    With `map_batches`, `exchange` and `mix_`, a colluder runs the batched Algorithm 2 of
    simulations; `exchange` is the network.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        adversary = self.group.adversary
        assert adversary is not None
        self.adversary = adversary
        self.outbox: Outbox | None = make_outbox(self.group, np.ones(1, dtype=bool))

    def publish_(
        self, n: int, online: Bool[np.ndarray, " N"], max_abs: Float[np.ndarray, " N"]
    ) -> None:
        """Offer the trained model; if the agent deceives peers, to its fellow attackers alone."""
        if not self.adversary.attack.deceives:
            super().publish_(n, online, max_abs)
            return
        # Colluders look at each other's trained models before they craft.
        self._offer(n, dict.fromkeys(self.adversary.benign_ids.tolist()))

    def craft_models_(
        self, n: int, is_finite: Bool[np.ndarray, " N"]
    ) -> dict[int, Float[np.ndarray, " r"]]:
        """Craft the agent's models; it downloads those that it knows."""

        def peek(ids: list[int]) -> Float[Tensor, "m d"]:
            models = self.client.peek(n, [i for i in ids if i != self.agent_id])
            own_model = self._own_model()  # in place of missing ones
            if not ids:
                return torch.zeros(0, self.spec.dim)
            return torch.stack([models.get(i, own_model) for i in ids])

        known = np.ones(self.spec.num_agents, dtype=bool)  # of others this is not known
        (largest,) = craft_models_(self.group, _ONLY_MEMBER, n, known, peek)
        return {0: largest}

    def replace_outbox(self, n: int, outbox: Outbox) -> None:
        """Offer each benign peer the model of an outbox."""
        receivers = AgentIds(self.adversary.benign_ids)
        senders = Members(np.zeros(len(receivers), np.int64))
        rows, claims = outbox.sent(senders, receivers)
        # Crafted models that are not acceptable are offered too: real receivers check them.
        pairs = zip(receivers.tolist(), rows.tolist(), claims.tolist(), strict=True)
        self._offer(
            n,
            {
                receiver: self.publisher.snapshot(
                    n, self.group.models[row], int(claim), self.triggers
                )
                for receiver, row, claim in pairs
            },
        )

    def map_batches(
        self, phase: Phase, n: int, *shared: Any, arguments: Sequence[Sequence[Any]] = ()
    ) -> list[Any]:
        """Call a phase of the only batch, with the candidates of the round as neighbours."""
        group = self._with_candidates(n)
        own = (argument[0] for argument in arguments)
        with self._kernels():
            return [phase.function(group, _ONLY_MEMBER, *own, n, *shared)]

    def exchange(self, n: int, sampled: Sequence[Ragged], deadline: float | None) -> list[Inbox]:
        """Download the models of the sampled peers (line 2)."""
        return [self._fetch(n, sampled[0].values.tolist(), [], deadline)]

    def mix_(self, decisions: Sequence[Decisions]) -> Bool[np.ndarray, " N"]:
        """Average the models in place: theta <- W theta (line 7).

        The result is True for each agent, except for this one if its model is not finite.
        """
        layout = self.group.layout
        matrix = mixing_matrix(decisions[0], layout.own, layout.previous)
        with flush_denormals():
            mix_(self.group.models, matrix, 0, self.spec.dim)
        return self._is_finite()

    def _offer(self, n: int, overrides: Mapping[int, Snapshot | None]) -> None:
        """Offer the trained model to all peers except those with a model of their own, or none."""
        num_samples = int(self.group.data.train.sizes[0])
        # Without the journal: an attacker signs several models for one round.
        snapshot = self.publisher.snapshot(n, self._own_model(), num_samples, self.triggers)
        self.publisher.server.publish(snapshot, overrides)
