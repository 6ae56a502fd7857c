"""Specification of a run, which all agents share.

>>> KernelConfig(linear="onednn").convolution
'grouped'
"""

import functools
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor, nn

from fedcb2o.federated import selection
from fedcb2o.federated.algorithm_spec import Algorithm
from fedcb2o.federated.losses import Loss
from fedcb2o.federated.optimisers import Optimiser
from fedcb2o.federated.sections import AgentsSection, LocalUpdateKeys
from fedcb2o.nn.batch_norm import has_local_statistics
from fedcb2o.nn.parameters import dimension, last_layer_shape, shared_tensors

LinearKernel = Literal["torch", "onednn"]
ConvolutionKernel = Literal["grouped", "unfolded", "mixed", "fourier"]


class Training(LocalUpdateKeys):
    """Settings of LocalUpdate: the keys of a configuration, functions, and facts of the network.

    Attributes:
        optimiser: Replaces SGD with momentum.
        loss: Loss to minimise; None for the cross-entropy.
        accepts_single_sample: Whether a mini-batch may have one sample, which batch norms reject; a
            last sample otherwise joins the batch before.
        is_sample_independent: Whether the network's output for a sample does not depend on the
            other samples of a training batch.
    """

    optimiser: Optimiser | None = None
    loss: Loss | None = None
    accepts_single_sample: bool = True
    is_sample_independent: bool = False


@dataclass(frozen=True)
class KernelConfig:
    """Numerical kernels; they change the rounding of results and nothing else.

    Attributes:
        linear: Kernel of dense layers.
        convolution: Kernel of convolutions.
        models_per_batch: Models that are trained or evaluated in one program; None for the default.
    """

    linear: LinearKernel = "torch"
    convolution: ConvolutionKernel = "grouped"
    models_per_batch: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Specification of a run: what every agent knows.

    Attributes:
        seed: Seed of all random streams.
        num_agents: N, the number of agents.
        num_classes: C, the number of classes; 1 for data without classes.
        rounds: T, the number of rounds.
        agents: The section of the configuration: M, participation, average of validation losses.
        model: Name of the model, for messages.
        module: The network.
        training: Settings of LocalUpdate.
        algorithm: Settings of LocalAggregation.
        malicious_share: Share of attackers that rules assume, in [0, 1].
        max_samples: Largest number of training samples that an agent may claim.
        neighbours: Ids that each agent may ask; None for all.
        kernels: Numerical kernels.
    """

    seed: int
    num_agents: int
    num_classes: int
    rounds: int
    agents: AgentsSection
    model: str
    module: nn.Module
    training: Training
    algorithm: Algorithm
    malicious_share: float
    max_samples: int
    neighbours: tuple[Int[Tensor, " _k"], ...] | None = None
    kernels: KernelConfig = KernelConfig()

    @functools.cached_property
    def dim(self) -> int:
        """d, the length of a model."""
        return dimension(self.module)

    @functools.cached_property
    def has_local_statistics(self) -> bool:
        """True where each agent estimates its own batch-norm statistics for every model."""
        return has_local_statistics(self.module)

    @property
    def max_asked(self) -> int:
        """Largest number of peers that an agent asks in a round."""
        select = self.algorithm.select
        if getattr(select, "func", select) is selection.everyone:  # whatever the budget
            return self.num_agents
        return min(self.agents.budget, self.num_agents)

    @functools.cached_property
    def last_layer(self) -> tuple[int, int] | None:
        """Shape of the network's last dense layer; None for another last layer."""
        return last_layer_shape(self.module)

    @functools.cached_property
    def layer_shapes(self) -> tuple[torch.Size, ...]:
        """Shapes of a model's tensors, in order."""
        return tuple(tensor.shape for tensor in shared_tensors(self.module).values())
