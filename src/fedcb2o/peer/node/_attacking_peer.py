"""A malicious agent of a simulation among real peers.

`simulation.AdversarialEngine` plays it. Benign nodes do not import this module.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedcb2o.federated import Outbox, craft_models_, make_outbox
from fedcb2o.federated.ragged import AgentIds, Members
from fedcb2o.peer.node._engine import PeerEngine
from fedcb2o.peer.wire._server import Snapshot

_ONLY_MEMBER = Members(np.zeros(1, np.int64))


class AttackingPeer(PeerEngine):
    """Engine of a peer that signs without a journal, and offers benign peers other models."""

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
                receiver: self.publisher.snapshot(n, self.group.models[row], int(claim))
                for receiver, row, claim in pairs
            },
        )

    def _offer(self, n: int, overrides: Mapping[int, Snapshot | None]) -> None:
        """Offer the trained model to all peers except those with a model of their own, or none."""
        num_samples = int(self.group.data.train.sizes[0])
        snapshot = self.publisher.snapshot(n, self._own_model(), num_samples)
        self.publisher.server.publish(snapshot, overrides)
