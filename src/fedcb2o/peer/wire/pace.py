"""Pace and nonces of one member's requests."""

import threading
import time
from collections.abc import Callable

REQUEST_BURST = 2048  # requests of one member that are read at once
REQUESTS_PER_SECOND = 400  # requests of one member that are read later
MAX_NONCES = 2048  # remembered, of one member


class Pace:
    """Pace of requests (a token bucket), by default of one member, which delays itself."""

    def __init__(
        self,
        burst: float | None = None,
        per_second: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._burst = float(REQUEST_BURST if burst is None else burst)
        self._per_second = REQUESTS_PER_SECOND if per_second is None else per_second
        self._clock = clock
        self._left = self._burst
        self._updated = clock()
        self._lock = threading.Lock()

    def left(self) -> float:
        """Return the number of requests that may be handled now; delayed ones make it negative."""
        with self._lock:
            now = self._clock()
            grown = self._left + (now - self._updated) * self._per_second
            # A member that was silent for hours may not ask for hours at once.
            self._left = min(self._burst, grown)
            self._updated = now
            return self._left

    def spend(self, count: float = 1) -> None:
        """Count further requests, whether they may be handled now or not."""
        with self._lock:
            self._left -= count

    def delay(self) -> float:
        """Count one more request; return the seconds after which it may be handled."""
        seconds = (1 - self.left()) / self._per_second
        self.spend()
        return max(0.0, seconds)

    def take(self) -> bool:
        """Count one more request, and return True, if it may be handled now."""
        may_handle = self.left() >= 1
        self.spend(may_handle)
        return may_handle


class Nonces:
    """The last nonces of one member, by which a repeated request is recognised."""

    def __init__(self) -> None:
        self._seen: dict[bytes, None] = {}  # the oldest first

    def accept(self, nonce: bytes) -> bool:
        """Remember a nonce; return False if it was used before."""
        if nonce in self._seen:
            return False
        self._seen[nonce] = None
        if len(self._seen) > MAX_NONCES:
            del self._seen[next(iter(self._seen))]
        return True
