"""Processes beside this one that do what they are given: one pipe to each, and nothing else between them and it.

There is no lock, semaphore, thread or further process, so that a member which is killed, at any moment, holds up nobody
and leaves nothing behind; its pipe tells. Members start alike from a file, a notebook and standard input, and what
`__main__` defines goes to them by value.
"""

import collections
import contextlib
import errno
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, ClassVar, TypeVar

import cloudpickle
import torch

from fedcb2o.errors import RunError

TaskId = TypeVar("TaskId")
Result = TypeVar("Result")

LIVENESS_SECONDS = 1.0  # seconds without a word after which it is looked whether members live
IDLE_SECONDS = 600.0  # seconds without work after which a member leaves
EXIT_SECONDS = 5.0  # seconds that members may take for leaving before they are killed
_SIGNALS = {
    signal.SIGINT,
    signal.SIGTERM,
}  # sent to all processes of a run, they are the first one's to answer
_FEWER_WORKERS = "with fewer of them (--workers 1; of a grid, --jobs 1)"
_BOOTSTRAP = """
import sys
from multiprocessing.connection import Connection
parent, pipe, sys.path[:] = int(sys.argv[1]), Connection(int(sys.argv[2])), sys.argv[3:]
try:
    from fedcb2o.parallel.executors import work_for
except BaseException as error:
    pipe.send((None, f"{type(error).__name__}: {error}"))
else:
    work_for(parent, pipe)
"""


class WorkerProcessError(RunError):
    """A worker process that cannot start or was killed."""


class ProcessPool:
    """Some processes, each of which does one task at a time. They end with the one that made them."""

    def __init__(self) -> None:
        self.key, self.workers, self._module_specs = (
            _pool_key(),
            list[_WorkerProcess](),
            dict[str, Any](),
        )
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
        """Have `count` members do `function(*task)` for every (ticket, task), the next of which is asked for when one
        is free to do it; `heard` gets each ticket with its result as it comes, and `meanwhile` is called after each, or
        each second.

        A function's error is raised as it is; CrewError where members cannot start or one is killed. What ends this
        before its time ends all members.
        """
        left = iter(tasks)
        try:
            self._ensure_workers(count)
            while True:
                for place, member in enumerate(self.workers):
                    if not member.busy and (task := next(left, None)) is not None:
                        if not member.is_reusable():  # killed while it had nothing to do
                            _stop_workers([member], 0.0)
                            self.workers[place] = member = _WorkerProcess()
                        member.submit(task[0], function, task[1])
                busy = {member.pipe: member for member in self.workers if member.busy}
                if not busy:
                    return
                on_idle()
                there = wait(list(busy), LIVENESS_SECONDS)
                if not there and any(member.has_exited() for member in busy.values()):
                    raise _killed_error()
                for pipe, member in busy.items():
                    if pipe in there:
                        on_result(*member.receive())
        except BaseException:
            self.terminate()
            raise

    def reload_if_stale(self) -> None:
        """Where this process has loaded a module again since it was last asked, end the members, who may know its old
        code. One whose file was edited alone is the old one here as there."""
        loaded = {
            name: getattr(module, "__dict__", {}).get("__spec__")
            for name, module in sys.modules.copy().items()
        }
        if any(
            loaded[name] is not self._module_specs[name]
            for name in loaded.keys() & self._module_specs
        ):
            self.terminate()
        self._module_specs |= loaded

    def terminate(self) -> None:
        """End all members at once."""
        _stop_workers(self.workers, 0.0)
        self.workers.clear()

    def _ensure_workers(self, count: int) -> None:
        """Have `count` members who live and will not leave soon."""
        fit = [member for member in self.workers if member.is_reusable()]
        _stop_workers(
            [member for member in self.workers if member not in fit[:count]], EXIT_SECONDS
        )
        self.workers[:] = fit[:count]
        while len(self.workers) < count:
            self.workers.append(_WorkerProcess())


class _WorkerProcess:
    """One process, its pipe, and what it is at; raises CrewError where it cannot be started."""

    def __init__(self) -> None:
        self.busy, self.task_id, self.idle_since = False, None, time.monotonic()
        try:
            self.pipe, theirs = Pipe()
            with theirs, _blocked_signals():
                said = map(str, (os.getpid(), theirs.fileno(), *sys.path))
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _BOOTSTRAP, *said],
                    stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], process_group=0,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )  # fmt: skip
        except OSError as error:
            cure = "raise `ulimit -n`, or " if error.errno == errno.EMFILE else ""
            raise WorkerProcessError(
                f"cannot start a worker process ({error.strerror}): {cure}try {_FEWER_WORKERS}"
            ) from error

    def is_reusable(self) -> bool:
        """Whether it may be given work: it lives, and will not leave soon."""
        return (
            not self.pipe.closed
            and time.monotonic() - self.idle_since < 0.8 * IDLE_SECONDS
            and not self.pipe.poll()
        )

    def has_exited(self) -> bool:
        """Whether it is dead, and what it started with it, whose copies of its pipe would hide that."""
        if self.process.returncode is None and self.process.poll() is not None:
            with contextlib.suppress(OSError):  # there were none
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.returncode is not None

    def submit(self, task_id: Any, function: Callable[..., Any], task: tuple[Any, ...]) -> None:
        """Have it do a task."""
        content = serialize((function, task))
        self.busy = True
        self.task_id = task_id
        with contextlib.suppress(OSError):  # its last words follow, or its death
            self.pipe.send_bytes(content)

    def receive(self) -> tuple[Any, Any]:
        """What it was at, and the result; raises what it raised, and CrewError where it is dead."""
        try:
            content = self.pipe.recv_bytes()
        except (EOFError, OSError) as error:
            raise _killed_error() from error
        result = unwrap_result(content)
        self.busy, self.idle_since = False, time.monotonic()
        return self.task_id, result


