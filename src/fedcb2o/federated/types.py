"""Types of one round: what a selection, a criterion and a rule receive and return."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from fedcb2o.data import ValueRange
from fedcb2o.nn.low_rank import FactorPair
from fedcb2o.nn.parameters import LastLayer
from fedcb2o.plugins import Declaration, F


@dataclass(frozen=True)
class Losses:
    """Losses of m models on one agent's data (eq:benignAgentObj), or on those of several agents.

    Attributes:
        mean: Average loss L_j.
        by_class: Class losses L_{j,c}; 0 where the agent holds no sample of class c.
        present: Whether the agent holds a sample of each class.
        entropy_of: Computes `entropy`, which few functions read.
        per_sample: Loss of each sample, to compare models on the same samples.
        labels: Class of each sample; 0 for data without classes.
        is_cross_entropy: Whether the losses are the cross-entropies of `labels`.
    """

    mean: Float[Tensor, "*a m"]
    by_class: Float[Tensor, "*a m C"]
    present: Bool[Tensor, "*a C"]
    entropy_of: Callable[[], Float[Tensor, "*a m"]]
    per_sample: Float[Tensor, "*a m n"]
    labels: Int[Tensor, "*a n"]
    is_cross_entropy: bool = field(default=False, kw_only=True)

    @functools.cached_property
    def entropy(self) -> Float[Tensor, "*a m"]:
        """Mean entropy of the predictions, in nats; NaN for a model that is not finite."""
        return self.entropy_of()

    def __getitem__(self, k: int) -> "Losses":
        """Return the losses of one of several agents."""
        return self._map(lambda values: values[k])

    def clone(self) -> "Losses":
        """Return a copy that may be written to."""
        return self._map(Tensor.clone)

    def select(self, models: slice | Bool[Tensor, " m"]) -> "Losses":
        """Return the losses of some of the models."""
        return dataclasses.replace(
            self,
            mean=self.mean[..., models],
            by_class=self.by_class[..., models, :],
            entropy_of=lambda: self.entropy[..., models],
            per_sample=self.per_sample[..., models, :],
        )

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Losses":
        """Return the losses with each tensor changed."""
        names = ("mean", "by_class", "present", "per_sample", "labels")
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in names}
        return dataclasses.replace(self, entropy_of=lambda: change(self.entropy), **changed)


@dataclass(frozen=True)
class Contacts:
    """Peers that one agent has asked, with their likelihoods (eq:update_sampling_likelihood).

    Attributes:
        ids: Ids of the peers, ascending.
        likelihood: P_n^j of each; NaN for a peer that never answered.
    """

    ids: Int[Tensor, " k"]
    likelihood: Float[Tensor, " k"]


@dataclass(frozen=True)
class Received:
    """Models that one agent received (alg:localAggregation, line 2), or several agents.

    A model is a row of a buffer and never a copy. Fewer models than were asked for may arrive, or
    none.

    Attributes:
        ids: Sender of each model.
        rows: Row of the model buffer.
        num_samples: Training samples that the sender claims, clipped.
        round: Round of the model.
    """

    ids: Int[Tensor, "*a m"]
    rows: Int[Tensor, "*a m"]
    num_samples: Float[Tensor, "*a m"]
    round: Int[Tensor, "*a m"]

    def __getitem__(self, k: int | slice | Bool[Tensor, " m"]) -> "Received":
        """Return the models of one of several agents, or some models of one agent."""
        return Received(*(values[k] for values in self._tensors))

    def clone(self) -> "Received":
        """Return a copy that may be written to."""
        return Received(*(values.clone() for values in self._tensors))

    def with_own(self, own: "Received") -> "Received":
        """Return these models and, last, the agent's own."""
        pairs = zip(self._tensors, own._tensors, strict=True)
        return Received(*(torch.cat(pair, -1) for pair in pairs))

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return self.ids, self.rows, self.num_samples, self.round


SampleTransform = Callable[[Tensor], Tensor]
"""Samples [n, ...] -> changed samples of the same shape."""

Outputs = tuple[Float[Tensor, "m n *C"], Shaped[Tensor, "n *target"]]
"""Outputs of m models on n samples, before the softmax, and the labels or targets."""

ScalarObjective = Callable[[Float[Tensor, "k n *C"]], Float[Tensor, "k n"]]
"""Outputs of models on samples -> one number per sample, independent of the other samples."""


