"""Signals that end a command."""

import math
import signal
import threading
import time
from types import FrameType
from typing import Any

IGNORE_SECONDS = (
    5.0  # seconds after one that others are not heard: whoever stops a command may send several
)


class SignalGuard:
    """From now on, and until `forget`, SIGTERM and SIGHUP end a command as Ctrl-C does, where nothing else is made of
    them: what is at hand is left in order. A command that has begun to end does not hear them for a few seconds; later
    it does, for an own part may have swallowed the first (`except:`)."""

    def __init__(self) -> None:
        self.received, self.received_at, self.previous_handlers = (
            signal.SIGINT,
            -math.inf,
            dict[int, Any](),
        )
        if threading.current_thread() is threading.main_thread():
            for each in (signal.SIGTERM, signal.SIGHUP):
                if (
                    signal.getsignal(each) is signal.SIG_DFL
                ):  # a command under nohup is deaf to SIGHUP
                    self.previous_handlers[each] = signal.signal(each, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() - self.received_at > IGNORE_SECONDS:
            self.received, self.received_at = signal.Signals(number), time.monotonic()
            raise KeyboardInterrupt

    @property
    def outcome(self) -> str:
        """What became of the command."""
        return "Interrupted" if self.received is signal.SIGINT else "Terminated"

    @property
    def exit_status(self) -> int:
        """The exit status that tells the signal."""
        return 128 + self.received

    def restore(self) -> None:
        """Put back what was there."""
        for each, handler in self.previous_handlers.items():
            signal.signal(each, handler)
