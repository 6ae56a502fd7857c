"""What one agent offers its peers: its model as it is sent, with a signed manifest.

An agent that restarts must never sign two manifests for one round, so that what it will sign is written down first.
"""

from collections.abc import Callable, Mapping

from jaxtyping import Float
from torch import Tensor

from fedcb2o.peer.membership.federation import Federation
from fedcb2o.peer.membership.identity import Identity
from fedcb2o.peer.wire.compression import Codec
from fedcb2o.peer.wire.equivocation import SigningJournal
from fedcb2o.peer.wire.protocol import BytesLike, Manifest
from fedcb2o.peer.wire.server import Server, Snapshot


class ModelPublisher:
    """The models that an agent publishes by a server; `tell` hears what its operator should know."""

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

    def publish(self, n: int, theta: Float[Tensor, " d"], num_samples: int) -> None:
        """Offer the model of round `n` to everybody, unless another one of that round was signed before."""
        manifest, content = self._encode(n, theta, num_samples)
        if self.journal.reserve(n, manifest.digest):
            self.server.publish(self._sign(manifest, content))
        else:
            self.notify(
                f"the model of round {n + 1} is not offered: another one of that round was signed before"
            )

    def publish_attack(
        self,
        n: int,
        theta: Float[Tensor, " d"],
        num_samples: int,
        crafted: Mapping[int, Float[Tensor, " d"] | None],
        claimed_samples: int,
    ) -> None:
        """What an attacker of a simulation does: offer some peers what it `crafted` for them, or nothing yet, with
        another number of samples; and the others its model. It writes nothing down."""
        to = {
            i: None if model is None else self._sign(*self._encode(n, model, claimed_samples))
            for i, model in crafted.items()
        }
        self.server.publish(self._sign(*self._encode(n, theta, num_samples)), to)

    def _encode(
        self, n: int, theta: Float[Tensor, " d"], num_samples: int
    ) -> tuple[Manifest, BytesLike]:
        """The manifest of a model, and the model as it is sent."""
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
