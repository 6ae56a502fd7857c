"""Publisher of one agent's models: encoded, with a signed manifest.

An agent that restarts must never sign two manifests for one round. Each signature is therefore
written to the journal first.
"""

from collections.abc import Callable, Mapping

from jaxtyping import Float
from torch import Tensor

from fedcb2o.peer.membership.federation import Federation
from fedcb2o.peer.membership.identity import Identity
from fedcb2o.peer.wire._compression import Codec
from fedcb2o.peer.wire._equivocation import SigningJournal
from fedcb2o.peer.wire._protocol import BytesLike, Manifest
from fedcb2o.peer.wire._server import Server, Snapshot


class ModelPublisher:
    """Publisher of an agent's models through its server.

    Args:
        federation: The federation.
        identity: This organisation.
        codec: Encoding of models.
        journal: Journal of signed manifests.
        server: Server of the snapshots.
        notify: Function that shows a message to the operator.
    """

    def __init__(
        self,
        federation: Federation,
        identity: Identity,
        codec: Codec,
        journal: SigningJournal,
        server: Server,
        notify: Callable[[str], None],
    ) -> None:
        self.federation = federation
        self.identity = identity
        self.codec = codec
        self.journal = journal
        self.server = server
        self.notify = notify
        self.agent_id = federation.id_of(identity.member)
        self._has_notified = False

    def publish(self, n: int, theta: Float[Tensor, " d"], num_samples: int) -> None:
        """Offer a model to all peers, unless another one was signed.

        Args:
            n: The round, from 0.
            theta: The model, shape [d].
            num_samples: Claimed number of training samples.
        """
        if self.journal.suspension:
            return
        manifest, content = self._encode(n, theta, num_samples)
        if self.journal.reserve(n, manifest.digest):
            self.server.publish(self._sign(manifest, content))
        elif not self._has_notified:  # once, as the reason holds for all these rounds
            self._has_notified = True
            self.notify(
                f"no model up to round {self.journal.last_round + 1} is offered, as others may "
                "have been signed for these rounds before; training goes on"
            )

    def publish_attack(
        self,
        n: int,
        theta: Float[Tensor, " d"],
        num_samples: int,
        crafted: Mapping[int, Float[Tensor, " d"] | None],
        claimed_samples: int,
    ) -> None:
        """Offer crafted models to some peers, as an attacker of a simulation.

        The journal is not used.

        Args:
            n: The round, from 0.
            theta: The model for the other peers, shape [d].
            num_samples: Number of samples claimed to the other peers.
            crafted: The crafted model for each deceived peer, or None for no model yet.
            claimed_samples: Number of samples claimed to the deceived peers.
        """
        overrides: dict[int, Snapshot | None] = {}
        for i, model in crafted.items():
            overrides[i] = None
            if model is not None:
                overrides[i] = self._sign(*self._encode(n, model, claimed_samples))
        self.server.publish(self._sign(*self._encode(n, theta, num_samples)), overrides)

    def _encode(
        self, n: int, theta: Float[Tensor, " d"], num_samples: int
    ) -> tuple[Manifest, BytesLike]:
        content = self.codec.encode(theta)
        manifest = Manifest.from_content(
            content,
            run=self.federation.run,
            agent=self.agent_id,
            round=n,
            dim=len(theta),
            num_samples=num_samples,
            encoding=self.codec.encoding,
            base=self.codec.base,
        )
        return manifest, content

    def _sign(self, manifest: Manifest, content: BytesLike) -> Snapshot:
        return Snapshot(manifest.to_signed_bytes(self.identity.sign), content)
