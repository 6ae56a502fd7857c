"""A group of agents with a model buffer of its own.

All agents of a simulation are one group, as are those of one worker of a cluster, or the single
agent of a peer. The functions of `federated` take a group and the indices of members, and see no
other buffer.

>>> import numpy as np
>>> layout = BufferLayout.create(np.array([0, 1]), 2, np.array([False, True]), 3, False)
>>> layout.crafted_rows(1)
slice(2, 5, None)
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
    """Assignment of the rows of a model buffer.

    Attributes:
        own: Row of each agent's own model.
        first_crafted: First row of the models that each malicious agent crafts.
        crafted_per_attacker: Number of these models.
        previous: Row of each agent's model before the round; None where it is not kept.
        first_received: First row for models that arrive from outside the buffer, and the number of
            rows before them.
    """

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
        """Lay out a buffer: kept models, crafted models, models before the round.

        Args:
            own: Row of each agent's own model, below `num_kept`.
            num_kept: Number of rows that are kept from round to round.
            malicious: Whether each agent is malicious.
            crafted_per_attacker: Number of models that an attacker crafts.
            keep_previous: Whether the models before the round are kept.

        Returns:
            The layout.
        """
        attackers_before = malicious.cumsum() - malicious
        first_crafted = num_kept + crafted_per_attacker * attackers_before
        end = num_kept + crafted_per_attacker * int(malicious.sum())
        if not keep_previous:
            return cls(own, first_crafted, crafted_per_attacker, None, end)
        previous = np.arange(end, end + len(own))
        return cls(own, first_crafted, crafted_per_attacker, previous, end + len(own))

    def crafted_rows(self, k: int) -> slice:
        """Return the rows that the malicious agent at index k publishes.

        Args:
            k: Index of the agent.

        Returns:
            A slice of the model buffer.
        """
        first = int(self.first_crafted[k])
        return slice(first, first + self.crafted_per_attacker)


@dataclass(frozen=True)
class AgentGroup:
    """Agents that one process computes.

    Attributes:
        spec: Specification of the run, which all agents share.
        data: Samples of the agents.
        adversary: Malicious agents of the run.
        layout: Assignment of the buffer's rows.
        models: The model buffer.
    """

    spec: RunSpec
    data: AgentData
    adversary: Adversary
    layout: BufferLayout
    models: Float[Tensor, "rows d"]

    @property
    def agents(self) -> Int[np.ndarray, " a"]:
        """Ids of the agents, ascending."""
        return self.data.agents

    def previous_rows(self, members: Shaped[np.ndarray, "*a"]) -> Int[Tensor, "*a"] | None:
        """Return the rows of the members' models before the round; None where they are not kept.

        Args:
            members: Indices of agents, or one index.

        Returns:
            Rows of the model buffer, in the shape of `members`.
        """
        if self.layout.previous is None:
            return None
        return torch.from_numpy(np.asarray(self.layout.previous[members]))

    def reference(self, k: int) -> Shaped[Tensor, "_k *features"] | None:
        """Return the samples on which an agent estimates its batch-norm statistics.

        Args:
            k: Index of the agent.

        Returns:
            At most `MAX_REFERENCE_SAMPLES` evenly spaced training samples, without poison; None for
            a network without local statistics.
        """
        if not self.spec.has_local_statistics:
            return None
        x = self.data.clean_training_data(k).x
        return x[:: -(-len(x) // batch_norm.MAX_REFERENCE_SAMPLES)]

    def references(self, members: Indices) -> list[Shaped[Tensor, "_k *features"]] | None:
        """Return the `reference` of each member; None for a network without local statistics.

        Args:
            members: Indices of agents.

        Returns:
            Samples of each member.
        """
        if not self.spec.has_local_statistics:
            return None
        references = [self.reference(k) for k in members.tolist()]
        return [x for x in references if x is not None]
