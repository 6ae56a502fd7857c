"""Serialization of tasks, results and errors between processes.

`execute` runs a serialized task and serializes its result or its error; `unwrap_result` returns
the result, or raises the error with the traceback of the other process.

>>> unwrap_result(execute(serialize((pow, (2, 3)))))
8
"""

import collections
import io
import pickle
import traceback
from typing import Any, ClassVar

import cloudpickle
import torch

from fedcb2o.errors import RunError


def serialize(content: object) -> bytes:
    """Serialize any object; functions that `__main__` defines travel by value.

    Args:
        content: The object.

    Returns:
        Its pickle.

    Raises:
        RunError: The object cannot be pickled.
    """
    with io.BytesIO() as file:
        try:
            _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(content)
        except (AttributeError, TypeError, ValueError, pickle.PicklingError) as error:
            raise RunError(
                f"a user function cannot be sent to another process ({error}): "
                "take --workers 1 and no --cluster"
            ) from error
        return file.getvalue()


def execute(content: bytes, *context: object) -> bytes:
    """Run a serialized task and serialize its outcome.

    Args:
        content: A serialized pair (function, arguments).
        context: Leading arguments of the function, known to this process.

    Returns:
        The serialized pair (True, result), or (False, (error, traceback as text)).
    """
    try:
        function, arguments = pickle.loads(content)
        return serialize((True, function(*context, *arguments)))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            outcome = serialize((False, (error, text)))
            pickle.loads(outcome)
        except Exception:  # an error that pickles but does not unpickle
            return serialize((False, (RuntimeError(f"{type(error).__name__}: {error}"), text)))
        return outcome


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


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar[Any] = collections.ChainMap(
        {torch.Tensor: _reduce_tensor}, cloudpickle.Pickler.dispatch_table
    )
