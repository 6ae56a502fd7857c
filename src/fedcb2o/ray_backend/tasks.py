"""Independent work on the nodes of a cluster, which is heard of while it is done."""

import contextlib
import pickle
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
import torch

from fedcb2o.errors import RunError
from fedcb2o.parallel.serialization import serialize
from fedcb2o.ray_backend.actors import POLL_SECONDS, translate_ray_errors
from fedcb2o.ray_backend.code_shipping import extend_sys_path, runtime_environment

TaskId = TypeVar("TaskId")

RETRY_SECONDS = 10.0  # seconds before a task begins anew: a node on which all fail is always free, and would soon have had all


@dataclass(frozen=True)
class Task:
    """`function(*arguments, *lent)`, a generator. What is `lent` goes through Ray's store: arrays, which are not to be
    written to there, or references to them."""

    function: Callable[..., Iterator[Any]]
    arguments: Sequence[Any] = ()
    loans: Sequence[Any] = ()
    gpus: int = 0


class TaskPool:
    """Ray's tasks, which know `own` functions: one processor each, on whichever node has one free."""

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
        """Have the task of every ticket done, at most `count` at once, the next of which is asked for when there is
        room for it; `heard` gets each ticket with all that its task yields, as it comes, and `meanwhile` is called
        after each, or each second.

        Where a task came to nothing `failed` gets its ticket and why, LostError where its process or node is gone, and
        says whether it begins anew, which it does after a pause. What ends this before its time ends all tasks.
        """
        left = iter(task_ids)
        busy = dict[Any, TaskId]()
        again = deque[tuple[float, TaskId]]()  # and when
        do = ray.remote(
            lambda *given: (yield from _run_generator(*given))
        )  # what looks at types does not look like a generator

        def begin(ticket: TaskId) -> None:
            new = task(ticket)
            options = {
                "num_cpus": 1,
                "num_gpus": new.gpus,
                "max_retries": 0,
                **runtime_environment(self.user_functions),
            }
            waits = {
                "num_returns": "streaming",
                "_generator_backpressure_num_objects": 1,
            }  # until it is heard
            content = serialize((new.function, new.arguments))
            busy[do.options(**options, **waits).remote(sys.path, content, *new.loans)] = ticket

        try:
            while True:
                while again and again[0][0] <= time.monotonic():
                    begin(again.popleft()[1])
                while len(busy) + len(again) < count and (ticket := next(left, None)) is not None:
                    begin(ticket)
                if not busy and not again:
                    return
                on_idle()
                if not busy:
                    time.sleep(POLL_SECONDS)
                    continue
                ray.wait(list(busy), num_returns=1, timeout=POLL_SECONDS)
                there, _ = ray.wait(list(busy), num_returns=len(busy), timeout=0)
                for stream in there:
                    try:
                        found = _next_result(stream)
                    except RunError as error:
                        ticket = busy.pop(stream)
                        if on_failure(ticket, error):
                            again.append((time.monotonic() + RETRY_SECONDS, ticket))
                    else:
                        if found is None:
                            del busy[stream]
                        else:
                            on_result(busy[stream], found)
        finally:
            for stream in busy:
                with contextlib.suppress(Exception):  # the cluster may be what is gone
                    ray.cancel(stream, force=True)

    def put(self, content: Any) -> Any:
        """A reference to some content, which is in the store then, and goes to a node once."""
        with translate_ray_errors():
            return ray.put(content)


def _next_result(stream: Any) -> Any:
    """What a task yields next, or None where it has ended; raises LostError where it is gone, and RunError with what it
    raised."""
    with translate_ray_errors():
        ref = next(stream, None)
        return None if ref is None else ray.get(ref)


def _run_generator(path: Sequence[str], content: bytes, *lent: Any) -> Iterator[Any]:
    extend_sys_path(path)  # before what lies there is unpacked
    torch.set_num_threads(1)
    function, arguments = pickle.loads(content)
    yield from function(*arguments, *lent)
