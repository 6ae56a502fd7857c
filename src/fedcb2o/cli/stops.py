"""Signals that end a command."""

import signal
import threading
from types import FrameType
from typing import Any


class Stops:
    """From now on, and until `forget`, SIGTERM and SIGHUP end a command as Ctrl-C does, where nothing else is made of
    them: what is at hand is left in order. Of a command that ends already, they are not heard."""

    def __init__(self) -> None:
        self.got, self.before = signal.SIGINT, dict[int, Any]()
        if threading.current_thread() is threading.main_thread():
            for each in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(each) is signal.SIG_DFL:  # a command under nohup is deaf to SIGHUP
                    self.before[each] = signal.signal(each, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.got is signal.SIGINT:
            self.got = signal.Signals(number)
            raise KeyboardInterrupt

    @property
    def word(self) -> str:
        """What became of the command."""
        return "Interrupted" if self.got is signal.SIGINT else "Terminated"

    @property
    def status(self) -> int:
        """The exit status that tells the signal."""
        return 128 + self.got

    def forget(self) -> None:
        """Put back what was there."""
        for each, handler in self.before.items():
            signal.signal(each, handler)
