"""Standard output and error that no work depends on: what cannot be said is dropped.

A reader leaves (`| head -1`), a disk is full, a terminal is gone, a stream was closed from the start (`>&-`): the work
goes on, and whoever needs to know asks the stream whether something was lost.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast


class SafeStream:
    """A text stream whose writing never fails; `lost` is the first error that kept something from being said."""

    def __init__(self, stream: Any, lost: OSError | None = None) -> None:
        self.stream = stream
        self.error = lost

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Say it, or drop it."""
        self._try("write", text)
        return len(text)

    def flush(self) -> None:
        """Say now what waits to be said, or drop it."""
        self._try("flush")

    def _try(self, what: str, *arguments: str) -> None:
        try:
            getattr(self.stream, what)(*arguments)
        except (
            OSError,
            ValueError,
        ) as error:  # ValueError: it is closed, or its encoding lacks a character
            self.error = self.error or (
                error if isinstance(error, OSError) else OSError(str(error))
            )
            with contextlib.suppress(OSError, ValueError):
                self._discard_buffer()

    def _discard_buffer(self) -> None:
        """Empty the stream's buffer, with which every later flush would fail, that at the end of Python too."""
        descriptor = self.stream.fileno()
        kept = os.dup(descriptor)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, descriptor)
            self.stream.flush()
        finally:
            os.dup2(kept, descriptor)
            os.close(kept)
            os.close(nowhere)


def install_safe_streams() -> None:
    """From now on no writing to standard output and error fails."""
    _open_closed_descriptors()
    sys.stdout, sys.stderr = cast(Any, (_safe_stream(sys.stdout, 1), _safe_stream(sys.stderr, 2)))


@contextlib.contextmanager
def safe_streams() -> Iterator[None]:
    """In this block no writing to standard output and error fails; `@kept()` does the same for a function.

    Of blocks that overlap, one in another or in several threads, the first changes the streams and the last puts them
    back.
    """
    with _blocks.lock:
        if not _blocks.depth:
            _blocks.before = sys.stdout, sys.stderr
            install_safe_streams()
            _blocks.ours = sys.stdout, sys.stderr
        _blocks.depth += 1
    try:
        yield
    finally:
        _blocks.ours[0].flush()
        with _blocks.lock:
            _blocks.depth -= 1
            if not _blocks.depth:
                for name, before, ours in zip(
                    ("stdout", "stderr"), _blocks.before, _blocks.ours, strict=True
                ):
                    if (
                        getattr(sys, name) is ours
                    ):  # else somebody has put another one there, which is theirs
                        setattr(sys, name, before)


@dataclass
class _Blocks:
    """How many blocks of `kept` are under way, the streams from before the first of them, and theirs."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    depth: int = 0
    before: tuple[Any, Any] = (None, None)
    ours: tuple[Any, Any] = (None, None)


_blocks = _Blocks()


def write_error() -> OSError | None:
    """What kept something from being said on standard output, where it is kept; None where all was said."""
    sys.stdout.flush()
    return getattr(sys.stdout, "error", None)


def _safe_stream(stream: Any, descriptor: int) -> SafeStream:
    if stream is not None:
        return SafeStream(stream)
    nowhere = os.fdopen(descriptor, "w", closefd=False)  # it was closed when Python began
    return SafeStream(nowhere, OSError("it is closed"))


def _open_closed_descriptors() -> None:
    """Put what drops all in the place of closed standard descriptors: else files of a run would get their numbers, and
    with them what a library or another process prints."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(
                os.open(os.devnull, os.O_RDWR), True
            )  # the lowest number that is free: this one
