"""T rounds of all agents on one machine (alg:FedCB2O): train, craft, exchange and judge, mix.

The models are rows of one [N + P, d] tensor: those of the N agents, and the P that attackers craft and publish in their
stead, where they do; N more hold what the agents began the round with, where a rule looks at that. Right after the
agents' come those that a coordinator holds, where there is one. Agents of a phase are independent of each other, so
that workers share them out; the phases are synchronous: what peers download is the model after this round's
LocalUpdate.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from fedcb2o.errors import RunError
from fedcb2o.federated import ifca
from fedcb2o.federated.round import Mixed
from fedcb2o.federated.together import teams
from fedcb2o.federated.types import (
    Contacts,
)
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
    `triggered` that on samples with the trigger of a backdoor."""

    n: int
    train_loss: list[float]
    mixed: list[Mixed]
    confusion: dict[int, Int[Tensor, "C C"]] | None
    triggered: dict[int, Int[Tensor, "C C"]] | None
    seconds: dict[str, float]


def _by_choice(world: World, function: Callable[..., T], *task: Any) -> T:
    """What a function of the world finds, its dense layers by the run's choice."""
    with primitives.by(world.setting.linear):
        return function(world, *task)


def rounds(
    world: World,
    workers: Workers,
    contacts: list[Contacts],
    start: int,
    stop: int,
    evaluated: Callable[[int], bool],
    tell: Callable[[int, str], None] = lambda n, phase: None,
    columns: int | None = None,
) -> Iterator[Round]:
    """Rounds `start` to `stop` - 1 (alg:FedCB2O, lines 2-5); `contacts` and the models change in place.

    `tell` hears what a round is at, since a round may be long: "training", "crafting", "mixing", "evaluating". Models
    on a disk are mixed so many `columns` at a time, in memory. Raises RunError where a benign agent's training
    diverges, or its model overflows where it mixes. Under crafted models that is the attackers' success and no error:
    such an agent is broken from then on, and nobody receives its model.
    """
    setting, attack = world.setting, world.setting.attack
    everyone = range(setting.num_agents)
    benign = (~setting.population.malicious).nonzero().flatten().tolist()
    malicious = setting.population.malicious.nonzero().flatten().tolist()
    dim = world.models.shape[1]
    costs = [len(chosen) for chosen in setting.population.train]
    alone = dim >= LARGE and world.pool.device.type == "cpu"
    groups = teams(setting.module, dim, costs, setting.together)
    together = [sum(costs[j] for j in group) for group in groups]
    shares = blocks(range(len(groups)), together, len(groups) if alone else workers.count)

    def by_team(function: Callable[..., Mapping[int, T]], *arguments: Any, own: Sequence[Any] = ()) -> dict[int, T]:
        """What a function of the world finds for the agents of some teams, which are shared out among the workers.

        Its arguments are the teams, then a mapping with what is each agent's `own`, where there is such, then the rest.
        """
        tasks = []
        for share in shares:
            some = [groups[g] for g in share]
            mine = ({j: own[j] for team in some for j in team},) if own else ()
            tasks.append((function, some, *mine, *arguments))
        return {j: each for found in workers.map(_by_choice, tasks) for j, each in found.items()}

    def by_agent(function: Callable[..., list[T]], agents: Sequence[int], *arguments: Any) -> dict[int, T]:
        """What a function of the world finds for each agent, the agents shared out among the workers."""
        parts = blocks(agents, costs, len(agents) if alone else workers.count)
        found = zip(parts, workers.map(_by_choice, [(function, some, *arguments) for some in parts]), strict=True)
        return {j: result for some, results in found for j, result in zip(some, results, strict=True)}

    has_coordinator = setting.algorithm.models > 0
    chosen = by_agent(adopt, everyone) if has_coordinator else {}
    for n in range(start, stop):
        clock = _Clock()
        tell(n, "training")
        trained = by_team(train, n)
        for j in benign if not attack.crafts(n) else ():
            loss, finite = trained[j]
            if not (finite and math.isfinite(loss)):
                raise RunError(
                    f"training diverged: the model or the loss of benign agent {j} is not finite in round {n + 1}; "
                    "a smaller `training.gamma` usually helps"
                )
        clock.lap("train")
        good = torch.zeros(len(world.pool), dtype=torch.bool)
        good[: setting.num_agents] = torch.tensor([trained[j][1] for j in everyone])
        if attack.crafts(n):
            tell(n, "crafting")
            crafted = by_agent(craft, malicious, n, good[: setting.num_agents])
            for i in malicious:
                good[torch.tensor(setting.published(i))] = torch.tensor(crafted[i])
            clock.lap("craft")
        tell(n, "mixing")
        online = torch.from_numpy(stream(setting.seed, "online", n).random(setting.num_agents) < setting.participation)
        mixing = online & (good[: setting.num_agents] | setting.population.malicious)
        choices = by_team(aggregate, n, mixing, online, good, own=contacts)
        mixed = [choices[j] for j in everyone]
        contacts[:] = [choice.contacts for choice in mixed]
        averages = coordinate(setting, chosen, n, online, good) if has_coordinator else []
        clock.lap("aggregate")
        matrix = mixing_matrix([*mixed, *averages], len(world.pool))
        parts = (matrix.crow_indices(), matrix.col_indices(), matrix.values())
        reductions = {j: (one.reduction, one.factor) for j, one in enumerate(mixed) if one.reduction is not None}
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
            mixed = [ifca.seen_by(j, averages[chosen[j]], contacts[j]) for j in everyone]
            clock.lap("choose")
        counts = marked = None
        if evaluated(n):
            tell(n, "evaluating")
            counts = by_agent(evaluate, benign)
            marked = by_agent(evaluate, benign, True) if setting.trigger is not None else None
            clock.lap("evaluate")
        yield Round(n, [trained[j][0] for j in everyone], mixed, counts, marked, clock.seconds)


class _Clock:
    """Seconds since the lap before, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self.last = now - self.last, now
