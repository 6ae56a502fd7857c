"""Independent tasks on the nodes of a cluster, with results while they run."""

import contextlib
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
import torch

from fedcb2o.errors import RunError
from fedcb2o.parallel._serialization import serialize
from fedcb2o.ray_backend._errors import translate_ray_errors
from fedcb2o.ray_backend._user_code import extend_sys_path, import_path, runtime_environment

TaskId = TypeVar("TaskId")

RETRY_SECONDS = 10.0  # before a failed task starts again; a node on which all fail is always free
_IDLE_SECONDS = 1.0  # between two calls of `on_idle`


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

    def put(self, content: Any) -> Any:
        """Put content into the store, once per node; return its reference."""
        with translate_ray_errors():
            return ray.put(content)

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
        environment = runtime_environment(self.user_functions)
        running: dict[Any, TaskId] = {}  # by their streams of results
        # Ray's own retries would repeat the arguments. These tasks continue from later files.
        retries: deque[tuple[float, TaskId]] = deque()  # (time, id)
        try:
            while True:
                while retries and retries[0][0] <= time.monotonic():
                    task_id = retries.popleft()[1]
                    running[_start(task(task_id), environment)] = task_id
                # A task that waits for its retry keeps its processor.
                while len(running) + len(retries) < count:
                    new = next(remaining, None)
                    if new is None:
                        break
                    running[_start(task(new), environment)] = new
                if not running and not retries:
                    return

                on_idle()
                for stream in _wait(list(running)):
                    task_id = running[stream]
                    try:
                        value = _next_result(stream)
                    except RunError as error:
                        del running[stream]
                        if on_failure(task_id, error):
                            retries.append((time.monotonic() + RETRY_SECONDS, task_id))
                        continue
                    if value is None:
                        del running[stream]
                    else:
                        on_result(task_id, value)
        finally:
            for stream in running:
                with contextlib.suppress(Exception):  # the cluster itself may be gone
                    ray.cancel(stream, force=True)


def _start(task: Task, environment: dict[str, Any]) -> Any:
    """Start a task; return the stream of its results."""
    remote = _GENERATOR.options(
        num_cpus=1,
        num_gpus=task.gpus,
        max_retries=0,
        num_returns="streaming",
        _generator_backpressure_num_objects=1,  # wait until a value is consumed
        **environment,
    )
    content = serialize((task.function, task.arguments))
    return remote.remote(import_path(), content, *task.loans)


def _wait(streams: list[Any]) -> list[Any]:
    """Wait up to `_IDLE_SECONDS`; return the streams that have a value or have ended."""
    if not streams:
        time.sleep(_IDLE_SECONDS)
        return []
    ray.wait(streams, timeout=_IDLE_SECONDS)
    # After the first one, all that are ready, without waiting: none would starve.
    ready, _ = ray.wait(streams, num_returns=len(streams), timeout=0)
    return list(ready)


def _next_result(stream: Any) -> Any:
    """Return the next value of a task, or None at its end; raise its error as a RunError."""
    with translate_ray_errors():
        ref = next(stream, None)
        return None if ref is None else ray.get(ref)


def _run_generator(path: Sequence[str], content: bytes, *loans: Any) -> Iterator[Any]:
    extend_sys_path(path)  # before modules of user functions are unpickled
    torch.set_num_threads(1)
    function, arguments = pickle.loads(content)
    yield from function(*arguments, *loans)


# A lambda, because beartype would not see a generator function in `_run_generator` itself.
_GENERATOR = ray.remote(lambda *arguments: (yield from _run_generator(*arguments)))
