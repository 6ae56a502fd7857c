"""A process pool with one pipe per worker and no shared locks.

A killed worker cannot block the others: the pool has no lock, no semaphore, no thread and no helper
process, and a closed pipe reports the death. Workers start in the same way from a file, a notebook
and standard input.
"""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Pipe, wait
from typing import Any, TypeVar

from fedcb2o.errors import RunError
from fedcb2o.parallel import _worker_main
from fedcb2o.parallel._serialization import serialize, unwrap_result
from fedcb2o.parallel._worker_main import IDLE_SECONDS, SIGNALS

TaskId = TypeVar("TaskId")
Result = TypeVar("Result")

LIVENESS_SECONDS = 1.0  # without a message, after which the pool checks that its workers live
EXIT_SECONDS = 5.0  # granted to workers for exiting before they are killed
START_FAILURE = b"!"  # first byte of the only message of a worker that could not start; no pickle's

_FEWER_WORKERS = "with fewer of them (--workers 1; of a grid, --jobs 1)"
_BOOTSTRAP = f"""
import gc
import sys
gc.disable()  # during the imports, which take a sixth less time; `run_worker` enables it
from multiprocessing.connection import Connection
parent, pipe = int(sys.argv[1]), Connection(int(sys.argv[2]))
sys.path[:] = sys.argv[3:]
try:
    from {_worker_main.__name__} import run_worker
except BaseException as error:
    pipe.send_bytes({START_FAILURE!r} + f"{{type(error).__name__}}: {{error}}".encode())
else:
    run_worker(parent, pipe)
"""


class WorkerProcessError(RunError):
    """A worker process that could not start or was killed."""


class ProcessPool:
    """Worker processes, each of which computes one task at a time.

    The workers end with the process that started them.
    """

    def __init__(self) -> None:
        self.key = _pool_key()
        self.workers: list[_WorkerProcess] = []
        self._module_specs: dict[str, Any] = {}
        self.reload_if_stale()
        weakref.finalize(self, _stop_at_exit, self.workers, os.getpid())

    def map_unordered(
        self,
        count: int,
        function: Callable[..., Result],
        tasks: Iterable[tuple[TaskId, tuple[Any, ...]]],
        on_result: Callable[[TaskId, Result], object],
        on_idle: Callable[[], object] = lambda: None,
    ) -> None:
        """Compute `function(*arguments)` for every task on `count` workers.

        A task is a pair (task id, arguments); the next one is drawn when a worker is free.
        `on_result` receives each task id with its result, in order of completion. `on_idle` is
        called after each result, and every second without one. The error of a task is raised as it
        was, and WorkerProcessError if a worker could not start or was killed. If the call ends
        early, by an error or a signal, all workers are killed.
        """
        remaining = iter(tasks)
        try:
            self._ensure_workers(count)
            while True:
                self._submit_to_free_workers(function, remaining)
                busy = {worker.pipe: worker for worker in self.workers if worker.busy}
                if not busy:
                    return

                on_idle()
                ready = wait(list(busy), LIVENESS_SECONDS)
                # A dead worker's pipe stays open while one of its children has a copy.
                if not ready and any(worker.has_exited() for worker in busy.values()):
                    raise _killed_error()
                for pipe, worker in busy.items():
                    if pipe in ready:
                        on_result(*worker.receive())
        except BaseException:
            self.terminate()
            raise

    def reload_if_stale(self) -> None:
        """Kill the workers if this process has reloaded a module since the last call.

        A module whose file was edited, but that was not reloaded, is old here too.
        """
        specs = {
            name: getattr(module, "__dict__", {}).get("__spec__")
            for name, module in sys.modules.copy().items()
        }
        known = specs.keys() & self._module_specs
        # Workers may hold the module's old code.
        if any(specs[name] is not self._module_specs[name] for name in known):
            self.terminate()
        self._module_specs |= specs

    def terminate(self) -> None:
        """Kill all workers at once."""
        _stop_workers(self.workers, 0.0)
        self.workers.clear()

    def _ensure_workers(self, count: int) -> None:
        """Keep, start or stop workers until `count` of them are usable."""
        usable = [worker for worker in self.workers if worker.is_reusable()]
        kept = usable[:count]
        _stop_workers([worker for worker in self.workers if worker not in kept], EXIT_SECONDS)
        self.workers[:] = kept
        while len(self.workers) < count:
            self.workers.append(_WorkerProcess())

    def _submit_to_free_workers(
        self, function: Callable[..., Any], remaining: Iterator[tuple[Any, tuple[Any, ...]]]
    ) -> None:
        for index, worker in enumerate(self.workers):
            if worker.busy or (task := next(remaining, None)) is None:
                continue
            if not worker.is_reusable():  # killed while it was idle
                _stop_workers([worker], 0.0)
                worker = _WorkerProcess()
                self.workers[index] = worker
            task_id, arguments = task
            worker.submit(task_id, function, arguments)


