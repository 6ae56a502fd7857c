"""Models of a caller as rows of one tensor, and aggregates as the caller's type."""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.errors import ConfigError, describe_type
from fedcb2o.federated.aggregation import base
from fedcb2o.user_values import to_tensor

Models = Any
"""m models: a tensor or array [m, ...], or a list of m tensors, arrays, lists of numbers or
state dicts."""

_COMPUTED = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Stack:
    """Models of a caller."""

    # One model per row, in float32 or float64, shape [m, d].
    rows: Float[Tensor, "m d"]
    # Function from one row [d] to a model of the caller's type.
    restore: Callable[[Float[Tensor, " d"]], Any]
    # Whether the caller's models are a list, and not one tensor or array.
    is_list: bool
    # Function from the name of another model, such as the agent's own, and that model to its row.
    read: Callable[[str, Any], Float[Tensor, " d"]]

    def weighted(self, weights: Float[Tensor, " m"]) -> Any:
        """Return the weighted sum as one model of the caller's type."""
        every_row = torch.arange(len(self.rows))
        return self.restore(base.weighted_sum(self.rows, every_row, weights))

    def restore_all(self, rows: Float[Tensor, "j d"]) -> Any:
        """Return several models as the caller's type: a list, or a tensor or array [j, ...]."""
        if self.is_list:
            return [self.restore(row) for row in rows]
        return self.restore(rows)


def stack(models: Models) -> Stack:
    """Convert a caller's models.

    Models that differ in shape, type or names are a ConfigError.
    """
    if isinstance(models, Tensor | np.ndarray):
        if models.ndim < 2:
            raise ConfigError(
                f"`models` must be [m, ...], one model a row, got shape {[*models.shape]}"
            )
        return _from_tensor(models)
    if isinstance(models, Mapping | str) or not hasattr(models, "__iter__"):
        raise ConfigError(f"`models` must be a list of models, got {describe_type(models)}")

    models = list(models)
    if not models:
        raise ConfigError("there is no model to aggregate")
    first = models[0]
    kinds = (Mapping, Tensor, np.ndarray, Sequence)
    kind = next((kind for kind in kinds if isinstance(first, kind)), None)
    if kind is None or isinstance(first, str):
        raise ConfigError(f"model 0 is {describe_type(first)}, expected numbers or a state dict")
    for i, model in enumerate(models):
        if not isinstance(model, kind):
            raise ConfigError(
                f"model {i} is {describe_type(model)}, and model 0 is {describe_type(first)}"
            )
    if kind is Mapping:
        return _from_state_dicts(models)
    if kind is Sequence:
        models = [to_tensor(f"model {i} holds", model) for i, model in enumerate(models)]
    _require_alike(models, "")
    stack_arrays: Any = torch.stack if isinstance(models[0], Tensor) else np.stack
    if any(map(np.ma.isMA, models)):
        stack_arrays = np.ma.stack  # `np.stack` drops masks
    inner = _from_tensor(stack_arrays(models))

    def restore(row: Tensor) -> Any:
        model = inner.restore(row)
        return model.tolist() if kind is Sequence else model

    return Stack(inner.rows, restore, is_list=True, read=inner.read)


def _from_tensor(models: Tensor | np.ndarray) -> Stack:
    """Convert a tensor or an array [m, ...]."""
    if len(models) == 0:
        raise ConfigError("there is no model to aggregate")
    # PyTorch reads plain arrays where they are; `to_tensor` copies them.
    tensor = torch.from_numpy(models) if _is_plain(models) else to_tensor("`models` holds", models)
    dtype = tensor.dtype if tensor.is_floating_point() else torch.float64
    shape = tensor.shape[1:]
    # Each call of PyTorch takes the time of thousands of numbers.
    rows = tensor if tensor.ndim == 2 else tensor.reshape(len(tensor), -1)
    if not tensor.is_floating_point():
        # Sums of whole numbers must not wrap around.
        rows = rows.double()
    elif dtype not in _COMPUTED:
        rows = rows.float()

    def restore(values: Tensor) -> Any:
        result = values if values.dtype is dtype else values.to(dtype)
        if len(shape) != 1:
            result = result.view(*values.shape[:-1], *shape)
        return result.numpy() if isinstance(models, np.ndarray) else result

    def read(which: str, model: Any) -> Tensor:
        if isinstance(model, Mapping):
            raise ConfigError(f"{which} is a state dict, and the others are not")
        values = to_tensor(f"{which} holds", model)
        if values.shape != shape:
            raise ConfigError(
                f"{which} has {values.numel()} numbers, and the others have {shape.numel()}: of "
                f"shape {[*values.shape]}, expected {[*shape]}"
            )
        return values.reshape(-1).to(rows)

    return Stack(rows, restore, is_list=False, read=read)


