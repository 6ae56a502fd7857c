"""Executors, which run functions of a context in this process or in several that share tensors.

Every computation has one intra-op thread in each process, so that the number of workers changes no
bit of a result.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from fedcb2o.parallel._process_pool import current_pool
from fedcb2o.parallel._shared_memory import SharedTensors
from fedcb2o.parallel._worker_main import run_tasks

Context = TypeVar("Context")
Result = TypeVar("Result")

Settings = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class SerialExecutor(Generic[Context]):
    """An executor in this process; `context` is the first argument of every function.

    An executor runs `count` tasks at once.
    """

    context: Context
    count: int = 1

    def map(
        self,
        function: Callable[..., Result],
        tasks: Sequence[tuple[Any, ...]],
        parts: Sequence[Sequence[int]] | None = None,
        settings: Settings = contextlib.nullcontext,
    ) -> list[Result]:
        """Return `function(context, *task)` for every task, in the order of the tasks.

        `parts` has the indices of the tasks that a process computes one after the other, for each
        part; by default each task is a part. `settings` returns the context manager in which the
        tasks are computed.
        """
        with one_thread(), settings():
            return [function(self.context, *task) for task in tasks]


@dataclass(frozen=True)
class PoolExecutor(Generic[Context]):
    """An executor in `count` worker processes.

    All workers map the shared tensors. `make_context` builds each worker's context from them, once.
    """

    count: int
    shared_tensors: SharedTensors
    make_context: Callable[[dict[str, torch.Tensor]], Context]

    def __post_init__(self) -> None:
        """Make the workers use the code that this process has now."""
        current_pool().reload_if_stale()

    def map(
        self,
        function: Callable[..., Result],
        tasks: Sequence[tuple[Any, ...]],
        parts: Sequence[Sequence[int]] | None = None,
        settings: Settings = contextlib.nullcontext,
    ) -> list[Result]:
        """Return `function(context, *task)` for every task, in the order of the tasks.

        Workers compute parts as they come free; the arguments are those of `SerialExecutor.map`.
        RunError is raised if a worker cannot start or was killed, often because memory is short.
        """
        if parts is None:
            parts = [[index] for index in range(len(tasks))]
        context = (self.shared_tensors, self.make_context, settings)
        jobs = []
        for number, indices in enumerate(parts):
            jobs.append((number, (*context, function, [tasks[index] for index in indices])))
        results: dict[int, Result] = {}

        def store(number: int, part_results: list[Result]) -> None:
            results.update(zip(parts[number], part_results, strict=True))

        current_pool().map_unordered(self.count, run_tasks, jobs, store)
        return [results[index] for index in range(len(tasks))]


Executor = SerialExecutor[Any] | PoolExecutor[Any]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Use one intra-op thread inside, and the previous number of threads afterwards."""
    previous = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def balance_load(items: Sequence[int], costs: Sequence[int], count: int) -> list[list[int]]:
    """Partition items into at most `count` parts of similar duration, none of them empty.

    Items are indices into `costs`; the longest is dealt first.
    """
    if count == 1 and items:
        return [sorted(items, key=lambda item: -costs[item])]
    parts: list[list[int]] = [[] for _ in range(min(count, len(items)))]
    loads = [0] * len(parts)
    for item in sorted(items, key=lambda item: -costs[item]):
        index = min(range(len(parts)), key=lambda k: loads[k])
        parts[index].append(item)
        loads[index] += costs[item]
    return parts
