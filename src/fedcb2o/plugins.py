"""A name -> the function it means: one of a room's `__all__`, or a user's "package.module:function".

A function's keyword-only arguments are its parameters; they are checked against its signature before a run starts.
"""

import contextlib
import difflib
import functools
import importlib
import inspect
import json
import re
import sys
import traceback
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from fedcb2o.errors import ConfigError, FedCB2OError

PluginFunction = Callable[..., Any]
PluginChoice = str | PluginFunction | Mapping[str, Any]
"""A function's name, a function, or a table {name = ..., parameter = ...}."""

PYTORCH_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
)
"""The settings by which PyTorch computes in this process, each with what sets it."""

_TYPO_CUTOFF = (
    0.81  # how like words are (difflib) that differ by a slip: "median" and "mean" are 0.8
)

F = TypeVar("F", bound=PluginFunction)
T = TypeVar("T")


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """' Did you mean `x`?' for the word most like `word`, or nothing where none is like it.

    Most like are those with a slip of a letter, then those that have it in them or for one of their parts, or that it
    abbreviates ("median", "geomed": `geometric_median`), of which up to three are named. Of dotted words the last part
    counts; where several have the same, the last of them is named.
    """
    last = {each.rpartition(".")[2]: each for each in words}
    close = (
        difflib.get_close_matches(str(word), last, n=1, cutoff=_TYPO_CUTOFF)
        or _match_parts(str(word), last)
        or difflib.get_close_matches(str(word), last, n=1, cutoff=0.5)
    )
    return f" Did you mean {' or '.join(f'`{last[each]}`' for each in close)}?" if close else ""


def _match_parts(word: str, names: Iterable[str]) -> list[str]:
    """Up to three names that a word is in, else that have a part like it, else whose parts it abbreviates."""
    bare = "".join(_name_parts(word))
    parts = {name: _name_parts(name) for name in names}
    if not 3 <= len(bare) <= 60:
        return []
    found = [name for name in parts if bare in "".join(parts[name])]
    found = found or [
        name for name in parts if difflib.get_close_matches(bare, parts[name], cutoff=_TYPO_CUTOFF)
    ]
    found = found or [name for name in parts if _abbreviates(bare, parts[name])]
    return sorted(found, key=len)[:3]


def _name_parts(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


def _abbreviates(word: str, parts: Sequence[str]) -> bool:
    """Whether a word is made of the beginnings of all parts of a name."""
    if not parts:
        return not word
    first, *rest = parts
    lengths = range(1, min(len(first), len(word)) + 1)
    return any(word[:n] == first[:n] and _abbreviates(word[n:], rest) for n in lengths)


def label(function: str | PluginFunction) -> str:
    """How a configuration names a function: its built-in name or its import path."""
    if isinstance(function, str):
        return function
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}"


def resolve(kind: str, name: str | PluginFunction, namespace: types.ModuleType) -> PluginFunction:
    """The function that a configuration names: public in `room`, "package.module:function", or itself one already.

    `kind` is the word for it in messages. Raises ConfigError if there is no such function, or it cannot be imported.
    """
    if not (isinstance(name, str) or callable(name)):
        raise ConfigError(f"the {kind} must be a name or a function, got a {type(name).__name__}")
    if not isinstance(name, str):
        return wrap_user_function(kind, label(name), name)
    if ":" not in name:
        if name in namespace.__all__ and callable(getattr(namespace, name)):
            return getattr(namespace, name)  # type: ignore[no-any-return]
        names = sorted(n for n in namespace.__all__ if callable(getattr(namespace, n)))
        like = (
            " To have none, leave it out." if name.lower() == "none" else did_you_mean(name, names)
        )
        raise ConfigError(
            f"there is no {kind} `{name}`.{like} Built in: {', '.join(names)};"
            ' or name your own as "package.module:function"'
        )
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # a user's module usually lies beside the configuration
        sys.path.insert(0, here)
    try:
        function = functools.reduce(
            getattr, attribute.split("."), importlib.import_module(module_name)
        )
    except (Exception, SystemExit) as error:  # a user's module may fail in any way at import
        raise ConfigError(
            f"the {kind} `{name}` cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not callable(function):
        raise ConfigError(
            f"the {kind} `{name}` is of type {type(function).__name__}, not a function"
        )
    return wrap_user_function(kind, name, function)


def reexport(*namespaces: types.ModuleType) -> PluginFunction:
    """A module's `__getattr__`: what is public in other rooms is found in it too."""

    def find(name: str) -> Any:
        for room in namespaces:
            if name in room.__all__:
                return getattr(room, name)
        raise AttributeError(f"there is no {name!r} here")

    return find


def wrap_user_function(kind: str, name: str, function: PluginFunction) -> PluginFunction:
    """A user's function, its keywords bound or not, whose own failures are ConfigErrors that name it and its line."""
    if isinstance(function, functools.partial):
        return functools.partial(
            wrap_user_function(kind, name, function.func), *function.args, **function.keywords
        )

    @functools.wraps(function)
    def guarded(*arguments: Any, **keywords: Any) -> Any:
        with attribute_errors(
            kind, name, getattr(getattr(function, "__code__", None), "co_filename", None)
        ):
            return function(*arguments, **keywords)

    return USER_FUNCTION(name)(guarded)


def display_name(kind: str, function: PluginFunction) -> str:
    """How messages call a function, its keywords bound or not: by its `kind` and, where it is a user's, its name."""
    name = USER_FUNCTION.get(function)
    return kind if name is None else f"{kind} `{name}`"


@contextlib.contextmanager
def attribute_errors(kind: str, name: str, file: str | None = None) -> Iterator[None]:
    """Whatever fails inside is a ConfigError that names the plug-in and, where it lies in `file`, the line.

    So is what would end the process without a word, such as SystemExit; Ctrl-C is the user's. What it changes of the
    settings by which PyTorch computes is put back after it: others' bits depend on them.
    """
    before = [get() for get, _ in PYTORCH_SETTINGS]
    try:
        yield
    except (FedCB2OError, KeyboardInterrupt):
        raise
    except BaseException as error:
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == file
        ]
        where = f" at line {lines[-1]} of {file}" if lines else ""
        raise ConfigError(
            f"the {kind} `{name}` failed{where}: {type(error).__name__}: {error}"
        ) from error
    finally:
        for (get, put), was in zip(PYTORCH_SETTINGS, before, strict=True):
            if get() != was:
                put(was)


