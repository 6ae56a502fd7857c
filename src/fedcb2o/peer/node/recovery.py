"""Recovery of the highest signed round of an agent whose run directory was lost.

Two models signed for one round look like fraud, and nothing in an empty directory tells which
rounds were signed. More than half of the other members must therefore say which model of this agent
is the newest that they hold. The agent signs no round up to this one, nor `lag` + 1 further rounds,
which may not have reached a majority. Without a majority it signs nothing. All these rounds count
in the privacy budget, because they may have been trained.
"""

from collections.abc import Callable
from dataclasses import dataclass

from fedcb2o.errors import RunError
from fedcb2o.peer.node.peer_monitor import PeerMonitor
from fedcb2o.peer.node.privacy_ledger import PrivacyLedger
from fedcb2o.peer.wire.client import HELLO_SECONDS
from fedcb2o.peer.wire.equivocation import SigningJournal

_REPEAT_SECONDS = 0.5  # time for answers in later rounds


@dataclass
class SigningRecovery:
    """Recovery of the rounds that an agent must not sign again.

    Lost private rounds are added to `privacy`. `notify` shows a message to the operator.
    """

    journal: SigningJournal
    monitor: PeerMonitor
    name: str
    privacy: PrivacyLedger
    rounds_done: int
    is_resumed: bool
    notify: Callable[[str], None]

    def __post_init__(self) -> None:
        self.is_lost = self.is_resumed and not self.journal.is_complete
        self.answered: set[int] = set()
        self.newest_round = self.journal.last_round

    def start(self) -> None:
        """Ask the reachable members what this agent signed.

        A RunError says that a member holds a model of which a new run directory knows nothing.
        """
        # Also where nothing seems lost: another directory may have signed for this run.
        self._ask(HELLO_SECONDS)
        if self.newest_round > self.journal.last_round:
            self.is_lost = True
            if not self.is_resumed:
                raise RunError(
                    f"another peer holds a model that {self.name} signed for round "
                    f"{self.newest_round + 1}, of which this run directory knows nothing: go on in "
                    "the directory where it was begun; if that is lost, and no other program signs "
                    "with this key, --resume goes on here"
                )
        if self.is_lost:
            self.privacy.begin_recovery(self.rounds_done)
            self._decide()
        if self.is_lost:
            self.notify(self._describe_wait())

    def update(self) -> None:
        """Ask the members that have not answered yet, if more answers are needed."""
        if self.is_lost:
            self._ask(_REPEAT_SECONDS)
            self._decide()

    @property
    def _needed(self) -> int:
        """More than half of the other members."""
        return (len(self.monitor.federation.members) - 1) // 2 + 1

    def _ask(self, seconds: float) -> None:
        peers = self.monitor.transport.connected_peers() - self.answered
        answered, newest = self.monitor.client.newest_own_manifest(peers, seconds)
        self.answered |= answered
        if newest is not None:
            self.newest_round = max(self.newest_round, newest.round)

    def _decide(self) -> None:
        """Sign again after the newest known round, if a majority has answered."""
        if len(self.answered) < self._needed:
            self.journal.suspension = self._describe_wait()
            return
        federation = self.monitor.federation
        # Newer models may have reached only members that have not answered.
        last = min(federation.rounds - 1, self.newest_round + federation.lag + 1)
        self.privacy.end_recovery(last + 1)
        self.journal.complete(last)
        self.journal.suspension = ""
        self.is_lost = False
        known = "none"
        if self.newest_round >= 0:
            known = f"round {self.newest_round + 1}"
        self.notify(
            f"{len(self.answered)} members answered; newest known model of {self.name}: {known}; "
            f"models are offered again after round {last + 1}"
        )

    def _describe_wait(self) -> str:
        return (
            f"the record of what {self.name} signed was lost or is old: before it offers a model, "
            f"{self._needed} other members must tell what they hold of it, and "
            f"{len(self.answered)} did; or give it a new key (`fedcb2o peer identity` and `amend "
            "--replace`)"
        )
