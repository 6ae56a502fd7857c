"""The adversary: malicious agents, their attack, and their knowledge (sec:experiments)."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fedcb2o.data import Shard
from fedcb2o.errors import ConfigError
from fedcb2o.federated.contacts import CandidatePeers
from fedcb2o.federated.types import Losses
from fedcb2o.nn.low_rank import FactorPair
from fedcb2o.plugins import Declaration, F

Poison = Callable[..., Shard]
"""(shard, generator) or (shard, generator, me) -> the data that a malicious agent trains on."""

PER_SAMPLE = Declaration[bool]("per_sample")
"""Declares a poison that changes each sample by itself, without draws: for all agents at once."""

Knowledge = Literal["fellows", "benign"]
"""Agents whose models of a round an attack may see: its fellow attackers, or benign agents."""


@dataclass(frozen=True)
class Threat:
    """Threat model of an attack on models, declared by `knows`.

    Attributes:
        knows: Agents whose models the attack sees.
        each_receiver: Whether it publishes one model per receiver.
        on_poisoned_data: Whether it needs an agent that trains on poisoned data.
    """

    knows: frozenset[str] = frozenset()
    each_receiver: bool = False
    on_poisoned_data: bool = False


THREAT = Declaration[Threat]("threat")


def knows(
    *models: str, each_receiver: bool = False, on_poisoned_data: bool = False
) -> Callable[[F], F]:
    """Declare an attack on models and its threat model.

    Args:
        models: Agents whose models it sees: "fellows" for other attackers, "benign", or neither.
        each_receiver: Whether it may publish another model for every receiver.
        on_poisoned_data: Whether it makes sense only for an agent that trains on poisoned data.

    Returns:
        A decorator of the attack.

    Raises:
        ConfigError: A word other than "fellows" and "benign".
    """
    unknown = set(models) - set(get_args(Knowledge))
    if unknown:
        raise ConfigError(
            'an attack may know the models of "fellows" and of "benign" agents, '
            f"got {sorted(unknown)}"
        )
    return THREAT(Threat(frozenset(models), each_receiver, on_poisoned_data))


@dataclass(frozen=True, kw_only=True)
class AttackView:
    """Input of an attack on models: the view of one attacker in round n, after LocalUpdate.

    The tensors that `colluders` and `benign` return must not be written to.

    Attributes:
        n: Round, counted from 0.
        agent: Id of the attacker.
        cluster: Its cluster.
        num_clusters: Number of clusters.
        num_colluders: Attackers in its cluster, itself included.
        num_benign: Benign agents in its cluster.
        receivers: Ids of all benign agents.
        own: The model that it trained.
        previous: The model that it began the round with.
        data: Its samples, without poison.
        losses: Losses of models [m, d] on its samples.
        sample_losses: Losses of models [m, d] on each of its samples, [m, n]; with labels [m, n] as
            a second argument, for these labels. They can be differentiated.
        factor_pairs: Low-rank adapters of a model.
        threat: The threat model that the attack declared.
        server: Next model of the server from the models that agents send; None without a server.
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
    sample_losses: Callable[..., Float[Tensor, "m n"]]
    factor_pairs: tuple[FactorPair, ...] = ()
    threat: Threat
    server: Callable[[Float[Tensor, "m d"]], Float[Tensor, " d"]] | None = None
    # Functions: the models of other agents may be on another machine, and are fetched where an
    # attack looks at them.
    _ids_of: Callable[[Knowledge, int], Iterable[int]]
    _peek: Callable[[list[int]], Float[Tensor, "m d"]]
    _links: Callable[[], Bool[np.ndarray, "r r"]]

    def colluders(self, cluster: int | None = None) -> Float[Tensor, "f d"]:
        """Return the models that the attackers of a cluster trained.

        Args:
            cluster: The cluster; None for the attacker's own, with its own model.

        Returns:
            One row per attacker.

        Raises:
            ConfigError: The attack did not declare `knows("fellows")`.
        """
        return self._models("fellows", cluster)

    def benign(self, cluster: int | None = None) -> Float[Tensor, "b d"]:
        """Return the models that the benign agents of a cluster trained.

        Args:
            cluster: The cluster; None for the attacker's own.

        Returns:
            One row per agent.

        Raises:
            ConfigError: The attack did not declare `knows("benign")`.
        """
        return self._models("benign", cluster)

    def benign_ids(self, cluster: int | None = None) -> list[int]:
        """Return the ids of the benign agents of a cluster, in the order of `benign`.

        Args:
            cluster: The cluster; None for the attacker's own.

        Returns:
            Their ids.
        """
        return list(self._ids_of("benign", self.cluster if cluster is None else cluster))

    def model_of(self, receiver: int) -> Float[Tensor, " d"]:
        """Return the model that one benign agent trained.

        Args:
            receiver: Id of the agent.

        Returns:
            Its model.

        Raises:
            ConfigError: The attack did not declare `knows("benign")`.
        """
        self._require_declared("benign")
        return self._peek([receiver])[0]

    def links(self) -> Bool[Tensor, "r r"]:
        """Return which receivers may ask which others of their cluster.

        Returns:
            A truth value for each pair of receivers.
        """
        return torch.from_numpy(self._links())

    def _models(self, role: Knowledge, cluster: int | None) -> Float[Tensor, "m d"]:
        self._require_declared(role)
        return self._peek(list(self._ids_of(role, self.cluster if cluster is None else cluster)))

    def _require_declared(self, role: Knowledge) -> None:
        if role not in self.threat.knows:
            agents = "fellows" if role == "fellows" else "benign agents"
            raise ConfigError(
                f"the attack looks at the models of {agents}, which it does not declare to know: "
                f'write @fedcb2o.knows("{role}") above it'
            )