@dataclass(frozen=True)
class Declaration(Generic[T]):
    """Something that a function says of itself, such as whose models an attack knows: it decorates the function, and
    tells what was said."""

    name: str

    def __call__(self, value: T) -> Callable[[F], F]:
        """A decorator: the function says this."""

        def decorate(function: F) -> F:
            setattr(function, self.name, value)
            return function

        return decorate

    def get(self, function: PluginFunction) -> T | None:
        """What a function, its keywords bound or not, says; None if it does not."""
        return getattr(getattr(function, "func", function), self.name, None)


USER_FUNCTION = Declaration[str]("own_name")
"""What `resolve` says of a user's function: how the configuration names it."""


def _cached(find: Callable[[PluginFunction], T]) -> Callable[[PluginFunction], T]:
    """The same, which remembers what it found: a signature takes longer to read than many a rule to run."""
    known = functools.cache(find)

    @functools.wraps(find)
    def found(function: PluginFunction) -> T:
        return known(function) if isinstance(function, Hashable) else find(function)

    return found


@_cached
def parameters(function: PluginFunction) -> Mapping[str, inspect.Parameter]:
    """The parameters of a plug-in: its keyword-only arguments."""
    try:
        signature = inspect.signature(
            function, eval_str=True
        )  # as under `from __future__ import annotations`
    except Exception:  # an annotation may name what is not there when the program runs
        signature = inspect.signature(function)
    return {
        name: p
        for name, p in signature.parameters.items()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    }


@_cached
def positional_inputs(function: PluginFunction) -> tuple[str, ...]:
    """The names of a plug-in's arguments that are neither parameters nor have a default: what it looks at."""
    found = inspect.signature(function).parameters.items()
    ours = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(n for n, p in found if p.kind in ours and p.default is inspect.Parameter.empty)


def bind(
    kind: str, function: PluginFunction, values: Mapping[str, Any], *, deferred: Iterable[str] = ()
) -> dict[str, Any]:
    """The checked parameters for `function`, read from a configuration; those named in `later` may be missing.

    Raises ConfigError that names an unknown parameter (and the nearest right one), one of a wrong type, or one missing.
    """
    name = getattr(function, "__name__", None) or getattr(
        getattr(function, "func", None), "__name__", kind
    )
    known = parameters(function)
    for key in values:
        if key not in known:
            has = (
                f" It has: {', '.join(known)}"
                if known
                else " It has none (parameters are keyword-only arguments)"
            )
            raise ConfigError(
                f"{kind} `{name}` has no parameter `{key}`.{did_you_mean(key, known) or has}"
            )
    checked = {}
    for key, parameter in known.items():
        if key not in values:
            if parameter.default is inspect.Parameter.empty and key not in deferred:
                raise ConfigError(f"{kind} `{name}` needs the parameter `{key}`")
            continue
        annotation = parameter.annotation
        if annotation is inspect.Parameter.empty or isinstance(annotation, str):
            checked[key] = values[key]
            continue
        try:
            checked[key] = _validate(annotation, values[key])
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise ConfigError(f"{kind} `{name}`: `{key}` = {values[key]!r}: {reason}") from error
    return checked


def resolve_and_bind(
    kind: str, choice: PluginChoice, namespace: types.ModuleType, *, deferred: Iterable[str] = ()
) -> functools.partial[Any]:
    """The function that a choice means, with its checked parameters; raises ConfigError."""
    table = dict(choice) if isinstance(choice, Mapping) else {"name": choice}
    if "name" not in table:
        raise ConfigError(f"the {kind} has no `name`: {table}")
    function = resolve(kind, table.pop("name"), namespace)
    return functools.partial(function, **bind(kind, function, table, deferred=deferred))


def _validate(annotation: Any, value: Any) -> Any:
    """The value as its annotation has it, read as JSON: a list may be a tuple and 5 be 5.0, but "5" and true are no
    numbers. What JSON cannot write (a function, an array: from Python) is taken as it is or fails."""
    adapter = TypeAdapter(
        annotation, config=ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
    )
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        return adapter.validate_python(value)
    return adapter.validate_json(text, strict=True)
