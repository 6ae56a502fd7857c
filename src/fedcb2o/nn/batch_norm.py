"""Running statistics of normalisation layers: not parameters, yet part of a network's function.

A batch norm (Ioffe and Szegedy, 2015), or an instance norm with `track_running_stats`, keeps
running means and variances of its training inputs and divides by them in evaluation. Statistics
have a mode:

- "shared": part of theta, changed by the forward pass and not by gradients;
- "local": estimated by each agent on its own training data for each model that it evaluates (as in
  AdaBN: Li et al., "Revisiting batch normalization for practical domain adaptation", 2016);
- "dropped": their initial values for ever.

A norm with frozen parameters is frozen as a whole, with its statistics. Without a mode, in a user's
own loop, all statistics are shared. Counts of batches are never part of a model: they start at 0 in
each LocalUpdate.
"""

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from fedcb2o.errors import ConfigError

StatisticsMode = Literal["shared", "local", "dropped"]

MAX_REFERENCE_SAMPLES = 256
"""Largest number of samples on which local statistics are estimated."""

_MODE_ATTRIBUTE = "agents_statistics"  # attribute of a norm that holds its mode
_STATISTIC_NAMES = ("running_mean", "running_var")


def set_statistics_mode(module: nn.Module, statistics: StatisticsMode | None) -> None:
    """Set the mode of the statistics of all norms; None for those of a user's own loop."""
    for layer in module.modules():
        if isinstance(layer, _NormBase):
            setattr(layer, _MODE_ATTRIBUTE, statistics)


def require_tracked_statistics(module: nn.Module) -> None:
    """Refuse a batch norm that uses batch statistics in evaluation, by ConfigError."""
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and layer.running_mean is None:
            raise ConfigError(
                f"the model's norm `{name}` keeps no statistics (track_running_stats=False), so its"
                " output for a sample depends on the other samples of the batch, in tests too:"
                " let it track them, or take a group norm"
            )


def statistics(module: nn.Module, *kinds: StatisticsMode) -> dict[str, Float[Tensor, " c"]]:
    """Return the statistics of norms with given modes, by their names."""
    return {
        f"{name}.{statistic}".lstrip("."): getattr(layer, statistic)
        for name, layer in _norm_layers(module, *kinds).items()
        for statistic in _STATISTIC_NAMES
    }


def has_local_statistics(module: nn.Module) -> bool:
    """Return whether an agent must estimate statistics before it evaluates the network."""
    return bool(_norm_layers(module, "local"))


def train_(module: nn.Module) -> None:
    """Switch a network to training, with dropped statistics fixed and batch counts of 0."""
    module.train()
    for layer in _norm_layers(module, "dropped").values():
        layer.eval()
    for layer in _norm_layers(module, "shared", "local").values():
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.zero_()


@contextlib.contextmanager
def estimate_statistics_mode(module: nn.Module) -> Iterator[None]:
    """Make the inputs inside a `with` block the local statistics of a network.

    All other layers are in evaluation mode.
    """
    module.eval()
    layers = _norm_layers(module, "local").values()
    original = [layer.momentum for layer in layers]
    for layer in layers:
        layer.train()
        # The running statistics become those of the input, without a part of the old ones.
        layer.momentum = 1.0
    try:
        with torch.no_grad():
            yield
    finally:
        for layer, momentum in zip(layers, original, strict=True):
            layer.eval()
            layer.momentum = momentum


def estimate_statistics_(module: nn.Module, x: Float[Tensor, "n *features"]) -> None:
    """Estimate a network's local statistics on samples, under its parameters."""
    with estimate_statistics_mode(module):
        module(x)


def _norm_layers(module: nn.Module, *kinds: StatisticsMode) -> dict[str, _NormBase]:
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, _NormBase)
        and layer.running_mean is not None
        and _statistics_mode(layer) in kinds
    }


def _statistics_mode(layer: _NormBase) -> StatisticsMode:
    mode: StatisticsMode | None = getattr(layer, _MODE_ATTRIBUTE, None)
    # In a user's own loop, a norm with frozen parameters may still change its statistics.
    if mode is None:
        return "shared"
    own_parameters = list(layer.parameters(recurse=False))
    # A norm with frozen parameters is frozen as a whole.
    if own_parameters and not any(p.requires_grad for p in own_parameters):
        return "dropped"
    return mode