Craft = Callable[[AttackView, np.random.Generator], Float[Tensor, "..."]]
"""(view, generator) -> the model [d] that an attacker publishes, or one per receiver [r, d]."""


@dataclass(frozen=True, kw_only=True)
class Attack:
    """Behaviour of malicious agents (attackers).

    Before `from_round` they train and publish as benign agents do, but they collude. Only benign
    agents receive crafted models and false claims; attackers exchange the models that they trained.
    With `sybils`, they take a new identity in every round (Douceur, "The Sybil Attack", 2002).
    `claimed_samples` is None for the true number of training samples.
    """

    poison: Poison | None = None
    craft: Craft | None = None
    threat: Threat = Threat()
    from_round: int = 0
    sybils: bool = False
    claimed_samples: int | None = None

    def is_crafting(self, n: int) -> bool:
        """Return whether models are crafted in round n."""
        return self.craft is not None and n >= self.from_round

    @property
    def deceives(self) -> bool:
        """True if attackers publish crafted models or false claims in some rounds."""
        return self.craft is not None or self.claimed_samples is not None

    def num_published(self, malicious: int, benign: int) -> int:
        """Return the largest number of models that attackers publish in a round."""
        if self.craft is None:
            return 0
        return malicious * benign if self.threat.each_receiver else malicious


@dataclass(frozen=True, kw_only=True)
class Adversary:
    """Malicious agents with full knowledge of the clusters, which benign agents do not have.

    Without `colludes`, they behave like benign agents in LocalAggregation. With
    `averages_own_model`, colluders average their own model, too. `trigger` marks samples, for a
    backdoor. For an attack on text, `wanted_answers` selects test samples and gives them the
    attacker's answers.
    """

    attack: Attack
    malicious: Bool[np.ndarray, " N"]
    cluster: Int[np.ndarray, " N"]
    num_clusters: int
    colludes: bool
    averages_own_model: bool
    trigger: Callable[[Tensor], Tensor] | None = None
    wanted_answers: Callable[[Shard], Shard] | None = None

    @functools.cached_property
    def colluding(self) -> Bool[np.ndarray, " N"]:
        """True for each of the N agents that colludes."""
        return self.malicious & self.colludes

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
        """Return which benign agents of a cluster may ask which; without a graph, all."""
        ids = self.benign_ids
        cluster = self.cluster[ids]
        # An agent is no peer of itself.
        links: np.ndarray = (cluster[:, None] == cluster) & ~np.eye(len(ids), dtype=bool)
        if neighbours is not None:
            links &= np.stack([np.isin(ids, neighbours[j].numpy()) for j in ids.tolist()])
        return links

    def new_identities(self, n: int) -> Int[np.ndarray, " g"]:
        """Return the ascending ids of agents with a new identity in round n."""
        if self.attack.sybils and n >= self.attack.from_round:
            return self.malicious_ids
        return self.malicious_ids[:0]

    def colluding_peers(
        self, agents: Int[np.ndarray, " a"], neighbours: tuple[Int[Tensor, " _k"], ...] | None
    ) -> tuple[CandidatePeers, CandidatePeers]:
        """Return the fellows, and the benign agents of their clusters, that colluders may ask."""
        # Agents of a cluster share a list: a copy for each takes time in proportion to its peers.
        clusters, list_index = np.unique(self.cluster[agents], return_inverse=True)
        fellows = [self.members_by_role["fellows", k] for k in clusters.tolist()]
        benign = [self.members_by_role["benign", k] for k in clusters.tolist()]

        # A graph gives each agent a list of its own.
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
    found = []
    for k, own in zip(list_index.tolist(), reachable, strict=True):
        ids = lists[k]
        # A search of the few reachable ones takes no time in proportion to the list.
        own = np.sort(own)
        places = ids.searchsorted(own)
        found.append(own[ids.take(places, mode="clip") == own] if len(ids) else ids)
    return found
