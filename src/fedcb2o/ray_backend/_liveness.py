"""Liveness of the cluster's head and of the node of this process."""

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator

import ray

from fedcb2o.errors import RunError

_PROBE_SECONDS = 5.0  # granted to the head for an answer
_PROBE_INTERVAL_SECONDS = 0.5
_MAX_MISSED_PROBES = 5  # consecutive ones, after which the head counts as gone


@contextlib.contextmanager
def watch_cluster() -> Iterator[None]:
    """Interrupt the work inside when the cluster's head or this process's node is gone.

    RunError is then raised. In a thread other than the main one nothing is watched.
    """
    main = threading.main_thread()
    if threading.current_thread() is not main:
        yield
        return

    # Ray would end the process without a message. The interruption is a SIGURG, which has no other
    # use and does nothing by default; a command in the background ignores SIGINT.
    is_done = threading.Event()
    lost: list[str] = []
    context = ray.get_runtime_context()
    head = context.gcs_address
    host, _, port = head.rpartition(":")

    def watch() -> None:
        missed = 0
        while not is_done.is_set() and not lost:
            if _is_closed(node):
                lost.append("this machine's node of the cluster")
            try:
                socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS).close()
                missed = 0
            except OSError:
                missed += 1
            if missed == _MAX_MISSED_PROBES:
                lost.append(f"the head of the cluster at {head}")
        if lost and not is_done.is_set():
            signal.pthread_kill(main.ident or 0, signal.SIGURG)

    def interrupt(*_: object) -> None:
        if not is_done.is_set():
            raise KeyboardInterrupt  # which ends all waiting, Ray's too

    with socket.socket(socket.AF_UNIX) as node:
        own = [n["RayletSocketName"] for n in ray.nodes() if n["NodeID"] == context.get_node_id()]
        try:
            node.connect(own[0])
        except (LookupError, OSError) as error:
            raise RunError(
                "this machine's node of the cluster is gone: start the cluster again"
            ) from error
        node.settimeout(_PROBE_INTERVAL_SECONDS)
        watcher = threading.Thread(target=watch, daemon=True)
        previous = signal.signal(signal.SIGURG, interrupt)
        watcher.start()
        try:
            yield
        except KeyboardInterrupt as error:
            if not lost:
                raise
            raise RunError(
                f"{lost[0]} is gone: start the cluster again, and continue with --resume"
            ) from error
        finally:
            is_done.set()
            watcher.join()
            signal.signal(signal.SIGURG, previous)


def _is_closed(connection: socket.socket) -> bool:
    """Return True if the other side closes a silent connection within its timeout."""
    try:
        return not connection.recv(1)
    except TimeoutError:
        return False
    except OSError:
        return True
