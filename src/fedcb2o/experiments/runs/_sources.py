"""Digests of the source of users' functions, by which a resumed run notices a changed one.

The digest of a function covers its source without comments, and what it uses of the user's: other
functions, classes, and plain values among its globals and enclosed names.
"""

import ast
import functools
import hashlib
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from fedcb2o import plugins, records
from fedcb2o.errors import ConfigError
from fedcb2o.experiments.runs._kernel_config import ENVIRONMENT

_PLAIN = (bool, int, float, str, bytes, tuple, type(None))  # lists may change during a run


def source_digests(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the SHA-256 of the source of each user's function that settings name."""
    digests = {}
    for name in plugins.foreign_names_in(settings):
        # Paths have colons on some systems, too.
        if ":" not in name or set(name) & set("/\\~"):
            continue
        try:
            function = plugins.resolve("function", name, plugins)
        except ConfigError:  # a text that is no name of a function
            continue
        parts: dict[str, str] = {}
        _collect(name, function, parts)
        if parts:
            text = "\n".join(f"{key}\n{parts[key]}" for key in sorted(parts))
            digests[name] = hashlib.sha256(text.encode(errors="replace")).hexdigest()
    return digests


def changed_sources(folder: Path, settings: Mapping[str, Any]) -> str:
    """Return the users' functions whose source differs from that when a seed began; "" if none."""
    path = folder / ENVIRONMENT
    recorded = records.read_json(path).get("sources") if path.exists() else None
    if not recorded:
        return ""
    current = source_digests(settings)
    changed = [name for name in recorded if recorded[name] != current.get(name)]
    return ", ".join(f"`{name}`" for name in changed)


def _collect(name: str, value: Any, parts: dict[str, str]) -> None:
    """Add the sources of a value and of what it uses to `parts`, by qualified name."""
    # A decorator hides the function whose source counts.
    value = inspect.unwrap(value) if callable(value) else value
    if isinstance(value, functools.partial):
        _collect(name, value.func, parts)
    elif isinstance(value, staticmethod | classmethod | types.MethodType):
        _collect(name, value.__func__, parts)
    elif isinstance(value, property):
        _collect(name, value.fget, parts)
    elif isinstance(value, types.FunctionType):
        key = plugins.label(value)
        # A function may call itself, and libraries have versions in environment.json.
        if key not in parts and not plugins.is_of_library(value.__code__.co_filename):
            parts[key] = _source(value)
            for used, item in _used(value):
                _collect(f"{key}.{used}", item, parts)
    elif isinstance(value, type):
        key = plugins.label(value)
        file = getattr(sys.modules.get(value.__module__), "__file__", None)
        if key not in parts and value is not object and not plugins.is_of_library(file or ""):
            parts[key] = value.__name__
            for base in value.__bases__:
                _collect(key, base, parts)
            for attribute, item in vars(value).items():
                # Docstrings and annotations change no number; `__init__` does.
                if not attribute.startswith("__") or callable(item):
                    _collect(f"{key}.{attribute}", item, parts)
    elif isinstance(value, nn.Module):
        # Only the classes count: weights are initialised by the seed.
        for module in value.modules():
            _collect(name, type(module), parts)
    # An address differs between processes.
    elif isinstance(value, _PLAIN) and " at 0x" not in repr(value):
        parts[name] = repr(value)
    elif callable(value):
        _collect(name, type(value), parts)
        _collect(name, getattr(value, "network", None), parts)


def _source(function: types.FunctionType) -> str:
    """Return the source of a function without comments and layout, or its code without a file."""
    try:
        text = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return f"{function.__code__.co_code!r} {function.__code__.co_names}"
    try:
        return ast.unparse(ast.parse(text))
    except SyntaxError:  # a lambda in the middle of an expression
        return text


def _used(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the globals, enclosed values and attributes of users' modules that a function names."""
    names: list[str] = []
    codes = [function.__code__]
    for code in codes:
        # Inner functions and comprehensions have code objects of their own.
        names += code.co_names
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    found = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not yet bound
            continue
    for name, value in found.items():
        if isinstance(value, types.ModuleType):
            file = getattr(value, "__file__", None)
            if file and not plugins.is_of_library(file):
                for inner in names:
                    if inner in vars(value):
                        yield f"{name}.{inner}", vars(value)[inner]
        else:
            yield name, value
