"""Conversion of the numbers that a user's function returns.

A function may return tensors, NumPy arrays of any number type, masked arrays, lists, or columns of
pandas and other libraries. Masked and missing values become NaN. Values that are not real numbers
are refused.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcb2o.errors import ConfigError

_FLOAT64 = np.dtype(np.float64)
_PLAIN_TYPES = (torch.float32, torch.float64, torch.int64)
# Kinds of NumPy types that are not real numbers, with the cure.
_KINDS = {
    "c": "complex numbers: take the real part or the absolute value",
    "U": "words",
    "S": "words",
    "M": "dates: take numbers of seconds or days",
    "m": "durations: take numbers of seconds or days",
    "V": "records with several fields: take one of them",
}

_MISSING = {"NAType", "NaTType"}  # types of pandas's missing values


def to_tensor(source: str, values: Any) -> Tensor:
    """Convert values to a dense tensor of real numbers, without gradient history.

    Types of PyTorch stay as they are; other number types become float64 or int64. Only tensors
    share their memory with the user's. `source` starts the message of a ConfigError, such as "`x0`
    holds".
    """
    if type(values) is np.ndarray and values.dtype is _FLOAT64:
        return torch.from_numpy(values.copy())
    if not isinstance(values, Tensor):
        return torch.from_numpy(to_array(source, values))

    is_plain = type(values) is Tensor and values.layout is torch.strided
    if is_plain and not values.is_nested and values.dtype in _PLAIN_TYPES and not values.is_meta:
        return values.detach()
    unusable = {
        "nested": values.is_nested,
        "quantised": values.is_quantized,
        "sparse": values.layout is not torch.strided,
        # A wrapper of another type may have its numbers elsewhere.
        "meta": values.is_meta and type(values) is Tensor,
        "complex": values.is_complex(),
    }
    for kind, applies in unusable.items():
        if applies:
            raise ConfigError(f"{source} a {kind} tensor, expected a dense one of real numbers")
    return values.detach()


def returned_tensor(name: str, values: Any) -> Tensor:
    """Convert a return value to a dense real tensor; masked and missing values are NaN."""
    tensor = to_tensor(f"the {name} returned", values)
    if not isinstance(values, Tensor | np.ndarray) and tensor.dtype == torch.float64:
        return tensor.to(torch.get_default_dtype())  # as PyTorch converts a list
    return tensor


def to_array(source: str, values: Any) -> np.ndarray:
    """Convert values as `to_tensor` does, to a new array in the order of C."""
    if values is None:
        raise ConfigError(f"{source} None, expected numbers: is a `return` missing?")
    try:
        array = _gather(source, values)
        if array.dtype.kind == "O":
            array = _convert_objects(array)
    except ConfigError:
        raise
    except Exception as error:  # a user's object may fail in any way
        raise ConfigError(
            f"{source} a {type(values).__name__}, expected an array of numbers:"
            f" {type(error).__name__}: {error}"
        ) from error
    kind = array.dtype.kind
    if kind not in "biuf":
        name = _KINDS.get(kind, f"values of type {array.dtype}")
        raise ConfigError(f"{source} {name}; expected real numbers")

    mask = np.ma.getmask(array)
    data = np.ma.getdata(array)
    dtype = _torch_type(data)
    if mask is not np.ma.nomask and kind != "f":
        dtype = _FLOAT64
    with np.errstate(over="ignore"):  # a long double may be infinite in float64
        result = np.array(data, dtype=dtype, order="C")
    if mask is not np.ma.nomask:
        result[mask] = np.nan
    return result


def _gather(source: str, values: Any) -> np.ndarray:
    """Return an array or a masked array of any type."""
    if isinstance(values, np.ndarray):
        return values
    if isinstance(values, Tensor):
        tensor = to_tensor(source, values).cpu()
        return tensor.double().numpy() if tensor.is_floating_point() else tensor.numpy()
    if hasattr(values, "to_numpy"):  # pandas, polars, xarray
        return _gather(source, values.to_numpy())
    if isinstance(values, list | tuple) and any(map(_is_collection, values)):
        return np.asarray([to_array(source, item) for item in values])
    return np.asarray(values)


def _is_collection(item: Any) -> bool:
    return isinstance(item, list | tuple | np.ndarray | Tensor) or hasattr(item, "to_numpy")


def _torch_type(data: np.ndarray) -> np.dtype[Any]:
    """Return the type of PyTorch that holds the numbers, in native byte order."""
    dtype = data.dtype.newbyteorder("=")
    if dtype.kind == "f" and dtype.itemsize > _FLOAT64.itemsize:
        return _FLOAT64
    if dtype.kind == "u" and dtype.itemsize > 1:
        is_large = data.size > 0 and data.max() > np.iinfo(np.int64).max
        return _FLOAT64 if is_large else np.dtype(np.int64)
    return dtype


def _convert_objects(array: np.ndarray) -> np.ndarray:
    """Convert Python objects to float64; masked objects may be anything."""
    masked = np.ma.getmaskarray(array).ravel()
    items = np.ma.getdata(array).ravel()
    numbers = np.full(len(items), np.nan)
    for k in np.flatnonzero(~masked):
        numbers[k] = _to_float(items[k])
    return numbers.reshape(array.shape)


def _to_float(item: Any) -> float:
    if item is None or type(item).__name__ in _MISSING:
        return math.nan
    if isinstance(item, str | bytes | complex | np.complexfloating):
        raise TypeError(f"{item!r:.40} is not a real number")
    return float(item)
