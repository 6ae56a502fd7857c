r"""Text of others for terminals and logs.

Names, errors and titles may come from other organisations or from anybody's files. A terminal acts
on some of their characters. A line break begins a line that the program seems to have written.
"""

import copy
import logging
import re
import textwrap
import traceback
import unicodedata

# Unicode's categories of control characters, of formats such as the direction of letters, and of
# halves of characters.
_NOT_SHOWN = ("Cc", "Cf", "Cs")
_JOINERS = "\u200c\u200d"  # formats that scripts and emoji need; they act on their neighbours only
_MAX_LINE = 5000  # characters of a log line


def printable(text: str) -> str:
    """Return a text as one line without characters that control a terminal."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        letter
        for letter in re.sub(r"\s", " ", text)
        if letter in _JOINERS or unicodedata.category(letter) not in _NOT_SHOWN
    )


def one_line(text: str) -> str:
    """Return a text as one line, with single spaces and without control characters."""
    return printable(" ".join(text.split()))


def format_traceback(error: BaseException) -> str:
    """Format an exception with its traceback, whose messages control no terminal."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return "\n".join(_shorten(printable(line)) for line in lines)


def printable_record(record: logging.LogRecord) -> logging.LogRecord:
    """Return a copy of a log record: a bounded line, and `exc_text` by `format_traceback`."""
    plain = copy.copy(record)
    plain.msg, plain.args = _shorten(one_line(record.getMessage())), ()
    error = record.exc_info[1] if record.exc_info else None
    plain.exc_text = None if error is None else format_traceback(error)
    return plain


def _shorten(line: str) -> str:
    more = len(line) - _MAX_LINE
    return line if more <= 0 else f"{line[:_MAX_LINE]} ... ({more} more characters)"


class PrintableFormatter(logging.Formatter):
    """Formatter of `printable_record`, whose indented traceback looks like no log line."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        plain = printable_record(record)
        if plain.exc_text:
            plain.exc_text = textwrap.indent(plain.exc_text, "  ")
        return super().format(plain)
