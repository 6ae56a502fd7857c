"""Models of an agent: state dicts or flat arrays from and to the rows of a buffer."""

import collections
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fedcb2o.errors import ConfigError
from fedcb2o.nn import batch_norm, parameters
from fedcb2o.user_values import to_tensor

Model = Mapping[str, Any] | Tensor | np.ndarray
"""A `state_dict`, its tensors also as arrays, or theta as a flat array [d]."""


_Kind = tuple[torch.Size, torch.dtype, torch.device]
_ADAPTER_ATTRIBUTES = ("merged_adapters", "lora_A")


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
    """Names and shapes of the tensors of theta in a network, and the reader of received models.

    `is_numpy` tells if flat arrays are those of NumPy. The network must keep the names, shapes,
    types and places of these tensors; all else of it is read where it is used.
    """

    def __init__(self, network: nn.Module, is_numpy: bool = False) -> None:
        tensors = parameters.shared_tensors(network)
        sizes = [tensor.numel() for tensor in tensors.values()]
        ends = list(itertools.accumulate(sizes))
        starts = [0, *ends[:-1]]
        self.network = network
        self.columns = dict(zip(tensors, map(slice, starts, ends), strict=True))
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.dim = sum(sizes)
        self.is_flat = isinstance(network, FlatModel)
        self.is_numpy = is_numpy
        self._kinds = _kinds(tensors)
        # Other names of theta's tensors: those of tied tensors, and those of PEFT's messages.
        theta_names = {id(tensor): name for name, tensor in tensors.items()}
        others = {**_named_tensors(network), **_peft_state(network)}
        self._aliases = {
            name: theta_names[id(tensor)]
            for name, tensor in others.items()
            if id(tensor) in theta_names
        }
        self._saved_names = frozenset(network.state_dict())
        statistics = batch_norm.statistics(network, "shared", "local", "dropped")
        variances = [name for name in statistics if name.endswith("running_var")]
        self._variances = [name for name in variances if name in self.columns]

    def require_same(self) -> None:
        """Raise ConfigError if the network has changed so that models do not fit any more."""
        for name, layer in self.network.named_modules():
            # A missing attribute of a module takes long to look up.
            names = {*layer.__dict__, *layer._parameters, *layer._modules}
            if names.isdisjoint(_ADAPTER_ATTRIBUTES):
                continue
            if getattr(layer, "merged", False) is True:
                raise ConfigError(
                    f"the adapter of `{name}` is merged into its layer, so that received models "
                    "would change nothing: call `unmerge_adapter()`; with loralib, set "
                    "`merge_weights=False`"
                )
            if getattr(layer, "disable_adapters", False) is True:
                raise ConfigError(
                    f"the adapter of `{name}` is disabled, so that received models would change "
                    "nothing: enable it before"
                )

        kinds = _kinds(parameters.shared_tensors(self.network))
        # In this order they are theta.
        if list(kinds.items()) == list(self._kinds.items()):
            return
        every = [*self._kinds, *kinds]
        changed = [name for name in every if kinds.get(name) != self._kinds.get(name)]
        name = (changed or every)[0]
        raise ConfigError(
            "the tensors that the network exchanges have changed since the agent was made: "
            f"`{name}` is {_in_words(kinds.get(name))}, and was "
            f"{_in_words(self._kinds.get(name))}. Freeze, convert and move layers before, or "
            "make a new agent"
        )

    def read_(self, model: Model, row: Float[Tensor, " d"]) -> str:
        """Copy a received model into a row, by the names and shapes of its tensors.

        Returns the reason to refuse the model, or an empty text. The row of a refused model is
        undefined.
        """
        reason = self._copy_(model, row)
        if reason:
            return reason
        for name in self._variances:
            if row[self.columns[name]].lt(0).any():
                return f"its `{name}` holds variances below 0"
        return ""

    def _copy_(self, model: Model, row: Float[Tensor, " d"]) -> str:
        """Copy a received model into a row; see `read_`."""
        if not isinstance(model, Mapping):
            return _copy_("it", model, (self.dim,), row)

        given = dict(zip(self.shapes, self.shapes, strict=True))
        others: list[Any] = []
        if model.keys() != self.shapes.keys():
            given = {}
            for name in model:
                if name in self._aliases:
                    given.setdefault(self._aliases[name], name)
                else:
                    others.append(name)
        constants = self._constants() if others else {}
        unknown = [name for name in others if name not in constants.keys() | self._saved_names]
        for name in self.shapes:
            if name not in given:
                return _lacks(name, unknown)
        if unknown:
            return (
                f"it holds `{unknown[0]}`, which the network does not have: send `agent.publish()`,"
                " or the state dict of the same network"
            )
        for name, key in given.items():
            reason = _copy_(f"`{key}`", model[key], self.shapes[name], row[self.columns[name]])
            if reason:
                return reason
        return self._difference(model, given, constants)

    def _difference(
        self,
        model: Mapping[str, Any],
        given: Mapping[str, str],
        constants: Mapping[str, Tensor],
    ) -> str:
        """Return the reason to refuse a model whose other tensors make it another function.

        These are second names of tied tensors, frozen parameters and constant buffers. `given` has
        the name in the model of each tensor of theta, which is valid.
        """
        for name, value in model.items():
            tied = self._aliases.get(name)
            if tied is not None and given[tied] != name:
                if not _equals(value, to_tensor("it holds", model[given[tied]])):
                    return f"`{name}` and `{given[tied]}` are one tensor in the network, and differ"
            elif name in constants and not _equals(value, constants[name]):
                return (
                    f"its `{name}` is not exchanged, and differs from the agent's: let all agents "
                    "have the same frozen parameters and buffers, or send `agent.publish()`"
                )
        return ""

    def _constants(self) -> dict[str, Tensor]:
        """Return the network's tensors that must be the same for all agents, by name.

        These are all except theta, counts of batches and statistics that are not exchanged.
        """
        own = batch_norm.statistics(self.network, "local", "dropped")
        return {
            name: tensor
            for name, tensor in _named_tensors(self.network).items()
            if name not in self._aliases
            and name not in own
            and not name.endswith("num_batches_tracked")
        }

    def frozen_checksum(self) -> Int[Tensor, ""]:
        """Return the sum of the bytes of frozen parameters, which an agent does not save."""
        frozen = [p for p in self.network.parameters() if not p.requires_grad]
        # Bytes, because frozen parameters may have any type.
        sums = [p.detach().reshape(-1).view(torch.uint8).sum().cpu() for p in frozen]
        return torch.stack([torch.zeros((), dtype=torch.int64), *sums]).sum()

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


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, _Kind]:
    """Return shape, type and device of tensors."""
    return {name: (tensor.shape, tensor.dtype, tensor.device) for name, tensor in tensors.items()}


