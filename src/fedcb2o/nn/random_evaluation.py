"""Networks that draw random numbers in evaluation: equal numbers in each forward pass.

A named random stream seeds PyTorch's generator before each forward pass in evaluation. Runs repeat,
all processes agree, and all models meet the same random numbers.

Example:
    >>> from fedcb2o.rng import stream
    >>> network = nn.Sequential(nn.Linear(4, 2), nn.Dropout()).eval()
    >>> _ = network[1].train()
    >>> seed_evaluation_(network, stream(0, "evaluation"))
    >>> x = torch.ones(1, 4)
    >>> torch.equal(network(x), network(x))
    True
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def seed_evaluation_(module: nn.Module, draw: np.random.Generator) -> None:
    """Seed PyTorch's generator before each forward pass of a network in evaluation.

    Args:
        module: A network.
        draw: Source of the seed.
    """
    hooks = _EvaluationSeed(int(draw.integers(2**63)))
    module.register_forward_pre_hook(hooks.seed_generator)
    module.register_forward_hook(hooks.restore_generator, always_call=True)


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
