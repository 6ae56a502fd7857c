"""Plug-ins: functions that a configuration names.

A name is a function of a namespace's `__all__`, or a user's "package.module:function".

The keyword-only arguments of a function are its parameters. They are checked against its signature
before a run starts.

Example:
    >>> def rule(models, *, trim: int = 1): ...
    >>> bind("rule", rule, {"trim": 2})
    {'trim': 2}
"""

import contextlib
import difflib
import functools
import importlib
import importlib.machinery
import inspect
import json
import os
import re
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from fedcb2o import docstrings
from fedcb2o.errors import ConfigError, FedCB2OError

PluginFunction = Callable[..., Any]
PluginChoice = str | PluginFunction | Mapping[str, Any]
"""A function's name, a function, or a table {name = ..., parameter = ...}."""

# Similarity (difflib) of words that differ by a typing error; "median" and "mean" have 0.8.
_TYPO_CUTOFF = 0.81

# Beginnings of the names of files that are not users'.
_LIBRARIES = (
    "<",
    str(Path(__file__).parent),
    *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
)

# Bases of language models that are in fedcb2o or in an installed package.
_BUILT_IN_BASES = ("tiny", "smollm2")

_configuration_folder: list[Path] = []  # that of the last file that was read, if any

F = TypeVar("F", bound=PluginFunction)
T = TypeVar("T")


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return ' Did you mean `x`?' for the words most similar to `word`; empty without any.

    The search tries, in this order: words with a typing error; up to three words that contain
    `word`, have a part like it, or are abbreviated by it ("geomed": `geometric_median`); words that
    are only roughly similar. Only the last part of a dotted word counts, and of equal ones the last
    word.
    """
    by_last_part = {name.rpartition(".")[2]: name for name in words}
    matches = (
        difflib.get_close_matches(str(word), by_last_part, n=1, cutoff=_TYPO_CUTOFF)
        or _match_parts(str(word), by_last_part)
        or difflib.get_close_matches(str(word), by_last_part, n=1, cutoff=0.5)
    )
    if not matches:
        return ""
    return f" Did you mean {' or '.join(f'`{by_last_part[match]}`' for match in matches)}?"


def _match_parts(word: str, names: Iterable[str]) -> list[str]:
    """Return up to three names that contain, resemble in one part, or expand `word`."""
    letters = "".join(_name_parts(word))
    parts = {name: _name_parts(name) for name in names}
    if not 3 <= len(letters) <= 60:
        return []

    matches = [name for name in parts if letters in "".join(parts[name])]
    if not matches:
        matches = [
            name
            for name in parts
            if difflib.get_close_matches(letters, parts[name], cutoff=_TYPO_CUTOFF)
        ]
    if not matches:
        matches = [name for name in parts if _abbreviates(letters, parts[name])]
    return sorted(matches, key=len)[:3]


def _name_parts(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


def _abbreviates(word: str, parts: Sequence[str]) -> bool:
    """Return whether `word` consists of the beginnings of all parts of a name."""
    if not parts:
        return not word

    first, *rest = parts
    lengths = range(1, min(len(first), len(word)) + 1)
    return any(word[:n] == first[:n] and _abbreviates(word[n:], rest) for n in lengths)


def label(function: str | PluginFunction) -> str:
    """Return a function's name in a configuration: built-in name or "package.module:function"."""
    if isinstance(function, str):
        return function
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}"


def resolve(kind: str, name: str | PluginFunction, namespace: types.ModuleType) -> PluginFunction:
    """Return the function that a name in `namespace.__all__`, an import path, or a function names.

    `kind` is a word for messages, such as "attack".
    """
    if not isinstance(name, str):
        if not callable(name):
            got = type(name).__name__
            raise ConfigError(f"the {kind} must be a name or a function, got a {got}")
        return wrap_user_function(kind, label(name), name)
    if ":" in name:
        return wrap_user_function(kind, name, _import_function(kind, name))
    if name in namespace.__all__ and callable(getattr(namespace, name)):
        return getattr(namespace, name)  # type: ignore[no-any-return]

    names = sorted(key for key in namespace.__all__ if callable(getattr(namespace, key)))
    hint = did_you_mean(name, names)
    if name.lower() == "none":
        hint = " To have none, leave it out."
    raise ConfigError(
        f"there is no {kind} `{name}`.{hint} Built in: {', '.join(names)};"
        ' or name your own as "package.module:function"'
    )


