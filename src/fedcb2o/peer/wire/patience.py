"""Waiting times of downloads, judged by the usual times of all peers.

As soon as half of the peers answered, a round waits for the others within its minimum duration,
which costs nothing, and up to 1.5 times the median of all peers. Beyond that, all rounds together
wait for at most a seventh of the time. A peer whose answer takes three times the median is late,
and is not asked for some rounds.
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

_LATE_FACTOR = 3.0  # of the median; an answer that takes longer is late
_LATE_SECONDS = 1.0  # an answer within this time is never late
_WAIT_FACTOR = 1.5  # of the median; in this time a round waits for all models
_WAIT_SECONDS = 0.1
_CREDIT_SHARE = 0.15  # of all time may be spent on further waiting
_FIRST_CREDIT_SECONDS = 1.0
_MAX_MISSES = 3  # rounds in a row that went on without a peer: a stall
_MAX_STALLS = 5  # a peer with this many stalls is suspended for 31 rounds


class Backoff:
    """Suspension of peers that repeatedly delay rounds.

    A peer stalls if it answers late, or never, or if three rounds in a row went on without it
    although it was not late yet. After its first stall it is not asked for one round, then 3, 7 and
    so on. Each model that arrives in time removes one stall.
    """

    def __init__(self) -> None:
        self.stall_counts: dict[int, int] = {}
        self.suspended_until: dict[int, int] = {}
        self._misses: dict[int, int] = {}

    def record_miss(self, peer: int, n: int) -> None:
        """Note that round `n` went on without a peer before it was late."""
        self._misses[peer] = self._misses.get(peer, 0) + 1
        if self._misses[peer] >= _MAX_MISSES:
            self.record_stall(peer, n)

    def record_stall(self, peer: int, n: int) -> None:
        """Note that a peer answered round `n` late or never."""
        self._misses.pop(peer, None)
        count = min(_MAX_STALLS, self.stall_counts.get(peer, 0) + 1)
        self.stall_counts[peer] = count
        # A peer that stalls again and again delays ever fewer rounds, and may still come back.
        self.suspended_until[peer] = n + 2**count

    def record_arrival(self, peer: int) -> None:
        """Note that a peer's model arrived in time."""
        self._misses.pop(peer, None)
        self.stall_counts[peer] = max(0, self.stall_counts.get(peer, 0) - 1)

    def suspended(self, n: int) -> set[int]:
        """Return the peers that are not asked in a round."""
        return {peer for peer, end in self.suspended_until.items() if n < end}


class Credit:
    """Seconds that an agent may wait for others: a share of the time that passes."""

    def __init__(self, credit: float) -> None:
        self.credit = credit
        self._updated = math.inf

    def earn(self, now: float, maximum: float) -> None:
        """Add a share of the passed time to the credit, up to `maximum`."""
        passed = max(0.0, now - self._updated)
        self.credit = min(max(maximum, self.credit), self.credit + _CREDIT_SHARE * passed)
        self._updated = now

    def spend(self, seconds: float) -> None:
        """Subtract a wait from the credit."""
        self.credit = max(0.0, self.credit - seconds)


class Patience(Credit):
    """Usual download times of peers, and credit to wait for slow ones.

    The median counts every peer once, so that fewer than half of the peers can neither raise it
    above nor lower it below the times of the others. `seconds` has the duration of the last
    download from each peer. `expected` has the same, or a longer time for a peer that a round did
    not wait for.
    """

    def __init__(self) -> None:
        super().__init__(_FIRST_CREDIT_SECONDS)
        self.seconds: dict[int, float] = {}
        self.expected: dict[int, float] = {}

    def record_arrival(self, peer: int, seconds: float) -> None:
        """Note the seconds until a peer's last model had arrived."""
        self.seconds[peer] = seconds
        self.expected[peer] = seconds

    def record_missing(self, peer: int, seconds: float) -> None:
        """Note that a round went on without a peer; the next wait is longer, and rarer."""
        self.expected[peer] = max(self.expected.get(peer, 0.0), _WAIT_FACTOR * seconds)

    @property
    def median_seconds(self) -> float:
        """Median of all peers; infinite before the first model."""
        if not self.seconds:
            return math.inf
        # Of an even number of peers the lower one, so that half of them cannot raise it.
        return statistics.median_low(self.seconds.values())


@dataclass(eq=False)
class Wait:
    """Rules by which one round waits for models.

    The peers were asked at `start`. Models are missing after `deadline`. Waiting costs nothing
    until `free_until`. A round waits until the deadline, or until half of the `asked` peers
    answered. Those that stalled before do not count.

    Example:
        >>> wait = Wait(Patience(), start=0.0, deadline=60.0, free_until=0.0)
        >>> wait.end(asked=2)  # nothing arrived yet
        60.0
        >>> wait.record_arrival(0.4)
        >>> round(wait.end(asked=2, pending=[7]), 2)  # half arrived; a second of credit
        1.6
    """

    patience: Patience
    start: float
    deadline: float
    free_until: float

    def __post_init__(self) -> None:
        self.free_until = min(self.free_until, self.deadline)
        self.median_seconds = self.patience.median_seconds
        self.arrivals: list[float] = []  # seconds
        self.num_answers = 0

    def record_arrival(self, now: float) -> None:
        """Note that a model arrived."""
        self.arrivals.append(now - self.start)
        self.num_answers += 1

    def record_failure(self) -> None:
        """Note that a peer answered that it has no model, or answered wrongly."""
        self.num_answers += 1

    @property
    def spares_start(self) -> float:
        """Time at which other peers are asked in place of those that are missing."""
        if math.isfinite(self.median_seconds):
            return self.start + max(_LATE_SECONDS, _LATE_FACTOR * self.median_seconds)
        return self.start + max(_LATE_SECONDS, 0.1 * (self.deadline - self.start))

    def late_after(self) -> float:
        """Return the time after which an answer is late.

        It is three times the median, at most half of the deadline, and at least the free time.
        """
        # Before the first median, the fastest arrival of this round stands for it.
        usual = min([self.median_seconds, *self.arrivals])
        if math.isfinite(self.median_seconds):
            usual = self.median_seconds
        seconds = max(_LATE_SECONDS, _LATE_FACTOR * usual)
        return max(self.start + min(seconds, (self.deadline - self.start) / 2), self.free_until)

    def has_enough(self, asked: int) -> bool:
        """Check that half of the asked peers answered, with or without a model."""
        return self.num_answers >= math.ceil(asked / 2)

    def uncharged_end(self, asked: int) -> float:
        """Return the time after which further waiting is charged."""
        if not self.has_enough(asked):
            return self.deadline
        usual = self.median_seconds
        if not math.isfinite(usual):
            usual = max(self.arrivals, default=0.0)
        end = self.start + max(_WAIT_SECONDS, _WAIT_FACTOR * usual)
        return min(max(end, self.free_until), self.deadline)

    def end(self, asked: int, pending: Iterable[int] = ()) -> float:
        """Return the time at which the round goes on without the models of `pending` peers.

        Credit is spent only if it is likely to suffice for one of them.
        """
        uncharged_end = self.uncharged_end(asked)
        end = min(uncharged_end + self.patience.credit, self.deadline)
        # Credit that buys no model is lost for a peer that is nearly there.
        expected = (self.patience.expected.get(peer, 0.0) for peer in pending)
        if any(min(self.start + seconds, self.deadline) <= end for seconds in expected):
            return end
        return uncharged_end
