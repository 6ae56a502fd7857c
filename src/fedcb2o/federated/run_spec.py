"""What every agent of a run knows, whoever it is and wherever it works."""

import functools
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor, nn

from fedcb2o.federated import selection
from fedcb2o.federated.algorithm_spec import Algorithm
from fedcb2o.federated.inference import LossAverage
from fedcb2o.federated.local_update import Training
from fedcb2o.nn.batch_norm import has_local_statistics
from fedcb2o.nn.parameters import dimension, last_layer_shape, shared_tensors

LinearKernel = Literal["torch", "onednn"]
ConvolutionKernel = Literal["grouped", "unfolded", "mixed", "fourier"]


@dataclass(frozen=True)
class KernelConfig:
    """How products are computed, which changes bits alone: dense layers, convolutions (of one network, or of several at
    once), and how many agents train or models are evaluated `together`, in one program."""

    linear: LinearKernel = "torch"
    convolution: ConvolutionKernel = "grouped"
    models_per_batch: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """The terms on which the agents of a run work together.

    `share` is the attackers' share that rules are told to assume, `most_samples` the largest number of samples that
    an agent is believed to have trained on. `neighbours` says whom each agent may ask, where that is not everybody.
    """

    seed: int
    num_agents: int
    num_classes: int
    rounds: int
    budget: int
    model: str
    module: nn.Module
    training: Training
    algorithm: Algorithm
    loss_average: LossAverage
    malicious_share: float
    max_samples: int
    neighbours: tuple[Int[Tensor, " _k"], ...] | None = None
    participation: float = 1.0
    kernels: KernelConfig = KernelConfig()

    @functools.cached_property
    def dim(self) -> int:
        """d, the length of a model."""
        return dimension(self.module)

    @functools.cached_property
    def has_local_statistics(self) -> bool:
        """Whether each agent estimates statistics of its own for a model before it reads it."""
        return has_local_statistics(self.module)

    @property
    def max_asked(self) -> int:
        """How many others an agent asks in a round at most."""
        select = self.algorithm.select
        everybody = getattr(select, "func", select) is selection.everyone  # whatever the budget
        return self.num_agents if everybody else min(self.budget, self.num_agents)

    @functools.cached_property
    def last_layer(self) -> tuple[int, int] | None:
        """The shape of the network's last dense layer, where it ends in one."""
        return last_layer_shape(self.module)

    @functools.cached_property
    def layer_shapes(self) -> tuple[torch.Size, ...]:
        """The shapes of the tensors that a model is made of, in their order."""
        return tuple(tensor.shape for tensor in shared_tensors(self.module).values())
