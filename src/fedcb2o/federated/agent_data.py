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
from fedcb2o.federated.plugin_outputs import check_labels, poisoned_of
from fedcb2o.federated.ragged import Lists, Places
from fedcb2o.federated.types import Attack
from fedcb2o.rng import streams

Samples = tuple[Shaped[Tensor, "a n *features"], Shaped[Tensor, "a n *target"]]
"""Equally many samples of each of some agents, and their labels, or what else is to be told of them."""


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """What the `agents` at hand hold of some `samples`: what each trains on and what it judges on.

    `cluster` says how each of them sees samples, and the `test` set. The `malicious` among them poison what they train
    on, as their `attack` says. Where agents bring their own, `tests` are each one's own of the `test` set, and `common`
    those that test everybody.
    """

    agents: Int[np.ndarray, " a"]
    samples: Shard
    test: Shard
    train: Lists
    validation: Lists
    cluster: Int[np.ndarray, " a"]
    num_clusters: int
    num_classes: int
    malicious: Bool[np.ndarray, " a"]
    attack: Attack
    seed: int
    tests: Lists | None = None
    common: Int[np.ndarray, " c"] | None = None

    def trained_on(self, some: Places, n: int) -> Samples:
        """The training data in round `n` of agents in some places, which hold equally many, poisoned where they
        attack."""
        x, y = self._seen(some, self.train)
        attack = self.attack
        if attack.poison is None or not attack.poisons(n) or not (bad := np.flatnonzero(self.malicious[some])).size:
            return x, y
        ids = self.agents[some[bad]].tolist()
        draws = streams(self.seed, "attack", agents=ids)
        poison, told = attack.poison, "me" in plugins.looks_at(getattr(attack.poison, "func", attack.poison))
        places = torch.from_numpy(bad)
        shards = map(Shard, x[places].cpu().unbind(), y[places].cpu().unbind())
        made = [
            poisoned_of(poison, poison(shard, draw, me) if told else poison(shard, draw), shard)
            for shard, draw, me in zip(shards, draws, ids, strict=True)
        ]
        labels = torch.stack([each.y for each in made])
        if self.num_classes > 1:
            check_labels(poison, labels, self.num_classes)
        x[places], y[places] = torch.stack([each.x for each in made]).to(x), labels.to(y)
        return x, y

    def judged_on(self, some: Places) -> Samples:
        """The validation data of agents in some places, which hold equally many."""
        return self._seen(some, self.validation)

    def true(self, k: int) -> Shard:
        """The training data of the agent in place k, without poison."""
        x, y = self._seen(np.array([k]), self.train)
        return Shard(x[0], y[0])

    def tested_on(self, some: Places) -> Iterator[tuple[Places, Shard]]:
        """The test samples of agents in some places, with those of them that have the same: all as a cluster sees
        them, or each agent's own. Who has none of its own has those that test everybody."""
        if self.tests is None:
            cluster = self.cluster[some]
            for k in np.unique(cluster).tolist():
                yield some[cluster == k], Shard(rotate(self.test.x, k, self.num_clusters), self.test.y)
            return
        alone = self.tests.sizes[some] > 0
        for k in some[alone].tolist():
            yield np.array([k]), self.test.part(self.tests[k])
        if not alone.all() and (common := self.common_test()) is not None:
            yield some[~alone], common

    def common_test(self) -> Shard | None:
        """The samples that test everybody, where agents have others of their own too."""
        return self.test.part(self.common) if self.common is not None and len(self.common) else None

    def _seen(self, some: Places, held: Lists) -> Samples:
        chosen = torch.from_numpy(held.values[held.places(some)].reshape(len(some), -1))
        x, cluster = self.samples.x[chosen], self.cluster[some]
        for k in np.unique(cluster).tolist():
            theirs = torch.from_numpy(np.flatnonzero(cluster == k))
            if len(theirs) == len(cluster):
                x = rotate(x, k, self.num_clusters)
            else:
                x[theirs] = rotate(x[theirs], k, self.num_clusters)
        return x, self.samples.y[chosen]