def current_pool() -> ProcessPool:
    """The crew of this thread; another one where this is a process forked from the other's, or `sys.path` changed."""
    if getattr(_thread_local, "crew", None) is None or _thread_local.crew.key != _pool_key():
        _thread_local.crew = ProcessPool()
    found: ProcessPool = _thread_local.crew
    return found


def serve_tasks(pipe: Connection) -> None:
    """Do what is given through a pipe, until it is closed or nothing has come for a long time."""
    for each in _SIGNALS:
        signal.signal(
            each, lambda *_: None
        )  # unlike "ignored", this does not pass on to a process that a task starts
    # Out of the terminal's foreground, what is written there would stop it under `stty tostop`, with a handler too; and
    # what a task starts, which inherits this.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    with contextlib.suppress(EOFError, OSError):
        while pipe.poll(IDLE_SECONDS):
            pipe.send_bytes(execute(pipe.recv_bytes()))


def serialize(content: object) -> bytes:
    """Anything as bytes; raises RunError where that cannot be."""
    with io.BytesIO() as file:
        try:
            _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(content)
        except (AttributeError, TypeError, ValueError, pickle.PicklingError) as error:
            cure = "take --workers 1 and no --cluster"
            raise RunError(f"a part cannot be sent to another process ({error}): {cure}") from error
        return file.getvalue()


def _killed_error() -> WorkerProcessError:
    """What to raise where a member is dead."""
    return WorkerProcessError(
        f"a worker process was killed, perhaps for want of memory: go on with --resume, if need be {_FEWER_WORKERS}"
    )


_thread_local = threading.local()


def _pool_key() -> tuple[Any, ...]:
    """What members depend on: their parent, and where users' functions lie."""
    return os.getpid(), tuple(sys.path)


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """Signals wait, for this process's answer and, in one that is started here, until it can be deaf to them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stop_at_exit(members: Sequence[_WorkerProcess], pid: int) -> None:
    if os.getpid() == pid:  # not in a fork
        with contextlib.suppress(KeyboardInterrupt):  # who has no patience
            _stop_workers(members, EXIT_SECONDS)


def _stop_workers(workers: Sequence[_WorkerProcess], timeout: float) -> None:
    """Have members leave by themselves within so many seconds, or be killed, with the processes that they started."""
    end = time.monotonic() + timeout
    for member in workers:
        member.pipe.close()
    try:
        for member in workers:
            while not member.has_exited() and time.monotonic() < end:
                time.sleep(0.005)
    finally:
        for member in workers:
            if member.process.returncode is None:
                with contextlib.suppress(OSError):
                    os.killpg(member.process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    member.process.wait(EXIT_SECONDS)


class _RemoteTraceback(Exception):
    """The traceback of an error in a worker."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def execute(content: bytes, *context: object) -> bytes:
    """What a packed (function, task) comes to in a world, as bytes: (True, its result), or (False, its error and the
    traceback)."""
    try:
        function, task = pickle.loads(content)
        return serialize((True, function(*context, *task)))
    except BaseException as error:
        told = traceback.format_exc()
        try:
            answer = serialize((False, (error, told)))
            pickle.loads(answer)
        except Exception:
            return serialize((False, (RuntimeError(f"{type(error).__name__}: {error}"), told)))
        return answer


def unwrap_result(content: bytes) -> Any:
    """The result in an answer; raises what was raised there, and CrewError where a member could not start."""
    done, result = pickle.loads(content)
    if done is None:
        raise WorkerProcessError(
            f"a worker process cannot start, perhaps for want of memory ({result}): try {_FEWER_WORKERS}"
        )
    if not done:
        raise result[0] from _RemoteTraceback(result[1])
    return result


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    """A small tensor as bytes: PyTorch's own way between processes takes ten times as long, and more room for views."""
    try:
        content = tensor.contiguous().numpy().tobytes()
    except (
        RuntimeError,
        TypeError,
    ):  # what NumPy has not, in a user's function: bfloat16, a gradient, sparse ones
        return tensor.__reduce_ex__(pickle.DEFAULT_PROTOCOL)  # type: ignore[no-untyped-call]
    return _rebuild_tensor, (tensor.dtype, tuple(tensor.shape), content)


def _rebuild_tensor(dtype: torch.dtype, shape: tuple[int, ...], content: bytes) -> torch.Tensor:
    found = (
        torch.frombuffer(bytearray(content), dtype=dtype)
        if content
        else torch.empty(0, dtype=dtype)
    )
    return found.view(shape)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar[Any] = collections.ChainMap(
        {torch.Tensor: _reduce_tensor}, cloudpickle.Pickler.dispatch_table
    )
