"""The malicious agents of a run: what they do, and whom they know (sec:experiments)."""

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
    """Who of all agents is malicious, in which cluster each is, and what the malicious ones do.

    Attackers know all of this, and benign agents nothing. They `collude`, unless they act as benign agents do, and
    average their `own_model` too. `trigger` marks samples where their attack is a backdoor.
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
        """The malicious agents."""
        return np.flatnonzero(self.malicious)

    @functools.cached_property
    def benign_ids(self) -> Int[np.ndarray, " b"]:
        """All others: whom an attack on models deceives."""
        return np.flatnonzero(~self.malicious)

    @functools.cached_property
    def members_by_role(self) -> dict[tuple[Knowledge, int], Int[np.ndarray, " n"]]:
        """The malicious agents of each cluster, "fellows", and its "benign" ones."""
        return {
            (whose, k): np.flatnonzero(
                (self.cluster == k) & (self.malicious == (whose == "fellows"))
            )
            for k in range(self.num_clusters)
            for whose in ("fellows", "benign")
        }

    def benign_adjacency(
        self, neighbours: tuple[Int[Tensor, " _k"], ...] | None
    ) -> Bool[np.ndarray, "b b"]:
        """Which benign agents may ask which others of their own cluster."""
        ids = self.benign_ids
        cluster = self.cluster[self.benign_ids]
        links: np.ndarray = (cluster[:, None] == cluster) & ~np.eye(len(ids), dtype=bool)
        if neighbours is not None:
            links &= np.stack([np.isin(ids, neighbours[j].numpy()) for j in ids.tolist()])
        return links

    def new_identities(self, n: int) -> Int[np.ndarray, " g"]:
        """Who comes under a new name in round `n`: nobody has met these."""
        return self.malicious_ids if self.attack.uses_sybils(n) else self.malicious_ids[:0]

    def colluding_peers(
        self, agents: Int[np.ndarray, " a"], neighbours: tuple[Int[Tensor, " _k"], ...] | None
    ) -> tuple[CandidatePeers, CandidatePeers]:
        """The fellow attackers that some of them may ask, and the benign agents of their clusters."""
        clusters, which = np.unique(self.cluster[agents], return_inverse=True)
        fellows, benign = (
            [self.members_by_role[whose, k] for k in clusters.tolist()]
            for whose in ("fellows", "benign")
        )
        if neighbours is not None:
            near = [neighbours[j].numpy() for j in agents.tolist()]
            fellows, benign = (
                [
                    ids[np.isin(ids, mine)]
                    for ids, mine in zip((side[k] for k in which), near, strict=True)
                ]
                for side in (fellows, benign)
            )
            which = np.arange(len(agents))
        return CandidatePeers.from_lists(
            fellows, which, excluded=agents
        ), CandidatePeers.from_lists(benign, which)