class _WorkerProcess:
    """One worker process, its pipe and its current task."""

    def __init__(self) -> None:
        self.busy = False
        self.task_id: Any = None
        self.idle_since = time.monotonic()
        try:
            self.pipe, worker_end = Pipe()
            with worker_end, _blocked_signals():
                arguments = map(str, (os.getpid(), worker_end.fileno(), *sys.path))
                # A process group of its own: signals of the terminal do not reach the worker, and
                # its children can be killed with it.
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _BOOTSTRAP, *arguments],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[worker_end.fileno()],
                    process_group=0,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
        except OSError as error:
            cure = "raise `ulimit -n`, or " if error.errno == errno.EMFILE else ""
            raise WorkerProcessError(
                f"cannot start a worker process ({error.strerror}): {cure}try {_FEWER_WORKERS}"
            ) from error

    def is_reusable(self) -> bool:
        """Return True if the process lives and will not exit soon.

        It will if it was idle for 80% of `IDLE_SECONDS`. Its pipe is closed, or has data to read,
        if it is dead.
        """
        if self.pipe.closed or time.monotonic() - self.idle_since >= 0.8 * IDLE_SECONDS:
            return False
        return not self.pipe.poll()

    def has_exited(self) -> bool:
        """Return True if the process is dead; kill its children, which hold copies of its pipe."""
        if self.process.returncode is None and self.process.poll() is not None:
            with contextlib.suppress(OSError):  # without children there is no such group
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.returncode is not None

    def submit(
        self, task_id: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> None:
        """Send a task; `receive` reports a worker that is already dead.

        RunError is raised if the function or an argument cannot be pickled.
        """
        content = serialize((function, arguments))
        self.busy = True
        self.task_id = task_id
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(content)

    def receive(self) -> tuple[Any, Any]:
        """Return the task id and the result; raise the task's error as it was.

        WorkerProcessError is raised if the worker could not start or was killed.
        """
        try:
            content = self.pipe.recv_bytes()
        except (EOFError, OSError) as error:
            raise _killed_error() from error
        if content.startswith(START_FAILURE):
            raise WorkerProcessError(
                "a worker process cannot start, perhaps because memory is short "
                f"({content[1:].decode()}): try {_FEWER_WORKERS}"
            )

        result = unwrap_result(content)
        self.busy = False
        self.idle_since = time.monotonic()
        return self.task_id, result


def current_pool() -> ProcessPool:
    """Return the pool of this thread.

    It is that of the last call, or a new one in a forked process and after `sys.path` changed.
    """
    pool: ProcessPool | None = getattr(_thread_local, "pool", None)
    if pool is None or pool.key != _pool_key():
        pool = ProcessPool()
        _thread_local.pool = pool
    return pool


_thread_local = threading.local()


def _pool_key() -> tuple[Any, ...]:
    """Return the parent process and the places of user functions, on which workers depend."""
    return os.getpid(), tuple(sys.path)


def _killed_error() -> WorkerProcessError:
    return WorkerProcessError(
        "a worker process was killed, perhaps because memory is short: "
        f"go on with --resume, if need be {_FEWER_WORKERS}"
    )


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """Block `SIGNALS`: a process started inside inherits that until it has its own handlers."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _stop_at_exit(workers: Sequence[_WorkerProcess], parent: int) -> None:
    if os.getpid() != parent:  # a fork does not own the workers
        return
    with contextlib.suppress(KeyboardInterrupt):
        _stop_workers(workers, EXIT_SECONDS)


def _stop_workers(workers: Sequence[_WorkerProcess], timeout: float) -> None:
    """Let workers exit within `timeout` seconds, then kill them and their children."""
    deadline = time.monotonic() + timeout
    # A worker exits when its pipe is closed.
    for worker in workers:
        worker.pipe.close()
    try:
        for worker in workers:
            while not worker.has_exited() and time.monotonic() < deadline:
                time.sleep(0.005)
    finally:
        for worker in workers:
            if worker.process.returncode is not None:
                continue
            with contextlib.suppress(OSError):
                os.killpg(worker.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(EXIT_SECONDS)
