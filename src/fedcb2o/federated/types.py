"""The contracts of one round: what a selection, a criterion, a rule and an attack may look at.

A round has phases over all agents at hand: train, craft, exchange, judge, mix. A simulation, a cluster and a
network of real peers differ only in who answers `exchange`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.data.shard import Shard
from fedcb2o.errors import ConfigError
from fedcb2o.plugins import F


@dataclass(frozen=True)
class Losses:
    """Validation losses of m models on one agent's data (Algorithm 2, line 3; eq:benignAgentObj).

    `by_class` is zero where the agent holds no sample of a class; `present` says where it holds one. `entropy` is the
    mean entropy of a model's predictions, in nats; NaN for a model that is not finite.
    """

    mean: Float[Tensor, "*a m"]
    by_class: Float[Tensor, "*a m C"]
    present: Bool[Tensor, "*a C"]
    entropy: Float[Tensor, "*a m"]


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

    May be fewer than were asked, or none. `num_samples` is what each peer says it trained on. Of several agents that
    received equally many, with an axis over them.
    """

    ids: Int[Tensor, "*a m"]
    rows: Int[Tensor, "*a m"]
    pool: Float[Tensor, "p d"]
    num_samples: Float[Tensor, "*a m"]


Change = Callable[[Tensor], Tensor]
"""Samples [n, ...] -> as many, changed: what a criterion tries models on."""


@dataclass(frozen=True, kw_only=True)
class Local:
    """What an agent knows beside what it receives: whom it judges with, and what it may assume.

    `losses_of` gives the losses of models on its validation data, or on those changed. `share` is the attackers' share
    that it assumes, `progress` how much of the run is over, from 0 to 1. `before` is the row of the pool that holds
    the model which it began the round with, None where nobody asked to keep it; `head` the shape [C, h] of the last
    dense layer's weight, where the network ends in one. `draw` is its own stream of this round.
    """

    losses_of: Callable[[Received, Change | None], Losses]
    share: float = 0.0
    progress: float = 0.0
    before: int | None = None
    head: tuple[int, int] | None = None
    draw: np.random.Generator


class _Nobodys(Local):
    """In place of what one agent knows, where several are judged at once: whoever looks is told."""

    def __getattribute__(self, name: str) -> Any:
        raise TypeError(
            "`judged.local` is what one agent knows, and what declares `together` looks at several at once: drop it"
        )

    def __repr__(self) -> str:
        return "nobody's"


NOBODYS: Local = object.__new__(_Nobodys)


@dataclass(frozen=True)
class Judged:
    """All that a criterion or a rule may look at, from the view of one agent in round `n`.

    `losses` are the received models' losses on the agent's validation data, and `own` those of its own model
    (m = 1); both are None where the algorithm does not judge. `me` is the agent itself as if it was received. What is
    declared `together` gets several agents in one, with an axis over them in losses, ids, rows and numbers of samples,
    and an error where it looks at `local`.
    """

    n: int
    losses: Losses | None
    own: Losses | None
    received: Received
    me: Received
    local: Local

    @property
    def theta(self) -> Float[Tensor, " d"]:
        """The agent's own model after this round's LocalUpdate, before it mixes."""
        return self.me.pool[int(self.me.rows)]

    def losses_under(self, change: Change) -> Losses:
        """The received models' losses on the agent's validation data as `change` makes them: noise, a patch."""
        return self.local.losses_of(self.received, change)


Select = Callable[[Contacts, Int[Tensor, " c"], int, np.random.Generator], Int[Tensor, " s"]]
"""(contacts, candidates, budget, draw) -> the ids to ask: A_n."""

Criterion = Callable[[Judged], Float[Tensor, "*a m"]]
"""A value for each received model; low is trusted (G, or the average loss)."""

together = plugins.declare("together", True)
"""Declares a criterion or a rule that takes the axis over agents, and looks at nothing `local`."""

Columns = Callable[[Float[Tensor, "k b"]], Float[Tensor, " b"]]
"""A block of columns of k models -> the same columns of one."""


@dataclass(frozen=True)
class Reduction:
    """What a rule makes of models where no weights tell it: `reduce` of each block of columns of X, the models in
    `rows` of the pool, or with `mixing` P of the rows of P X."""

    rows: Int[Tensor, " k"]
    reduce: Columns
    mixing: Float[Tensor, "j k"] | None = None


@dataclass(frozen=True)
class Weighed:
    """What a rule decided that also says how: `outcome` are weights, then of the received models, the own one and that
    before the round [m + 2], or a reduction; `f` is the number of attackers that it assumed, where it assumes one."""

    outcome: Float[Tensor, " k"] | Reduction
    f: int | None = None


Rule = Callable[[Judged], Float[Tensor, " k"] | Weighed]
"""Normalised weights of the received models [m], or of those and, last, of the agent's own [m + 1]; or `Weighed`."""

