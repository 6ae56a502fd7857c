"""What takes the steps of LocalUpdate in place of the paper's SGD with momentum (alg:FedCB2O).

An optimiser is a function (parameters, lr) -> a `torch.optim.Optimizer`; its further arguments are keywords. `lr` is
lambda2 * gamma. It is made anew in every round for each agent, so that nothing of it is carried over or exchanged.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.plugins import USER_FUNCTION, attribute_errors

__all__ = ["adamw"]

Optimiser = Callable[[Sequence[Tensor], float], Any]


def adamw(
    parameters: Sequence[Tensor],
    lr: float,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> Any:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), as `torch.optim.AdamW` has it."""
    import torch.optim  # its compiler takes a second to import, which nobody else waits for

    return torch.optim.AdamW(
        parameters, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay
    )


def make_step(
    optimiser: Optimiser, parameters: Sequence[Tensor], lr: float
) -> Callable[[Sequence[Tensor]], None]:
    """What takes a step of an optimiser, new for these parameters, by their gradients.

    Raises ConfigError where the function fails, or returned something else.
    """
    name = optimiser_name(optimiser)
    with attribute_errors("optimiser", name):
        made = optimiser(parameters, lr)
    if not callable(getattr(made, "step", None)):
        raise ConfigError(
            f"the optimiser `{name}` returned a {type(made).__name__}, expected a torch.optim.Optimizer"
        )

    def step(gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        with attribute_errors("optimiser", name):
            made.step()
        for parameter in parameters:
            parameter.grad = None

    return step


def optimiser_name(optimiser: Optimiser) -> str:
    """What messages call an optimiser, its keywords bound or not."""
    function = getattr(optimiser, "func", optimiser)
    return USER_FUNCTION.get(optimiser) or str(
        getattr(function, "__name__", type(function).__name__)
    )
