"""The contracts of one round: what a selection, a criterion, a rule and an attack may look at."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from fedcb2o.data._dataset import Shard
from fedcb2o.errors import ConfigError
from fedcb2o.plugins import Declaration, F


@dataclass(frozen=True)
class Losses:
    """Validation losses of m models on one agent's data (Algorithm 2, line 3; eq:benignAgentObj), or of several agents
    with an axis over them.

    `by_class` is zero where the agent holds no sample of a class; `present` says where it holds one. `entropy` is the
    mean entropy of a model's predictions, in nats; NaN for a model that is not finite. `each` is the loss of each
    sample, and `labels` are their classes, so that models can be compared on the same samples; without classes all 0.
    """

    mean: Float[Tensor, "*a m"]
    by_class: Float[Tensor, "*a m C"]
    present: Bool[Tensor, "*a C"]
    entropy: Float[Tensor, "*a m"]
    per_sample: Float[Tensor, "*a m n"]
    labels: Int[Tensor, "*a n"]

    def __getitem__(self, k: int) -> "Losses":
        """Those of one of several agents."""
        return Losses(*(values[k] for values in self._tensors))

    def copy(self) -> "Losses":
        """The same, whoever writes to it."""
        return Losses(*(values.clone() for values in self._tensors))

    def select(self, models: slice) -> "Losses":
        """Those of some of the models."""
        mean = self.mean[..., models]
        entropy = self.entropy[..., models]
        return Losses(
            mean,
            self.by_class[..., models, :],
            self.present,
            entropy,
            self.per_sample[..., models, :],
            self.labels,
        )

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return self.mean, self.by_class, self.present, self.entropy, self.per_sample, self.labels


@dataclass(frozen=True)
class Contacts:
    """The peers an agent has asked so far, and the sampling likelihood P_n^j of each (eq:update_sampling_likelihood).

    `ids` ascend. A peer that was asked and never answered has likelihood NaN: it was met, nothing is known of it.
    """

    ids: Int[Tensor, " k"]
    likelihood: Float[Tensor, " k"]


@dataclass(frozen=True)
class Received:
    """The models that one agent downloaded in a round (alg:localAggregation, line 2): rows of a pool, never a copy.

    May be fewer than were asked, or none. `num_samples` is what each peer says it trained on, and `round` the round
    that it says its model is of, both within the bounds of `admit`. Of several agents that received equally many, with
    an axis over them.
    """

    ids: Int[Tensor, "*a m"]
    rows: Int[Tensor, "*a m"]
    num_samples: Float[Tensor, "*a m"]
    round: Int[Tensor, "*a m"]

    def __getitem__(self, k: int | slice | Bool[Tensor, " m"]) -> "Received":
        """What one of several agents received, or some of what one did."""
        return Received(*(each[k] for each in self._tensors))

    def copy(self) -> "Received":
        """The same, whoever writes to it."""
        return Received(*(each.clone() for each in self._tensors))

    def with_own(self, own: "Received") -> "Received":
        """These and, last, the agent's own."""
        return Received(
            *(torch.cat(pair, -1) for pair in zip(self._tensors, own._tensors, strict=True))
        )

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return self.ids, self.rows, self.num_samples, self.round


SampleTransform = Callable[[Tensor], Tensor]
"""Samples [n, ...] -> as many, changed: what a criterion tries models on."""

Outputs = tuple[Float[Tensor, "m n *C"], Shaped[Tensor, "n *target"]]
"""What m models make of n samples, before the softmax, and the labels of these, or what else is to be told."""

ScalarObjective = Callable[[Float[Tensor, "k n *C"]], Float[Tensor, "k n"]]
"""The outputs of some models for samples of their own, on the device of the run -> a number of each sample, which no
other's outputs change."""


