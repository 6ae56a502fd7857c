"""Pace of one member's requests."""

import threading
import time

REQUEST_BURST = 2048  # requests of one member that are read at once
REQUESTS_PER_SECOND = 400  # requests of one member that are read later


class Pace:
    """Pace of requests, by default of one member, which delays itself if it asks faster."""

    def __init__(self, burst: float | None = None, per_second: float | None = None) -> None:
        self._burst = float(REQUEST_BURST if burst is None else burst)
        self._per_second = REQUESTS_PER_SECOND if per_second is None else per_second
        self._left = self._burst
        self._updated = time.monotonic()
        self._lock = threading.Lock()

    def delay(self) -> float:
        """Count one more request; return the seconds after which it may be handled."""
        with self._lock:
            seconds = (1 - self._grow()) / self._per_second
            self._left -= 1
        return max(0.0, seconds)

    def take(self) -> bool:
        """Count one more request, and return True, if it may be handled now."""
        with self._lock:
            may_read = self._grow() >= 1
            self._left -= may_read
        return may_read

    def _grow(self) -> float:
        """Return the number of requests that may be handled now; the caller holds the lock."""
        now = time.monotonic()
        grown = self._left + (now - self._updated) * self._per_second
        self._left = min(self._burst, grown)
        self._updated = now
        return self._left
