"""Faults in the process of one node, for the option `prepare` of `Nodes.start`."""

import datetime
import resource
import signal
import time

import numpy as np
import torch

from fedcb2o.federated import trigger_exchange


def lease(seconds: float) -> None:
    """Consider a link as down after `seconds` without a sign of life."""
    from fedcb2o.peer.wire import dialer

    dialer.LEASE_SECONDS = seconds
    dialer._HEARTBEAT_SECONDS = seconds / 4


def patient(seconds: float) -> None:
    """Let rounds wait `seconds` for slow members, as after many rounds without waiting."""
    from fedcb2o.peer.wire import patience

    patience._FIRST_CREDIT_SECONDS = seconds


def full(size: int) -> None:
    """Limit files to `size` bytes, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def clock(hours: float) -> None:
    """Shift the clock of Python by `hours`."""
    now, offset = time.time, datetime.timedelta(hours=hours)

    class ShiftedDatetime(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) + offset

    time.time = lambda: now() + 3600 * hours
    time.time_ns = lambda: int(time.time() * 1e9)
    from fedcb2o.peer.membership import identity

    identity.datetime = ShiftedDatetime


def slow(seconds: float) -> None:
    """Delay the training of each round by `seconds`."""
    from fedcb2o.peer.node.engine import PeerEngine

    train_ = PeerEngine.train_

    def train_slowly_(engine, n):
        time.sleep(seconds)
        return train_(engine, n)

    PeerEngine.train_ = train_slowly_


def accuse(*, signs: bool) -> None:
    """Publish two random triggers of 8 by 8 pixels in each round, with or without a signature."""
    from fedcb2o.federated.trigger_exchange import Triggers
    from fedcb2o.peer.node import publisher

    draw = np.random.default_rng(0)

    def random_triggers(state) -> bytes:
        pixels = np.zeros((2, 64), np.int8)
        for row in pixels:
            row[draw.choice(64, 2, replace=False)] = draw.choice([-1, 1], 2)
        classes = torch.from_numpy(draw.integers(10, size=2))
        return Triggers(torch.from_numpy(pixels).view(2, 8, 8), classes).to_bytes()

    trigger_exchange.published_bytes = random_triggers
    if not signs:
        publisher.sign_triggers = lambda triggers, manifest, sign: triggers + bytes(64)


def command(log, *arguments: object) -> None:
    """Run `fedcb2o ARGUMENTS` in this process and append its output to `log`."""
    import os
    import sys

    from fedcb2o import cli

    file = log.open("a", buffering=1)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.argv = ["fedcb2o", *map(str, arguments)]
    cli.main()