@dataclass(frozen=True, kw_only=True)
class AgentContext:
    """What an agent knows beside what it receives: whom it judges with, and what it may assume.

    `outputs_of` gives what models make of its validation data, or of so many, or of these changed. `some_samples` gives
    so many of these, spread over all, as a network reads them, with their labels; `outputs_at` what models make of
    samples of their own, and `gradients_of` how what a `Slope` makes of that changes with each sample. `share` is the
    attackers' share that it assumes, `progress` how much of the run is over, from 0 to 1. `head` is the shape [C, h] of
    the last dense layer's weight, where the network ends in one; `layers` the shapes of the tensors that a model is
    made of, in their order. `contacts` and `draw` are made when they are asked for.
    """

    outputs: Callable[..., Outputs]  # of models, of a change or None, and at how many
    samples: Callable[[int], tuple[Float[Tensor, "k *features"], Shaped[Tensor, "k *target"]]]
    outputs_per_model: Callable[[Received, Float[Tensor, "m k *features"]], Float[Tensor, "m k *C"]]
    input_gradients: Callable[
        [Received, Float[Tensor, "m k *features"], ScalarObjective], Float[Tensor, "m k *features"]
    ]
    malicious_share: float = 0.0
    progress: float = 0.0
    last_layer: tuple[int, int] | None = None
    layer_shapes: tuple[torch.Size, ...] = ()
    contacts_of: Callable[[], Contacts]
    draw_of: Callable[[], np.random.Generator]

    @functools.cached_property
    def contacts(self) -> Contacts:
        """The peers that it knows from before this round."""
        return self.contacts_of()

    @functools.cached_property
    def draw(self) -> np.random.Generator:
        """Its own generator of this round."""
        return self.draw_of()


@dataclass(frozen=True)
class CriterionInput:
    """All that a criterion or a rule may look at, from the view of one agent in round `n`.

    `pool` holds the models in its rows. `losses` are the received models' losses on the agent's validation data, and
    `own` those of its own model (m = 1); both are None where the algorithm does not judge. `me` is the agent itself as
    if it was received. `among` says which received models are in the sub-level set, None where all are asked about.
    `before` is the row of the pool that holds the model which it began the round with, None where nobody asked to keep
    it. `losses_of` gives the losses of any models on its validation data, or on those changed. What is declared
    `together` gets several agents in one, with an axis over them in losses, ids, rows and numbers of samples, and an
    error where it looks at `local`, since `knows` is then None.
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

    def for_agent(
        self,
        k: int,
        losses_of: Callable[[Received, SampleTransform | None], Losses],
        context: AgentContext,
    ) -> "CriterionInput":
        """The view of one of several agents."""
        losses, own = (None if each is None else each[k] for each in (self.losses, self.own_losses))
        among, before = (
            None if each is None else each[k] for each in (self.in_sublevel_set, self.previous)
        )
        return CriterionInput(
            self.n,
            self.models,
            losses,
            own,
            self.received[k],
            self.own_entry[k],
            losses_of,
            context,
            among,
            before,
        )

    def copy(self) -> "CriterionInput":
        """The same with all but the models copied: who writes to it changes nothing for others."""
        losses, own = (
            None if each is None else each.copy() for each in (self.losses, self.own_losses)
        )
        among, before = (
            None if each is None else each.clone() for each in (self.in_sublevel_set, self.previous)
        )
        received = self.received.copy()
        me = self.own_entry.copy()
        return dataclasses.replace(
            self,
            losses=losses,
            own_losses=own,
            received=received,
            own_entry=me,
            in_sublevel_set=among,
            previous=before,
        )

    def with_own_only(self) -> "CriterionInput":
        """The same with the agent's own model as the only one received."""
        return dataclasses.replace(
            self, losses=self.own_losses, received=self.own_entry, in_sublevel_set=None
        )

    @property
    def context(self) -> AgentContext:
        """What the agent knows beside; raises TypeError where several are judged at once."""
        if self.agent_context is None:
            raise TypeError(
                "`judged.local` is what one agent knows, and what declares `together` looks at several at once: drop it"
            )
        return self.agent_context

    @property
    def theta(self) -> Float[Tensor, " d"]:
        """The agent's own model after this round's LocalUpdate, before it mixes."""
        return self.models[int(self.own_entry.rows)]

    def losses_under(self, transform: SampleTransform) -> Losses:
        """The received models' losses on the agent's validation data as `change` makes them: noise, a patch."""
        return self.losses_of(self.received, transform)


Select = Callable[[Contacts, Int[Tensor, " c"], int, np.random.Generator], Int[Tensor, " s"]]
"""(contacts, candidates, budget, draw) -> the ids to ask: A_n."""

@dataclass(frozen=True)
class CriterionValues:
    """Values G of a robustness criterion (Algorithm 2, line 5).

    Attributes:
        values: G^i of each received model, in float64; low is trusted.
        own: G of the agent's own model.
        counted: Members of the sub-level set, the received models and, last, the agent's own.
        is_average_loss: Whether G is the average loss itself, as before round T_G.
    """

    values: Float[Tensor, "*a m"]
    own: Float[Tensor, "*a 1"]
    counted: Bool[Tensor, "*a k"]
    is_average_loss: bool = False


