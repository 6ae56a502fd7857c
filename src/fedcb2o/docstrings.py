"""Docstrings of built-in functions: entries that all functions of a kind share are written once.

>>> def squared(outputs, targets, *, scale=1.0):
...     '''Square the error.
...
...     Args:
...         scale: Factor of the error.
...     '''
>>> share_entries(squared, {"outputs": "Predictions.", "targets": "Numbers."}, "The square.")
>>> print(squared.__doc__)
Square the error.
<BLANKLINE>
Args:
    outputs: Predictions.
    targets: Numbers.
    scale: Factor of the error.
<BLANKLINE>
Returns:
    The square.
"""

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

SECTION = re.compile(r"^(Args|Attributes|Example|Raises|Returns|Yields):\n", re.MULTILINE)
ENTRY = re.compile(r"^    (\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)

_OUT_OF_RANGE = "    ConfigError: A parameter is out of range."


def share_entries(
    function: Callable[..., Any], arguments: Mapping[str, str], returns: str = ""
) -> None:
    """Add the entries of arguments, and the texts of Returns and Raises, that a docstring lacks.

    A function that calls `errors.require`, or raises ConfigError, checks the range of a parameter.
    """
    text, *parts = SECTION.split(inspect.getdoc(function) or "")
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    entries = {match[1]: match[0] for match in ENTRY.finditer(sections.pop("Args", ""))}
    for name in arguments:
        entries.setdefault(name, docstring_entry(name, arguments[name]))
    names = [name for name in inspect.signature(function).parameters if name in entries]
    inner: Any = inspect.unwrap(function)
    code = getattr(inner, "func", inner).__code__
    checks_range = {"require", "ConfigError"} & set(code.co_names)
    first = {
        "Args": "\n".join(entries[name] for name in names),
        "Returns": sections.pop("Returns", f"    {returns}"),
        "Raises": sections.pop("Raises", _OUT_OF_RANGE if checks_range else ""),
    }
    blocks = [f"{name}:\n{body.rstrip()}" for name, body in {**first, **sections}.items() if body]
    # The documentation reads the function inside a decorated one.
    whole = "\n\n".join([text.strip(), *blocks])
    function.__doc__ = whole
    inner.__doc__ = whole


def docstring_entry(name: str, text: str) -> str:
    """Return an entry of Args, in lines as wide as those of a docstring."""
    return textwrap.fill(f"    {name}: {text}", 96, subsequent_indent=" " * 8)
