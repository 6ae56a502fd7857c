"""Independent tasks on the nodes of a cluster, with results while they run.

>>> Task(iter, ([1, 2],)).gpus
0
"""

import contextlib
import pickle
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray
import torch

from fedcb2o.errors import RunError
from fedcb2o.parallel._serialization import serialize
from fedcb2o.ray_backend._actors import POLL_SECONDS, translate_ray_errors
from fedcb2o.ray_backend._code_shipping import extend_sys_path, pack_modules, runtime_environment

TaskId = TypeVar("TaskId")

RETRY_SECONDS = 10.0  # before a failed task starts again; a node on which all fail is always free


@dataclass(frozen=True)
class Task:
    """A call `function(*arguments, *loans)` of a generator function.

    Loans are arrays that go through Ray's store and are read-only, or references to them.
    """

    function: Callable[..., Iterator[Any]]
    arguments: Sequence[Any] = ()
    loans: Sequence[Any] = ()
    gpus: int = 0


class TaskPool:
    """A pool of Ray's tasks with one processor each, on any node that has one free."""

    def __init__(self, user_functions: Sequence[str] = ()) -> None:
        self.user_functions = user_functions

    def map_unordered(
        self,
        count: int,
        task_ids: Iterable[TaskId],
        task: Callable[[TaskId], Task],
        on_result: Callable[[TaskId, Any], object],
        on_failure: Callable[[TaskId, RunError], bool],
        on_idle: Callable[[], object] = lambda: None,
    ) -> None:
        """Run the task of every id, at most `count` at once.

        The next id is drawn when a processor is free for it. `on_result` receives an id with each
        value that its task yields. `on_failure` receives an id and its task's error:
        WorkerLostError if the process or node is gone. The task starts again, after
        `RETRY_SECONDS`, if it returns True. `on_idle` is called after each result, and every second
        without one. If the call ends early, all tasks are cancelled.
        """
        remaining = iter(task_ids)
        active = _ActiveTasks(task, self.user_functions)
        try:
            while True:
                active.retry_due()
                while active.count < count and (task_id := next(remaining, None)) is not None:
                    active.start(task_id)
                if not active.count:
                    return

                on_idle()
                for stream in active.ready():
                    _handle_result(active, stream, on_result, on_failure)
        finally:
            active.cancel()

    def put(self, content: Any) -> Any:
        """Put content into the store, once per node; return its reference."""
        with translate_ray_errors():
            return ray.put(content)


class _ActiveTasks(Generic[TaskId]):
    """The running tasks by their streams of results, and those that will start again."""

    def __init__(self, task: Callable[[TaskId], Task], user_functions: Sequence[str]) -> None:
        self.task = task
        self.archive = pack_modules(user_functions)
        self.running: dict[Any, TaskId] = {}
        self.retries: deque[tuple[float, TaskId]] = deque()  # (time, id)
        # A lambda, because beartype would not see a generator function in `_run_generator` itself.
        self.remote = ray.remote(lambda *arguments: (yield from _run_generator(*arguments)))

    @property
    def count(self) -> int:
        return len(self.running) + len(self.retries)

    def start(self, task_id: TaskId) -> None:
        task = self.task(task_id)
        remote = self.remote.options(
            num_cpus=1,
            num_gpus=task.gpus,
            max_retries=0,
            num_returns="streaming",
            _generator_backpressure_num_objects=1,  # wait until a value is consumed
            **runtime_environment(self.archive),
        )
        content = serialize((task.function, task.arguments))
        stream = remote.remote(sys.path, self.archive, content, *task.loans)
        self.running[stream] = task_id

    def retry_later(self, task_id: TaskId) -> None:
        self.retries.append((time.monotonic() + RETRY_SECONDS, task_id))

    def retry_due(self) -> None:
        while self.retries and self.retries[0][0] <= time.monotonic():
            self.start(self.retries.popleft()[1])

    def ready(self) -> list[Any]:
        """Wait up to `POLL_SECONDS`; return the streams that have a value or have ended."""
        if not self.running:
            time.sleep(POLL_SECONDS)
            return []
        streams = list(self.running)
        ray.wait(streams, num_returns=1, timeout=POLL_SECONDS)
        # After the first one, all that are ready, without waiting.
        ready, _ = ray.wait(streams, num_returns=len(streams), timeout=0)
        return list(ready)

    def cancel(self) -> None:
        for stream in self.running:
            with contextlib.suppress(Exception):  # the cluster itself may be gone
                ray.cancel(stream, force=True)


def _handle_result(
    active: _ActiveTasks[TaskId],
    stream: Any,
    on_result: Callable[[TaskId, Any], object],
    on_failure: Callable[[TaskId, RunError], bool],
) -> None:
    try:
        value = _next_result(stream)
    except RunError as error:
        task_id = active.running.pop(stream)
        if on_failure(task_id, error):
            active.retry_later(task_id)
        return
    if value is None:
        del active.running[stream]
    else:
        on_result(active.running[stream], value)


def _next_result(stream: Any) -> Any:
    """Return the next value of a task, or None at its end; raise its error as a RunError."""
    with translate_ray_errors():
        ref = next(stream, None)
        return None if ref is None else ray.get(ref)


def _run_generator(
    path: Sequence[str], archive: bytes, content: bytes, *loans: Any
) -> Iterator[Any]:
    extend_sys_path(path, archive)  # before modules of user functions are unpickled
    torch.set_num_threads(1)
    function, arguments = pickle.loads(content)
    yield from function(*arguments, *loans)
