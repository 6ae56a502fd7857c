"""What the rounds of a run depend on, and the models that all who work on them share.

Models and samples lie on the run's device; whatever is small, on the CPU. Users' functions of samples (attacks,
triggers, what a criterion tries) get them on the CPU, those of models get rows as they lie.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from fedcb2o.data.partition import Population, rotate
from fedcb2o.data.shard import Dataset, Shard
from fedcb2o.errors import ConfigError
from fedcb2o.federated import lists
from fedcb2o.federated.algorithms import Algorithm
from fedcb2o.federated.evaluate import Average, losses_of
from fedcb2o.federated.local_update import Training
from fedcb2o.federated.types import (
    Attack,
    Change,
    Losses,
    Received,
)
from fedcb2o.models import head_of
from fedcb2o.plugins import tensor_of
from fedcb2o.runtime import primitives
from fedcb2o.streams import streams


@dataclass(frozen=True, kw_only=True)
class Setting:
    """All that the rounds of a run depend on, beside the models and the contacts.

    `linear`, `convolution` and `together`, how many agents train or models are evaluated in one program, are the run's
    primitives.
    """

    seed: int
    dataset: Dataset
    test: Shard
    population: Population
    model: str
    module: nn.Module
    training: Training
    algorithm: Algorithm
    attack: Attack
    trigger: Callable[[Tensor], Tensor] | None
    colluding: bool
    colluders_own_model: bool
    budget: int
    participation: float
    average: Average
    rounds: int
    share: float
    neighbours: tuple[Int[Tensor, " _k"], ...] | None
    linear: primitives.Linear = "torch"
    convolution: primitives.Convolution = "grouped"
    together: int | None = None

    @property
    def num_agents(self) -> int:
        """N, the number of agents in the system."""
        return len(self.population.cluster)

    @property
    def num_kept(self) -> int:
        """The rows of the pool that outlive a round: of the agents' models, then of those that a coordinator holds."""
        return self.num_agents + self.algorithm.models

    @functools.cached_property
    def agents(self) -> Int[Tensor, " N"]:
        """The ids of all agents."""
        return torch.arange(self.num_agents)

    @functools.cached_property
    def malicious(self) -> list[bool]:
        """Which agents are malicious."""
        found: list[bool] = self.population.malicious.tolist()
        return found

    @functools.cached_property
    def num_samples(self) -> Float[Tensor, " N"]:
        """How many samples each agent trains on."""
        return torch.tensor([len(chosen) for chosen in self.population.train], dtype=torch.float64)

    @functools.cached_property
    def train(self) -> lists.Lists:
        """What each agent trains on."""
        return lists.joined([chosen.numpy() for chosen in self.population.train])

    @functools.cached_property
    def validation(self) -> lists.Lists:
        """What each agent judges on."""
        return lists.joined([chosen.numpy() for chosen in self.population.validation])

    @functools.cached_property
    def head(self) -> tuple[int, int] | None:
        """The shape of the network's last dense layer, where it ends in one."""
        return head_of(self.module)

    @functools.cached_property
    def sides(self) -> dict[tuple[int, bool], Int[np.ndarray, " n"]]:
        """The agents of each cluster that are malicious, and those that are not."""
        cluster, malicious = self.population.cluster.numpy(), self.population.malicious.numpy()
        return {
            (k, bad): np.flatnonzero((cluster == k) & (malicious == bad))
            for k in range(self.population.num_clusters)
            for bad in (False, True)
        }

    @functools.cached_property
    def _ahead(self) -> Int[np.ndarray, " N"]:
        """How many malicious agents come before each agent."""
        malicious = self.population.malicious.long()
        return (malicious.cumsum(0) - malicious).numpy()

    @functools.cached_property
    def _each(self) -> int:
        """How many models a malicious agent crafts: one, or one for each benign agent."""
        return self.malicious.count(False) if self.attack.threat.each_receiver else 1

    def published(self, i: int) -> range:
        """The rows of the pool for what malicious agent i crafts: one, or one for each benign agent."""
        start = self.num_kept + self._each * int(self._ahead[i])
        return range(start, start + self._each)

    def before(self, j: int) -> int | None:
        """The row of the pool for what agent j began the round with, where somebody looks at it."""
        if not self.algorithm.keeps_before:
            return None
        malicious = self.population.malicious
        return self.num_kept + self.attack.num_published(int(malicious.sum()), int((~malicious).sum())) + j

    def rows(self, j: int | Int[np.ndarray, " m"], ids: Int[Tensor, " m"], n: int) -> Int[Tensor, " m"]:
        """The rows of the pool in which agent j, or one for each of them, finds what others publish in round `n`.

        Only benign agents are deceived: fellow attackers find the models that each trained.
        """
        if not self.attack.crafts(n):
            return ids
        place = j - self._ahead[j] if self.attack.threat.each_receiver else 0
        crafted = self.num_kept + self._each * self._ahead[ids.numpy()] + place
        deceived = self.population.malicious[ids] & ~self.population.malicious[j]
        return torch.where(deceived, torch.from_numpy(crafted), ids)