@dataclass(frozen=True, kw_only=True)
class AgentContext:
    """Knowledge of an agent other than the models that it received.

    Attributes:
        outputs: (models, transform, count) -> outputs of models on validation samples.
        samples: (count) -> validation samples as a network reads them, and their labels.
        outputs_per_model: (models, x) -> outputs of each model on its own samples.
        input_gradients: (models, x, objective) -> gradients of an objective at each sample.
        malicious_share: Share of attackers that the agent assumes, in [0, 1].
        value_range: Black and white in `samples`: the lowest and highest value of the data set.
        progress: Share of the run that is over, in [0, 1].
        layer_shapes: Shapes of a model's tensors, in order.
        factor_pairs: Low-rank adapters of a model.
        contacts_of: Makes the contacts.
        draw_of: Makes the generator.
    """

    outputs: Callable[..., Outputs]
    samples: Callable[[int], tuple[Float[Tensor, "k *features"], Shaped[Tensor, "k *target"]]]
    outputs_per_model: Callable[[Received, Float[Tensor, "m k *features"]], Float[Tensor, "m k *C"]]
    input_gradients: Callable[
        [Received, Float[Tensor, "m k *features"], ScalarObjective], Float[Tensor, "m k *features"]
    ]
    malicious_share: float = 0.0
    value_range: ValueRange = (0.0, 1.0)
    progress: float = 0.0
    layer_shapes: tuple[torch.Size, ...] = ()
    factor_pairs: tuple[FactorPair, ...] = ()
    contacts_of: Callable[[], Contacts]
    draw_of: Callable[[], np.random.Generator]

    @functools.cached_property
    def contacts(self) -> Contacts:
        """Contacts from before this round."""
        return self.contacts_of()

    @functools.cached_property
    def draw(self) -> np.random.Generator:
        """The agent's generator of this round."""
        return self.draw_of()


@dataclass(frozen=True)
class CriterionInput:
    """Input of a criterion or a rule: the view of one agent in round n.

    A batched criterion or rule gets several agents, with an axis over them in losses, ids and rows.

    Attributes:
        n: Round, counted from 0.
        models: Model buffer; rows of it are models.
        losses: Losses of the received models; None where the algorithm needs none.
        own_losses: Losses of the agent's own model (m = 1).
        received: The models received.
        own_entry: The agent's own model as if it was received.
        losses_of: (models, transform) -> losses of any models on the validation data.
        agent_context: Further knowledge; None for several agents.
        in_sublevel_set: For a criterion, the received models that line 6 weighs: those in Q_beta,
            and those that the guard `loss_tolerance` adds; None until they are known, and for a
            rule.
        previous: Row of the model before the round; None where it is not kept.
        tolerated: The received models within the guard `loss_tolerance`; None without the guard.
        last_layer: Place of the last linear layer in a model; None without one.
    """

    n: int
    models: Float[Tensor, "p d"]
    losses: Losses | None
    own_losses: Losses | None
    received: Received
    own_entry: Received
    losses_of: Callable[[Received, SampleTransform | None], Losses]
    agent_context: AgentContext | None
    in_sublevel_set: Bool[Tensor, "*a m"] | None = None
    previous: Int[Tensor, "*a"] | None = None
    tolerated: Bool[Tensor, "*a m"] | None = None
    last_layer: LastLayer | None = None

    def for_agent(
        self,
        k: int,
        losses_of: Callable[[Received, SampleTransform | None], Losses],
        context: AgentContext,
    ) -> "CriterionInput":
        """Return the view of agent k, without the axis over agents, with its own context."""
        own = self._per_agent(operator.itemgetter(k))
        return dataclasses.replace(self, losses_of=losses_of, agent_context=context, **own)

    def copy(self) -> "CriterionInput":
        """Return a copy of all but the models, so that writes change nothing for others."""
        return dataclasses.replace(self, **self._per_agent(operator.methodcaller("clone")))

    def _per_agent(self, change: Callable[[Any], Any]) -> dict[str, Any]:
        """Apply a function to the fields with an axis over agents."""
        # Not `dataclasses.asdict`, which would copy the model buffer.
        values = {name: getattr(self, name) for name in _PER_AGENT}
        return {name: None if value is None else change(value) for name, value in values.items()}

    def with_own_only(self) -> "CriterionInput":
        """Return the view with the agent's own model as the only one received."""
        return dataclasses.replace(
            self,
            losses=self.own_losses,
            received=self.own_entry,
            in_sublevel_set=None,
            tolerated=None,
        )

    def tolerated_only(self) -> "CriterionInput":
        """Return the view of one agent without the models that are not `tolerated`."""
        if self.tolerated is None:
            return self
        return dataclasses.replace(
            self,
            losses=None if self.losses is None else self.losses.select(self.tolerated),
            received=self.received[self.tolerated],
            tolerated=None,
        )

    @property
    def context(self) -> AgentContext:
        """Knowledge of one agent; raises TypeError for several agents."""
        if self.agent_context is None:
            raise TypeError(
                "`inputs.context` is one agent's, and a function declared `batched` gets several "
                "agents: drop the declaration"
            )
        return self.agent_context

    @property
    def theta(self) -> Float[Tensor, " d"]:
        """The agent's own model after LocalUpdate, before it mixes."""
        return self.models[int(self.own_entry.rows)]

    def losses_under(self, transform: SampleTransform) -> Losses:
        """Compute the losses of the received models on changed validation samples.

        Args:
            transform: Change of the samples.

        Returns:
            Losses of the received models.
        """
        return self.losses_of(self.received, transform)


