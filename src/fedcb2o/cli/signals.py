"""Signals that end a command."""

import math
import signal
import threading
import time
from types import FrameType
from typing import Any

IGNORE_SECONDS = 5.0  # time after a signal in which others are ignored: several may be sent


class ServiceEndedError(Exception):
    """A service was asked to end by a signal; the text says what that means."""


class SignalGuard:
    """Handlers that end a command on SIGTERM and SIGHUP like Ctrl-C.

    A signal with another handler keeps it. A command that has begun to end ignores signals for a
    few seconds; later it obeys again, because a user's `except:` may have swallowed the first one.
    """

    def __init__(self) -> None:
        self.received = signal.SIGINT
        self.received_at = -math.inf
        self.previous_handlers: dict[int, Any] = {}
        # Python sets handlers in the main thread only. Tests run commands in others.
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
                self.previous_handlers[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() - self.received_at > IGNORE_SECONDS:
            self.received = signal.Signals(number)
            self.received_at = time.monotonic()
            raise KeyboardInterrupt

    @property
    def outcome(self) -> str:
        """The status of the work: "Interrupted" by SIGINT or by no signal, else "Terminated"."""
        return "Interrupted" if self.received is signal.SIGINT else "Terminated"

    @property
    def exit_status(self) -> int:
        """128 plus the number of the last signal, by the convention of shells."""
        return 128 + self.received

    def restore(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)
