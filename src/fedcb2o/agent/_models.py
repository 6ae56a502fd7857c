"""Models of an agent: state dicts or flat arrays from and to the rows of a buffer.

>>> import torch
>>> model_format = ModelFormat(nn.Linear(2, 1))
>>> row = torch.zeros(3)
>>> model_format.read_({"weight": [[1.0, 2.0]], "bias": [3.0]}, row)
''
>>> row.tolist()
[1.0, 2.0, 3.0]
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from fedcb2o.errors import ConfigError
from fedcb2o.nn import parameters
from fedcb2o.user_values import to_tensor

Model = Mapping[str, Any] | Tensor | np.ndarray
"""A `state_dict`, its tensors also as arrays, or theta as a flat array [d]."""


class FlatModel(nn.Module):
    """Stand-in for a network where the model is an array that a function evaluates."""

    def __init__(self, theta: Tensor) -> None:
        super().__init__()
        self.theta = nn.Parameter(theta)


def as_network(model: Any) -> tuple[nn.Module, bool]:
    """Return a network, or the stand-in for an array.

    The second value tells if the user's arrays are those of NumPy. An array that is empty, not flat
    or not finite is a ConfigError.
    """
    if isinstance(model, nn.Module):
        return model, False
    theta = to_tensor("the model holds", model)
    if theta.ndim != 1 or not theta.isfinite().all():
        raise ConfigError(
            "the model must be an nn.Module, or a flat array of finite numbers [d], got shape "
            f"{tuple(theta.shape)}"
        )
    # A copy, because the agent changes its model in place.
    return FlatModel(theta.float().clone()), not isinstance(model, Tensor)


class ModelFormat:
    """Names and shapes of the tensors of theta.

    `is_numpy` tells if flat arrays are those of NumPy.
    """

    def __init__(self, network: nn.Module, is_numpy: bool = False) -> None:
        tensors = parameters.shared_tensors(network)
        sizes = [tensor.numel() for tensor in tensors.values()]
        ends = list(itertools.accumulate(sizes))
        starts = [0, *ends[:-1]]
        self.columns = dict(zip(tensors, map(slice, starts, ends), strict=True))
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.dim = sum(sizes)
        self.is_flat = isinstance(network, FlatModel)
        self.is_numpy = is_numpy
        self._known = {
            *network.state_dict(),
            *(name for name, _ in network.named_parameters(remove_duplicate=False)),
            *(name for name, _ in network.named_buffers(remove_duplicate=False)),
        }

    def read_(self, model: Model, row: Float[Tensor, " d"]) -> str:
        """Copy a received model into a row.

        Returns the reason to refuse the model, or an empty text. The row of a refused model is
        undefined.
        """
        # The model is this row of the buffer already.
        if _address(model, row) == row.data_ptr():
            return ""
        if not isinstance(model, Mapping):
            return _copy_("it", model, (self.dim,), row)

        unknown = [name for name in model if name not in self._known]
        also = f" and holds `{unknown[0]}`" if unknown else ""
        for name in self.shapes:
            if name not in model:
                return f"it lacks `{name}`{also}"
        if unknown:
            return f"it holds `{unknown[0]}`, which the network does not have"
        for name, shape in self.shapes.items():
            reason = _copy_(f"`{name}`", model[name], shape, row[self.columns[name]])
            if reason:
                return reason
        return ""

    def views(self, theta: Float[Tensor, " d"]) -> dict[str, Tensor]:
        """Return the tensors of a model by name, as views."""
        return {name: theta[self.columns[name]].view(shape) for name, shape in self.shapes.items()}

    def to_user(self, thetas: Float[Tensor, "m d"]) -> Any:
        """Return models as their user writes them.

        They are a list of state dicts or, for an agent without a network, an array [m, d].
        """
        if not self.is_flat:
            return [self.views(theta) for theta in thetas]
        return thetas.numpy() if self.is_numpy else thetas


def placed_rows(models: Sequence[Model], buffer: Float[Tensor, "p d"], first_row: int) -> list[int]:
    """Return the row of a buffer for each model.

    A model that is a row of the buffer keeps it. The others get rows from `first_row` on that no
    model is.
    """
    addresses = {row.data_ptr(): k for k, row in enumerate(buffer[first_row:], first_row)}
    rows = [addresses.get(_address(model, buffer[0]), -1) for model in models]
    free = iter(sorted(set(addresses.values()) - set(rows)))
    return [next(free) if row < 0 else row for row in rows]


def _address(model: Model, row: Float[Tensor, " d"]) -> int:
    """Return the address of a model that has the format of a row; otherwise 0."""
    if type(model) is not Tensor or model.layout is not torch.strided or model.is_nested:
        return 0
    is_alike = model.shape == row.shape and model.dtype == row.dtype
    return model.data_ptr() if is_alike and model.is_contiguous() else 0


def _copy_(name: str, values: Any, shape: tuple[int, ...], target: Float[Tensor, " k"]) -> str:
    """Copy numbers into a part of a row; return the reason to refuse them, or an empty text."""
    try:
        tensor = to_tensor(f"{name} holds", values)
    except ConfigError as error:
        return str(error)
    if tensor.shape != shape or not tensor.is_floating_point():
        return (
            f"{name} has shape {tuple(tensor.shape)} and type {tensor.dtype}, expected "
            f"{tuple(shape)} and floating point"
        )
    target.copy_(tensor.reshape(-1))
    return ""
