"""Serialization of tasks, results and errors between processes.

`execute` runs a serialized task and serializes its result or its error; `unwrap_result` returns
the result, or raises the error with the traceback of the other process.

>>> unwrap_result(execute(serialize((pow, (2, 3)))))
8
"""

import collections
import functools
import io
import pickle
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any, ClassVar

import cloudpickle
import torch

from fedcb2o.errors import FedCB2OError, RunError


def serialize(content: object) -> bytes:
    """Serialize any object; functions that `__main__` defines travel by value.

    Args:
        content: The object.

    Returns:
        Its pickle.

    Raises:
        RunError: The object cannot be pickled. The error names the last function or class that was.
    """
    with io.BytesIO() as file:
        pickler = _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            pickler.dump(content)
        except Exception as error:  # a user's object may fail in any way
            raise _sending_error(pickler.current, error) from error
        return file.getvalue()


def _sending_error(name: str, error: Exception) -> RunError:
    place = f" `{name}`" if name else ""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return RunError(
        f"a user function{place} cannot be sent to another process ({lines[0]}): take --workers 1 "
        "and no --cluster, or define it in a module that can be imported"
    )


def execute(content: bytes, *context: object) -> bytes:
    """Run a serialized task and serialize its outcome.

    Args:
        content: A serialized pair (function, arguments).
        context: Leading arguments of the function, known to this process.

    Returns:
        The serialized pair (True, result), or (False, (error, traceback as text)).
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
    except FedCB2OError:
        raise
    except Exception as error:  # a user's object may fail in any way
        raise _sending_error("", error) from error


def unwrap_result(content: bytes) -> Any:
    """Return the result in an outcome of `execute`.

    Args:
        content: The serialized outcome.

    Returns:
        The task's result.

    Raises:
        Exception: The task's error, with the remote traceback as its cause.
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
    """Reduce a small tensor to bytes.

    PyTorch's own way between processes takes ten times as long, and more memory for views.
    """
    try:
        content = tensor.contiguous().numpy().tobytes()
    except (RuntimeError, TypeError):  # NumPy lacks bfloat16, gradients and sparse tensors
        return tensor.__reduce_ex__(pickle.DEFAULT_PROTOCOL)  # type: ignore[no-untyped-call]
    return _rebuild_tensor, (tensor.dtype, tuple(tensor.shape), content)


def _rebuild_tensor(dtype: torch.dtype, shape: tuple[int, ...], content: bytes) -> torch.Tensor:
    if not content:
        return torch.empty(0, dtype=dtype).view(shape)
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)


_REDUCED_TYPES = (types.FunctionType, type, functools._lru_cache_wrapper)


def _rebuild_cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that knows which user function it is at, for errors."""

    dispatch_table: ClassVar[Any] = collections.ChainMap(
        {torch.Tensor: _reduce_tensor}, cloudpickle.Pickler.dispatch_table
    )
    current = ""

    def reducer_override(self, obj: Any) -> Any:
        """Reduce functions with a cache by value, unless another process can import them."""
        if isinstance(obj, _REDUCED_TYPES) and not _is_importable(obj):
            self.current = f"{obj.__module__}:{obj.__qualname__}"
            if isinstance(obj, functools._lru_cache_wrapper):
                return _rebuild_cached, (obj.__wrapped__, obj.cache_parameters())
        return super().reducer_override(obj)


def _is_importable(function: Any) -> bool:
    """Return whether another process finds a function or class under its name."""
    if function.__module__ == "__main__":
        return False
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function
