"""The other agents as a node sees them: whom it may ask, and how long it waits for whom."""

import statistics
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from fedcb2o.peer.node.observer import NodeObserver
from fedcb2o.peer.node.preflight import describe_disagreement
from fedcb2o.peer.wire.client import HELLO_SECONDS, PeerClient, StoppedError
from fedcb2o.peer.wire.transport import Transport

_POLL_SECONDS = 0.2  # seconds between two looks at who is there
_REJOIN_SECONDS = 3.0  # seconds in which who is there is reached
_SYNCHRONOUS_POLL_SECONDS = (
    0.02  # seconds between two looks at how far the others are, where all wait for each other
)


class PeerMonitor:
    """Those with whom an agent trains, found out by its `transport` and `downloads`.

    Once `stop` is set nobody is waited for, and `watch` is told what the operator should know."""

    def __init__(
        self,
        transport: Transport,
        downloads: PeerClient,
        stop: threading.Event,
        watch: NodeObserver,
    ) -> None:
        self.transport = transport
        self.client = downloads
        self.stop = stop
        self.observer = watch
        self.federation = downloads.federation
        self.agent_id = downloads.agent_id

    @property
    def other_members(self) -> frozenset[int]:
        """All members but this agent, and those who equivocated."""
        return (
            frozenset(self.federation.members) - self.client.ledger.equivocators - {self.agent_id}
        )

    def reachable(self) -> frozenset[int]:
        """Those of them that can be reached."""
        return self.other_members & self.transport.connected_peers()

    def candidates(self, n: int) -> list[int]:
        """Whom the agent may ask in round n: in a synchronous federation everybody, else who can be reached, and did
        not keep it waiting of late."""
        if self.federation.synchronous:
            return sorted(self.other_members)
        return sorted(self.reachable() - self.client.backoff.suspended(n))

    def wait_for_members(self, seconds: float, done: int) -> None:
        """Wait so long until everybody is there; where rounds are `done` not for long, if anybody is there."""
        others = self.federation.members.keys() - {self.agent_id}
        began = time.monotonic()
        told = False
        while (absent := others - self.transport.connected_peers()) and (
            waited := time.monotonic() - began
        ) < seconds:
            if done and waited > _REJOIN_SECONDS and absent != others:
                break
            if waited > _REJOIN_SECONDS and not told:
                told = True
                self.observer.on_note(f"waits for {self._names(absent)}, up to {seconds:.0f} s")
            if self.stop.wait(_POLL_SECONDS):
                raise StoppedError
        if absent:
            self.observer.on_note(
                f"begins without {self._names(absent)}, who could not be reached in {waited:.0f} s"
            )

    def _names(self, ids: Collection[int]) -> str:
        return ", ".join(self.federation.members[i].name for i in sorted(ids))

    def report_disagreements(self) -> None:
        """Tell the operator who holds another file of the federation, whose models are refused, and what differs."""
        there = sorted(self.transport.connected_peers() & self.federation.members.keys())
        with ThreadPoolExecutor(len(there) or 1) as pool:
            said = pool.map(lambda i: self.client.hello(i, HELLO_SECONDS), there)
            for i, about in zip(there, said, strict=True):
                if about is not None and (wrong := describe_disagreement(self.federation, about)):
                    self.observer.on_note(f"{self.federation.members[i].name}: {wrong}")

    def throttle(self, done: int, until: float, ahead: bool) -> None:
        """Wait until the last of so many rounds that are `done` has had its time, unless most of those that are there
        are further.

        Each round has its time to itself: who was stopped for a while, and finds nobody there, does not race to the end
        alone; and who is `ahead` of all whom it asked waits for half of those that are there. In a synchronous
        federation nobody begins a round before the others have done the one before: a model is offered in two rounds
        alone.
        """
        federation = self.federation
        if federation.synchronous:
            self.wait_for_rounds(
                lambda: self.other_members,
                done,
                federation.deadline_seconds,
                _SYNCHRONOUS_POLL_SECONDS,
            )
        elif ahead:
            self.wait_for_rounds(
                self.reachable,
                done - federation.lag,
                federation.deadline_seconds,
                _POLL_SECONDS,
                0.5,
            )
        while (left := until - time.monotonic()) > 0:
            rounds = [
                self.client.last_rounds[i] for i in self.reachable() if i in self.client.last_rounds
            ]
            if rounds and statistics.median_low(rounds) >= done:
                return
            if self.stop.wait(min(left, _POLL_SECONDS)):
                return

    def linger(self, done: int, seconds: float) -> None:
        """Wait so long until all who can be reached are done too: they may want the last model."""
        self.wait_for_rounds(self.reachable, done, seconds, _POLL_SECONDS)

    def wait_for_rounds(
        self,
        whom: Callable[[], Collection[int]],
        n: int,
        seconds: float,
        pause: float,
        share: float = 1.0,
    ) -> None:
        """Wait until a share of some peers have done `n` rounds, but for no more than so many seconds."""
        until = time.monotonic() + seconds
        there = set[int]()
        while (left := until - time.monotonic()) > 0:
            for i in sorted(set(whom()) - there):
                if (
                    left := until - time.monotonic()
                ) <= 0 or self.stop.is_set():  # each may take its time
                    return
                said = (self.client.hello(i, min(left, HELLO_SECONDS)) or {}).get("round")
                if isinstance(said, int) and said >= n:
                    there.add(i)
            wanted = set(whom())
            if len(wanted & there) >= share * len(wanted) or self.stop.wait(min(left, pause)):
                return
