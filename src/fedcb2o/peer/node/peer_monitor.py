"""Monitor of the other members: candidates for requests, and waiting for members."""

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fedcb2o.errors import RemovedError
from fedcb2o.peer.membership.identity import Identity
from fedcb2o.peer.node.observer import NodeObserver
from fedcb2o.peer.node.preflight import describe_disagreement
from fedcb2o.peer.wire.client import HELLO_SECONDS, PeerClient, StoppedError
from fedcb2o.peer.wire.patience import Credit
from fedcb2o.peer.wire.probe import probe_member
from fedcb2o.peer.wire.transport import Transport

_POLL_SECONDS = 0.2  # between two looks at the links
_REJOIN_SECONDS = 3.0  # in which a running member is reached
_SYNCHRONOUS_POLL_SECONDS = 0.02  # between two looks at rounds in a synchronous federation
_MIN_ANNOUNCEMENTS = 2  # of rounds: no single member makes another one skip rounds
_FRESH_SECONDS = HELLO_SECONDS + 1.0  # in which a member that is waited for must answer again
_MAX_PAUSE_SECONDS = 5.0  # between two questions to members that are behind
_FIRST_PROBE_SECONDS = 5.0  # after the start
_PROBE_SECONDS = 60.0  # between two looks at members without a link
_LAST_SECONDS = 1.0  # for members that compare digests with an agent that has finished


