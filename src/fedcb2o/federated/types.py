"""The contracts of one round: what a selection, a criterion and a rule may look at.

A round has phases over all agents at hand: train, craft, exchange, judge, mix. A simulation, a cluster and a
network of real peers differ only in who answers `exchange`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Losses:
    """Validation losses of m models on one agent's data (Algorithm 2, line 3; eq:benignAgentObj).

    `by_class` is zero where the agent holds no sample of a class; `present` says where it holds one.
    """

    mean: Float[Tensor, "*a m"]
    by_class: Float[Tensor, "*a m C"]
    present: Bool[Tensor, "*a C"]


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

    May be fewer than were asked, or none. `num_samples` is what each peer says it trained on.
    """

    ids: Int[Tensor, " m"]
    rows: Int[Tensor, " m"]
    pool: Float[Tensor, "p d"]
    num_samples: Float[Tensor, " m"]


@dataclass(frozen=True)
class Judged:
    """All that a criterion or a rule may look at, from the view of one agent in round `n`.

    `losses` are the received models' losses on the agent's validation data, and `own` those of its own model
    (m = 1); both are None where the algorithm does not judge. `me` is the agent itself as if it was received.
    """

    n: int
    losses: Losses | None
    own: Losses | None
    received: Received
    me: Received

    @property
    def theta(self) -> Float[Tensor, " d"]:
        """The agent's own model after this round's LocalUpdate, before it mixes."""
        return self.me.pool[int(self.me.rows)]


Select = Callable[[Contacts, Int[Tensor, " c"], int, np.random.Generator], Int[Tensor, " s"]]
"""(contacts, candidates, budget, draw) -> the ids to ask: A_n."""

Criterion = Callable[[Judged], Float[Tensor, "*a m"]]
"""A value for each received model; low is trusted (G, or the average loss)."""

Rule = Callable[[Judged], Float[Tensor, " k"]]
"""Normalised weights of the received models [m], or of those and, last, of the agent's own [m + 1]."""
