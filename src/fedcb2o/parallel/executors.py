"""Who does the work of a round: this process, or several that share the models.

Every computation has one intra-op thread, here as there, so that the number of workers changes no bit.
"""

import atexit
import contextlib
import faulthandler
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch

from fedcb2o import safe_stdio
from fedcb2o.parallel.process_pool import current_pool, serve_tasks
from fedcb2o.parallel.resources import retain_freed_memory
from fedcb2o.parallel.shared_memory import SharedTensors

Context = TypeVar("Context")
Result = TypeVar("Result")


@runtime_checkable
class Executor(Protocol):
    """Runs functions of a world; the order of the results is that of the tasks."""

    @property
    def count(self) -> int:
        """How many work at once."""
        ...

    def map(
        self, function: Callable[..., Result], tasks: Iterable[tuple[Any, ...]]
    ) -> list[Result]:
        """`function(world, *task)` for every task."""
        ...


@dataclass(frozen=True)
class SerialExecutor(Generic[Context]):
    """Work in this process."""

    context: Context
    count: int = 1

    def map(
        self, function: Callable[..., Result], tasks: Iterable[tuple[Any, ...]]
    ) -> list[Result]:
        """`function(world, *task)` for every task, one after the other."""
        with one_thread():
            return [function(self.context, *task) for task in tasks]


@dataclass(frozen=True)
class PoolExecutor(Generic[Context]):
    """Work in `count` processes; each makes the world once, from the tensors that all of them share."""

    count: int
    shared_tensors: SharedTensors
    make_context: Callable[[dict[str, torch.Tensor]], Context]

    def __post_init__(self) -> None:
        """What follows is done by the code that this process has now."""
        current_pool().reload_if_stale()

    def map(
        self, function: Callable[..., Result], tasks: Iterable[tuple[Any, ...]]
    ) -> list[Result]:
        """`function(world, *task)` for every task, as workers come free.

        Raises RunError where a worker cannot start or dies (often for want of memory).
        """
        work = [(self.shared_tensors, self.make_context, function, task) for task in tasks]
        found: dict[int, Result] = {}
        current_pool().map_unordered(self.count, _run_task, enumerate(work), found.__setitem__)
        return [found[k] for k in range(len(work))]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One intra-op thread in this process while it works, then as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def balance_load(
    agents: Sequence[int], costs: Sequence[int], count: int, speeds: Sequence[float] | None = None
) -> list[list[int]]:
    """Agents in `count` blocks that take about as long as each other, dearest first (longest processing time): that is
    their cost, by the speed of who works on them where `speeds` differ. None is empty but those of who is too slow."""
    shares: list[list[int]] = [[] for _ in range(min(count, len(agents)))]
    loads = [0] * len(shares)
    speeds = speeds or [1.0] * len(shares)
    for agent in sorted(agents, key=lambda a: -costs[a]):
        first = min(range(len(shares)), key=lambda b: (loads[b] + costs[agent]) / speeds[b])
        shares[first].append(agent)
        loads[first] += costs[agent]
    return shares


# What follows runs in a worker, which knows the world of one run at a time.

_contexts: dict[Path, Any] = {}


def _run_task(
    arena: SharedTensors,
    make: Callable[..., Any],
    function: Callable[..., Result],
    task: tuple[Any, ...],
) -> Result:
    world = _contexts.get(arena.path)
    if world is None:
        _drop_stale_contexts()
        world = _contexts[arena.path] = make(arena.tensors())
    return function(world, *task)


def _drop_stale_contexts() -> None:
    """Let go of the worlds whose arena is gone: a mapping keeps a file's memory after its name."""
    for path in list(_contexts):
        if not path.exists():
            _contexts.pop(path, None)
            gc.collect()


def work_for(parent: int, pipe: Connection) -> None:
    """What a worker does: watch whether the process that started it lives, and serve it."""
    safe_stdio.install_safe_streams()
    if sys.stderr is not None:
        faulthandler.enable()
    torch.set_num_threads(1)
    retain_freed_memory()
    over = threading.Event()
    watch = threading.Thread(target=_watch_parent, args=(parent, over), daemon=True)
    watch.start()
    atexit.register(_stop_watcher, watch, over)
    serve_tasks(pipe)


def _stop_watcher(watch: threading.Thread, over: threading.Event) -> None:
    """End the watch before Python ends: PyTorch lets go of the interpreter while it gives mapped memory back, and a
    thread that finds it gone then takes the whole process down."""
    over.set()
    watch.join()


def _watch_parent(parent: int, over: threading.Event) -> None:
    """Give the memory of a run back soon after it ended, and end this process soon after its parent did, leaving no
    arena behind."""
    while os.getppid() == parent:
        if over.wait(0.1):
            return
        _drop_stale_contexts()
    for path in list(_contexts):
        path.unlink(missing_ok=True)
    os._exit(1)
