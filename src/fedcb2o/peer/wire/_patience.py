"""Waiting times of downloads, judged by the usual times of all peers.

A peer answers in time if its model arrives within three times the median of all peers. Waiting
within the round's minimum duration costs nothing, so that this is in time as well. A peer that
answers late is not asked for some rounds.

Example:
    >>> patience = Patience()
    >>> patience.record_arrival(peer=3, seconds=2.0)
    >>> patience.usual_seconds
    6.0
"""

import math
import statistics

_USUAL_FACTOR = 3.0
_MIN_SECONDS = 1.0  # an answer within this time is never late
_CREDIT_SHARE = 0.1  # of all time may be spent on peers that were late before
_MAX_STALLS = 5  # a peer with this many stalls is suspended for 31 rounds


class Backoff:
    """Suspension of peers that repeatedly delay rounds.

    A peer stalls if it answers late, or never. After its first stall it is not asked for one
    round, then 3, 7 and so on. Each model that arrives in time removes one stall. A peer that
    always stalls therefore delays a few rounds instead of every round, and a peer that was slow
    for a while is asked again.
    """

    def __init__(self) -> None:
        self.stall_counts: dict[int, int] = {}
        self.suspended_until: dict[int, int] = {}

    def record_stall(self, peer: int, n: int) -> None:
        """Note that a peer answered round `n` late or never.

        Args:
            peer: The peer.
            n: The round.
        """
        count = min(_MAX_STALLS, self.stall_counts.get(peer, 0) + 1)
        self.stall_counts[peer] = count
        self.suspended_until[peer] = n + 2**count

    def record_arrival(self, peer: int) -> None:
        """Note that a peer's model arrived in time.

        Args:
            peer: The peer.
        """
        self.stall_counts[peer] = max(0, self.stall_counts.get(peer, 0) - 1)

    def suspended(self, n: int) -> set[int]:
        """Return the peers that are not asked in a round.

        Args:
            n: The round.

        Returns:
            Their ids.
        """
        return {peer for peer, end in self.suspended_until.items() if n < end}


class Patience:
    """Usual download times of peers, and credit to wait for slow ones.

    The median counts every peer once, so that fewer than half of the peers can neither raise it
    above nor lower it below the times of the others.
    """

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        self.credit = 0.0
        self.updated = math.inf

    def record_arrival(self, peer: int, seconds: float) -> None:
        """Note the duration of a peer's last download.

        Args:
            peer: The peer.
            seconds: Seconds until its model had arrived.
        """
        self.seconds[peer] = seconds

    @property
    def usual_seconds(self) -> float:
        """Time in which a model usually arrives; infinite before the first one."""
        if not self.seconds:
            return math.inf
        return self.limit(statistics.median_low(self.seconds.values()))

    def limit(self, seconds: float) -> float:
        """Return the time after which an answer is late.

        Args:
            seconds: Time of a usual answer.

        Returns:
            Seconds.
        """
        return max(_MIN_SECONDS, _USUAL_FACTOR * seconds)

    def earn(self, now: float, maximum: float) -> None:
        """Add a tenth of the passed time to the credit.

        Args:
            now: Time of a monotonic clock.
            maximum: Largest credit.
        """
        passed = max(0.0, now - self.updated)
        self.credit = min(maximum, self.credit + _CREDIT_SHARE * passed)
        self.updated = now


class Wait:
    """Rules by which one round waits for models.

    Args:
        patience: Usual times and credit.
        start: Time at which the peers were asked.
        deadline: Time after which models are missing.
        free_until: Time until which waiting costs nothing.

    Example:
        >>> wait = Wait(Patience(), start=0.0, deadline=60.0, free_until=0.0)
        >>> wait.end(asked=2, failed=0, is_probation=False)  # nothing arrived yet
        60.0
        >>> wait.record_arrival(0.5)
        >>> wait.end(asked=2, failed=0, is_probation=False)  # half of the models arrived
        1.5
    """

    def __init__(
        self, patience: Patience, start: float, deadline: float, free_until: float
    ) -> None:
        self.patience = patience
        self.start = start
        self.deadline = deadline
        self.free_until = min(free_until, deadline)
        self.usual_seconds = patience.usual_seconds
        self.arrivals: list[float] = []  # seconds

    def record_arrival(self, now: float) -> None:
        """Note that a model arrived.

        Args:
            now: Time of its arrival.
        """
        self.arrivals.append(now - self.start)

    @property
    def spares_start(self) -> float:
        """Time at which other peers are asked in place of those that are missing."""
        unknown = 0.1 * (self.deadline - self.start)
        return self.start + min(self.usual_seconds, max(self.patience.limit(0.0), unknown))

    def late_after(self) -> float:
        """Return the time after which an answer is late.

        Returns:
            The usual time, at most half of the deadline, and at least the free time.
        """
        usual = self.usual_seconds
        if not math.isfinite(usual) and self.arrivals:
            usual = self.patience.limit(min(self.arrivals))
        seconds = min(usual, (self.deadline - self.start) / 2)
        return max(self.start + seconds, self.free_until)

    def end(self, asked: int, failed: int, *, is_probation: bool) -> float:
        """Return the time at which the round goes on without the missing models.

        Args:
            asked: Number of peers whose models the round needs.
            failed: Number of these that can give no model.
            is_probation: A missing peer was late before, so that credit is spent on it.

        Returns:
            The deadline, until half of the models arrived.
        """
        enough = math.ceil((asked - failed) / 2)
        if len(self.arrivals) < max(1, enough):
            return self.deadline
        usual = self.usual_seconds
        if not math.isfinite(usual):
            usual = self.patience.limit(sorted(self.arrivals)[enough - 1])
        end = max(self.start + usual, self.free_until)
        if is_probation:
            end += self.patience.credit
        return min(end, self.deadline)
