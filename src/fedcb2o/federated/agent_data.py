"""The samples of the agents at hand, each as its cluster sees them, poisoned where it attacks.

Samples lie on the run's device. Users' functions of samples (attacks, triggers, what a criterion tries) get them on
the CPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.data._dataset import Shard
from fedcb2o.data._partition import rotate
from fedcb2o.federated.plugin_outputs import require_known_labels, validated_poison
from fedcb2o.federated.ragged import Indices, Ragged
from fedcb2o.federated.types import Attack
from fedcb2o.rng import agent_streams

SampleBatch = tuple[Shaped[Tensor, "a n *features"], Shaped[Tensor, "a n *target"]]
"""Equally many samples of each of some agents, and their labels, or what else is to be told of them."""


@dataclass(frozen=True, kw_only=True)
class AgentData:
    """What the `agents` at hand hold of some `samples`: what each trains on and what it judges on.

    `cluster` says how each of them sees samples, and the `test` set. The `malicious` among them poison what they train
    on, as their `attack` says. Where agents bring their own, `tests` are each one's own of the `test` set, and `common`
    those that test everybody.
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
        """The training data in round `n` of agents in some places, which hold equally many, poisoned where they
        attack."""
        x, y = self._gather(members, self.train)
        attack = self.attack
        if (
            attack.poison is None
            or not attack.is_poisoning(n)
            or not (bad := np.flatnonzero(self.malicious[members])).size
        ):
            return x, y
        ids = self.agents[members[bad]].tolist()
        draws = agent_streams(self.seed, "attack", agents=ids)
        poison = attack.poison
        told = "me" in plugins.positional_inputs(getattr(attack.poison, "func", attack.poison))
        places = torch.from_numpy(bad)
        shards = map(Shard, x[places].cpu().unbind(), y[places].cpu().unbind())
        made = [
            validated_poison(
                poison, poison(shard, draw, me) if told else poison(shard, draw), shard
            )
            for shard, draw, me in zip(shards, draws, ids, strict=True)
        ]
        labels = torch.stack([each.y for each in made])
        if self.num_classes > 1:
            require_known_labels(poison, labels, self.num_classes)
        x[places], y[places] = torch.stack([each.x for each in made]).to(x), labels.to(y)
        return x, y

    def validation_data(self, members: Indices) -> SampleBatch:
        """The validation data of agents in some places, which hold equally many."""
        return self._gather(members, self.validation)

    def clean_training_data(self, k: int) -> Shard:
        """The training data of the agent in place k, without poison."""
        x, y = self._gather(np.array([k]), self.train)
        return Shard(x[0], y[0])

    def test_sets(self, members: Indices) -> Iterator[tuple[Indices, Shard]]:
        """The test samples of agents in some places, with those of them that have the same: all as a cluster sees
        them, or each agent's own. Who has none of its own has those that test everybody."""
        if self.own_tests is None:
            cluster = self.cluster[members]
            for k in np.unique(cluster).tolist():
                yield (
                    members[cluster == k],
                    Shard(rotate(self.test.x, k, self.num_clusters), self.test.y),
                )
            return
        alone = self.own_tests.sizes[members] > 0
        for k in members[alone].tolist():
            yield np.array([k]), self.test.part(self.own_tests[k])
        if not alone.all() and (common := self.common_test_set()) is not None:
            yield members[~alone], common

    def common_test_set(self) -> Shard | None:
        """The samples that test everybody, where agents have others of their own too."""
        return (
            self.test.part(self.common_test)
            if self.common_test is not None and len(self.common_test)
            else None
        )

    def _gather(self, members: Indices, sample_ids: Ragged) -> SampleBatch:
        chosen = torch.from_numpy(
            sample_ids.values[sample_ids.flat_index(members)].reshape(len(members), -1)
        )
        x = self.samples.x[chosen]
        cluster = self.cluster[members]
        for k in np.unique(cluster).tolist():
            theirs = torch.from_numpy(np.flatnonzero(cluster == k))
            if len(theirs) == len(cluster):
                x = rotate(x, k, self.num_clusters)
            else:
                x[theirs] = rotate(x[theirs], k, self.num_clusters)
        return x, self.samples.y[chosen]
