"""Former names of methods and keywords of `fedcb2o.peer`, with a DeprecationWarning."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])


def warn_renamed(former: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn that a name is deprecated, by default at the caller of the caller."""
    warnings.warn(
        f"`{former}` is now `{new}`; the former name goes with the next minor version",
        DeprecationWarning,
        stacklevel=stacklevel,
    )


def former_attributes(**names: str) -> Callable[[C], C]:
    """Return a class decorator that keeps former names of attributes and methods."""

    def find(self: Any, name: str) -> Any:
        if name not in names:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warn_renamed(f"{type(self).__name__}.{name}", names[name])
        return getattr(self, names[name])

    def decorate(cls: C) -> C:
        cls.__getattr__ = find  # type: ignore[attr-defined]
        return cls

    return decorate


def former_fields(**names: str) -> Callable[[C], C]:
    """Return a class decorator that keeps former field names.

    They are read as attributes and accepted as keywords of the constructor.
    """

    def decorate(cls: C) -> C:
        cls.__init__ = former_parameters(**names)(cls.__init__)  # type: ignore[misc]
        return former_attributes(**names)(cls)

    return decorate


def former_parameters(**names: str) -> Callable[[F], F]:
    """Return a function decorator that accepts former names of keyword arguments."""

    def decorate(function: F) -> F:
        title = function.__qualname__.removesuffix(".__init__").rpartition(".<locals>.")[2]

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            for name in names.keys() & keywords.keys():
                warn_renamed(f"{title}({name}=...)", f"{names[name]}=...")
                keywords[names[name]] = keywords.pop(name)
            return function(*arguments, **keywords)

        return cast(F, call)

    return decorate
