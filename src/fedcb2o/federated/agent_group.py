"""A block: the agents at hand, with a pool of models of their own.

All agents of a simulation are one block, as are those of a machine in a cluster, or the single agent of a peer. What
`federated` computes is a function of a block and of places in it, and knows no other pool.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from fedcb2o.federated.adversary import Adversary
from fedcb2o.federated.agent_data import AgentData
from fedcb2o.federated.ragged import Indices
from fedcb2o.federated.run_spec import RunSpec
from fedcb2o.nn import batch_norm


@dataclass(frozen=True)
class BufferLayout:
    """Which rows of a pool hold what, for the agents of a block: the `own` models; what each `crafts`, from that row on
    `each` models, where it is malicious; and what each had `before` the round, where a rule looks at that. `rows` is
    how many there are; those from `inbox` on are for what arrives, where it does not lie in the pool already."""

    own: Int[np.ndarray, " a"]
    first_crafted: Int[np.ndarray, " a"]
    crafted_per_attacker: int
    previous: Int[np.ndarray, " a"] | None
    first_received: int

    @classmethod
    def create(
        cls,
        own: Int[np.ndarray, " a"],
        num_kept: int,
        malicious: Bool[np.ndarray, " a"],
        crafted_per_attacker: int,
        keep_previous: bool,
    ) -> "BufferLayout":
        """`own` rows among so many that are `kept` from round to round, then `each` ones for every malicious agent,
        then those `before` the round."""
        ahead = malicious.cumsum() - malicious
        end = num_kept + crafted_per_attacker * int(malicious.sum())
        then = np.arange(end, end + len(own)) if keep_previous else None
        return cls(
            own,
            num_kept + crafted_per_attacker * ahead,
            crafted_per_attacker,
            then,
            end + len(own) * keep_previous,
        )

    def crafted_rows(self, k: int) -> slice:
        """The rows that the malicious agent in place k publishes."""
        return slice(
            int(self.first_crafted[k]), int(self.first_crafted[k]) + self.crafted_per_attacker
        )


@dataclass(frozen=True)
class AgentGroup:
    """The agents at hand: the `terms` that they share with all others, what they hold, and the pool of models that they
    look at, whose rows `layout` tells."""

    spec: RunSpec
    data: AgentData
    adversary: Adversary
    layout: BufferLayout
    models: Float[Tensor, "rows d"]

    @property
    def agents(self) -> Int[np.ndarray, " a"]:
        """Their ids, ascending."""
        return self.data.agents

    def previous_rows(self, members: Shaped[np.ndarray, "*a"]) -> Int[Tensor, "*a"] | None:
        """Return the rows of the models before the round; None where they are not kept."""
        if self.layout.previous is None:
            return None
        return torch.from_numpy(np.asarray(self.layout.previous[members]))

    def reference(self, k: int) -> Shaped[Tensor, "_k *features"] | None:
        """The samples on which the agent in place k estimates the statistics of norms, where these are local: up to so
        many of its training data, evenly spaced, without poison."""
        if not self.spec.has_local_statistics:
            return None
        x = self.data.clean_training_data(k).x
        return x[:: -(-len(x) // batch_norm.MAX_REFERENCE_SAMPLES)]

    def references(self, members: Indices) -> list[Shaped[Tensor, "_k *features"]] | None:
        """Those of agents in some places."""
        return (
            [x for k in members.tolist() if (x := self.reference(k)) is not None]
            if self.spec.has_local_statistics
            else None
        )
