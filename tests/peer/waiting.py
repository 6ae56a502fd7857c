"""Waiting for a state that other threads and processes bring about."""

import math
import time
from collections.abc import Callable
from typing import Any


class Clock:
    """Virtual time, which passes in waits only: `time` of a module, or the event that ends waits.

    It is set at the time `end`.
    """

    def __init__(self, end: float = math.inf) -> None:
        self.now, self.end = 0.0, end

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(0.0, seconds)

    def wait(self, seconds: float) -> bool:
        self.sleep(seconds)
        return self.is_set()

    def is_set(self) -> bool:
        return self.now >= self.end


SECONDS = 120.0  # also a busy machine needs far less


def wait_for(condition: Callable[[], Any], message: Callable[[], str] = str) -> Any:
    """Return the first true result of `condition()`; fail if there is none in two minutes."""
    end = time.monotonic() + SECONDS
    while not (result := condition()):
        assert time.monotonic() < end, f"it did not happen in {SECONDS:.0f} s: {message()}"
        time.sleep(0.005)
    return result
