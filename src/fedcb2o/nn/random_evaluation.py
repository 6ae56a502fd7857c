"""Networks that draw random numbers in evaluation: equal numbers in each forward pass.

A named random stream seeds PyTorch's generator before each forward pass in evaluation. Runs repeat,
all processes agree, and all models meet the same random numbers.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fedcb2o.nn.comparison import agree, first_difference
from fedcb2o.rng import stream


def seed_if_random_(
    name: str, modules: Sequence[nn.Module], x: Float[Tensor, "2 *features"], seed: int
) -> bool:
    """Seed a network that is random in evaluation, with a warning.

    Returns False for another network. `modules` are the network and copies of it; `x` has two
    samples. `name` is that of the model in messages, and `seed` that of the run.
    """
    place = _random_place(modules[0], x)
    if not place:
        return False
    warnings.warn(
        f"the model `{name}` draws random numbers in evaluation, first in {place}: all evaluations"
        " of a seed draw the same numbers, so that its runs repeat. Draw only in training, as by"
        " F.dropout(x, p, self.training), or say that it is meant: `model.random_evaluation` ="
        " true",
        stacklevel=2,
    )
    for module in modules:
        seed_evaluation_(module, stream(seed, "evaluation"))
    return True


def seed_evaluation_(module: nn.Module, draw: np.random.Generator) -> list[RemovableHandle]:
    """Seed PyTorch's generator before each forward pass of a network in evaluation.

    The handles end it.
    """
    hooks = _EvaluationSeed(int(draw.integers(2**63)))
    return [
        module.register_forward_pre_hook(hooks.seed_generator),
        # Also after an error in the forward pass.
        module.register_forward_hook(hooks.restore_generator, always_call=True),
    ]


def _random_place(module: nn.Module, x: Float[Tensor, "2 *features"]) -> str:
    """Return the layer in which a network draws random numbers in evaluation, in words.

    It is "" if the network draws none by PyTorch's generator. The network is left as it was, in
    evaluation mode.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if agree(module.eval()(x), module(x)):
            return ""
        seeded = []
        for _ in range(2):
            torch.default_generator.manual_seed(0)
            seeded.append(module(x))
        return first_difference(module, x, [x]) if agree(*seeded) else ""


class _EvaluationSeed:
    """Hooks around a forward pass; PyTorch's generator is as before after it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.state: Tensor | None = None

    def seed_generator(self, module: nn.Module, inputs: Any) -> None:
        if module.training:
            return
        self.state = torch.default_generator.get_state()
        if next(module.parameters()).device.type == "cpu":
            torch.default_generator.manual_seed(self.seed)
        else:
            torch.random.manual_seed(self.seed)

    def restore_generator(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self.state is not None:
            torch.default_generator.set_state(self.state)
            self.state = None
