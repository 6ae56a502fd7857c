"""Monitor of the other members: candidates for requests, and waiting for members."""

import statistics
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from fedcb2o.peer.node._observer import NodeObserver
from fedcb2o.peer.node._preflight import describe_disagreement
from fedcb2o.peer.wire._client import HELLO_SECONDS, PeerClient, StoppedError
from fedcb2o.peer.wire._transport import Transport

_POLL_SECONDS = 0.2  # between two looks at the links
_REJOIN_SECONDS = 3.0  # in which a running member is reached
_SYNCHRONOUS_POLL_SECONDS = 0.02  # between two looks at rounds in a synchronous federation


class PeerMonitor:
    """Monitor of the members that an agent trains with.

    Args:
        transport: Carrier of requests, which knows the links.
        client: Client that asks members for their round.
        stop: Event after which nothing is waited for.
        observer: Receiver of messages for the operator.
    """

    def __init__(
        self,
        transport: Transport,
        client: PeerClient,
        stop: threading.Event,
        observer: NodeObserver,
    ) -> None:
        self.transport = transport
        self.client = client
        self.stop = stop
        self.observer = observer
        self.federation = client.federation
        self.agent_id = client.agent_id

    @property
    def other_members(self) -> frozenset[int]:
        """Members except this agent and those that equivocated."""
        members = frozenset(self.federation.members)
        return members - self.client.ledger.equivocators - {self.agent_id}

    def reachable(self) -> frozenset[int]:
        """Return the other members with a working link.

        Returns:
            Their ids.
        """
        return self.other_members & self.transport.connected_peers()

    def candidates(self, n: int) -> list[int]:
        """Return the members that may be asked in a round.

        In a synchronous federation these are all other members, otherwise the reachable ones that
        did not delay recent rounds.

        Args:
            n: The round.

        Returns:
            Ascending ids.
        """
        if self.federation.synchronous:
            return sorted(self.other_members)
        return sorted(self.reachable() - self.client.backoff.suspended(n))

    def wait_for_members(self, seconds: float, rounds_done: int) -> None:
        """Wait until all members are reachable.

        A resumed node waits only a few seconds if at least one member is reachable.

        Args:
            seconds: Longest time to wait.
            rounds_done: Rounds that this agent has finished.

        Raises:
            StoppedError: The agent was asked to stop.
        """
        others = self.federation.members.keys() - {self.agent_id}
        start = time.monotonic()
        has_notified = False
        waited = 0.0
        while absent := others - self.transport.connected_peers():
            waited = time.monotonic() - start
            if waited >= seconds:
                break
            if rounds_done and waited > _REJOIN_SECONDS and absent != others:
                break
            if waited > _REJOIN_SECONDS and not has_notified:
                has_notified = True
                self.observer.on_note(f"waits for {self._names(absent)}, up to {seconds:.0f} s")
            if self.stop.wait(_POLL_SECONDS):
                raise StoppedError
        if absent:
            self.observer.on_note(
                f"begins without {self._names(absent)}, not reachable within {waited:.0f} s"
            )

    def _names(self, ids: Collection[int]) -> str:
        return ", ".join(self.federation.members[i].name for i in sorted(ids))

    def report_disagreements(self) -> None:
        """Tell the operator which reachable members hold another file."""
        members = self.federation.members
        ids = sorted(self.transport.connected_peers() & members.keys())
        with ThreadPoolExecutor(len(ids) or 1) as pool:
            contents = pool.map(lambda i: self.client.hello(i, HELLO_SECONDS), ids)
            for i, content in zip(ids, contents, strict=True):
                if content is None:
                    continue
                if error := describe_disagreement(self.federation, content):
                    self.observer.on_note(f"{members[i].name}: {error}")

    def throttle(self, rounds_done: int, end: float, is_ahead: bool) -> None:
        """Wait for the round's minimum duration, unless this agent is behind.

        The minimum holds for each round by itself, so that an agent that was suspended and finds no
        other member does not race to the end. An agent that is ahead of all peers that it asked
        waits for half of the reachable members. In a synchronous federation an agent waits until
        all others have finished the previous round, because a model is offered in two rounds only.

        Args:
            rounds_done: Rounds that this agent has finished.
            end: Time at which the last round has had its minimum duration.
            is_ahead: All asked peers answered that they have no model yet.
        """
        federation = self.federation
        deadline = federation.deadline_seconds
        if federation.synchronous:
            self.wait_for_rounds(
                lambda: self.other_members, rounds_done, deadline, _SYNCHRONOUS_POLL_SECONDS
            )
        elif is_ahead:
            n = rounds_done - federation.lag
            self.wait_for_rounds(self.reachable, n, deadline, _POLL_SECONDS, 0.5)

        last_rounds = self.client.last_rounds
        while (left := end - time.monotonic()) > 0:
            rounds = [last_rounds[i] for i in self.reachable() if i in last_rounds]
            if rounds and statistics.median_low(rounds) >= rounds_done:
                return
            if self.stop.wait(min(left, _POLL_SECONDS)):
                return

    def linger(self, rounds_done: int, seconds: float) -> None:
        """Wait until all reachable members have finished, as they may need models.

        Args:
            rounds_done: Rounds that they should have finished.
            seconds: Longest time to wait.
        """
        self.wait_for_rounds(self.reachable, rounds_done, seconds, _POLL_SECONDS)

    def wait_for_rounds(
        self,
        peers: Callable[[], Collection[int]],
        n: int,
        seconds: float,
        pause: float,
        share: float = 1.0,
    ) -> None:
        """Wait until a share of some peers has finished `n` rounds.

        Args:
            peers: Function that returns the peers, which may change.
            n: Number of rounds.
            seconds: Longest time to wait.
            pause: Time between two questions to a peer.
            share: Share of the peers to wait for.
        """
        end = time.monotonic() + seconds
        finished = set[int]()
        while (left := end - time.monotonic()) > 0:
            for i in sorted(set(peers()) - finished):
                left = end - time.monotonic()  # each answer may take its time
                if left <= 0 or self.stop.is_set():
                    return
                content = self.client.hello(i, min(left, HELLO_SECONDS)) or {}
                rounds = content.get("round")
                if isinstance(rounds, int) and rounds >= n:
                    finished.add(i)
            current = set(peers())
            if len(current & finished) >= share * len(current):
                return
            if self.stop.wait(min(left, pause)):
                return
