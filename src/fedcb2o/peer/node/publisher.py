"""Publisher of one agent's models: encoded, with a signed manifest.

An agent that restarts must never sign two manifests for one round. Each signature is therefore
written to the journal first.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from fedcb2o.peer.membership.federation import Federation
from fedcb2o.peer.membership.identity import Identity
from fedcb2o.peer.wire.compression import Codec
from fedcb2o.peer.wire.equivocation import SigningJournal
from fedcb2o.peer.wire.protocol import BytesLike, Manifest, sign_triggers
from fedcb2o.peer.wire.server import Server, Snapshot


@dataclass
class ModelPublisher:
    """Publisher of an agent's models through its server; `notify` tells the operator."""

    federation: Federation
    identity: Identity
    codec: Codec
    journal: SigningJournal
    server: Server
    notify: Callable[[str], None]
    _has_notified: bool = field(default=False, init=False)

    def publish(
        self, n: int, theta: Float[Tensor, " d"], num_samples: int, triggers: bytes = b""
    ) -> None:
        """Offer the model of round n, and triggers, to all peers, unless another one was signed."""
        # The agent trains on, and averages the models of others.
        if self.journal.suspension:
            return
        manifest, content = self._encode(n, theta, num_samples)
        if self.journal.reserve(n, manifest.digest):
            self.server.publish(self._sign(manifest, content, triggers))
        elif not self._has_notified:
            # Once, as the reason holds for all these rounds.
            self._has_notified = True
            self.notify(
                f"no model up to round {self.journal.last_round + 1} is offered, as others may "
                "have been signed for these rounds before; training goes on"
            )

    def snapshot(
        self, n: int, theta: Float[Tensor, " d"], num_samples: int, triggers: bytes = b""
    ) -> Snapshot:
        """Return a signed model. The journal does not know the signature."""
        return self._sign(*self._encode(n, theta, num_samples, is_one_of_several=True), triggers)

    def _encode(
        self,
        n: int,
        theta: Float[Tensor, " d"],
        num_samples: int,
        *,
        is_one_of_several: bool = False,
    ) -> tuple[Manifest, BytesLike]:
        codec = self.codec
        content = codec.encode_exactly(theta) if is_one_of_several else codec.encode(theta, n)
        manifest = Manifest.from_content(
            memoryview(content)[: codec.max_bytes],
            run=self.federation.run,
            agent=self.federation.id_of(self.identity.member),
            round=n,
            dim=len(theta),
            num_samples=num_samples,
            encoding=self.codec.encoding,
            base=self.codec.base,
        )
        return manifest, content

    def _sign(self, manifest: Manifest, content: BytesLike, triggers: bytes) -> Snapshot:
        sign = self.identity.sign
        signed = sign_triggers(triggers, manifest, sign) if triggers else b""
        return Snapshot(manifest.to_signed_bytes(sign), content, signed)
