"""Log lines of the command line: the logger `fedcb2o` on standard error."""

import contextlib
import json
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import StrEnum
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from fedcb2o.printable import PrintableFormatter, printable_record

_LOGGER = logging.getLogger("fedcb2o")
_PACKAGE_FOLDER = str(Path(__file__).parents[1])
_PREFIXES = {logging.WARNING: "Note: ", logging.ERROR: "Error: ", logging.CRITICAL: "Error: "}


_MAX_LOG_BYTES = 10 * 2**20
_OLD_LOG_FILES = 5


class LogFormat(StrEnum):
    """Format of log lines."""

    text = "text"
    json = "json"


class _JsonFormatter(logging.Formatter):
    """Formatter of one JSON object per log line."""

    def format(self, record: logging.LogRecord) -> str:
        record = printable_record(record)
        content = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "data", {}),
        }
        if record.exc_text:
            content["error"] = record.exc_text
        return json.dumps(content, default=str)


class _StderrHandler(logging.Handler):
    """A handler that prints to the current standard error."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(PrintableFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        is_json = isinstance(self.formatter, _JsonFormatter)
        prefix = "" if is_json else _PREFIXES.get(record.levelno, "")
        print(f"{prefix}{self.format(record)}", file=sys.stderr, flush=True)


class _PrivateFileHandler(RotatingFileHandler):
    """A handler that writes to a regular file that only its owner may read, and its old files."""

    def __init__(self, file: Path) -> None:
        # Others may be able to read old files of a former release.
        for number in range(1, _OLD_LOG_FILES + 1):
            if os.path.lexists(f"{file}.{number}"):
                os.close(_open_private(f"{file}.{number}"))
        super().__init__(file, maxBytes=_MAX_LOG_BYTES, backupCount=_OLD_LOG_FILES)

    def _open(self) -> TextIOWrapper:
        file = _open_private(self.baseFilename)
        return os.fdopen(file, "a", encoding="utf-8", errors="backslashreplace")


def _open_private(path: str) -> int:
    from fedcb2o.records import open_private  # slow to import

    try:
        return open_private(path)
    except OSError as error:  # that of a descriptor names no file
        raise OSError(error.errno, error.strerror, path) from error


@contextlib.contextmanager
def stderr_logging() -> Iterator[None]:
    """Print log lines, own warnings, and errors that end a thread to standard error."""
    level = _LOGGER.level
    handlers = list(_LOGGER.handlers)
    _LOGGER.addHandler(_StderrHandler())
    _LOGGER.setLevel(logging.INFO)
    thread_hook = threading.excepthook
    threading.excepthook = _log_thread_error
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _log_own_warnings(warnings.showwarning)
            yield
    finally:
        threading.excepthook = thread_hook
        for handler in set(_LOGGER.handlers) - set(handlers):
            _LOGGER.removeHandler(handler)
            handler.close()
        _LOGGER.setLevel(level)


def _log_thread_error(error: threading.ExceptHookArgs) -> None:
    """Log the error that ended a thread, which Python would print as it is."""
    if error.exc_type is not SystemExit and error.exc_value is not None:
        name = error.thread.name if error.thread else "a thread"
        _LOGGER.error("an error ended %s", name, exc_info=error.exc_value)


def _log_own_warnings(show_other: Any) -> Any:
    """Return a function for `warnings.showwarning` that logs the package's own warnings."""

    def show(
        message: Warning | str, category: type[Warning], filename: str, *arguments: Any
    ) -> None:
        if category is UserWarning and filename.startswith(_PACKAGE_FOLDER):
            _LOGGER.warning("%s.", message)
        else:
            show_other(message, category, filename, *arguments)

    return show


def configure_logs(log_format: LogFormat, file: Path | None) -> None:
    """Choose the format of log lines, and a file in place of standard error."""
    (handler,) = [one for one in _LOGGER.handlers if isinstance(one, _StderrHandler)]
    chosen: logging.Handler = handler
    if file is not None:
        chosen = _PrivateFileHandler(file)
        chosen.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(message)s"))
        _LOGGER.addHandler(chosen)
        _LOGGER.removeHandler(handler)
    if log_format is LogFormat.json:
        chosen.setFormatter(_JsonFormatter())


def log_end(message: str, level: int, error: BaseException | None = None) -> bool:
    """Log the end of a command where logs are JSON or a file; True if it was printed."""
    if not has_log_settings():
        return False
    _LOGGER.log(level, "%s", message, exc_info=error)
    return not has_log_file()


def has_log_file() -> bool:
    """Return True if log lines go to a file."""
    return any(isinstance(one, RotatingFileHandler) for one in _LOGGER.handlers)


def has_log_settings() -> bool:
    """Return True if log lines are JSON or go to a file."""
    is_json = any(isinstance(one.formatter, _JsonFormatter) for one in _LOGGER.handlers)
    return is_json or has_log_file()


def set_verbosity(*, verbose: bool = False, quiet: bool = False) -> None:
    """Choose the log lines that are printed; `quiet` (errors only) wins over `verbose`."""
    if quiet:
        _LOGGER.setLevel(logging.ERROR)
    elif verbose:
        _LOGGER.setLevel(logging.DEBUG)


def is_quiet() -> bool:
    """Return True if only errors are printed, and no progress."""
    return not _LOGGER.isEnabledFor(logging.INFO)


def is_verbose() -> bool:
    """Return True if all log lines are printed: `verbose` was set, and `quiet` was not."""
    return _LOGGER.isEnabledFor(logging.DEBUG)
