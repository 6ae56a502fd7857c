"""A group of agents with their samples and a model buffer of its own.

All agents of a simulation are one group, as are those of one worker of a cluster, or the single
agent of a peer. The functions of `federated` take a group and the indices of members, and see no
other buffer.

Samples are on the run's device, as the agents' clusters see them, poisoned where an agent attacks.
Plug-ins (attacks, triggers, criteria) get samples on the CPU.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.data import ClusterView, Shard, ValueRange, using_range
from fedcb2o.federated.adversary import PER_SAMPLE, Adversary, Attack
from fedcb2o.federated.plugin_outputs import validated_poison
from fedcb2o.federated.ragged import AgentIds, Indices, Ragged
from fedcb2o.federated.run_spec import RunSpec
from fedcb2o.nn import batch_norm
from fedcb2o.rng import agent_streams

SampleBatch = tuple[Shaped[Tensor, "a n *features"], Shaped[Tensor, "a n *target"]]
"""Equally many samples of each of some agents, and their labels or targets."""


_NO_ATTACK = Attack()


@dataclass(frozen=True)
class Phase:
    """A function (group, members, *arguments, n, *shared), called for each batch in round n.

    A cheap one is divided into one task per worker. One that `calls_rules` may not write into the
    models that criteria and rules get, and returns new states of agents, first in each result.
    """

    function: Callable[..., Any]
    is_cheap: bool = False
    calls_rules: bool = False


@dataclass(frozen=True, kw_only=True)
class AgentData:
    """Training, validation and test samples of several agents.

    `train` and `validation` are indices into `samples`, and `own_tests` and `common_test` into
    `test`. Both tests are None unless agents bring their own; `common_test` is for all agents.
    `view` shows samples as a cluster sees them. Data without classes have `num_classes` 1. `seed`
    is that of the poison's random streams. `claims` are numbers of samples that weigh models, by
    default those of `train`.
    """

    agents: Int[np.ndarray, " a"]
    samples: Shard
    test: Shard
    train: Ragged
    validation: Ragged
    cluster: Int[np.ndarray, " a"]
    view: ClusterView
    num_classes: int
    malicious: Bool[np.ndarray, " a"]
    seed: int
    attack: Attack = _NO_ATTACK
    own_tests: Ragged | None = None
    common_test: Int[np.ndarray, " c"] | None = None
    value_range: ValueRange = (0.0, 1.0)
    claims: Float[np.ndarray, " a"] | None = None

    @property
    def num_samples(self) -> Float[np.ndarray, " a"]:
        """Numbers of samples that weigh the agents' models."""
        return self.train.sizes.astype(float) if self.claims is None else self.claims

    def training_data(self, members: Indices, n: int) -> SampleBatch:
        """Return training data in round n, poisoned by attackers; zeros fill shorter data."""
        sizes = self.train.sizes[members]
        groups = [np.flatnonzero(sizes == size) for size in np.unique(sizes)]
        parts = [self.gather(members[equal], self.train) for equal in groups]
        if n >= self.attack.from_round:
            for equal, (x, y) in zip(groups, parts, strict=True):
                self._poison_(members[equal], x, y)
        # Without a copy where all have equally many samples.
        if len(parts) == 1:
            return parts[0]

        def pad(tensors: Sequence[Tensor]) -> Tensor:
            # `np.unique` sorts the sizes, so that the last group has the most samples.
            largest = tensors[-1]
            padded = largest.new_zeros(len(members), *largest.shape[1:])
            for equal, part in zip(groups, tensors, strict=True):
                padded[torch.from_numpy(equal), : part.shape[1]] = part
            return padded

        return pad([x for x, _ in parts]), pad([y for _, y in parts])

    def _poison_(self, members: Indices, x: Tensor, y: Tensor) -> None:
        """Poison the training data of attackers among members with equally many samples."""
        poison = self.attack.poison
        attackers = np.flatnonzero(self.malicious[members])
        if poison is None or not attackers.size:
            return

        rows = torch.from_numpy(attackers)
        ids = self.agents[members[attackers]].tolist()
        draws = agent_streams(self.seed, "attack", agents=ids)
        takes_id = "me" in plugins.positional_inputs(getattr(poison, "func", poison))
        # Plug-ins get samples on the CPU.
        parts = [x[rows].cpu(), y[rows].cpu()]
        if PER_SAMPLE.get(poison):  # one call for the samples of all attackers
            parts = [part.flatten(0, 1).unsqueeze(0) for part in parts]
        shards = [*map(Shard, *(part.unbind() for part in parts))]
        with using_range(self.value_range):
            outputs = [
                poison(shard, draw, *[j] * takes_id)
                for shard, draw, j in zip(shards, draws, ids, strict=False)
            ]
        poisoned = validated_poison(poison, outputs, shards, self.num_classes)
        x[rows] = poisoned.x.view(len(rows), *x.shape[1:]).to(x)
        y[rows] = poisoned.y.view(len(rows), *y.shape[1:]).to(y)

    def clean_training_data(self, k: int) -> Shard:
        """Return the training data of the agent at index k, without poison."""
        x, y = self.gather(np.array([k]), self.train)
        return Shard(x[0], y[0])

    def test_sets(self, members: Indices) -> Iterator[tuple[Indices, Shard]]:
        """Group members by their test set: their own, that of their cluster, or the common one."""
        if self.own_tests is None:
            cluster = self.cluster[members]
            for k in np.unique(cluster).tolist():
                yield members[cluster == k], self.view(self.test, k)
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

    def gather(self, members: Indices, sample_ids: Ragged) -> SampleBatch:
        """Return equally many samples of members, as their clusters see them, without poison."""
        flat = sample_ids.values[sample_ids.flat_index(members)]
        index = torch.from_numpy(flat)
        shape = (len(members), len(flat) // len(members))
        x, y = (
            part.index_select(0, index.to(part.device)).view(*shape, *part.shape[1:])
            for part in (self.samples.x, self.samples.y)
        )
        # Samples are transformed when they are read, because copies of all samples for each cluster
        # would take K times the memory.
        cluster = self.cluster[members]
        clusters = np.unique(cluster).tolist()
        for k in clusters:
            rows: Tensor | slice = slice(None)  # all, without a copy
            if len(clusters) > 1:
                rows = torch.from_numpy(np.flatnonzero(cluster == k))
            part = Shard(x[rows].flatten(0, 1), y[rows].flatten(0, 1))
            seen = self.view(part, k)
            # A transform that changes nothing returns its input.
            if seen is not part:
                x[rows] = seen.x.view(x[rows].shape)
                y[rows] = seen.y.view(y[rows].shape)
        return x, y


@dataclass(frozen=True)
class BufferLayout:
    """Assignment of the rows of a model buffer.

    Attributes:
        own: Row of each agent's own model.
        sent: Row of each agent's published model, where models are encoded; else None.
        first_crafted: First row of the models that each malicious agent crafts. While the agent
            trains, the row holds its model before the round.
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
    sent: Int[np.ndarray, " a"] | None = None

    @classmethod
    def create(
        cls,
        own: Int[np.ndarray, " a"],
        num_kept: int,
        malicious: Bool[np.ndarray, " a"],
        crafted_per_attacker: int,
        keep_previous: bool,
    ) -> "BufferLayout":
        """Lay out a buffer: `num_kept` models, crafted models, models before the round."""
        # Only attackers have rows for crafted models.
        attackers_before = malicious.cumsum() - malicious
        first_crafted = num_kept + crafted_per_attacker * attackers_before
        end = num_kept + crafted_per_attacker * int(malicious.sum())
        if not keep_previous:
            return cls(own, first_crafted, crafted_per_attacker, None, end)
        previous = np.arange(end, end + len(own))
        return cls(own, first_crafted, crafted_per_attacker, previous, end + len(own))

    def crafted_rows(self, k: int) -> slice:
        """Return the rows that the malicious agent at index k publishes."""
        first = int(self.first_crafted[k])
        return slice(first, first + self.crafted_per_attacker)


@dataclass(frozen=True)
class AgentGroup:
    """Agents that one process computes; `adversary` is None outside of simulations."""

    spec: RunSpec
    data: AgentData
    adversary: Adversary | None
    layout: BufferLayout
    models: Float[Tensor, "rows d"]

    @property
    def agents(self) -> AgentIds:
        """Ids of the agents, ascending."""
        return AgentIds(self.data.agents)

    def previous_rows(self, members: Shaped[np.ndarray, "*a"]) -> Int[Tensor, "*a"] | None:
        """Return rows of models before the round, in the shape of `members`; None if not kept."""
        if self.layout.previous is None:
            return None
        return torch.from_numpy(np.asarray(self.layout.previous[members]))

    def reference(self, k: int) -> Shaped[Tensor, "_k *features"] | None:
        """Return evenly spaced clean samples for local batch-norm statistics; None without any."""
        if not self.spec.has_local_statistics:
            return None
        x = self.data.clean_training_data(k).x
        return x[:: -(-len(x) // batch_norm.MAX_REFERENCE_SAMPLES)]

    def references(self, members: Indices) -> list[Shaped[Tensor, "_k *features"]] | None:
        """Return the `reference` of each member; None for a network without local statistics."""
        if not self.spec.has_local_statistics:
            return None
        references = [self.reference(k) for k in members.tolist()]
        return [x for x in references if x is not None]
