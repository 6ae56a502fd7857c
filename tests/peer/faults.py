"""What goes wrong in the process of one node: functions for its `prepare`."""

import datetime
import resource
import signal
import time


def lease(seconds: float) -> None:
    """A link is down after fewer seconds without a sign of life."""
    from fedcb2o.peer.wire import _link

    _link.LEASE_SECONDS = seconds


def forgiving() -> None:
    """A link that was closed for what its member sent is opened again at once."""
    from fedcb2o.peer.wire import _transport

    _transport._ABUSE_PAUSE = 0.1


def patient(seconds: float) -> None:
    """Rounds may wait this long for slow members, as after many rounds without a wait."""
    from fedcb2o.peer.wire import _patience

    _patience._FIRST_CREDIT_SECONDS = seconds


def full(size: int) -> None:
    """No file grows beyond so many bytes, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def clock(hours: float) -> None:
    """The clock that Python tells is off."""
    now, wrong = time.time, datetime.timedelta(hours=hours)

    class Wrong(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) + wrong

    time.time = lambda: now() + 3600 * hours
    time.time_ns = lambda: int(time.time() * 1e9)
    from fedcb2o.peer.membership import identity

    identity.datetime = Wrong


def minor_version(minor: int) -> None:
    """A release with this minor version of the protocol."""
    from fedcb2o.peer.node import _preflight

    _preflight.MINOR_VERSION = minor


def slow(seconds: float) -> None:
    """The work of a round takes so much longer."""
    from fedcb2o.peer.node._engine import PeerEngine

    train = PeerEngine.map_batches

    def map_batches(engine, function, *shared, **options):
        if function.__name__ == "train_":
            time.sleep(seconds)
        return train(engine, function, *shared, **options)

    PeerEngine.map_batches = map_batches


def command(log, *arguments: object) -> None:
    """`fedcb2o ARGUMENTS` in this process, as a user gives it; what it says goes to a file."""
    import os
    import sys

    from fedcb2o import cli

    file = log.open("a", buffering=1)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.argv = ["fedcb2o", *map(str, arguments)]
    cli.main()
