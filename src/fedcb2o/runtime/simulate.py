"""T rounds of all agents on one machine (alg:FedCB2O): train, craft, exchange and judge, mix.

The models are rows of one [N + P, d] tensor: those of the N agents, and the P that attackers craft and publish in their
stead, where they do; N more hold what the agents began the round with, where a rule looks at that. Right after the
agents' come those that a coordinator holds, where there is one. Agents of a phase are independent of each other, so
that workers share them out; the phases are synchronous: what peers download is the model after this round's
LocalUpdate.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from fedcb2o.errors import RunError
from fedcb2o.federated import ifca
from fedcb2o.federated.peers import Met
from fedcb2o.federated.round import Choices
from fedcb2o.federated.together import teams
from fedcb2o.federated.types import Contacts
from fedcb2o.runtime import primitives
from fedcb2o.runtime.mixing import mixing_matrix
from fedcb2o.runtime.phases import TILE, WIDE, adopt, aggregate, are_finite, coordinate, craft, evaluate, mix_, train
from fedcb2o.runtime.workers import Workers, blocks
from fedcb2o.runtime.world import World
from fedcb2o.streams import stream

T = TypeVar("T")

LARGE = 2**17  # from this many parameters on, each agent is a task of its own on the CPU


@dataclass(frozen=True)
class Round:
    """What happened in round `n`: `confusion` is that of each benign agent's model, where it was evaluated, and
    `triggered` that on samples with the trigger of a backdoor. `contacts` are those of each agent after it."""

    n: int
    train_loss: list[float]
    mixed: Choices
    contacts: Sequence[Contacts]
    confusion: dict[int, Int[Tensor, "C C"]] | None
    triggered: dict[int, Int[Tensor, "C C"]] | None
    seconds: dict[str, float]


def _by_choice(world: World, function: Callable[..., T], *task: Any) -> T:
    """What a function of the world finds, its products by the run's choice."""
    with primitives.by(world.setting.linear, world.setting.convolution):
        return function(world, *task)