def _in_words(kind: _Kind | None) -> str:
    """Return what `_kinds` says of a tensor as words."""
    if kind is None:
        return "not exchanged"
    shape, dtype, device = kind
    return f"{[*shape]} of {dtype} on {device}"


def _named_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by all their names."""
    return {
        **dict(network.named_parameters(remove_duplicate=False)),
        **dict(network.named_buffers(remove_duplicate=False)),
    }


def _peft_state(network: nn.Module) -> dict[str, Tensor]:
    """Return the parameters in a message of PEFT, whose names lack those of adapters."""
    adapters = getattr(network, "peft_config", None)
    if not isinstance(adapters, Mapping):
        return {}
    from peft import get_peft_model_state_dict

    state = network.state_dict(keep_vars=True)
    messages = [
        get_peft_model_state_dict(network, state, adapter, save_embedding_layers=False)
        for adapter in adapters
    ]
    # The names of two adapters are the same: such messages say nothing.
    names = collections.Counter(itertools.chain(*messages))
    return {k: tensor for m in messages for k, tensor in m.items() if names[k] == 1}


def _lacks(name: str, unknown: Sequence[Any]) -> str:
    """Return the reason to refuse a model without a tensor, with a cure."""
    cure = "send `agent.publish()`, or the whole state dict of the same network"
    if not unknown:
        return f"it lacks `{name}`: {cure}"
    other = next((str(one) for one in unknown if str(one).endswith(f".{name}")), None)
    if other is not None:
        cure = f"send it without the prefix `{other.removesuffix(name)}`"
    return f"it lacks `{name}` and holds `{other or unknown[0]}`: {cure}"


def _equals(value: Any, own: Tensor) -> bool:
    """Return whether a received tensor has the shape and numbers of the agent's.

    They are compared in the type of the received one, which may be of less precision.
    """
    if value is own:
        return True
    try:
        tensor = to_tensor("it holds", value)
    except ConfigError:
        return False
    return tensor.shape == own.shape and own.detach().to(tensor).equal(tensor)


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