@dataclass(eq=False)
class PeerMonitor:
    """Monitor of the members that an agent trains with.

    Nothing is waited for after `stop`. The observer gets messages for the operator.
    """

    transport: Transport
    client: PeerClient
    stop: threading.Event
    observer: NodeObserver

    def __post_init__(self) -> None:
        self.federation = self.client.federation
        self.agent_id = self.client.agent_id
        self._ahead = Credit(self.federation.deadline_seconds)  # for members that are behind
        self._refusing = set[int]()
        self._next_probe = time.monotonic() + _FIRST_PROBE_SECONDS

    @property
    def other_members(self) -> frozenset[int]:
        """Members except this agent and those that equivocated."""
        members = frozenset(self.federation.members)
        return members - self.client.ledger.equivocators - {self.agent_id}

    def reachable(self) -> frozenset[int]:
        """Return the other members with a working link."""
        return self.other_members & self.transport.connected_peers()

    def candidates(self, n: int) -> list[int]:
        """Return the members that may be asked in a round, by ascending id.

        In a synchronous federation these are all other members, otherwise the reachable ones that
        did not delay recent rounds.
        """
        if self.federation.synchronous:
            # With absent ones, which the round waits for.
            return sorted(self.other_members)
        return sorted(self.reachable() - self.client.backoff.suspended(n))

    def audit(self, n: int, asked: Collection[int]) -> None:
        """Ask the reachable members that are not asked for models for their manifests.

        Their digests, taken together, are of all members, so that digests do not tell whose models
        an agent downloads. A synchronous federation, which is for tests, does without.
        """
        if not self.federation.synchronous:
            self.client.audit(n, self.reachable() - set(asked))

    def wait_for_members(self, seconds: float, rounds_done: int) -> None:
        """Wait until all members are reachable, at most for `seconds`.

        A resumed node waits only a few seconds if at least one member is reachable. A StoppedError
        says that the agent was asked to stop.
        """
        others = self.federation.members.keys() - {self.agent_id}
        start = time.monotonic()
        has_notified = False
        waited = 0.0
        while absent := others - self.transport.connected_peers():
            waited = time.monotonic() - start
            if waited >= seconds:
                break
            # The others train on meanwhile, and this agent falls behind.
            if rounds_done and waited > _REJOIN_SECONDS and absent != others:
                break
            if waited > _REJOIN_SECONDS and not has_notified:
                has_notified = True
                self.observer.on_note(f"waits for {self._names(absent)}, up to {seconds:.0f} s")
            if self.stop.wait(_POLL_SECONDS):
                raise StoppedError
        # Without a wait, most links do not exist yet.
        if absent and seconds > 0:
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
                if content and (error := describe_disagreement(self.federation, content)):
                    self.observer.on_note(f"{members[i].name}: {error}")

    def probe_unreachable(self, identity: Identity) -> None:
        """Find out in the background, once a minute, which members refuse our certificate."""
        if time.monotonic() < self._next_probe or self.other_members <= self.reachable():
            return
        self._next_probe = time.monotonic() + _PROBE_SECONDS
        # A probe takes seconds, for which no round should wait.
        thread = threading.Thread(target=self._note_refusals, args=[identity], daemon=True)
        thread.start()

    def _note_refusals(self, identity: Identity) -> None:
        new = self._refusing_members(identity) - self._refusing
        self._refusing |= new
        if new:
            self.observer.on_note(
                f"{self._names(new)} refuses the certificate of {identity.member.name}: a newer "
                "version of the federation may have changed or removed this member (ask for its "
                "file), or the certificate has expired"
            )

    def _refusing_members(self, identity: Identity) -> set[int]:
        """Return the unreachable members that refuse our certificate."""
        members = self.federation.members
        ids = sorted(self.other_members - self.reachable())
        with ThreadPoolExecutor(min(16, len(ids)) or 1) as pool:
            results = pool.map(lambda i: probe_member(members[i], identity), ids)
            return {i for i, result in zip(ids, results, strict=True) if result.is_refused}

    def check_membership(self, identity: Identity) -> None:
        """Raise RemovedError if more than half of the others refuse our certificate."""
        others = self.other_members
        unreachable = others - self.reachable()
        if 2 * len(unreachable) <= len(others):
            return
        # Members that refused this one before may have ended since.
        refusing = self._refusing_members(identity) | (self._refusing & unreachable)
        if 2 * len(refusing) > len(others):
            raise RemovedError(
                f"{self._names(refusing)} refuse the certificate of {identity.member.name}: it "
                "was removed from the federation, or changed in a newer version (ask for its "
                "file). Its rounds are done, and its model is written, but the last rounds were "
                "trained without these members"
            )

    def common_round(self) -> int:
        """Return the latest round that more than half of the other members have reached.

        Members that announced nothing count as being in round 0. Fewer than half of the others can
        therefore not raise the result beyond the round of the fastest honest member. At least two
        announcements are needed. The round counts from 0.
        """
        announced = dict(self.client.announced_rounds)
        rounds = sorted((announced.get(i, 0) for i in self.other_members), reverse=True)
        # Of all others, also banned and absent ones: absence must not make a minority the majority.
        num_others = len(self.federation.members) - 1
        needed = max(_MIN_ANNOUNCEMENTS, num_others // 2 + 1)
        if len(rounds) < needed:
            return 0
        return rounds[needed - 1]

    def is_late(self, rounds_done: int) -> bool:
        """Return whether more than half of the other members are ahead by at least two rounds.

        Skipped rounds count as done. False in a synchronous federation.
        """
        return not self.federation.synchronous and self.common_round() > rounds_done + 1

    def next_round(self, rounds_done: int) -> int:
        """Return the round with which an agent goes on: that of the others if it is too far behind.

        An agent more than `lag` rounds behind `common_round` skips the rounds between, because the
        others would not accept its models. It never skips the last `lag` + 1 rounds of a run. In a
        synchronous federation no round is skipped. Without skipped rounds, `rounds_done` is
        returned.
        """
        federation = self.federation
        common = self.common_round()
        chosen = min(common, federation.rounds - 1 - federation.lag)
        is_behind = common > rounds_done + federation.lag
        if federation.synchronous or not is_behind or chosen <= rounds_done:
            return rounds_done

        skipped = f"rounds {rounds_done + 1} to {chosen}"
        if chosen == rounds_done + 1:
            skipped = f"round {chosen}"
        self.observer.on_note(
            f"skips {skipped}: more than half of the other members have finished round {common}, "
            f"and do not accept a model that is more than {federation.lag} rounds behind"
        )
        return chosen

    def throttle(self, rounds_done: int, start: float) -> None:
        """Wait for the round's minimum duration, unless this agent is late.

        The minimum holds for each round by itself, so that an agent that was suspended and finds no
        other member does not race to the end.

        An agent waits for members that are behind (`_wait_for_others`). In a synchronous federation
        it waits until all others have finished the previous round, because a model is offered in
        two rounds only. `start` is the time at which the last round began.
        """
        federation = self.federation
        if federation.synchronous:
            self.wait_for_rounds(
                lambda: self.other_members,
                rounds_done,
                federation.deadline_seconds,
                _SYNCHRONOUS_POLL_SECONDS,
            )
        else:
            self._wait_for_others(rounds_done, start + federation.round_seconds)

        left = start + federation.round_seconds - time.monotonic()
        if left > 0 and not self.is_late(rounds_done):
            self.stop.wait(left)

    def _wait_for_others(self, rounds_done: int, free_until: float) -> None:
        """Wait while at least half of the reachable members say that they are behind.

        A member is behind from half of the lag on, so that its models still arrive. Without a
        minimum duration there is no common pace, and the whole lag counts. The wait costs nothing
        within the minimum duration, and further credit: one deadline, and a share of all time.
        """
        federation = self.federation
        allowed = federation.lag // 2 if federation.round_seconds else federation.lag
        n = rounds_done - max(1, allowed)
        start = time.monotonic()
        self._ahead.earn(start, federation.deadline_seconds)
        end = max(start, free_until) + self._ahead.credit
        pause = min(federation.round_seconds / 5 or _POLL_SECONDS, _MAX_PAUSE_SECONDS)
        while (left := end - time.monotonic()) > 0:
            reachable = self.reachable()
            behind = self._behind(reachable, n, start)
            # A single member is waited for only if it is the only reachable one.
            if not behind or len(behind) < max(min(2, len(reachable)), len(reachable) / 2):
                break
            self.client.inquire(behind)
            if self.stop.wait(min(left, pause)):
                break
        self._ahead.spend(max(0.0, time.monotonic() - max(start, free_until)))

    def _behind(self, peers: Collection[int], n: int, start: float) -> set[int]:
        """Return the peers that announced a round before `n`, and still answer."""
        now = time.monotonic()
        announced = dict(self.client.announced_rounds)
        times = dict(self.client.announcement_times)
        oldest = max(start, now - _FRESH_SECONDS)
        # At the start, the members had no time to answer.
        is_new = now < start + _FRESH_SECONDS
        return {
            i for i in peers if announced.get(i, n) < n and (is_new or times.get(i, 0.0) > oldest)
        }

    def linger(self, rounds_done: int, seconds: float) -> None:
        """Wait until all reachable members have finished, as they may need models.

        At most `seconds` are waited. Digests are compared with each member as soon as it has
        finished, and with all at the end: no later round would show two models of the last one.
        """
        if seconds <= 0 or not self.reachable():
            return
        n = rounds_done - 1
        end = time.monotonic() + seconds
        self.wait_for_rounds(
            self.reachable,
            rounds_done,
            seconds,
            _POLL_SECONDS,
            on_finished=lambda i: self.client.audit(n, [i]),
        )
        self._compare_last_digests(n)
        self.stop.wait(min(_LAST_SECONDS, max(0.0, end - time.monotonic())))

    def _compare_last_digests(self, n: int) -> None:
        self.client.audit(n, self.reachable())
        end = time.monotonic() + HELLO_SECONDS
        while self.client.is_auditing and time.monotonic() < end:
            if self.stop.wait(_SYNCHRONOUS_POLL_SECONDS):
                return

    def wait_for_rounds(
        self,
        peers: Callable[[], Collection[int]],
        n: int,
        seconds: float,
        pause: float,
        on_finished: Callable[[int], None] = lambda i: None,
    ) -> bool:
        """Wait until some peers have finished `n` rounds, and return whether all have.

        `peers` returns the peers, which may change. At most `seconds` are waited, with a pause
        between two questions to a peer. `on_finished` is called once with each peer that has
        finished them.
        """
        end = time.monotonic() + seconds
        finished = set[int]()
        while (left := end - time.monotonic()) > 0:
            for i in sorted(set(peers()) - finished):
                # Each answer may take its time.
                left = end - time.monotonic()
                if left <= 0 or self.stop.is_set():
                    return False
                content = self.client.hello(i, min(left, HELLO_SECONDS)) or {}
                rounds = content.get("round")
                if isinstance(rounds, int) and rounds >= n:
                    finished.add(i)
                    on_finished(i)
            if finished.issuperset(peers()):
                return True
            if self.stop.wait(min(left, pause)):
                return False
        return False
