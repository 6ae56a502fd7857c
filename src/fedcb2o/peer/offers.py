"""What one agent offers its peers: a snapshot of its model with a signed manifest, by a `Server`.

An agent that restarts must never sign two manifests for one round, so that what it will sign is written down first.
"""

from collections.abc import Callable, Mapping, Sequence

from jaxtyping import Float
from torch import Tensor

from fedcb2o.peer.coding import Coding
from fedcb2o.peer.federation import Federation
from fedcb2o.peer.identity import Identity
from fedcb2o.peer.ledger import Journal
from fedcb2o.peer.serve import Server


class Offers:
    """The published models of agent `me`; `tell` hears what its operator should know."""

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

    def publish(
        self,
        n: int,
        theta: Float[Tensor, " d"],
        num_samples: int,
        *,
        withheld: Sequence[int] = (),
        crafted: Mapping[int, Float[Tensor, " d"]] | None = None,
        claims: int = 0,
    ) -> None:
        """Offer the model of round `n`, to all but whom it is `withheld` from. Attackers of a simulation offer what
        they `crafted` to those peers, and claim another number of samples to them; they write nothing down first."""
        if crafted is None and not withheld:
            manifest, content = self._packed(n, theta, num_samples)
            if self.journal.may_sign(n, manifest.digest):
                self.server.publish(self._signed(manifest, content))
            else:
                self.tell(f"the model of round {n + 1} is not offered: another one of that round was signed before")
            return
        others = {
            to: self._snapshot(n, model, claims).signed(self.identity.sign) for to, model in (crafted or {}).items()
        }
        own = self._snapshot(n, theta, num_samples).signed(self.identity.sign)
        self.server.publish(own, {**dict.fromkeys(withheld), **others})