Criterion = Callable[[CriterionInput], Float[Tensor, "*a m"]]
"""A value for each received model; low is trusted (G, or the average loss)."""

BATCHED = Declaration[bool]("together")
batched = BATCHED(True)
"""Declares a criterion or a rule that takes the axis over agents, and looks at nothing `local`."""

ColumnReduction = Callable[[Float[Tensor, "k b"]], Float[Tensor, " b"]]
"""A block of columns of k models -> the same columns of one."""

OffsetColumnReduction = Callable[[Float[Tensor, "k b"], int], Float[Tensor, " b"]]
"""The same, told the number of the first of these columns."""


@dataclass(frozen=True)
class Reduction:
    """What a rule makes of models where no weights tell it: `reduce` of each block of columns of X, the models in
    `rows` of the pool, or with `mixing` P of the rows of P X. Where it is `placed`, `reduce` also gets the number of
    the block's first column: for what differs from layer to layer, and for noise. `weights` are what the models count
    in it, where that can be said: for the record."""

    rows: Int[Tensor, " k"]
    reduce: ColumnReduction | OffsetColumnReduction
    mixing: Float[Tensor, "j k"] | None = None
    takes_offset: bool = False
    weights: Float[Tensor, " k"] | None = None

    def apply_to_buffer(self, group: Float[Tensor, "p b"], first: int) -> Float[Tensor, " b"]:
        """What it makes of a block of columns of the pool, `first` and those after it."""
        return self.apply(group[self.rows], first)

    def apply(self, x: Float[Tensor, "k b"], first: int) -> Float[Tensor, " b"]:
        """What it makes of a block of columns of X."""
        x = x if self.mixing is None else self.mixing.to(x.device, x.dtype) @ x
        return self.reduce(x, *[first] * self.takes_offset)


@dataclass(frozen=True)
class RuleOutput:
    """What a rule decided that also says how: `outcome` are weights of the received models and, if it counts, of the
    own one [m or m + 1], or a reduction. `before` is the weight of the model before the round; where it has one, all
    sum to 1. `f` is the number of attackers that the rule assumed, where it assumes one. `values` are those of the
    criterion, where there is one, that a peer's record may count beside its losses; of several agents [a, m]."""

    outcome: Float[Tensor, "*a k"] | Reduction
    previous_weight: float | None = None
    f: int | None = None


Rule = Callable[[CriterionInput], Float[Tensor, " k"] | RuleOutput]
"""Normalised weights of the received models [m], or of those and, last, of the agent's own [m + 1]; or `Weighed`."""

RuleState = Mapping[str, Tensor]
"""What an agent's rule keeps from one round to the next, by name; nothing before the first."""

StatefulRule = Callable[
    [RuleState, CriterionInput], tuple[RuleState, Float[Tensor, " k"] | RuleOutput]
]
"""A rule that also gets what it kept after the agent's round before, and returns what it keeps."""


@dataclass(frozen=True)
class Stateful:
    """What a rule with memory declares: whether it looks at the model `before` the round."""

    uses_previous: bool


STATEFUL = Declaration[Stateful]("remembers")


def stateful(*, uses_previous: bool = False) -> Callable[[F], F]:
    """Declares a rule with memory, (state, judged) -> (state, weights); `before`: it looks at the model that the agent
    began the round with, the row `judged.before` of the pool."""
    return STATEFUL(Stateful(uses_previous))


Poison = Callable[..., Shard]
"""(shard, draw) -> what a malicious agent trains on instead of its own data; (shard, draw, me) with its id."""

Knowledge = Literal["fellows", "benign"]
"""Whose models of a round an attack may see, beside its own."""


@dataclass(frozen=True)
class Threat:
    """What an attack on models declares by `knows`: its published threat model."""

    knows: frozenset[str] = frozenset()
    each_receiver: bool = False
    on_poisoned_data: bool = False


THREAT = Declaration[Threat]("threat")


