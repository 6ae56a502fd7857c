"""What the agents of a block received in a round, and what they decided, in arrays over all of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int

from fedcb2o.federated.ragged import Indices, Ragged
from fedcb2o.federated.types import Received, Reduction


@dataclass(frozen=True)
class Inbox:
    """What several agents received: the `ids` of who sent it, and of each model its row in their pool, the number of
    samples that its sender is believed to have trained on, and its round."""

    ids: Ragged
    rows: Int[np.ndarray, " m"]
    num_samples: Float[np.ndarray, " m"]
    round: Int[np.ndarray, " m"]

    def __len__(self) -> int:
        return len(self.ids)

    def group_by_size(
        self, members: Indices, *keys: Int[np.ndarray, " a"]
    ) -> Iterator[tuple[Indices, Indices, Received]]:
        """Of agents in some places, those that received equally many models (and are alike in numbers that all agents
        have): their places, where these models lie, and the models [a, m]."""
        kind = np.zeros(len(members), np.int64)
        for numbers in (self.ids.sizes, *keys):
            kind = kind * (1 + int(numbers.max(initial=0))) + numbers[members]
        for k in np.unique(kind).tolist():
            those = members[kind == k]
            where = self.ids.flat_index(those)
            parts = (self.ids.values, self.rows, self.num_samples, self.round)
            yield (
                those,
                where,
                Received(
                    *(torch.from_numpy(each[where].reshape(len(those), -1)) for each in parts)
                ),
            )


@dataclass(frozen=True)
class Decisions:
    """What some agents decided in a round: whom they `asked`, from whom they `received` models, in which `rows` of
    their pool, and the `weights` of the consensus point m_j over these and the own model, before the mixing factor.

    The weights of an agent sum to 1, or to 0 where nobody answered or nobody is trusted: then it keeps its model. Where
    a rule works on columns, m_j is the reduction, by the agent's id, and its weights are NaN or for the record alone.
    `before` are the weights of the models that the agents began the round with, and `f` the numbers of attackers
    assumed; NaN where a rule has no such.
    """

    agents: Int[np.ndarray, " a"]
    asked: Ragged
    received: Ragged
    rows: Int[np.ndarray, " m"]
    weights: Float[np.ndarray, " m"]
    own_weight: Float[np.ndarray, " a"]
    factor: Float[np.ndarray, " a"]
    own_loss: Float[np.ndarray, " a"]
    previous_weight: Float[np.ndarray, " a"]
    f: Float[np.ndarray, " a"]
    reductions: dict[int, Reduction] = field(default_factory=dict)

    @classmethod
    def empty(cls, agents: Int[np.ndarray, " a"], asked: Ragged, inbox: Inbox) -> "Decisions":
        """Of agents that keep their models, whatever they received: to be filled in."""
        return cls(
            agents=agents,
            asked=asked,
            received=inbox.ids,
            rows=inbox.rows,
            weights=np.zeros(len(inbox.rows)),
            own_weight=np.zeros(len(agents)),
            factor=np.ones(len(agents)),
            own_loss=np.full(len(agents), np.nan),
            previous_weight=np.full(len(agents), np.nan),
            f=np.full(len(agents), np.nan),
        )

    @classmethod
    def concatenate(cls, parts: "Sequence[Decisions]") -> "Decisions":
        """What the agents of all parts decided, in ascending order."""

        def whole(name: str) -> Any:
            return np.concatenate([getattr(one, name) for one in parts])

        order = whole("agents").argsort()
        received = Ragged.concatenate([one.received for one in parts])
        return cls(
            agents=whole("agents")[order],
            asked=Ragged.concatenate([one.asked for one in parts]).take(order),
            received=received.take(order),
            **{name: whole(name)[received.flat_index(order)] for name in ("rows", "weights")},
            **{
                name: whole(name)[order]
                for name in ("own_weight", "factor", "own_loss", "previous_weight", "f")
            },
            reductions={j: each for one in parts for j, each in one.reductions.items()},
        )

    def __len__(self) -> int:
        return len(self.agents)
