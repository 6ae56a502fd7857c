"""Optimisers of LocalUpdate in place of the paper's SGD with momentum (alg:FedCB2O).

An optimiser is a function (parameters, lr, *, ...) -> a `torch.optim.Optimizer`; its keyword
arguments are parameters of a configuration. `lr` is lambda2 * gamma. Every agent makes a new one in
every round, so that none of its state is carried over or exchanged.

>>> import torch
>>> adamw([torch.zeros(2, requires_grad=True)], 0.1).defaults["lr"]
0.1
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fedcb2o.errors import ConfigError, describe_type
from fedcb2o.plugins import attribute_errors, function_name

__all__ = ["adamw", "sgd"]

Optimiser = Callable[[Sequence[Tensor], float], Any]
"""(parameters, lr) -> a `torch.optim.Optimizer`."""


def adamw(
    parameters: Sequence[Tensor],
    lr: float,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> Any:
    """Return Adam with decoupled weight decay (Loshchilov and Hutter, 2019).

    Args:
        parameters: Parameters to train.
        lr: Learning rate.
        beta1: Decay of the mean of the gradients, in [0, 1).
        beta2: Decay of the mean of their squares, in [0, 1).
        eps: Added to the denominator.
        weight_decay: Rate of the decay.

    Returns:
        A `torch.optim.AdamW`.
    """
    import torch.optim  # its compiler takes a second to import

    betas = (beta1, beta2)
    return torch.optim.AdamW(parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def sgd(
    parameters: Sequence[Tensor], lr: float, *, momentum: float = 0.9, weight_decay: float = 0.01
) -> Any:
    """Return SGD with momentum and weight decay, such as for vectors of few samples.

    Args:
        parameters: Parameters to train.
        lr: Learning rate.
        momentum: Decay of the sum of the gradients, in [0, 1).
        weight_decay: Rate of the decay, which is added to the gradients.

    Returns:
        A `torch.optim.SGD`.
    """
    import torch.optim  # its compiler takes a second to import

    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)


def make_optimiser(optimiser: Optimiser, parameters: Sequence[Tensor], lr: float) -> Any:
    """Make a new optimiser over all parameters, an object with a `step`."""
    name = function_name(optimiser)
    with attribute_errors("optimiser", name):
        instance = optimiser(parameters, lr)
    if not callable(getattr(instance, "step", None)):
        raise ConfigError(
            f"the optimiser `{name}` returned {describe_type(instance)}, "
            "expected a torch.optim.Optimizer"
        )

    groups = getattr(instance, "param_groups", None)
    if groups is None:
        return instance
    # A parameter that the optimiser does not hold would never be trained.
    held = {id(p) for group in groups for p in group["params"]}
    missing = [p for p in parameters if id(p) not in held]
    kind = f"the optimiser `{name}` returned a {type(instance).__name__}"
    if len(missing) == len(parameters):
        raise ConfigError(
            f"{kind} over other tensors than the parameters that it received, such as copies, so "
            "that nothing would be trained: make a new one over `parameters` themselves"
        )
    if missing:
        raise ConfigError(
            f"{kind} without {len(missing)} of {len(parameters)} parameters, such as one of shape "
            f"{tuple(missing[0].shape)}: pass on all `parameters`, and freeze the others in the "
            "model by requires_grad_(False)"
        )
    return instance


def make_step(
    optimiser: Optimiser, parameters: Sequence[Tensor], lr: float
) -> Callable[[Sequence[Tensor | None]], None]:
    """Make a new optimiser and return its step, a function of gradients, in place."""
    name = function_name(optimiser)
    instance = make_optimiser(optimiser, parameters, lr)

    def step(gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        with attribute_errors("optimiser", name):
            instance.step()
        for parameter in parameters:
            parameter.grad = None

    return step