def rounds(
    world: World,
    workers: Workers,
    contacts: Sequence[Contacts],
    start: int,
    stop: int,
    evaluated: Callable[[int], bool],
    tell: Callable[[int, str], None] = lambda n, phase: None,
    columns: int | None = None,
) -> Iterator[Round]:
    """Rounds `start` to `stop` - 1 (alg:FedCB2O, lines 2-5), from the `contacts` of each agent; the models change in
    place.

    `tell` hears what a round is at, since a round may be long: "training", "crafting", "mixing", "evaluating". Models
    on a disk are mixed so many `columns` at a time, in memory. Raises RunError where a benign agent's training
    diverges, or its model overflows where it mixes. Under crafted models that is the attackers' success and no error:
    such an agent is broken from then on, and nobody receives its model.
    """
    setting, attack = world.setting, world.setting.attack
    bad = setting.population.malicious.numpy()
    everyone, benign, malicious = list(range(len(bad))), np.flatnonzero(~bad).tolist(), np.flatnonzero(bad).tolist()
    dim = world.models.shape[1]
    costs = [len(chosen) for chosen in setting.population.train]
    alone = dim >= LARGE and world.pool.device.type == "cpu"
    groups = teams(setting.module, dim, costs, setting.together)
    members = np.concatenate(groups)
    together = [sum(costs[j] for j in group) for group in groups]
    shares = blocks(range(len(groups)), together, len(groups) if alone else workers.count)

    def by_team(function: Callable[..., list[T]], *arguments: Any, own: Sequence[Any] = ()) -> list[T]:
        """What a function of the world finds for each team, the teams shared out among the workers.

        Its arguments are some teams, then what is each team's `own`, where there is such, then the rest.
        """
        tasks = [
            (function, [groups[g] for g in share], *([[own[g] for g in share]] if own else []), *arguments)
            for share in shares
        ]
        found = dict(_in_order(shares, workers.map(_by_choice, tasks)))
        return [found[g] for g in range(len(groups))]

    def by_agent(function: Callable[..., list[T]], agents: Sequence[int], *arguments: Any) -> dict[int, T]:
        """What a function of the world finds for each agent, the agents shared out among the workers."""
        parts = blocks(agents, costs, len(agents) if alone else workers.count)
        return dict(_in_order(parts, workers.map(_by_choice, [(function, some, *arguments) for some in parts])))

    known = list(contacts)
    met = [Met.of([known[j] for j in group]) for group in groups]
    del contacts, known  # and their memory, where nobody else holds it
    has_coordinator = setting.algorithm.models > 0
    chosen = by_agent(adopt, everyone) if has_coordinator else {}
    for n in range(start, stop):
        clock = _Clock()
        tell(n, "training")
        trained = by_team(train, n)
        losses, finite = np.empty(len(members)), np.empty(len(members), dtype=bool)
        losses[members] = np.concatenate([loss for loss, _ in trained])
        finite[members] = np.concatenate([good for _, good in trained])
        diverged = np.flatnonzero(~(bad | (finite & np.isfinite(losses))))
        if len(diverged) and not attack.crafts(n):
            raise RunError(
                f"training diverged: the model or the loss of benign agent {diverged[0]} is not finite in round "
                f"{n + 1}; a smaller `training.gamma` usually helps"
            )
        clock.lap("train")
        good = np.zeros(len(world.pool), dtype=bool)
        good[: setting.num_agents] = finite
        if attack.crafts(n):
            tell(n, "crafting")
            crafted = by_agent(craft, malicious, n, torch.from_numpy(finite))
            for i in malicious:
                good[setting.published(i)] = crafted[i]
            clock.lap("craft")
        tell(n, "mixing")
        online = stream(setting.seed, "online", n).random(setting.num_agents) < setting.participation
        found = by_team(aggregate, n, online & (finite | bad), online, good, own=met)
        met = [known for known, _ in found]
        choices = [part for _, parts in found for part in parts]
        averages = coordinate(setting, chosen, n, online, good) if has_coordinator else None
        clock.lap("aggregate")
        mixed = Choices.joined(choices if averages is None else [*choices, averages])
        matrix = mixing_matrix(mixed, len(world.pool))
        parts = (matrix.crow_indices(), matrix.col_indices(), matrix.values())
        reductions = {j: (reduction, float(mixed.factor[j])) for j, reduction in mixed.reductions.items()}
        tile = WIDE if reductions else TILE
        step = -(-dim // (8 * workers.count)) if columns is None else columns // tile * tile
        step = tile * max(1, -(-step // tile))
        mix = functools.partial(mix_, copied=columns is not None)
        workers.map(mix, [(parts, a, min(a + step, dim), reductions) for a in range(0, dim, step)])
        overflowed = [j for j, finite in by_agent(are_finite, benign).items() if not finite]
        if overflowed and not attack.crafts(n):
            raise RunError(
                f"the model of benign agent {min(overflowed)} is not finite after mixing in round {n + 1}: models that "
                "it averaged are finite but too large to add up; a smaller `training.gamma` usually helps"
            )
        clock.lap("mix")
        if has_coordinator:
            chosen = by_agent(adopt, everyone)
            mixed = Choices.of([ifca.seen_by(j, mixed[setting.num_agents + chosen[j]]) for j in everyone])
            clock.lap("choose")
        counts = marked = None
        if evaluated(n):
            tell(n, "evaluating")
            counts = by_agent(evaluate, benign)
            marked = by_agent(evaluate, benign, True) if setting.trigger is not None else None
            clock.lap("evaluate")
        yield Round(n, losses.tolist(), mixed, _Everyones(groups, met), counts, marked, clock.seconds)


def _in_order(parts: Sequence[Sequence[int]], results: Sequence[Sequence[T]]) -> Iterator[tuple[int, T]]:
    """Each number in the parts, and its result."""
    for some, found in zip(parts, results, strict=True):
        yield from zip(some, found, strict=True)


@dataclass(frozen=True)
class _Everyones(Sequence[Contacts]):
    """The contacts of each agent, where those of each team lie."""

    teams: Sequence[Sequence[int]]
    met: Sequence[Met]

    def __len__(self) -> int:
        return sum(map(len, self.teams))

    def __getitem__(self, j: Any) -> Any:
        for team, met in zip(self.teams, self.met, strict=True):
            if j in team:
                return met[team.index(j)]
        raise IndexError(j)

    def __iter__(self) -> Iterator[Contacts]:
        found = dict(_in_order(self.teams, [list(met) for met in self.met]))
        return (found[j] for j in range(len(found)))


class _Clock:
    """Seconds since the lap before, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self.last = now - self.last, now
