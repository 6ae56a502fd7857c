"""Algorithm 1 (alg:FedCB2O), lines 2 to 5: the loop over rounds that all engines share, and what an engine is.

An engine holds the agents in blocks and answers what crosses from one to another: `exchange`, and `look` for attackers.
It takes no peer's word for anything (`federated.admit`), decides nothing on a receiver's side that the receiver does
not know, raises for no peer's fault, and lets no order of arrival change a bit.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int

from fedcb2o.errors import RunError
from fedcb2o.federated.adversary import Adversary
from fedcb2o.federated.batched_aggregation import Engine as Aggregating
from fedcb2o.federated.batched_training import train_
from fedcb2o.federated.contacts import AgentState
from fedcb2o.federated.decisions import Decisions
from fedcb2o.federated.metrics import EvaluationResult
from fedcb2o.federated.run_spec import RunSpec
from fedcb2o.rng import stream


class WorkerLostError(RunError):
    """A part of an engine is gone, and with it models of this round: a run can go on from its last checkpoint."""


OnPhase = Callable[[int, str], None]
"""(round, what it is at): "training", "crafting", "mixing" or "evaluating"."""


@runtime_checkable
class Engine(Aggregating, Protocol):
    """The agents of a run, or those of them that are here, in `parts`: the ids of those that one call is for."""

    spec: RunSpec
    adversary: Adversary
    groups: list[Int[np.ndarray, " _a"]]

    def publish_(
        self, n: int, online: Bool[np.ndarray, " N"], sizes: Float[np.ndarray, " N"]
    ) -> None:
        """Have the attackers craft, and offer what all publish in round n; `sizes` are the trained models' extents."""
        ...

    def local_aggregation_(
        self,
        n: int,
        states: Sequence[AgentState],
        active: Bool[np.ndarray, " N"],
        deadline: float | None,
        on_step: Callable[[str], None],
    ) -> tuple[list[AgentState], list[Decisions], Bool[np.ndarray, " N"]]:
        """Run LocalAggregation (Algorithm 2) for the active agents of round n."""
        ...

    def evaluate(self) -> dict[int, EvaluationResult]:
        """What each benign agent's model does in its test."""
        ...


@dataclass(frozen=True)
class Round:
    """What happened in round `n`, by parts of the agents: what each `chose`, and what it remembers after it.

    `tested` is what each benign agent's model did in its test, where it was evaluated.
    """

    n: int
    train_loss: Float[np.ndarray, " N"]
    group_decisions: Sequence[Decisions]
    group_memories: Sequence[AgentState]
    groups: Sequence[Int[np.ndarray, " _a"]]
    test_results: dict[int, EvaluationResult] | None
    seconds: dict[str, float]

    @functools.cached_property
    def decisions(self) -> Decisions:
        """What all agents decided, in their order."""
        return Decisions.concatenate(self.group_decisions)

    @property
    def memory(self) -> AgentState:
        """What all agents remember, in their order."""
        return AgentState.concatenate(self.group_memories).take(
            np.concatenate(self.groups).argsort()
        )


def run_rounds(
    engine: Engine,
    memory: AgentState,
    start: int,
    stop: int,
    is_evaluated: Callable[[int], bool],
    on_phase: OnPhase = lambda n, phase: None,
    deadline: float | None = None,
) -> Iterator[Round]:
    """Rounds `start` to `stop` - 1 (alg:FedCB2O, lines 2-5), from what the agents here remember, in the order of
    their ids; the models change in place.

    `tell` hears what a round is at, since a round may be long. Raises RunError where a benign agent's training
    diverges, or its model overflows where it mixes. Under crafted models that is the attackers' success and no error:
    such an agent is broken from then on, and nobody receives its model.
    """
    parts = engine.groups
    here = np.sort(np.concatenate(parts))
    remembered = [memory.take(here.searchsorted(part)) for part in parts]
    del memory  # where nobody else holds it
    for n in range(start, stop):
        clock = PhaseTimer()
        losses, active = train_and_publish_(engine, n, on_phase, clock)  # line 3: LocalUpdate
        on_phase(n, "mixing")
        remembered, chose, finite = engine.local_aggregation_(
            n, remembered, active, deadline, clock.stop
        )  # line 4
        broken = engine.adversary.benign_ids[~finite[engine.adversary.benign_ids]]
        if len(broken) and not engine.adversary.attack.is_crafting(n):
            raise RunError(
                f"the model of benign agent {broken[0]} is not finite after mixing in round {n + 1}: its rule "
                "made that of finite models; a built-in one needs a smaller `training.gamma`, an own one a look"
            )
        tested = evaluate_if_due(engine, n, is_evaluated, on_phase, clock)
        yield Round(n, losses, chose, remembered, parts, tested, clock.seconds)


def train_and_publish_(
    engine: Engine, n: int, on_phase: OnPhase, timer: "PhaseTimer"
) -> tuple[Float[np.ndarray, " N"], Bool[np.ndarray, " N"]]:
    """LocalUpdate of all agents, and what they publish: their training losses, and who is there to aggregate, which
    benign agents whose models are broken are not.

    Raises RunError where a benign agent's training diverges without an attack on models.
    """
    attackers = engine.adversary
    here = np.concatenate(engine.groups)
    size = engine.spec.num_agents
    on_phase(n, "training")
    losses, extents = np.full(size, np.nan), np.zeros(size)  # of agents elsewhere nothing is known
    losses[here], extents[here] = map(
        np.concatenate, zip(*engine.map_groups(train_, n), strict=True)
    )
    finite = np.isfinite(extents)
    crafts = attackers.attack.is_crafting(n)
    diverged = here[~(attackers.malicious | (finite & np.isfinite(losses)))[here]]
    if len(diverged) and not crafts:
        raise RunError(
            f"training diverged: the model or the loss of benign agent {diverged.min()} is not finite in round "
            f"{n + 1}; a smaller `training.gamma` usually helps"
        )
    timer.stop("train")
    online = stream(engine.spec.seed, "online", n).random(size) < engine.spec.participation
    if crafts:
        on_phase(n, "crafting")
    engine.publish_(n, online, extents)
    if crafts:
        timer.stop("craft")
    return losses, online & (finite | attackers.malicious)


def evaluate_if_due(
    engine: Engine,
    n: int,
    is_evaluated: Callable[[int], bool],
    on_phase: OnPhase,
    timer: "PhaseTimer",
) -> dict[int, EvaluationResult] | None:
    """What benign agents' models do in their tests after a round, where it is evaluated."""
    if not is_evaluated(n):
        return None
    on_phase(n, "evaluating")
    found = engine.evaluate()
    timer.stop("evaluate")
    return found


class PhaseTimer:
    """Seconds since the lap before, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last_stop = time.perf_counter()

    def stop(self, name: str) -> None:
        """The seconds since the last lap are those of `name`."""
        now = time.perf_counter()
        self.seconds[name], self._last_stop = now - self._last_stop, now