def _import_function(kind: str, name: str) -> PluginFunction:
    module_name, _, attribute = name.partition(":")

    _search_first(Path.cwd(), again=False)
    if _configuration_folder:
        _search_first(_configuration_folder[0], again=True)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may fail in any way at import
        hint = ""
        if isinstance(error, ModuleNotFoundError):
            hint = (
                ". Modules are looked for beside the configuration's file, in the current folder, "
                f"{Path.cwd()}, and on Python's path"
            )
        raise ConfigError(
            f"the {kind} `{name}` cannot be imported: {type(error).__name__}: {error}{hint}"
        ) from error
    _check_origin(f"the {kind} `{name}`", module_name.partition(".")[0])
    try:
        function = functools.reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        names = [key for key in dir(module) if not key.startswith("_")]
        raise ConfigError(
            f"the {kind} `{name}` cannot be imported: {error}.{did_you_mean(attribute, names)}"
        ) from error
    if not callable(function):
        raise ConfigError(
            f"the {kind} `{name}` is of type {type(function).__name__}, not a function"
        )
    return function


def find_modules_beside(configuration: Path) -> None:
    """Look for modules in the folder of a configuration first, then in the current one.

    Python's path changes when a configuration names a function of a user, and not before: files
    in the folder could replace modules of libraries.
    """
    _configuration_folder[:] = [configuration.parent.resolve()]


def _search_first(folder: Path, *, again: bool) -> None:
    """Put a folder at the start of Python's path; with `again` also if it is on it already.

    The command `fedcb2o` starts with the folder of its script on the path, and not the current one.
    """
    entry = str(folder)
    if entry in sys.path:
        if not again:
            return
        sys.path.remove(entry)
    sys.path.insert(0, entry)


def _check_origin(where: str, module: str) -> None:
    """Refuse a module of the same name as the one that Python's path leads to now.

    Python imports a name once in a process, so that configurations of two folders, each with its
    own `mine.py`, would silently share the first one.
    """
    imported = getattr(sys.modules.get(module), "__file__", None)
    found = importlib.machinery.PathFinder.find_spec(module)
    if imported is None or found is None or found.origin is None:
        return
    if Path(imported).resolve() != Path(found.origin).resolve():
        raise ConfigError(
            f"{where} is in {found.origin}, but this process has imported {imported} under the "
            "same name: rename one of them, or use another process"
        )


def wrap_user_function(kind: str, name: str, function: PluginFunction) -> PluginFunction:
    """Return a user's function or partial whose failures are ConfigErrors with its line."""
    # The function inside is wrapped, so that the result is a partial with the same keywords.
    if isinstance(function, functools.partial):
        wrapped = wrap_user_function(kind, name, function.func)
        return functools.partial(wrapped, *function.args, **function.keywords)

    @functools.wraps(function)
    def guarded(*arguments: Any, **keywords: Any) -> Any:
        file = getattr(getattr(function, "__code__", None), "co_filename", None)
        with attribute_errors(kind, name, file):
            return function(*arguments, **keywords)

    return USER_FUNCTION(name)(guarded)


def display_name(kind: str, function: PluginFunction) -> str:
    """Return `kind` for messages, followed by the name if the function is a user's."""
    name = USER_FUNCTION.get(function)
    return kind if name is None else f"{kind} `{name}`"


def function_name(function: PluginFunction) -> str:
    """Return the name of a plug-in in a configuration; that of its class without a name."""
    whole = getattr(function, "func", function)
    return USER_FUNCTION.get(function) or str(getattr(whole, "__name__", type(whole).__name__))


@contextlib.contextmanager
def attribute_errors(kind: str, name: str, file: str | None = None) -> Iterator[None]:
    """Turn failures inside a `with` block into ConfigErrors that name the plug-in.

    SystemExit and other silent exits count as failures; Ctrl-C does not. PyTorch settings that the
    block changes are restored, because the bits of other results depend on them. The message names
    the failing line, in `file` where there is one.
    """
    import torch  # slow to import

    settings: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
        (torch.get_num_threads, torch.set_num_threads),
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.is_grad_enabled, torch.set_grad_enabled),
    )
    original = [getter() for getter, _ in settings]
    try:
        yield
    except (FedCB2OError, KeyboardInterrupt):
        raise
    except BaseException as error:
        place = failing_line(error, file)
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        raise ConfigError(
            f"the {kind} `{name}` failed{place}: {type(error).__name__}: {error}{notes}"
        ) from error
    finally:
        for (getter, setter), value in zip(settings, original, strict=True):
            if getter() != value:
                setter(value)


