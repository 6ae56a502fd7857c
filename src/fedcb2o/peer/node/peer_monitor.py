"""The other agents as a node sees them: whom it may ask, and how long it waits for whom."""

import statistics
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from fedcb2o.peer.node.observer import Watch
from fedcb2o.peer.node.preflight import disagrees
from fedcb2o.peer.wire.client import HELLO_SECONDS, Downloads, StoppedError
from fedcb2o.peer.wire.transport import Transport

SETTLED = 0.2  # seconds between two looks at who is there
REJOIN = 3.0  # seconds in which who is there is reached
PAUSE = 0.02  # seconds between two looks at how far the others are, where all wait for each other


class Company:
    """Those with whom an agent trains, found out by its `transport` and `downloads`.

    Once `stop` is set nobody is waited for, and `watch` is told what the operator should know."""

    def __init__(self, transport: Transport, downloads: Downloads, stop: threading.Event, watch: Watch) -> None:
        self.transport, self.downloads, self.stop, self.watch = transport, downloads, stop, watch
        self.federation, self.me = downloads.federation, downloads.me

    @property
    def others(self) -> frozenset[int]:
        """All members but this agent, and those who equivocated."""
        return frozenset(self.federation.members) - self.downloads.ledger.guilty - {self.me}

    def there(self) -> frozenset[int]:
        """Those of them that can be reached."""
        return self.others & self.transport.alive()

    def to_ask(self, n: int) -> list[int]:
        """Whom the agent may ask in round n: in a synchronous federation everybody, else who can be reached, and did
        not keep it waiting of late."""
        if self.federation.synchronous:
            return sorted(self.others)
        return sorted(self.there() - self.downloads.patience.resting(n))

    def gather(self, seconds: float, done: int) -> None:
        """Wait so long until everybody is there; where rounds are `done` not for long, if anybody is there."""
        others, began, told = self.federation.members.keys() - {self.me}, time.monotonic(), False
        while (absent := others - self.transport.alive()) and (waited := time.monotonic() - began) < seconds:
            if done and waited > REJOIN and absent != others:
                break
            if waited > REJOIN and not told:
                told = True
                self.watch.note(f"waits for {self._names(absent)}, up to {seconds:.0f} s")
            if self.stop.wait(SETTLED):
                raise StoppedError
        if absent:
            self.watch.note(f"begins without {self._names(absent)}, who could not be reached in {waited:.0f} s")

    def _names(self, ids: Collection[int]) -> str:
        return ", ".join(self.federation.members[i].name for i in sorted(ids))

    def compare(self) -> None:
        """Tell the operator who holds another file of the federation, whose models are refused, and what differs."""
        there = sorted(self.transport.alive() & self.federation.members.keys())
        with ThreadPoolExecutor(len(there) or 1) as pool:
            said = pool.map(lambda i: self.downloads.hello(i, HELLO_SECONDS), there)
            for i, about in zip(there, said, strict=True):
                if about is not None and (wrong := disagrees(self.federation, about)):
                    self.watch.note(f"{self.federation.members[i].name}: {wrong}")

    def pace(self, done: int, until: float, ahead: bool) -> None:
        """Wait until the last of so many rounds that are `done` has had its time, unless most of those that are there
        are further.

        Each round has its time to itself: who was stopped for a while, and finds nobody there, does not race to the end
        alone; and who is `ahead` of all whom it asked waits for half of those that are there. In a synchronous
        federation nobody begins a round before the others have done the one before: a model is offered in two rounds
        alone.
        """
        federation = self.federation
        if federation.synchronous:
            self.wait_for(lambda: self.others, done, federation.deadline_seconds, PAUSE)
        elif ahead:
            self.wait_for(self.there, done - federation.lag, federation.deadline_seconds, SETTLED, 0.5)
        while (left := until - time.monotonic()) > 0:
            rounds = [self.downloads.least[i] for i in self.there() if i in self.downloads.least]
            if rounds and statistics.median_low(rounds) >= done:
                return
            if self.stop.wait(min(left, SETTLED)):
                return

    def see_off(self, done: int, seconds: float) -> None:
        """Wait so long until all who can be reached are done too: they may want the last model."""
        self.wait_for(self.there, done, seconds, SETTLED)

    def wait_for(
        self, whom: Callable[[], Collection[int]], n: int, seconds: float, pause: float, share: float = 1.0
    ) -> None:
        """Wait until a share of some peers have done `n` rounds, but for no more than so many seconds."""
        until, there = time.monotonic() + seconds, set[int]()
        while (left := until - time.monotonic()) > 0:
            for i in sorted(set(whom()) - there):
                if (left := until - time.monotonic()) <= 0 or self.stop.is_set():  # each may take its time
                    return
                said = (self.downloads.hello(i, min(left, HELLO_SECONDS)) or {}).get("round")
                if isinstance(said, int) and said >= n:
                    there.add(i)
            wanted = set(whom())
            if len(wanted & there) >= share * len(wanted) or self.stop.wait(min(left, pause)):
                return
