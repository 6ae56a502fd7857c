"""Checks of users' losses and optimisers, before a run begins.

A loss must be a differentiable function of one output and one target. An optimiser must change all
parameters that it receives.

>>> check_loss("squared", lambda o, y: (o - y).square(), torch.rand(2), torch.zeros(2))
"""

import inspect
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from fedcb2o.data import Shard
from fedcb2o.errors import ConfigError
from fedcb2o.federated.inference import per_sample_losses
from fedcb2o.federated.losses import Loss
from fedcb2o.federated.optimisers import Optimiser, make_optimiser
from fedcb2o.nn.comparison import agree, equal
from fedcb2o.plugins import attribute_errors, function_name

_LOG = logging.getLogger(__name__)

_OUTPUT_SCALES = (1.0, 10.0, 100.0)  # of outputs, on all of which a loss without slope has none

_MAX_CANDIDATES = 1024  # samples among which a different one is searched


def different_samples(shard: Shard) -> list[int]:
    """Return the indices of two samples that differ, in their targets where possible.

    The first index is 0.
    """
    is_other = shard.y.ne(shard.y[0]).reshape(len(shard), -1).any(1)
    candidates = is_other.nonzero().flatten()[:_MAX_CANDIDATES]
    if not len(candidates):
        candidates = torch.arange(len(shard))[:_MAX_CANDIDATES]
    differs = shard.x[candidates].ne(shard.x[0]).reshape(len(candidates), -1).any(1)
    return [0, int(candidates[differs.int().argmax()])]


def check_loss(
    name: str, loss: Loss, outputs: Float[Tensor, "2 *k"], targets: Shaped[Tensor, "2 *target"]
) -> None:
    """Check that a loss is a differentiable function of one output and its target.

    The outputs are for two samples with different targets. ConfigError is raised for a loss that
    fails, is random, is NaN, has no gradient or writes into the targets. A loss of a sample that
    depends on other samples gives a UserWarning.
    """
    original = targets.clone()
    leaf = outputs.detach().clone().requires_grad_()
    # Twice together and once apart, to find random numbers, state and mixed samples.
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            together = per_sample_losses(loss, leaf.clone(), targets, 1)
        except ConfigError:
            raise
        except (RuntimeError, IndexError, ValueError) as error:
            raise ConfigError(
                f"the loss `{name}` cannot compare outputs of shape {tuple(outputs.shape)} and type"
                f" {outputs.dtype} with targets of shape {tuple(targets.shape)} and type"
                f" {targets.dtype}: {error}"
            ) from error
        again = per_sample_losses(loss, leaf.clone(), targets, 1)
        rows = range(len(targets))
        alone = torch.cat(
            [per_sample_losses(loss, leaf[[i]], targets[[i]], 1) for i in rows]
        ).detach()

    if not equal(targets, original):
        raise ConfigError(f"the loss `{name}` writes into the targets: let it compute new tensors")
    if together.isnan().any():
        raise ConfigError(
            f"the loss `{name}` is NaN for outputs {outputs.flatten().tolist()[:4]} and targets"
            f" {targets.flatten().tolist()[:4]}: let it be a number for any outputs"
        )
    if not agree(together, again):
        raise ConfigError(
            f"the loss `{name}` draws random numbers or keeps state: two calls differ. Let it be a"
            " function of outputs and targets"
        )
    if not agree(together, alone):
        warnings.warn(
            f"the loss `{name}` of a sample depends on other samples, so that training and"
            f" validation depend on the batch: two samples have the losses {_shown(together)}"
            f" together and {_shown(alone)} one by one. Compare equal shapes, such as"
            f" outputs.squeeze(1) (outputs are {tuple(outputs.shape)}, targets"
            f" {tuple(targets.shape)}), and take no mean over samples",
            stacklevel=2,
        )
    _check_slope(name, loss, _slope(together, leaf), outputs, targets)


def check_optimiser(optimiser: Optimiser, module: nn.Module, lr: float) -> None:
    """Refuse an optimiser whose step does not change the parameters of a network.

    The network is not changed. ConfigError is raised if the optimiser fails, or trains none or only
    a part of the parameters.
    """
    name = function_name(optimiser)
    named = {key: p.detach() for key, p in module.named_parameters() if p.requires_grad}
    trial = [p.clone().requires_grad_() for p in named.values()]
    instance = make_optimiser(optimiser, trial, lr)
    kind = f"the optimiser `{name}` returned a {type(instance).__name__}"
    needed = _required_arguments(instance.step)
    if needed:
        raise ConfigError(
            f"{kind}, whose step needs the argument `{needed[0]}`: return a torch.optim.Optimizer"
            " whose step needs no argument, such as SGD or Adam (not LBFGS, which needs a closure)"
        )

    # No number is 0, so that each parameter should move.
    for p in trial:
        p.grad = torch.linspace(0.5, 1.5, p.numel()).view_as(p)
    with attribute_errors("optimiser", name), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of schedulers, which are refused below
        instance.step()
    if any(not torch.equal(p, q) for p, q in zip(trial, named.values(), strict=True)):
        return
    groups = getattr(instance, "param_groups", None)
    if groups and all(group.get("lr") == 0 for group in groups):
        _LOG.warning("the optimiser `%s` has learning rate 0: training changes no model.", name)
        return
    raise ConfigError(
        f"{kind}, whose step changes no parameter: return a torch.optim.Optimizer over"
        " `parameters` (not a learning-rate scheduler)"
    )


def _slope(losses: Tensor, outputs: Tensor) -> Tensor | None:
    """Return the gradient of losses with respect to outputs; None without one."""
    if not losses.requires_grad:
        return None
    with torch.enable_grad():
        total = losses.sum()
    return torch.autograd.grad(total, outputs, allow_unused=True)[0]


def _check_slope(
    name: str, loss: Loss, slope: Tensor | None, outputs: Tensor, targets: Tensor
) -> None:
    """Refuse a loss without a gradient, or whose gradient is 0 for any outputs."""
    cure = "take out `argmax`, `round`, comparisons, `detach()` and `torch.no_grad()`"
    if slope is None:
        raise ConfigError(f"the loss `{name}` has no gradient, so that nothing trains: {cure}")
    if slope.any():
        return

    # The gradient may be 0 at these outputs alone: others are tried, of several scales.
    draw = torch.Generator().manual_seed(0)
    for scale in _OUTPUT_SCALES:
        noise = torch.randn(outputs.shape, generator=draw)
        leaf = (outputs.detach() + scale * noise).requires_grad_()
        try:
            with torch.enable_grad():
                other = _slope(per_sample_losses(loss, leaf.clone(), targets, 1), leaf)
        except Exception:  # outputs may have to be probabilities
            return
        if other is not None and other.any():
            return
    raise ConfigError(f"the loss `{name}` has gradient 0, so that nothing trains: {cure}")


def _shown(losses: Tensor) -> str:
    return ", ".join(f"{value:.4g}" for value in losses.tolist())


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of compiled functions
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]
