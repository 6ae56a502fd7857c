"""A block: the agents at hand, with a pool of models of their own.

All agents of a simulation are one block, as are those of a machine in a cluster, or the single agent of a peer. What
`federated` computes is a function of a block and of places in it, and knows no other pool.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from fedcb2o.federated.adversary import Attackers
from fedcb2o.federated.agent_data import Holdings
from fedcb2o.federated.ragged import Places
from fedcb2o.federated.run_spec import Terms
from fedcb2o.nn import batch_norm


@dataclass(frozen=True)
class Layout:
    """Which rows of a pool hold what, for the agents of a block: the `own` models; what each `crafts`, from that row on
    `each` models, where it is malicious; and what each had `before` the round, where a rule looks at that. `rows` is
    how many there are; those from `inbox` on are for what arrives, where it does not lie in the pool already."""

    own: Int[np.ndarray, " a"]
    crafts: Int[np.ndarray, " a"]
    each: int
    before: Int[np.ndarray, " a"] | None
    inbox: int

    @classmethod
    def of(
        cls, own: Int[np.ndarray, " a"], kept: int, malicious: Bool[np.ndarray, " a"], each: int, before: bool
    ) -> "Layout":
        """`own` rows among so many that are `kept` from round to round, then `each` ones for every malicious agent,
        then those `before` the round."""
        ahead = malicious.cumsum() - malicious
        end = kept + each * int(malicious.sum())
        then = np.arange(end, end + len(own)) if before else None
        return cls(own, kept + each * ahead, each, then, end + len(own) * before)

    def crafted(self, k: int) -> slice:
        """The rows that the malicious agent in place k publishes."""
        return slice(int(self.crafts[k]), int(self.crafts[k]) + self.each)


@dataclass(frozen=True)
class Block:
    """The agents at hand: the `terms` that they share with all others, what they hold, and the pool of models that they
    look at, whose rows `layout` tells."""

    terms: Terms
    holdings: Holdings
    attackers: Attackers
    layout: Layout
    pool: Float[Tensor, "rows d"]

    @property
    def agents(self) -> Int[np.ndarray, " a"]:
        """Their ids, ascending."""
        return self.holdings.agents

    def reference(self, k: int) -> Shaped[Tensor, "_k *features"] | None:
        """The samples on which the agent in place k estimates the statistics of norms, where these are local: up to so
        many of its training data, evenly spaced, without poison."""
        if not self.terms.local:
            return None
        x = self.holdings.true(k).x
        return x[:: -(-len(x) // batch_norm.SEEN)]

    def references(self, some: Places) -> list[Shaped[Tensor, "_k *features"]] | None:
        """Those of agents in some places."""
        return [x for k in some.tolist() if (x := self.reference(k)) is not None] if self.terms.local else None