# Fields of `CriterionInput` with an axis over agents.
_PER_AGENT = (
    "losses",
    "own_losses",
    "received",
    "own_entry",
    "in_sublevel_set",
    "previous",
    "tolerated",
)

Select = Callable[[Contacts, Int[Tensor, " c"], int, np.random.Generator], Int[Tensor, " s"]]
"""(contacts, candidates, budget, generator) -> ids of the peers to ask, A_n."""


@dataclass(frozen=True)
class CriterionValues:
    """Values G of a robustness criterion (Algorithm 2, line 5); low is trusted.

    `in_sublevel_set` tells whether each received model and, last, the agent's own is weighed: it is
    in Q_beta, or the guard `loss_tolerance` adds it.
    """

    values: Float[Tensor, "*a m"]
    own: Float[Tensor, "*a 1"]
    in_sublevel_set: Bool[Tensor, "*a k"]


Criterion = Callable[[CriterionInput], Float[Tensor, "*a m"]]
"""View -> one value per received model, low is trusted: G, or the average loss."""

BATCHED = Declaration[bool]("batched")
batched = BATCHED(True)
"""Declare that a criterion or a rule takes several agents and does not use `context`."""

ColumnReduction = Callable[[Float[Tensor, "k b"]], Float[Tensor, " b"]]
"""Some columns of k models -> the same columns of one model."""

OffsetColumnReduction = Callable[[Float[Tensor, "k b"], int], Float[Tensor, " b"]]
"""Some columns of k models, and the index of the first -> the same columns of one model."""


@dataclass(frozen=True)
class Reduction:
    """A reduction over coordinates, for a rule that is no weighted mean.

    Attributes:
        rows: Rows of the model buffer to reduce, the models X.
        reduce: Reduces some columns of X.
        mixing: P, where P X is reduced in place of X.
        takes_offset: Whether `reduce` also gets the index of the first column.
        weights: Weights of the models for the record; None where there are none.
    """

    rows: Int[Tensor, " k"]
    reduce: ColumnReduction | OffsetColumnReduction
    mixing: Float[Tensor, "j k"] | None = None
    takes_offset: bool = False
    weights: Float[Tensor, " k"] | None = None

    def apply_to_buffer(self, columns: Float[Tensor, "p b"], first: int) -> Float[Tensor, " b"]:
        """Reduce some columns of the model buffer, of which `first` is the first."""
        return self.apply(columns[self.rows], first)

    def apply(self, x: Float[Tensor, "k b"], first: int) -> Float[Tensor, " b"]:
        """Reduce some columns of X, of which `first` is the first."""
        # Mixed here, on some columns: P X of all columns would be a second model buffer.
        x = x if self.mixing is None else self.mixing.to(x.device, x.dtype) @ x
        # Few reductions depend on the column; those of users have one argument.
        return self.reduce(x, *[first] * self.takes_offset)


@dataclass(frozen=True)
class RuleOutput:
    """Output of a rule with more than weights.

    Attributes:
        outcome: Weights of the received models and, if it counts, of the agent's own, shape [m] or
            [m + 1]; or a reduction.
        previous_weight: Weight of the model before the round; all weights then sum to 1.
        f: Number of attackers that the rule assumed; None for a rule that assumes none.
    """

    outcome: Float[Tensor, "*a k"] | Reduction
    previous_weight: float | None = None
    f: int | None = None


Rule = Callable[[CriterionInput], Float[Tensor, " k"] | RuleOutput]
"""View -> normalised weights [m] or, with the agent's own model last, [m + 1]; or `RuleOutput`."""

RuleState = Mapping[str, Tensor]
"""State of an agent's rule, tensors by name; empty before the first round."""


@runtime_checkable
class Weighing(Protocol):
    """Lines 5 and 6 of an algorithm: weights by a criterion or a rule; see `algorithm2`."""

    @property
    def function(self) -> Callable[..., Any]:
        """The criterion or the rule."""

    @property
    def is_stateful(self) -> bool:
        """True if the rule keeps a state from round to round."""

    @property
    def sees_all(self) -> bool:
        """True if it gets models outside of `CriterionInput.tolerated`, too."""

    @property
    def is_batched(self) -> bool:
        """True if several agents are weighed at once."""

    def __call__(self, inputs: CriterionInput, state: RuleState) -> tuple[RuleOutput, RuleState]:
        """Return the weights of the received models and the new state."""


@dataclass(frozen=True)
class Stateful:
    """Declaration of a rule with a state."""

    uses_previous: bool


STATEFUL = Declaration[Stateful]("remembers")


def stateful(*, uses_previous: bool = False) -> Callable[[F], F]:
    """Declare a rule with a state, (state, view) -> (state, weights).

    Args:
        uses_previous: Whether the rule uses the model before the round, `inputs.previous`.

    Returns:
        A decorator of the rule.
    """
    return STATEFUL(Stateful(uses_previous))