def failing_line(error: BaseException, file: str | None = None) -> str:
    """Return " at line L of FILE" for the last line of `file`, or else of users' code, or ""."""
    frames = traceback.extract_tb(error.__traceback__)
    found = [frame for frame in frames if frame.filename == file]
    found = found or [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    return f" at line {found[-1].lineno} of {found[-1].filename}" if found else ""


def is_of_library(file: str) -> bool:
    """Return whether a file belongs to Python, an installed package or fedcb2o."""
    return file.startswith(_LIBRARIES[1:])


def foreign_names_in(value: Any) -> Iterator[str]:
    """Yield every text in tables that may be an import path, a file, or a model to download."""
    if isinstance(value, Mapping):
        base = value.get("base")
        if isinstance(base, str) and base not in _BUILT_IN_BASES:
            yield base
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inner in value:
            yield from foreign_names_in(inner)
    elif isinstance(value, str) and set(value) & set(":/\\~"):
        yield value


def describe_effect(name: str) -> str:
    """Describe the effect of a text of `foreign_names_in`, and what to do before it is allowed."""
    if ":" in name and not set(name) & set("/\\~"):
        return "code that would run here: read it"
    return "a model that would be read or downloaded here: check it"


@dataclass(frozen=True)
class Declaration(Generic[T]):
    """A named property of functions, set by a decorator.

    Example:
        >>> PURPOSE = Declaration[str]("purpose")
        >>> @PURPOSE("tests")
        ... def function(): ...
        >>> PURPOSE.get(function)
        'tests'
    """

    name: str

    def __call__(self, value: T) -> Callable[[F], F]:
        """Return a decorator that sets the property and returns the same function."""

        def decorate(function: F) -> F:
            setattr(function, self.name, value)
            return function

        return decorate

    def get(self, function: PluginFunction) -> T | None:
        """Return the property of a function, or of the function in a `functools.partial`."""
        return getattr(getattr(function, "func", function), self.name, None)


USER_FUNCTION = Declaration[str]("own_name")
"""Name of a user's function in the configuration, set by `resolve`."""

VARIANTS = Declaration[Mapping[str, Mapping[str, Any]]]("variants")
"""Defaults of a function's parameters, by the value of its parameter `variant`."""


def _cached(inspector: Callable[[PluginFunction], T]) -> Callable[[PluginFunction], T]:
    """Cache results for hashable functions; reading a signature takes longer than many rules."""
    cache = functools.cache(inspector)

    @functools.wraps(inspector)
    def lookup(function: PluginFunction) -> T:
        return cache(function) if isinstance(function, Hashable) else inspector(function)

    return lookup


@_cached
def parameters(function: PluginFunction) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a plug-in, which are its keyword-only arguments."""
    try:
        # Evaluates annotations that are strings, as under `from __future__ import annotations`.
        signature = inspect.signature(function, eval_str=True)
    except Exception:  # an annotation may use a name that does not exist at run time
        try:
            signature = inspect.signature(function)
        except ValueError:  # compiled functions, such as TorchScript's, have none
            return {}
    return {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def docstring_sections(function: PluginFunction) -> dict[str, str]:
    """Return the sections of a docstring in Google style; "" names the text before them."""
    whole = function.func if isinstance(function, functools.partial) else function
    text, *sections = docstrings.SECTION.split(inspect.getdoc(whole) or "")
    return {
        "": text,
        "Args": "",
        "Example": "",
        **dict(zip(sections[::2], sections[1::2], strict=True)),
    }


def argument_descriptions(function: PluginFunction) -> dict[str, str]:
    """Return the descriptions of the arguments in a docstring in Google style."""
    entries = docstrings.ENTRY.findall(docstring_sections(function)["Args"])
    return {name: " ".join(text.split()) for name, text in entries}


@_cached
def positional_inputs(function: PluginFunction) -> tuple[str, ...]:
    """Return the names of a plug-in's positional arguments without a default, in order."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in kinds and parameter.default is inspect.Parameter.empty
    )


def extra_inputs(
    kind: str, function: PluginFunction, known: Iterable[str], first: int
) -> tuple[str, ...]:
    """Return the positional inputs from number `first` on, which must be known ones."""
    names = positional_inputs(function)[first:]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"the {kind} reads `{name}`, which is not an input.{did_you_mean(name, known)} "
                f"The inputs are: {', '.join(known)}"
            )
    return names


