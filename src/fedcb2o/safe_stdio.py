"""Standard output and error that never fail: text that cannot be written is dropped.

A reader leaves (`| head -1`), a disk is full, a terminal is gone, a stream was closed from the
start (`>&-`). The work continues, and the stream remembers the first error.
"""

import codecs
import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

_ERROR_HANDLER = "fedcb2o_escape"


def encodable(text: str, encoding: str | None) -> str:
    r"""Return a text in which characters that an encoding lacks are escaped as in Python."""
    return text if encoding is None else text.encode(encoding, _ERROR_HANDLER).decode(encoding)


def _escape_characters(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    codes = [ord(character) for character in error.object[error.start : error.end]]
    escapes = [f"\\u{code:04x}" if code < 2**16 else f"\\U{code:08x}" for code in codes]
    return "".join(escapes), error.end


codecs.register_error(_ERROR_HANDLER, _escape_characters)


class SafeStream:
    """A text stream that never fails to write; `error` is the first that dropped text."""

    def __init__(self, stream: Any, error: OSError | None = None) -> None:
        self.stream = stream
        self.error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write text, escaped where the encoding lacks a character, or drop it."""
        self._try("write", text)
        return len(text)

    def flush(self) -> None:
        """Write the buffered text, or drop it."""
        self._try("flush")

    def _try(self, method: str, *arguments: str) -> None:
        function = getattr(self.stream, method)
        try:
            try:
                function(*arguments)
            except UnicodeEncodeError:
                function(
                    *(encodable(text, getattr(self.stream, "encoding", None)) for text in arguments)
                )
        except (OSError, ValueError) as error:
            # ValueError: the stream is closed.
            if self.error is None:
                self.error = error if isinstance(error, OSError) else OSError(str(error))
            with contextlib.suppress(OSError, ValueError):
                self._discard_buffer()

    def _discard_buffer(self) -> None:
        """Empty the stream's buffer, with which every later flush would fail."""
        descriptor = self.stream.fileno()
        original = os.dup(descriptor)
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, descriptor)
            self.stream.flush()
        finally:
            os.dup2(original, descriptor)
            os.close(original)
            os.close(null)


def install_safe_streams() -> None:
    """Replace standard output and error by streams that never fail to write."""
    _open_closed_descriptors()
    sys.stdout = cast(Any, _safe_stream(sys.stdout, 1))
    sys.stderr = cast(Any, _safe_stream(sys.stderr, 2))


@contextlib.contextmanager
def safe_streams() -> Iterator[None]:
    """Use safe streams in a `with` block, or in a function by `@safe_streams()`.

    Of blocks that overlap, in several threads too, the first one replaces the streams and the last
    one restores them.
    """
    with _blocks.lock:
        if not _blocks.depth:
            _blocks.original = (sys.stdout, sys.stderr)
            install_safe_streams()
            _blocks.safe = (sys.stdout, sys.stderr)
        _blocks.depth += 1
    try:
        yield
    finally:
        _blocks.safe[0].flush()
        with _blocks.lock:
            _blocks.depth -= 1
            if not _blocks.depth:
                _restore()


@dataclass
class _Blocks:
    """Number of active `safe_streams` blocks, the original streams and the safe ones."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    depth: int = 0
    original: tuple[Any, Any] = (None, None)
    safe: tuple[Any, Any] = (None, None)


_blocks = _Blocks()


def _restore() -> None:
    """Restore the original streams, except where other code has replaced the safe ones."""
    pairs = zip(("stdout", "stderr"), _blocks.original, _blocks.safe, strict=True)
    for name, original, safe in pairs:
        if getattr(sys, name) is safe:
            setattr(sys, name, original)


def write_error() -> OSError | None:
    """Return the error that caused standard output to drop text, if any."""
    sys.stdout.flush()
    return getattr(sys.stdout, "error", None)


def _safe_stream(stream: Any, descriptor: int) -> SafeStream:
    if stream is not None:
        return SafeStream(stream)

    # The descriptor was closed when Python started.
    null = os.fdopen(descriptor, "w", closefd=False)
    return SafeStream(null, OSError("it is closed"))


def _open_closed_descriptors() -> None:
    """Open the null device for closed descriptors, whose numbers files would get."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