@dataclass(frozen=True)
class World:
    """A setting and the models that the workers share: of all agents, then those that are crafted."""

    setting: Setting
    pool: Float[Tensor, "rows d"]

    @property
    def models(self) -> Float[Tensor, "N d"]:
        """The models of all agents."""
        return self.pool[: self.setting.num_agents]

    @property
    def kept(self) -> Float[Tensor, "rows d"]:
        """The models of all agents, then those that a coordinator holds: what the next round depends on."""
        return self.pool[: self.setting.num_kept]


def samples_of(
    setting: Setting, agents: Sequence[int], n: int = 0
) -> tuple[Shaped[Tensor, "a n *features"], Int[Tensor, "a n"]]:
    """The training data in round `n` of agents with equally many samples, each as its cluster sees it, poisoned where
    it attacks."""
    x, y = views_of(setting, agents, setting.train)
    attack = setting.attack
    if attack.poison is not None and attack.poisons(n):
        bad = [k for k, j in enumerate(agents) if setting.malicious[j]]
        draws = streams(setting.seed, "attack", agents=[agents[k] for k in bad])
        places = torch.tensor(bad, dtype=torch.int64)
        shards = list(map(Shard, x[places].cpu().unbind(), y[places].cpu().unbind()))
        made = [_checked(attack.poison(shard, draw), shard) for shard, draw in zip(shards, draws, strict=True)]
        if made:
            labels, classes = torch.stack([each.y for each in made]), setting.dataset.num_classes
            if labels.numel() and not (labels.min() >= 0 and labels.max() < classes):
                raise ConfigError(f"the attack returned labels outside 0 to {classes - 1}")
            x[places], y[places] = torch.stack([each.x for each in made]).to(x), labels.to(y)
    return x, y


def shard_of(setting: Setting, j: int, n: int = 0) -> Shard:
    """The training data of agent j in round `n`."""
    x, y = samples_of(setting, [j], n)
    return Shard(x[0], y[0])


def _checked(poisoned: Any, shard: Shard) -> Shard:
    """What an attack made of a shard; raises ConfigError where it is none, or of another shape."""
    if not isinstance(poisoned, Shard):
        raise ConfigError(f"the attack returned a {type(poisoned).__name__}, expected a fedcb2o.Shard")
    for name, new, old in (("samples", poisoned.x, shard.x), ("labels", poisoned.y, shard.y)):
        if new.shape != old.shape or new.dtype.is_floating_point != old.dtype.is_floating_point:
            raise ConfigError(
                f"the attack returned {name} of shape {tuple(new.shape)} and type {new.dtype}, "
                f"expected {tuple(old.shape)} and {old.dtype}: it may change values only"
            )
    return poisoned


def view_of(setting: Setting, j: int, chosen: Int[Tensor, " n"]) -> Shard:
    """Samples of the pool as agent j's cluster sees them."""
    x, y = _seen(setting, [j], chosen.unsqueeze(0))
    return Shard(x[0], y[0])


def views_of(
    setting: Setting, agents: Sequence[int], held: lists.Lists
) -> tuple[Shaped[Tensor, "a n *features"], Int[Tensor, "a n"]]:
    """What each of some agents holds, equally many samples of the pool, as its cluster sees them, and their labels."""
    values, sizes = held
    chosen = values[lists.places(sizes, np.array(agents))].reshape(len(agents), -1)
    return _seen(setting, agents, torch.from_numpy(chosen))


def _seen(
    setting: Setting, agents: Sequence[int], samples: Int[Tensor, "a n"]
) -> tuple[Shaped[Tensor, "a n *features"], Int[Tensor, "a n"]]:
    pool, population = setting.dataset.pool, setting.population
    x, cluster = pool.x[samples], population.cluster[list(agents)]
    for k in sorted(set(cluster.tolist())):
        theirs = (cluster == k).nonzero().flatten()
        if len(theirs) == len(cluster):
            x = rotate(x, k, population.num_clusters)
        else:
            x[theirs] = rotate(x[theirs], k, population.num_clusters)
    return x, pool.y[samples]


def losses_seen_by(setting: Setting, j: int) -> Callable[[Received, Change | None], Losses]:
    """The losses of models on agent j's validation data, or on those changed."""

    def judge(models: Received, change: Change | None) -> Losses:
        validation = view_of(setting, j, setting.population.validation[j])
        return losses_of(
            setting.module,
            models.pool,
            models.rows,
            validation if change is None else _changed(validation, change),
            setting.dataset.num_classes,
            average=setting.average,
            batch_size=setting.training.batch_size,
            together=setting.together,
        )

    return judge


def _changed(data: Shard, change: Change) -> Shard:
    """Validation data as a criterion changes them; raises ConfigError where it changes their shape."""
    x = tensor_of("criterion's change of the samples", change(data.x.cpu()))
    if x.shape != data.x.shape:
        raise ConfigError(
            f"the criterion changed samples of shape {tuple(data.x.shape)} into {tuple(x.shape)}: it may change values"
        )
    return Shard(x.to(data.x.device), data.y)
