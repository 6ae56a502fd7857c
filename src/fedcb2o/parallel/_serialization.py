"""Serialization of tasks, results and errors between processes.

`execute` runs a serialized task and serializes its result or its error; `unwrap_result` returns
the result, or raises the error with the traceback of the other process.
"""

import collections
import functools
import io
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import cloudpickle
import torch

from fedcb2o import plugins
from fedcb2o.errors import FedCB2OError, RunError

_MAX_DEPTH = 10  # of the search for a function that cannot be sent


def serialize(content: object) -> bytes:
    """Pickle any object; functions that `__main__` defines travel by value.

    RunError is raised if the object cannot be pickled, and names the function that cannot.
    """
    try:
        return _dump(content)
    except MemoryError:
        raise
    except Exception as error:  # a user's object may fail in any way
        raise _sending_error(_unsendable_function(content), error) from error


def _dump(content: object) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(content)
        return file.getvalue()


def _sending_error(name: str, error: Exception) -> RunError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return RunError(
        f"a user function{name} cannot be sent to another process ({lines[0]}): take --workers 1 "
        "and no --cluster, or define it in a module that can be imported"
    )


def _unsendable_function(content: Any, name: str = "", depth: int = _MAX_DEPTH) -> str:
    """Return " `module:function`" of the innermost function that cannot be pickled, or ""."""
    parts: list[Any] = []
    if not depth:
        return name
    if isinstance(content, functools.partial):
        parts = [content.func, *content.args, *content.keywords.values()]
    elif isinstance(content, Mapping):
        parts = list(content.values())
    elif isinstance(content, list | tuple):
        parts = list(content)
    elif callable(content):
        name = f" `{plugins.label(content)}`"
    elif hasattr(content, "__dict__"):
        parts = [*vars(content).values(), getattr(content, "__pydantic_extra__", None)]
    for part in parts:
        try:
            _dump(part)
        except Exception:  # for whatever reason the whole fails
            return _unsendable_function(part, name, depth - 1)
    return name


def execute(content: bytes, *context: object) -> bytes:
    """Run a serialized pair (function, arguments) and serialize its outcome.

    The context has leading arguments of the function, known to this process. The outcome is (True,
    result), or (False, (error, traceback as text)).
    """
    try:
        function, arguments = _deserialize_task(content)
        return serialize((True, function(*context, *arguments)))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            outcome = serialize((False, (error, text)))
            pickle.loads(outcome)
        except Exception:  # an error that pickles but does not unpickle
            return serialize((False, (RuntimeError(f"{type(error).__name__}: {error}"), text)))
        return outcome


def _deserialize_task(content: bytes) -> Any:
    """Return a task. Raise RunError if its parts exist in the process that sent it alone."""
    try:
        return pickle.loads(content)
    except (FedCB2OError, MemoryError):
        raise
    except Exception as error:  # a user's object may fail in any way
        raise _sending_error("", error) from error


def unwrap_result(content: bytes) -> Any:
    """Return the result in an outcome of `execute`.

    The task's error is raised with the remote traceback as its cause.
    """
    succeeded, result = pickle.loads(content)
    if succeeded:
        return result
    error, text = result
    raise error from _RemoteTraceback(text)


class _RemoteTraceback(Exception):  # noqa: N818 (shown as the cause of an error)
    """The traceback of an error in another process."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    """Reduce a small tensor to bytes."""
    # PyTorch's own way between processes takes ten times as long, and more memory for views.
    try:
        content = tensor.contiguous().numpy().tobytes()
    except (RuntimeError, TypeError):  # NumPy lacks bfloat16, gradients and sparse tensors
        return tensor.__reduce_ex__(pickle.DEFAULT_PROTOCOL)  # type: ignore[no-untyped-call]
    return _rebuild_tensor, (tensor.dtype, tuple(tensor.shape), content)


def _rebuild_tensor(dtype: torch.dtype, shape: tuple[int, ...], content: bytes) -> torch.Tensor:
    if not content:
        return torch.empty(0, dtype=dtype).view(shape)
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)


def _rebuild_cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar[Any] = collections.ChainMap(
        {torch.Tensor: _reduce_tensor}, cloudpickle.Pickler.dispatch_table
    )

    def reducer_override(self, obj: Any) -> Any:
        """Reduce functions with a cache by value, unless another process can import them."""
        if isinstance(obj, functools._lru_cache_wrapper) and not _is_importable(obj):
            return _rebuild_cached, (obj.__wrapped__, obj.cache_parameters())
        return super().reducer_override(obj)


def _is_importable(function: Any) -> bool:
    """Return whether another process finds a function under its name."""
    if function.__module__ == "__main__":
        return False
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function