Poison = Callable[[Shard, np.random.Generator], Shard]
"""(shard, draw) -> what a malicious agent trains on instead of its own data."""

Knowledge = Literal["fellows", "benign"]
"""Whose models of a round an attack may see, beside its own."""


@dataclass(frozen=True)
class Threat:
    """What an attack on models declares by `knows`: its published threat model."""

    knows: frozenset[str] = frozenset()
    each_receiver: bool = False
    on_poisoned_data: bool = False


def knows(*models: str, each_receiver: bool = False, on_poisoned_data: bool = False) -> Callable[[F], F]:
    """Declares an attack on models, and whose models it sees: those of its "fellows", of "benign" agents, or neither.

    `each_receiver`: it may publish another model for every receiver. `on_poisoned_data`: it makes no sense for an agent
    that trains on true data.
    """
    if unknown := set(models) - set(get_args(Knowledge)):
        raise ConfigError(f'an attack may know the models of "fellows" and of "benign" agents, got {sorted(unknown)}')
    return plugins.declare("threat", Threat(frozenset(models), each_receiver, on_poisoned_data))


@dataclass(frozen=True, kw_only=True)
class View:
    """All that an attack on models may look at, from the view of one attacker in round `n`, after LocalUpdate.

    `own` is the model that it trained, `before` the one that it began the round with, `data` its own samples without
    poison, and `losses` gives the losses of models [m, d] on them. `receivers` are the ids of all benign agents. What
    `fellows` and `benign` return are rows of the models of all agents, not to be written to.
    """

    n: int
    agent: int
    cluster: int
    num_clusters: int
    num_fellows: int
    num_benign: int
    receivers: Int[Tensor, " r"]
    own: Float[Tensor, " d"]
    before: Float[Tensor, " d"]
    data: Shard
    losses: Callable[[Float[Tensor, "m d"]], Losses]
    threat: Threat
    _ids_of: Callable[[Knowledge, int], Int[Tensor, " m"]]
    _models: Float[Tensor, "N d"]

    def fellows(self, cluster: int | None = None) -> Float[Tensor, "f d"]:
        """The models that the attackers of a cluster trained, by default its own cluster and then its own among them.

        Raises ConfigError unless the attack declared to know them; so do the other methods.
        """
        return self._look("fellows", cluster)

    def benign(self, cluster: int | None = None) -> Float[Tensor, "b d"]:
        """The models that the benign agents of a cluster trained, by default of its own."""
        return self._look("benign", cluster)

    def model_of(self, receiver: int) -> Float[Tensor, " d"]:
        """The model that one benign agent trained."""
        self._check("benign")
        return self._models[receiver]

    def _look(self, whose: Knowledge, cluster: int | None) -> Float[Tensor, "m d"]:
        self._check(whose)
        ids = self._ids_of(whose, self.cluster if cluster is None else cluster)
        together = len(ids) > 0 and int(ids[-1] - ids[0]) == len(ids) - 1
        return self._models[ids[0] : ids[-1] + 1] if together else self._models[ids]

    def _check(self, whose: Knowledge) -> None:
        if whose not in self.threat.knows:
            raise ConfigError(
                f"the attack looks at the models of {whose if whose == 'fellows' else 'benign agents'}, which it does "
                f'not declare to know: write @fedcb2o.knows("{whose}") above it'
            )


Craft = Callable[[View, np.random.Generator], Float[Tensor, "..."]]
"""(view, draw) -> the model [d] that a malicious agent publishes, or one for each receiver [r, d]."""


@dataclass(frozen=True, kw_only=True)
class Attack:
    """What malicious agents do from round `from_round` on (0 is the first): `poison` what they train on, `craft` what
    they publish, or both; before, they are honest.

    What they `craft` only benign agents receive; among themselves they exchange the models that they trained. `sybils`
    take a new identity in every round, so that nobody has met them (Douceur, "The Sybil Attack", IPTPS 2002).
    """

    poison: Poison | None = None
    craft: Craft | None = None
    threat: Threat = Threat()
    from_round: int = 0
    sybils: bool = False

    def poisons(self, n: int) -> bool:
        """Whether it poisons data in round `n`."""
        return self.poison is not None and n >= self.from_round

    def crafts(self, n: int) -> bool:
        """Whether it crafts models in round `n`."""
        return self.craft is not None and n >= self.from_round

    def hides(self, n: int) -> bool:
        """Whether nobody knows the attackers of round `n` from before."""
        return self.sybils and n >= self.from_round

    def num_published(self, malicious: int, benign: int) -> int:
        """P, how many models that many attackers publish in a round at most."""
        if self.craft is None:
            return 0
        return malicious * benign if self.threat.each_receiver else malicious
