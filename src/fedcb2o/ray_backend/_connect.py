"""Connection to a cluster, and the start of Ray on this machine."""

import contextlib
import io
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import ray

from fedcb2o.errors import RunError
from fedcb2o.printable import one_line

LOCAL = "local"  # the address of a cluster on this machine alone
AUTO = "auto"  # the address of the cluster that this machine is in
QUIET_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # Ray's C++ prints errors that it also raises
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # silences a warning about a later version
}

# A client of HTTP/2, which gRPC uses, begins with this text and an empty frame of settings. The
# server's first frame has settings too: its fourth byte, after the length, is the frame's type.
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4" + bytes(5)
_PROBE_SECONDS = 5.0  # granted to a cluster for an answer
_ERROR_LISTENER = "ray_listen_error_messages"  # the thread in which Ray prints errors of its nodes
_MAX_ERROR_CHARACTERS = 300

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def connected(
    address: str, store: int | None = None, processors: int | None = None
) -> Iterator[None]:
    """Connect this process to a cluster; an existing connection is used and kept.

    The address is "host:port" of the head, "auto" for the cluster of this machine, or "local" to
    start Ray on this machine, with an object store of `store` bytes and `processors` processors.
    RunError is raised if no cluster can be reached, or it has other versions.
    """
    # Errors of nodes that matter are raised as well.
    quiet_stdout = contextlib.redirect_stdout(_WithoutListener(sys.stdout))
    if ray.is_initialized():
        with quiet_stdout:
            yield
        return
    os.environ.update(QUIET_ENVIRONMENT)
    work = f"Joining the cluster at {address}"
    if address == AUTO:
        work = "Joining the cluster that this machine is in"
    if address == LOCAL:
        work = "Starting Ray on this machine"
    _log.info("%s ...", work)  # takes some seconds, or many
    _probe(address)
    options: dict[str, Any] = {"address": address}
    if address == LOCAL:
        options |= {
            "include_dashboard": False,
            "object_store_memory": store,
            "num_cpus": processors,
        }
    try:
        _start(options)
        with quiet_stdout:
            yield
    finally:
        # Ray prints here what its error listener kept back as a repetition.
        with contextlib.redirect_stdout(io.StringIO()):
            ray.shutdown()


def _start(options: dict[str, Any]) -> None:
    """Call `ray.init`; raise its errors as RunError."""
    address = options["address"]
    try:
        with _defer_signals(), _suppress_stderr():
            ray.init(
                **options,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=True,
            )
    except ray.exceptions.AuthenticationError as error:
        raise RunError(
            f"the cluster at {address!r} requires its owner's token: copy ~/.ray/auth_token from "
            "its head to this machine, or set RAY_AUTH_MODE=token if it is already here"
        ) from error
    except (ray.exceptions.RayError, TimeoutError, RuntimeError, ValueError, OSError) as error:
        if address == AUTO and isinstance(error, ConnectionError):
            raise RunError(
                "this machine is in no cluster: `ray start` starts or joins one, and --cluster "
                "without an address needs none"
            ) from error
        text = one_line(str(error))[:_MAX_ERROR_CHARACTERS]
        raise RunError(
            f"cannot join the cluster at {address!r} ({text}): see `ray status` there"
        ) from error


def _probe(address: str) -> None:
    """Raise RunError if no cluster answers at an address."""
    if address == AUTO:
        address = os.environ.get("RAY_ADDRESS") or AUTO
    if address in (LOCAL, AUTO):
        return
    # Ray would take two minutes, and then end the process.
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS) as connection:
            if os.environ.get("RAY_USE_TLS"):
                return
            connection.sendall(_HTTP2_PREFACE)
            is_ray = connection.recv(4)[3:] == b"\4"
    except (OSError, UnicodeError) as error:
        is_name = isinstance(error, socket.gaierror | UnicodeError)
        cure = f"check the name {host!r}" if is_name else "see `ray status` there"
        raise RunError(f"no cluster can be reached at {address!r} ({error}): {cure}") from error
    if not is_ray:
        raise RunError(
            f"the program that listens at {address!r} is not a Ray cluster: give the port of its "
            "head, 6379 unless `ray start` had another"
        )


@contextlib.contextmanager
def _defer_signals() -> Iterator[None]:
    """Defer a first SIGINT or SIGTERM, and restore the handlers that Ray replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Ray loses track of the processes that it started if its start is interrupted.
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    received: list[int] = []

    def defer(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt

    for number, handler in previous.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, defer)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])


@contextlib.contextmanager
def _suppress_stderr() -> Iterator[None]:
    """Discard standard error, on which Ray's C++ prints the errors that it then raises."""
    saved = os.dup(2)
    try:
        with Path(os.devnull).open("wb") as devnull:
            os.dup2(devnull.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


class _WithoutListener:
    """A text stream that discards what Ray's error listener writes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if threading.current_thread().name == _ERROR_LISTENER:
            return len(text)
        return int(self._stream.write(text))