def knows(
    *models: str, each_receiver: bool = False, on_poisoned_data: bool = False
) -> Callable[[F], F]:
    """Declares an attack on models, and whose models it sees: those of its "fellows", of "benign" agents, or neither.

    `each_receiver`: it may publish another model for every receiver. `on_poisoned_data`: it makes no sense for an agent
    that trains on true data.
    """
    if unknown := set(models) - set(get_args(Knowledge)):
        raise ConfigError(
            f'an attack may know the models of "fellows" and of "benign" agents, got {sorted(unknown)}'
        )
    return THREAT(Threat(frozenset(models), each_receiver, on_poisoned_data))


@dataclass(frozen=True, kw_only=True)
class AttackView:
    """All that an attack on models may look at, from the view of one attacker in round `n`, after LocalUpdate.

    `own` is the model that it trained, `before` the one that it began the round with, `data` its own samples without
    poison, and `losses` gives the losses of models [m, d] on them. `receivers` are the ids of all benign agents. What
    `fellows` and `benign` return is not to be written to.
    """

    n: int
    agent: int
    cluster: int
    num_clusters: int
    num_colluders: int
    num_benign: int
    receivers: Int[Tensor, " r"]
    own: Float[Tensor, " d"]
    previous: Float[Tensor, " d"]
    data: Shard
    losses: Callable[[Float[Tensor, "m d"]], Losses]
    threat: Threat
    _ids_of: Callable[[Knowledge, int], Iterable[int]]
    _peek: Callable[[list[int]], Float[Tensor, "m d"]]
    _links: Callable[[], Bool[np.ndarray, "r r"]]

    def colluders(self, cluster: int | None = None) -> Float[Tensor, "f d"]:
        """The models that the attackers of a cluster trained, by default its own cluster and then its own among them.

        Raises ConfigError unless the attack declared to know them; so do the other methods.
        """
        return self._models("fellows", cluster)

    def benign(self, cluster: int | None = None) -> Float[Tensor, "b d"]:
        """The models that the benign agents of a cluster trained, by default of its own."""
        return self._models("benign", cluster)

    def model_of(self, receiver: int) -> Float[Tensor, " d"]:
        """The model that one benign agent trained."""
        self._require_declared("benign")
        return self._peek([receiver])[0]

    def links(self) -> Bool[Tensor, "r r"]:
        """Which of the receivers may ask which others of their own cluster, whatever the attack declared."""
        return torch.from_numpy(self._links())

    def _models(self, whose: Knowledge, cluster: int | None) -> Float[Tensor, "m d"]:
        self._require_declared(whose)
        return self._peek(list(self._ids_of(whose, self.cluster if cluster is None else cluster)))

    def _require_declared(self, whose: Knowledge) -> None:
        if whose not in self.threat.knows:
            raise ConfigError(
                f"the attack looks at the models of {whose if whose == 'fellows' else 'benign agents'}, which it does "
                f'not declare to know: write @fedcb2o.knows("{whose}") above it'
            )


Craft = Callable[[AttackView, np.random.Generator], Float[Tensor, "..."]]
"""(view, draw) -> the model [d] that a malicious agent publishes, or one for each receiver [r, d]."""


@dataclass(frozen=True, kw_only=True)
class Attack:
    """What malicious agents do from round `from_round` on (0 is the first): `poison` what they train on, `craft` what
    they publish, or both, and say that they trained on `claims` samples; before, they do as benign
    agents do.

    What they `craft` or claim only benign agents receive; among themselves they exchange the models that they trained.
    `sybils` take a new identity in every round, so that nobody has met them (Douceur, "The Sybil Attack", IPTPS 2002).
    """

    poison: Poison | None = None
    craft: Craft | None = None
    threat: Threat = Threat()
    from_round: int = 0
    sybils: bool = False
    claimed_samples: int | None = None

    def is_poisoning(self, n: int) -> bool:
        """Whether it poisons data in round `n`."""
        return self.poison is not None and n >= self.from_round

    def is_crafting(self, n: int) -> bool:
        """Whether it crafts models in round `n`."""
        return self.craft is not None and n >= self.from_round

    def uses_sybils(self, n: int) -> bool:
        """Whether nobody knows the attackers of round `n` from before."""
        return self.sybils and n >= self.from_round

    def misreports_samples(self, n: int) -> bool:
        """Whether it lies in round `n` about the samples that it trained on."""
        return self.claimed_samples is not None and n >= self.from_round

    def num_published(self, malicious: int, benign: int) -> int:
        """P, how many models that many attackers publish in a round at most."""
        if self.craft is None:
            return 0
        return malicious * benign if self.threat.each_receiver else malicious
