"""Specification of a run, which all agents share: its algorithm, training and kernels."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fedcb2o.federated import selection
from fedcb2o.federated.guards.checks import NO_GUARDS, Guards
from fedcb2o.federated.losses import Loss
from fedcb2o.federated.optimisers import Optimiser
from fedcb2o.federated.plugin_outputs import Metric
from fedcb2o.federated.sample_weights import SampleWeights
from fedcb2o.federated.sections import AgentsSection, LocalUpdateKeys
from fedcb2o.federated.types import Select, Weighing
from fedcb2o.nn.batch_norm import has_local_statistics
from fedcb2o.nn.low_rank import DOWN, UP, FactorPair, factor_pairs
from fedcb2o.nn.parameters import LastLayer, dimension, last_layer, shared_tensors

LinearKernel = Literal["torch", "onednn", "batched"]
ConvolutionKernel = Literal["grouped", "unfolded", "mixed", "fourier"]
_LAMBDA1 = 10.0
"""The drift towards the consensus point where nobody gives one (line 7)."""


class Training(LocalUpdateKeys):
    """Settings of LocalUpdate: the keys of a configuration, functions, and facts of the network.

    `optimiser` replaces SGD with momentum; `loss` is None for the cross-entropy. `rates` are the
    factors on the learning rate by round, None for a constant one. Batch norms do not
    accept a mini-batch of a single sample; a last sample then joins the batch before. With
    `is_sample_independent`, the network's output for a sample does not depend on the other samples
    of a training batch.
    """

    optimiser: Optimiser | None = None
    loss: Loss | None = None
    weights: SampleWeights | None = None
    rates: tuple[float, ...] | None = None
    accepts_single_sample: bool = True
    is_sample_independent: bool = False

    def in_round(self, n: int) -> "Training":
        """Return the settings of round n, counted from 0, with its learning rate."""
        if self.rates is None:
            return self
        factor = self.rates[min(n, len(self.rates) - 1)]
        return self.model_copy(update={"gamma": self.gamma * factor, "rates": None})


@dataclass(frozen=True)
class KernelConfig:
    """Numerical kernels, which change rounding only, and models per program (None: default)."""

    linear: LinearKernel = "torch"
    convolution: ConvolutionKernel = "grouped"
    models_per_batch: int | None = None


OwnLikelihood = Literal["sampled", "every_round"]


@dataclass(frozen=True)
class ClusterModels:
    """Models of the clusters in IFCA and DFCA.

    A coordinator holds `num_models` models (IFCA), or each agent does (`per_agent`, DFCA). An agent
    trains the model that fits it best. With `by_samples`, agents are weighed by numbers of samples;
    a robust `rule` replaces the average. Of `restarts` sets of initial models, the one that fits
    best after `trial_rounds` rounds goes on. A `server` has one model, without clusters.
    """

    num_models: int
    per_agent: bool = False
    by_samples: bool = False
    rule: functools.partial[Any] | None = None
    restarts: int = 1
    trial_rounds: int = 0
    server: "Server | None" = None

    def num_rows(self, num_agents: int) -> int:
        """Return the rows that the models of all holders and restarts take in the buffer."""
        if self.server is not None:  # its model, its last aggregate, and the agents' momenta
            return 2 + num_agents
        return self.num_models * (num_agents if self.per_agent else self.restarts)


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that aggregates the vectors of agents, as in centralised federated learning.

    Agents train the server's model x with step size lr. They send gradients (x - theta) / lr,
    "updates" theta - x, or "models" theta. The momentum of an agent is m <- momentum m +
    (1 - dampening) (x - theta) / lr, and theta = x - lr m. `aggregate` gets the vectors, the last
    aggregate and a generator.
    """

    aggregate: Callable[
        [Float[Tensor, "m d"], Float[Tensor, " d"], np.random.Generator], Float[Tensor, " d"]
    ]
    sent: Literal["gradients", "updates", "models"] = "gradients"
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0

    def add_momentum_(
        self,
        theta: Float[Tensor, " d"],
        memory: Float[Tensor, " d"],
        x: Float[Tensor, " d"],
        lr: float,
    ) -> None:
        """Replace the step of a trained model by that of its agent's momentum."""
        if self.momentum:
            memory.mul_(self.momentum).add_(x - theta, alpha=(1 - self.dampening) / lr)
            torch.sub(x, memory, alpha=lr, out=theta)

    def step(
        self,
        models: Float[Tensor, "m d"],
        x: Float[Tensor, " d"],
        last: Float[Tensor, " d"],
        lr: float,
        draw: np.random.Generator,
    ) -> tuple[Float[Tensor, " d"], Float[Tensor, " d"]]:
        """Return the server's next model, without weight decay, and the aggregate."""
        if self.sent == "models":
            aggregate = self.aggregate(models, last, draw)
            return aggregate, aggregate
        scale = -lr if self.sent == "gradients" else 1.0
        aggregate = self.aggregate((models - x) / scale, last, draw)
        return x + scale * aggregate, aggregate


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """The choices of a benign agent in LocalAggregation (alg:localAggregation).

    Attributes:
        select: Peer selection (line 1).
        weigh: The criterion and its weights, or a rule (lines 5 and 6).
        needs_losses: Validation losses are computed (line 3).
        lambda1: Drift towards the consensus point (line 7); None for 10 or 1 / gamma, the smaller.
        mixing_factor: Replaces lambda1 * gamma; None for the product.
        own_candidate: An agent may sample itself.
        kappa: kappa in the update of the likelihoods (line 4).
        zeta: zeta in the update of the likelihoods, in (0, 1].
        first_contact: "whole" takes the first likelihood of a peer without averaging.
        own_likelihood: "every_round" updates an agent's likelihood of asking itself in every round.
        reads_previous: The rule or the criterion reads the model before the round.
        validate_budget: Raises ConfigError for a budget that the rule does not admit.
        switching_interval: Rounds in which LocalUpdate trains one factor of low-rank adapters,
            before it trains the other; None for both at once.
    """

    select: Select
    weigh: Weighing
    needs_losses: bool
    lambda1: float | None
    mixing_factor: float | None
    own_candidate: bool = False
    kappa: float = 2.0
    zeta: float = 0.5
    first_contact: str = "average"
    own_likelihood: OwnLikelihood = "sampled"
    reads_previous: bool = False
    validate_budget: Callable[[int], None] | None = None
    clusters: ClusterModels | None = None
    guards: Guards = NO_GUARDS
    switching_interval: int | None = None

    def with_guards(self, guards: Guards) -> "Algorithm":
        """Return the algorithm with other guards; it computes losses if a guard needs them."""
        # A rule without losses can have a guard by losses.
        needs_losses = self.needs_losses or guards.loss_tolerance is not False
        return dataclasses.replace(self, guards=guards, needs_losses=needs_losses)

    @property
    def server(self) -> Server | None:
        """The server, in place of exchange between agents."""
        return None if self.clusters is None else self.clusters.server

    @property
    def keeps_previous(self) -> bool:
        """True if agents keep their models from before the round."""
        return self.reads_previous or self.guards.needs_previous

    def frozen_factor(self, n: int) -> str | None:
        """Return the part of the names of parameters not trained in round n; None for all."""
        if self.switching_interval is None:
            return None
        # B is trained first, because the gradient of A is 0 where B is.
        return (DOWN, UP)[n // self.switching_interval % 2]

    @functools.cached_property
    def is_batched(self) -> bool:
        """True if several agents are weighed at once."""
        # Agents have different numbers of tolerated models.
        has_equal_numbers = self.weigh.sees_all or self.guards.loss_tolerance is False
        return has_equal_numbers and self.weigh.is_batched

    @property
    def is_stateful(self) -> bool:
        """True if a rule state is kept from round to round."""
        keeps_trial = self.guards.exit_test is not False
        return keeps_trial or self.weigh.is_stateful or self.own_likelihood == "every_round"

    def factor(self, gamma: float) -> float:
        """Return the share of the consensus point in the new model (eq:local_agg_update)."""
        if self.mixing_factor is not None:
            return self.mixing_factor
        return min(_LAMBDA1 * gamma, 1.0) if self.lambda1 is None else self.lambda1 * gamma


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Specification of a run: what every agent knows.

    `num_classes` is 1 for data without classes. `agents` is the section of the configuration, as it
    is. `model` is the name of the network, for messages. Rules assume the share `malicious_share`
    of attackers, in [0, 1]. An agent may claim at most `max_samples` training samples. `neighbours`
    are the ids that each agent may ask; None for all. `training_seed` is that of LocalUpdate's
    random streams, where it is secret; None for `seed`. `user_functions` are the import paths of
    users' functions that receive models, by kind. `metrics` are those that the configuration added,
    by the name of their column. `loss_groups` divide validation samples in place of classes.
    `keep_best` lets evaluations have validation losses.
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
    training_seed: int | None = None
    user_functions: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, Metric] = dataclasses.field(default_factory=dict)
    loss_groups: functools.partial[Any] | None = None
    keep_best: bool = False

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
    def last_layer(self) -> LastLayer | None:
        """Place of the network's last linear layer in a model; None without one."""
        return last_layer(self.module, self.num_classes)

    @functools.cached_property
    def layer_shapes(self) -> tuple[torch.Size, ...]:
        """Shapes of a model's tensors, in order."""
        return tuple(tensor.shape for tensor in shared_tensors(self.module).values())

    @functools.cached_property
    def factor_pairs(self) -> tuple[FactorPair, ...]:
        """Low-rank adapters of the network, where its parameters are named as PEFT names them."""
        return factor_pairs(self.module)
