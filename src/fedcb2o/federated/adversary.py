"""Malicious agents of a run: their attack and their knowledge (sec:experiments).

>>> import numpy as np
>>> from fedcb2o.federated.types import Attack
>>> adversary = Adversary(
...     attack=Attack(),
...     malicious=np.array([False, True, False]),
...     cluster=np.zeros(3, int),
...     num_clusters=1,
...     colludes=True,
...     averages_own_model=False,
... )
>>> adversary.benign_ids.tolist()
[0, 2]
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int
from torch import Tensor

from fedcb2o.federated.contacts import CandidatePeers
from fedcb2o.federated.types import Attack, Knowledge


@dataclass(frozen=True, kw_only=True)
class Adversary:
    """Malicious agents with full knowledge of the clusters, which benign agents do not have.

    Attributes:
        attack: Their behaviour.
        malicious: Whether each of the N agents is malicious.
        cluster: Cluster of each agent.
        num_clusters: Number of clusters.
        colludes: Whether they collude in LocalAggregation, or behave like benign agents there.
        averages_own_model: Whether colluders average their own model, too.
        trigger: Marks samples, for a backdoor.
    """

    attack: Attack
    malicious: Bool[np.ndarray, " N"]
    cluster: Int[np.ndarray, " N"]
    num_clusters: int
    colludes: bool
    averages_own_model: bool
    trigger: Callable[[Tensor], Tensor] | None = None

    @functools.cached_property
    def malicious_ids(self) -> Int[np.ndarray, " m"]:
        """Ids of the malicious agents."""
        return np.flatnonzero(self.malicious)

    @functools.cached_property
    def benign_ids(self) -> Int[np.ndarray, " b"]:
        """Ids of the benign agents, the receivers of crafted models."""
        return np.flatnonzero(~self.malicious)

    @functools.cached_property
    def members_by_role(self) -> dict[tuple[Knowledge, int], Int[np.ndarray, " n"]]:
        """Ids of the "fellows" (attackers) and of the "benign" agents of each cluster."""
        members: dict[tuple[Knowledge, int], Int[np.ndarray, " n"]] = {}
        for k in range(self.num_clusters):
            members["fellows", k] = np.flatnonzero((self.cluster == k) & self.malicious)
            members["benign", k] = np.flatnonzero((self.cluster == k) & ~self.malicious)
        return members

    def benign_adjacency(
        self, neighbours: tuple[Int[Tensor, " _k"], ...] | None
    ) -> Bool[np.ndarray, "b b"]:
        """Return which benign agents may ask which others of their own cluster.

        Args:
            neighbours: Ids that each agent may ask; None for all.

        Returns:
            A truth value per pair of benign agents, shape [b, b].
        """
        ids = self.benign_ids
        cluster = self.cluster[ids]
        links: np.ndarray = (cluster[:, None] == cluster) & ~np.eye(len(ids), dtype=bool)
        if neighbours is not None:
            links &= np.stack([np.isin(ids, neighbours[j].numpy()) for j in ids.tolist()])
        return links

    def new_identities(self, n: int) -> Int[np.ndarray, " g"]:
        """Return the ids of agents that have a new identity in round n.

        Args:
            n: Round.

        Returns:
            Ids, ascending.
        """
        return self.malicious_ids if self.attack.uses_sybils(n) else self.malicious_ids[:0]

    def colluding_peers(
        self, agents: Int[np.ndarray, " a"], neighbours: tuple[Int[Tensor, " _k"], ...] | None
    ) -> tuple[CandidatePeers, CandidatePeers]:
        """Return the peers that colluders may ask, all of their own clusters.

        Args:
            agents: Ids of colluders.
            neighbours: Ids that each agent may ask; None for all.

        Returns:
            Their fellow attackers, and the benign agents.
        """
        clusters, list_index = np.unique(self.cluster[agents], return_inverse=True)
        fellows = [self.members_by_role["fellows", k] for k in clusters.tolist()]
        benign = [self.members_by_role["benign", k] for k in clusters.tolist()]

        if neighbours is not None:
            reachable = [neighbours[j].numpy() for j in agents.tolist()]
            fellows = _intersect(fellows, list_index, reachable)
            benign = _intersect(benign, list_index, reachable)
            list_index = np.arange(len(agents))

        colluders = CandidatePeers.from_lists(fellows, list_index, excluded=agents)
        return colluders, CandidatePeers.from_lists(benign, list_index)


def _intersect(
    lists: list[np.ndarray], list_index: np.ndarray, reachable: list[np.ndarray]
) -> list[np.ndarray]:
    """Return one list per agent: the ids of its list that it can reach."""
    chosen = [lists[k] for k in list_index.tolist()]
    return [ids[np.isin(ids, own)] for ids, own in zip(chosen, reachable, strict=True)]
