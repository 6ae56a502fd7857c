"""Samples of several agents, as their clusters see them, poisoned where an agent attacks.

Samples are on the run's device. Plug-ins (attacks, triggers, criteria) get samples on the CPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.data import Shard, cluster_samples, rotate
from fedcb2o.federated.plugin_outputs import require_known_labels, validated_poison
from fedcb2o.federated.ragged import Indices, Ragged
from fedcb2o.federated.types import Attack, Poison
from fedcb2o.rng import agent_streams

SampleBatch = tuple[Shaped[Tensor, "a n *features"], Shaped[Tensor, "a n *target"]]
"""Equally many samples of each of some agents, and their labels or targets."""


@dataclass(frozen=True, kw_only=True)
class AgentData:
    """Training, validation and test samples of several agents.

    Attributes:
        agents: Ids of the agents.
        samples: Samples that the agents' indices point into.
        test: Test samples.
        train: Training samples of each agent, indices into `samples`.
        validation: Validation samples of each agent.
        cluster: Cluster of each agent; it sees the samples rotated by the cluster's angle.
        num_clusters: Number of clusters.
        num_classes: Number of classes; 1 for data without classes.
        malicious: Whether each agent poisons its training data.
        attack: The attack of malicious agents.
        seed: Seed of the poison's random streams.
        own_tests: Test samples of each agent, where agents bring their own.
        common_test: Test samples for all agents, where agents bring their own.
    """

    agents: Int[np.ndarray, " a"]
    samples: Shard
    test: Shard
    train: Ragged
    validation: Ragged
    cluster: Int[np.ndarray, " a"]
    num_clusters: int
    num_classes: int
    malicious: Bool[np.ndarray, " a"]
    attack: Attack
    seed: int
    own_tests: Ragged | None = None
    common_test: Int[np.ndarray, " c"] | None = None

    def training_data(self, members: Indices, n: int) -> SampleBatch:
        """Return the training data of members in round n, poisoned where they attack.

        Args:
            members: Indices of agents with equally many training samples.
            n: Round.

        Returns:
            Samples and labels, with an axis over the members.

        Raises:
            ConfigError: The poison returned other shapes, types or labels.
        """
        x, y = self._gather(members, self.train)
        poison = self.attack.poison
        if poison is None or not self.attack.is_poisoning(n):
            return x, y
        attackers = np.flatnonzero(self.malicious[members])
        if not attackers.size:
            return x, y

        rows = torch.from_numpy(attackers)
        ids = self.agents[members[attackers]].tolist()
        shards = list(map(Shard, x[rows].cpu().unbind(), y[rows].cpu().unbind()))
        poisoned = self._poison(poison, shards, ids)
        labels = torch.stack([shard.y for shard in poisoned])
        if self.num_classes > 1:
            require_known_labels(poison, labels, self.num_classes)
        x[rows] = torch.stack([shard.x for shard in poisoned]).to(x)
        y[rows] = labels.to(y)
        return x, y

    def _poison(self, poison: Poison, shards: list[Shard], ids: list[int]) -> list[Shard]:
        """Poison the data of some attackers."""
        takes_id = "me" in plugins.positional_inputs(getattr(poison, "func", poison))
        poisoned = []
        for shard, generator, j in zip(
            shards, agent_streams(self.seed, "attack", agents=ids), ids, strict=True
        ):
            output = poison(shard, generator, *[j] * takes_id)
            poisoned.append(validated_poison(poison, output, shard))
        return poisoned

    def validation_data(self, members: Indices) -> SampleBatch:
        """Return the validation data of members with equally many samples.

        Args:
            members: Indices of agents.

        Returns:
            Samples and labels, with an axis over the members.
        """
        return self._gather(members, self.validation)

    def clean_training_data(self, k: int) -> Shard:
        """Return the training data of the agent at index k, without poison.

        Args:
            k: Index of the agent.

        Returns:
            Its samples.
        """
        x, y = self._gather(np.array([k]), self.train)
        return Shard(x[0], y[0])

    def test_sets(self, members: Indices) -> Iterator[tuple[Indices, Shard]]:
        """Group members by their test set.

        Members of a cluster share a test set, unless agents bring their own. An agent without test
        samples of its own has the common ones.

        Args:
            members: Indices of agents.

        Yields:
            Indices of members, and their test set.
        """
        if self.own_tests is None:
            cluster = self.cluster[members]
            for k in np.unique(cluster).tolist():
                x = rotate(self.test.x, k, self.num_clusters)
                yield members[cluster == k], Shard(x, self.test.y)
            return

        has_own = self.own_tests.sizes[members] > 0
        for k in members[has_own].tolist():
            yield np.array([k]), self.test.part(self.own_tests[k])
        common = self.common_test_set()
        if not has_own.all() and common is not None:
            yield members[~has_own], common

    def common_test_set(self) -> Shard | None:
        """Return the test samples for all agents, where agents bring their own; else None."""
        if self.common_test is None or not len(self.common_test):
            return None
        return self.test.part(self.common_test)

    def _gather(self, members: Indices, sample_ids: Ragged) -> SampleBatch:
        """Return equally many samples of each member, as its cluster sees them."""
        flat = sample_ids.values[sample_ids.flat_index(members)]
        index = torch.from_numpy(flat.reshape(len(members), -1))
        cluster = self.cluster[members]
        x = cluster_samples(self.samples.x, index, cluster, self.num_clusters)
        return x, self.samples.y[index]