def shares_memory(models: Models, rows: Float[Tensor, "m d"]) -> bool:
    """Return whether rows are the memory of a caller's tensor or array.

    A list, models that were copied and rows with gaps do not share it.
    """
    if isinstance(models, np.ndarray):
        return rows.is_contiguous() and bool(models.ctypes.data == rows.data_ptr())
    is_same = isinstance(models, Tensor) and models.data_ptr() == rows.data_ptr()
    return is_same and rows.is_contiguous()


def _is_plain(models: Any) -> bool:
    """Return whether PyTorch can read an array of real numbers where it is."""
    if type(models) is not np.ndarray or models.dtype not in (np.float32, np.float64):
        return False
    return models.dtype.isnative and min(models.strides) >= 0 and models.flags.writeable


def _require_alike(values: Sequence[Any], name: str) -> None:
    """Check that all models have the shape and type of the first one."""
    first = values[0]
    for i, value in enumerate(values):
        if value.shape != first.shape or value.dtype != first.dtype:
            raise ConfigError(
                f"model {i} has{name} shape {[*value.shape]} and type {value.dtype}, and model 0 "
                f"{[*first.shape]} and {first.dtype}"
            )


def _from_state_dicts(models: Sequence[Mapping[str, Any]]) -> Stack:
    """Convert state dicts; tensors of whole numbers, such as batch counts, give their median."""
    names = list(models[0])
    for i, model in enumerate(models):
        _require_names(f"model {i}", model, names)
    whole: dict[str, Any] = {}
    numbers: dict[str, Stack] = {}
    for name in names:
        values = [model[name] for model in models]
        if not all(hasattr(value, "dtype") for value in values):
            raise ConfigError(f"`{name}` of a model is not a tensor or an array")
        _require_alike(values, f" for `{name}`")
        if isinstance(values[0], Tensor) and values[0].is_complex():
            raise ConfigError(f"`{name}` of a model is complex, expected real numbers")
        if _is_float(values[0]):
            numbers[name] = stack([value.reshape(-1) for value in values])
        else:
            whole[name] = _lower_median(values)
    if not numbers:
        raise ConfigError("the models have no tensor of real numbers to aggregate")

    parts = [part.rows for part in numbers.values()]
    # One matrix has one type: the smallest that holds all tensors exactly.
    dtype = functools.reduce(torch.promote_types, [part.dtype for part in parts])
    rows = torch.cat([part.to(dtype) for part in parts], 1)
    sizes = [part.shape[1] for part in parts]

    def restore(row: Float[Tensor, " d"]) -> dict[str, Any]:
        values = dict(zip(numbers, torch.split(row, sizes), strict=True))
        result = {}
        for name in names:
            if name in numbers:
                value = numbers[name].restore(values[name])
                result[name] = value.reshape(models[0][name].shape)
            else:
                # A caller may change the result, and ask for several.
                result[name] = copy.deepcopy(whole[name])
        return result

    def read(which: str, model: Any) -> Tensor:
        if not isinstance(model, Mapping):
            raise ConfigError(f"{which} is {describe_type(model)}, and the others are state dicts")
        _require_names(which, model, names)
        for name in numbers:
            if not hasattr(model[name], "dtype"):
                raise ConfigError(f"`{name}` of {which} is not a tensor or an array")
            shape, expected = np.shape(model[name]), models[0][name].shape
            if shape != expected:
                raise ConfigError(
                    f"{which} has for `{name}` shape {[*shape]}, expected {[*expected]}"
                )
        parts = [numbers[name].read(which, model[name].reshape(-1)) for name in numbers]
        return torch.cat([part.to(rows) for part in parts])

    return Stack(rows, restore, is_list=True, read=read)


def _require_names(which: str, model: Mapping[str, Any], names: Sequence[str]) -> None:
    """Check that a state dict has the names of model 0, in any order."""
    different = sorted(map(str, set(model) ^ set(names)))
    if different:
        raise ConfigError(
            f"{which} and model 0 do not both have the tensor `{different[0]}`: take state dicts "
            "of one network"
        )


def _is_float(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point()
    return bool(np.issubdtype(value.dtype, np.floating))


def _lower_median(values: Sequence[Any]) -> Any:
    """Return the lower median of whole numbers or truth values, element by element."""
    if any(np.ma.is_masked(value) for value in values if not isinstance(value, Tensor)):
        raise ConfigError("a model holds masked whole numbers: fill them, or leave it out")
    middle = (len(values) - 1) // 2
    if isinstance(values[0], Tensor):
        return torch.stack([*values]).sort(0).values[middle]
    return np.sort(np.stack(values), 0)[middle]
