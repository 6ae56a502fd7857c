"""What this process cannot do without in a cluster: its head, and the node that this process is in."""

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator

import ray

from fedcb2o.errors import RunError

_PROBE_SECONDS = 5.0  # seconds that the head may take for answering
_PROBE_INTERVAL_SECONDS, _MAX_MISSED_PROBES = (
    0.5,
    5,
)  # seconds between knocks at it, and how many in vain mean that it is gone


@contextlib.contextmanager
def watch_cluster() -> Iterator[None]:
    """Within it, RunError is raised where the cluster's head or this process's own node is gone, whatever it waits for:
    Ray would end the process without a word. In another thread than the main one nothing is watched.

    SIGURG is what nobody else uses, and it does nothing by default; a command in the background is deaf to SIGINT.
    """
    main = threading.main_thread()
    done = threading.Event()
    gone = list[str]()
    if threading.current_thread() is not main:
        yield
        return
    here = ray.get_runtime_context()
    head = here.gcs_address
    host, _, port = head.rpartition(":")

    def watch() -> None:
        missed = 0
        while not done.is_set() and not gone:
            if _is_closed(node):
                gone.append("this machine's node of the cluster")
            try:
                socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS).close()
                missed = 0
            except OSError:
                missed += 1
            if missed == _MAX_MISSED_PROBES:
                gone.append(f"the head of the cluster at {head}")
        if gone and not done.is_set():
            signal.pthread_kill(main.ident or 0, signal.SIGURG)

    def stop(*_: object) -> None:
        if not done.is_set():
            raise KeyboardInterrupt  # which ends all waiting, Ray's too

    with socket.socket(socket.AF_UNIX) as node:
        mine = [
            each["RayletSocketName"] for each in ray.nodes() if each["NodeID"] == here.get_node_id()
        ]
        try:
            node.connect(mine[0])
        except (LookupError, OSError) as error:
            raise RunError(
                "this machine's node of the cluster is gone: start the cluster again"
            ) from error
        node.settimeout(_PROBE_INTERVAL_SECONDS)
        watcher = threading.Thread(target=watch, daemon=True)
        before = signal.signal(signal.SIGURG, stop)
        watcher.start()
        try:
            yield
        except KeyboardInterrupt as error:
            if not gone:
                raise
            raise RunError(
                f"{gone[0]} is gone: start the cluster again, and go on with --resume"
            ) from error
        finally:
            done.set()
            watcher.join()
            signal.signal(signal.SIGURG, before)


def _is_closed(line: socket.socket) -> bool:
    """Whether the other side has closed a connection through which nothing comes, or does so within its timeout."""
    try:
        return not line.recv(1)
    except TimeoutError:
        return False
    except OSError:
        return True
