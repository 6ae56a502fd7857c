"""What one agent offers its peers: its model as it is sent, with a signed manifest.

An agent that restarts must never sign two manifests for one round, so that what it will sign is written down first.
"""

from collections.abc import Callable, Mapping

from jaxtyping import Float
from torch import Tensor

from fedcb2o.peer.membership.federation import Federation
from fedcb2o.peer.membership.identity import Identity
from fedcb2o.peer.wire.compression import Coding
from fedcb2o.peer.wire.equivocation import Journal
from fedcb2o.peer.wire.protocol import Bytes, Manifest
from fedcb2o.peer.wire.server import Server, Snapshot


class Offers:
    """The models that an agent publishes by a server; `tell` hears what its operator should know."""

    def __init__(
        self,
        federation: Federation,
        identity: Identity,
        coding: Coding,
        journal: Journal,
        server: Server,
        tell: Callable[[str], None],
    ) -> None:
        self.federation, self.identity, self.coding = federation, identity, coding
        self.journal, self.server, self.tell = journal, server, tell
        self.me = federation.id_of(identity.member)

    def publish(self, n: int, theta: Float[Tensor, " d"], num_samples: int) -> None:
        """Offer the model of round `n` to everybody, unless another one of that round was signed before."""
        manifest, content = self._packed(n, theta, num_samples)
        if self.journal.may_sign(n, manifest.digest):
            self.server.publish(self._signed(manifest, content))
        else:
            self.tell(f"the model of round {n + 1} is not offered: another one of that round was signed before")

    def deceive(
        self,
        n: int,
        theta: Float[Tensor, " d"],
        num_samples: int,
        crafted: Mapping[int, Float[Tensor, " d"] | None],
        claims: int,
    ) -> None:
        """What an attacker of a simulation does: offer some peers what it `crafted` for them, or nothing yet, with
        another number of samples; and the others its model. It writes nothing down."""
        to = {
            i: None if model is None else self._signed(*self._packed(n, model, claims)) for i, model in crafted.items()
        }
        self.server.publish(self._signed(*self._packed(n, theta, num_samples)), to)

    def _packed(self, n: int, theta: Float[Tensor, " d"], num_samples: int) -> tuple[Manifest, Bytes]:
        """The manifest of a model, and the model as it is sent."""
        content = self.coding.pack(theta)
        manifest = Manifest.of(
            content,
            run=self.federation.run,
            agent=self.me,
            round=n,
            dim=len(theta),
            num_samples=num_samples,
            encoding=self.coding.number,
            base=self.coding.base,
        )
        return manifest, content

    def _signed(self, manifest: Manifest, content: Bytes) -> Snapshot:
        return Snapshot(manifest.signed(self.identity.sign), content)
