"""Join a cluster, or start Ray on this machine."""

import contextlib
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
from ray._private import services
from ray._private.authentication.authentication_token_setup import (
    maybe_enable_token_auth_if_token_available,
)
from ray._raylet import GcsClient  # type: ignore[attr-defined]

from fedcb2o.errors import RunError
from fedcb2o.ray_backend.liveness import watch_cluster

LOCAL = "local"  # the address of a cluster that is this machine alone
AUTO = "auto"  # that of the cluster which this machine is in
_HTTP2_SETTINGS = (
    b"\0\0\0\4"  # how a frame begins with which both sides of HTTP/2, as gRPC speaks it, begin
)
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _HTTP2_SETTINGS + bytes(5)
_PROBE_SECONDS = 5.0  # seconds that a cluster may take for answering at all
QUIET_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # its C++ writes errors to the terminal, of which those that matter are raised
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else it warns of what a later version will do
}


@contextlib.contextmanager
def connected(
    address: str, store: int | None = None, processors: int | None = None
) -> Iterator[None]:
    """Within it, this process is in the cluster at an address, "auto" for the one that runs here; "local" starts Ray on
    this machine, with a `store` of so many bytes for objects. What another has joined already is used, and stays.

    Raises RunError where there is no cluster to be reached, or one of other versions.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.update(QUIET_ENVIRONMENT)
    print(
        f"{_describe(address)} ...", file=sys.stderr, flush=True
    )  # which takes some seconds, or many
    with _suppress_stderr():
        _probe(address)
    known: dict[str, Any] = {"address": address}
    if address == LOCAL:
        known |= {"include_dashboard": False, "object_store_memory": store, "num_cpus": processors}
    try:
        try:
            with _defer_signals(), _suppress_stderr():
                ray.init(
                    **known,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    configure_logging=True,
                )
        except (ray.exceptions.RayError, TimeoutError, RuntimeError, ValueError, OSError) as error:
            told = " ".join(str(error).split())[:300]
            raise RunError(
                f"cannot join the cluster at {address!r} ({told}): see `ray status` there"
            ) from error
        with _suppress_stdout(), watch_cluster():
            yield
    finally:
        ray.shutdown()


def _describe(address: str) -> str:
    if address == LOCAL:
        return "Starting Ray on this machine"
    return (
        f"Joining the cluster {'that this machine is in' if address == AUTO else f'at {address}'}"
    )


def _probe(address: str) -> None:
    """Raises RunError where no cluster is at an address: Ray itself would take minutes to say so."""
    if address == LOCAL:
        return
    try:
        found = address if address != AUTO else str(services.canonicalize_bootstrap_address(AUTO))
    except ConnectionError as error:
        told = "this machine is in no cluster: `ray start` has it begin one or join one, and --cluster alone needs none"
        raise RunError(told) from error
    host, _, port = found.rpartition(":")
    other = f"what listens at {found!r} is no cluster of Ray's: give its head's port, 6379 unless `ray start` had another"
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS) as line:
            if not os.environ.get("RAY_USE_TLS"):
                line.sendall(_HTTP2_PREFACE)
                if line.recv(4)[3:] != _HTTP2_SETTINGS[3:]:  # the other bytes are its length
                    raise RunError(other)
        try:
            GcsClient(address=found)
        except (
            ray.exceptions.AuthenticationError
        ):  # `ray start` uses this user's token where there is one, ray.init not
            maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
            GcsClient(address=found)
    except ray.exceptions.AuthenticationError as error:
        raise RunError(
            f"the cluster at {found!r} wants its owner's token: copy ~/.ray/auth_token from its head to this machine"
        ) from error
    except ray.exceptions.RpcError as error:
        raise RunError(other) from error
    except (socket.gaierror, UnicodeError) as error:
        raise RunError(
            f"no cluster can be reached at {found!r} ({error}): check the name {host!r}"
        ) from error
    except OSError as error:
        raise RunError(
            f"no cluster can be reached at {found!r} ({error}): see `ray status` there"
        ) from error


@contextlib.contextmanager
def _defer_signals() -> Iterator[None]:
    """Within it, a first SIGINT or SIGTERM waits: Ray forgets what it has started where it is stopped while it starts.
    It also puts handlers of its own in the place of those that are here."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    got = list[int]()

    def stop(number: int, frame: FrameType | None) -> None:
        got.append(number)
        if len(got) > 1:
            raise KeyboardInterrupt

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for first in got[:1]:
            signal.raise_signal(first)


@contextlib.contextmanager
def _suppress_stderr() -> Iterator[None]:
    """Within it, nothing is written to standard error: Ray's C++ logs what it then raises."""
    kept = os.dup(2)
    try:
        with Path(os.devnull).open("wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextlib.contextmanager
def _suppress_stdout() -> Iterator[None]:
    """Within it, Ray does not print to standard output what its processes report: what matters comes as an error."""
    printing = sys.modules["ray._private.worker"]
    name = "print_to_stdstream"
    before = getattr(printing, name, None)
    setattr(printing, name, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(printing, name, before)
