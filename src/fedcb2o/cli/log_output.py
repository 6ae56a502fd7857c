"""Log lines of the command line: the logger `fedcb2o` on standard error."""

import contextlib
import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import StrEnum
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

_LOGGER = logging.getLogger("fedcb2o")
_RENAMED_PATTERN = ".* minor version$"  # end of every warning about a former name
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
        content = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "data", {}),
        }
        if record.exc_info:
            content["error"] = self.formatException(record.exc_info)
        return json.dumps(content, default=str)


class _StderrHandler(logging.Handler):
    """A handler that prints to the current standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        is_json = isinstance(self.formatter, _JsonFormatter)
        prefix = "" if is_json else _PREFIXES.get(record.levelno, "")
        print(f"{prefix}{self.format(record)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def stderr_logging() -> Iterator[None]:
    """Print log lines to standard error within this context.

    The package's own warnings are log lines too. A warning about a former name is one, once for
    each name. Python itself would hide it. The option `-W` of Python and PYTHONWARNINGS keep their
    effect.

    Yields:
        Nothing.
    """
    level = _LOGGER.level
    handlers = list(_LOGGER.handlers)
    _LOGGER.addHandler(_StderrHandler())
    _LOGGER.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings():
            if not sys.warnoptions:
                for category in (DeprecationWarning, FutureWarning):
                    warnings.filterwarnings("once", _RENAMED_PATTERN, category)
            warnings.showwarning = _log_deprecation(warnings.showwarning)
            yield
    finally:
        for handler in set(_LOGGER.handlers) - set(handlers):
            _LOGGER.removeHandler(handler)
            handler.close()
        _LOGGER.setLevel(level)


def _log_deprecation(show_other: Any) -> Any:
    """Return a function for `warnings.showwarning` that logs the package's own warnings."""

    def show(
        message: Warning | str, category: type[Warning], filename: str, *arguments: Any
    ) -> None:
        is_deprecation = issubclass(category, DeprecationWarning | FutureWarning)
        is_renamed = is_deprecation and re.match(_RENAMED_PATTERN, str(message))
        is_own = category is UserWarning and filename.startswith(_PACKAGE_FOLDER)
        if is_renamed or is_own:
            _LOGGER.warning("%s.", message)
        else:
            show_other(message, category, filename, *arguments)

    return show


def configure_logs(log_format: LogFormat, file: Path | None) -> None:
    """Choose the format of log lines and a file for them.

    Args:
        log_format: The format.
        file: File in place of standard error; a file of 10 MiB is renamed, and five are kept.

    Raises:
        OSError: The file cannot be written.
    """
    (handler,) = [one for one in _LOGGER.handlers if isinstance(one, _StderrHandler)]
    chosen: logging.Handler = handler
    if file is not None:
        chosen = RotatingFileHandler(file, maxBytes=_MAX_LOG_BYTES, backupCount=_OLD_LOG_FILES)
        chosen.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        _LOGGER.addHandler(chosen)
        _LOGGER.removeHandler(handler)
    if log_format is LogFormat.json:
        chosen.setFormatter(_JsonFormatter())


def log_end(message: str, level: int, error: BaseException | None = None) -> bool:
    """Log the end of a command, if log lines are JSON or go to a file.

    Args:
        message: The message.
        level: Level of the line.
        error: Exception whose traceback the line has.

    Returns:
        True if the line went to standard error.
    """
    if not has_log_settings():
        return False
    _LOGGER.log(level, "%s", message, exc_info=error)
    return not has_log_file()


def has_log_file() -> bool:
    """Return True if log lines go to a file.

    Returns:
        True after `configure_logs` with a file.
    """
    return any(isinstance(one, RotatingFileHandler) for one in _LOGGER.handlers)


def has_log_settings() -> bool:
    """Return True if log lines are JSON or go to a file.

    Returns:
        True after `configure_logs` with either.
    """
    is_json = any(isinstance(one.formatter, _JsonFormatter) for one in _LOGGER.handlers)
    return is_json or has_log_file()


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
    """Return True if only errors are printed.

    Returns:
        True after `set_verbosity(quiet=True)`, when progress lines are dropped.
    """
    return not _LOGGER.isEnabledFor(logging.INFO)


def is_verbose() -> bool:
    """Return True if all log lines are printed.

    Returns:
        True after `set_verbosity(verbose=True)`, unless `quiet` was set too.
    """
    return _LOGGER.isEnabledFor(logging.DEBUG)
