"""Main program of a worker process: serve tasks, and end soon after the parent process ends.

A worker holds the context of one run at a time, which it builds from the run's shared tensors.
"""

import atexit
import contextlib
import faulthandler
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from fedcb2o import safe_stdio
from fedcb2o.parallel._resources import retain_freed_memory
from fedcb2o.parallel._serialization import execute
from fedcb2o.parallel._shared_memory import SharedTensors

Result = TypeVar("Result")

IDLE_SECONDS = 600.0  # without a task, after which a worker exits
SIGNALS = {signal.SIGINT, signal.SIGTERM}  # sent to a whole process group; its leader answers them
WATCH_SECONDS = 0.1  # between looks at the parent process

_contexts: dict[Path, Any] = {}  # by the file of the shared tensors


def run_worker(parent: int, pipe: Connection) -> None:
    """Serve the tasks of a pipe while the parent process lives.

    `parent` is its process id.
    """
    gc.freeze()  # the imported modules stay, so that no collection examines them
    gc.enable()
    safe_stdio.install_safe_streams()
    if sys.stderr is not None:
        faulthandler.enable()
    torch.set_num_threads(1)
    retain_freed_memory()

    is_done = threading.Event()
    watcher = threading.Thread(target=_watch_parent, args=(parent, is_done), daemon=True)
    watcher.start()
    atexit.register(_stop_watcher, watcher, is_done)
    _serve_tasks(pipe)


def run_tasks(
    shared_tensors: SharedTensors,
    make_context: Callable[..., Any],
    settings: Callable[[], contextlib.AbstractContextManager[Any]],
    function: Callable[..., Result],
    tasks: Sequence[tuple[Any, ...]],
) -> list[Result]:
    """Compute `function(context, *task)` for each task, in a worker.

    `make_context` builds the context from the run's shared tensors, once per run. `settings`
    returns the context manager in which the tasks are computed.
    """
    context = _contexts.get(shared_tensors.path)
    if context is None:
        _drop_stale_contexts()
        context = make_context(shared_tensors.tensors())
        _contexts[shared_tensors.path] = context
    with settings():
        return [function(context, *task) for task in tasks]


def _serve_tasks(pipe: Connection) -> None:
    """Execute tasks until the pipe is closed or `IDLE_SECONDS` pass without one."""
    for number in SIGNALS:
        # A handler, because a process that a task starts would inherit an ignored signal.
        signal.signal(number, lambda *_: None)
    # A worker is outside the terminal's foreground group. Under `stty tostop` its output would stop
    # it, even with a handler. Processes that a task starts inherit this.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    with contextlib.suppress(EOFError, OSError):
        while pipe.poll(IDLE_SECONDS):
            pipe.send_bytes(execute(pipe.recv_bytes()))


def _drop_stale_contexts() -> None:
    """Drop the contexts whose shared file is removed."""
    # A mapping would keep the memory of a removed file.
    for path in list(_contexts):
        if not path.exists():
            _contexts.pop(path, None)
            gc.collect()


def _watch_parent(parent: int, is_done: threading.Event) -> None:
    """Drop stale contexts; exit and remove the shared files soon after the parent's death."""
    while os.getppid() == parent:
        if is_done.wait(WATCH_SECONDS):
            return
        _drop_stale_contexts()
    for path in list(_contexts):
        path.unlink(missing_ok=True)
    os._exit(1)


def _stop_watcher(watcher: threading.Thread, is_done: threading.Event) -> None:
    """Stop the watcher before Python ends."""
    # PyTorch releases the interpreter while it unmaps memory. A thread that finds the interpreter
    # gone would abort the whole process.
    is_done.set()
    watcher.join()