def bind(
    kind: str, function: PluginFunction, values: Mapping[str, Any], *, deferred: Iterable[str] = ()
) -> dict[str, Any]:
    """Check parameter values from a configuration against a function's signature.

    Parameters of `deferred` may be missing, because the program sets them later.
    """
    function_name = getattr(function, "__name__", None)
    if not function_name:
        function_name = getattr(getattr(function, "func", None), "__name__", kind)

    valid = parameters(function)
    for name in values:
        if name not in valid:
            has = " It has none (parameters are keyword-only arguments)"
            if valid:
                has = f" It has: {', '.join(valid)}"
            hint = _having_parameter(name, function) or did_you_mean(name, valid) or has
            raise ConfigError(f"{kind} `{function_name}` has no parameter `{name}`.{hint}")

    checked = {}
    for name, parameter in valid.items():
        if name not in values:
            if parameter.default is inspect.Parameter.empty and name not in deferred:
                raise ConfigError(f"{kind} `{function_name}` needs the parameter `{name}`")
            continue

        annotation = parameter.annotation
        if annotation is inspect.Parameter.empty or isinstance(annotation, str):
            checked[name] = values[name]
            continue

        try:
            checked[name] = _validate(annotation, values[name])
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            got = repr(to_python(values[name]))
            raise ConfigError(
                f"{kind} `{function_name}`: `{name}` = {got:.200}: {reason}"
            ) from error
    return checked


def _having_parameter(name: str, function: PluginFunction) -> str:
    """Return ' It is a parameter of `x`.' for the built-in functions next to `function`."""
    module = str(getattr(getattr(function, "func", function), "__module__", ""))
    package = sys.modules.get(module.rpartition(".")[0])
    siblings = {other: getattr(package, other) for other in getattr(package, "__all__", ())}
    having = [
        f"`{other}`"
        for other, sibling in siblings.items()
        if callable(sibling) and name in parameters(sibling)
    ]
    # A common name such as `f` would list half of the functions.
    if not having or len(having) > 3:
        return ""
    return f" It is a parameter of {' and '.join(having)}: is this the `name` that you want?"


def resolve_and_bind(
    kind: str, choice: PluginChoice, namespace: types.ModuleType, *, deferred: Iterable[str] = ()
) -> functools.partial[Any]:
    """Return the function of a name or a table {name = ..., parameter = ...}, bound."""
    table: dict[str, Any] = dict(choice) if isinstance(choice, Mapping) else {"name": choice}
    if "name" not in table:
        raise ConfigError(f"the {kind} has no `name`: {table}; name it beside its parameters")

    function = resolve(kind, table.pop("name"), namespace)
    return functools.partial(function, **bind(kind, function, table, deferred=deferred))


def to_python(value: Any, *, arrays: bool = True) -> Any:
    """Return settings with Python's types in place of NumPy's numbers, and of paths.

    Arrays and tensors become lists, unless `arrays` is False; values of all other types stay.
    """
    if isinstance(value, Mapping):
        return {
            to_python(key, arrays=arrays): to_python(item, arrays=arrays)
            for key, item in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(to_python(item, arrays=arrays) for item in value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    is_array = _is_of(value, "numpy", "ndarray") or _is_of(value, "torch", "Tensor")
    # Its `tolist` returns the same type, which JSON and TOML lack.
    if _is_of(value, "numpy", "longdouble"):
        return float(value)
    if _is_of(value, "numpy", "generic") or (arrays and is_array):
        return value.tolist()
    return value


def section_to_python(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section with Python's types; tables in it keep their arrays."""
    return {
        key: to_python(value, arrays=not isinstance(value, Mapping)) for key, value in table.items()
    }


def to_plain(value: Any) -> Any:
    """Return a value as TOML has it: functions as import paths, arrays as lists."""
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if callable(value):
        return label(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    return to_python(value)


def _is_of(value: Any, library: str, name: str) -> bool:
    """Say whether a value has a type of a library, which a relay never imports."""
    types = getattr(sys.modules.get(library), name, ())
    return isinstance(value, types)


def _validate(annotation: Any, value: Any) -> Any:
    """Return the value as its annotation has it, read as JSON.

    A list may be a tuple and 5 may be 5.0, but "5" and true are not numbers.
    """
    config = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
    adapter = TypeAdapter(annotation, config=config)
    value = to_python(value, arrays=False)
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        # A function or a module has no JSON. Arrays are kept for a parameter that takes them.
        with contextlib.suppress(ValidationError):
            return adapter.validate_python(value, strict=True)
        plain = to_python(value)
        try:
            text = json.dumps(plain)
        except (TypeError, ValueError):
            return adapter.validate_python(plain)
    return adapter.validate_json(text, strict=True)
