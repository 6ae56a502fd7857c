"""Log lines of the command line: the logger `fedcb2o` on standard error."""

import contextlib
import logging
import sys
from collections.abc import Iterator

_LOGGER = logging.getLogger("fedcb2o")
_PREFIXES = {logging.WARNING: "Note: ", logging.ERROR: "Error: ", logging.CRITICAL: "Error: "}


class _StderrHandler(logging.Handler):
    """A handler that prints to the current standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        prefix = _PREFIXES.get(record.levelno, "")
        print(f"{prefix}{self.format(record)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def stderr_logging() -> Iterator[None]:
    """Print log lines to standard error within this context.

    Yields:
        Nothing.
    """
    handler = _StderrHandler()
    level = _LOGGER.level
    _LOGGER.addHandler(handler)
    _LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        _LOGGER.removeHandler(handler)
        _LOGGER.setLevel(level)


def set_verbosity(*, verbose: bool = False, quiet: bool = False) -> None:
    """Choose the log lines that are printed.

    Args:
        verbose: Print all lines.
        quiet: Print errors only; wins over `verbose`.
    """
    if quiet:
        _LOGGER.setLevel(logging.ERROR)
    elif verbose:
        _LOGGER.setLevel(logging.DEBUG)


def is_quiet() -> bool:
    """Return True if only errors are printed."""
    return not _LOGGER.isEnabledFor(logging.INFO)


def is_verbose() -> bool:
    """Return True if all log lines are printed."""
    return _LOGGER.isEnabledFor(logging.DEBUG)
