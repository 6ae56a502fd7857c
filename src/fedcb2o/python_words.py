"""Errors in Python's words: `resume=True` where the command line has `--resume`.

>>> translate("seed 0 is there: --resume continues it, or choose another --out")
'seed 0 is there: resume=True continues it, or choose another `out`'
"""

import contextlib
import re
from collections.abc import Iterator
from contextvars import ContextVar

from fedcb2o.errors import FedCB2OError

_IS_COMMAND = ContextVar("is_command", default=False)
_TRANSLATIONS = (
    (r"--set (\w[\w.]*)=(\w+)", r"`\1` = \2"),
    (r"--(workers|jobs) (\d+)", r"\1=\2"),
    (r"--(resume|overwrite)\b", r"\1=True"),
    (r"--(out|workers|jobs|memory|blocks|cluster|seeds|track)\b", r"`\1`"),
    (r"--data-dir\b", "`data_dir`"),
)


def translate(text: str) -> str:
    """Return a message with arguments in place of options, except within commands."""
    parts = text.split("`")
    for i in range(0, len(parts), 2):  # the others are between backticks
        for pattern, words in _TRANSLATIONS:
            parts[i] = re.sub(pattern, words, parts[i])
    return "`".join(parts)


@contextlib.contextmanager
def python_words() -> Iterator[None]:
    """Translate the message of an error that leaves the block."""
    try:
        yield
    except FedCB2OError as error:
        if not _IS_COMMAND.get():
            error.args = (translate(str(error)), *error.args[1:])
        raise


@contextlib.contextmanager
def command_words() -> Iterator[None]:
    """Keep options of the command line in the errors of functions within the block."""
    token = _IS_COMMAND.set(True)
    try:
        yield
    finally:
        _IS_COMMAND.reset(token)
