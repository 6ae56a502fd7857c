"""Algorithm 1 (alg:FedCB2O), lines 2 to 5: the loop over rounds, and the interface of engines.

An engine computes the agents in batches and transports their models. A wrapper of it plays the
attackers (`adversarial_engine`). `federated` explains *group*, *batch* and *members*. An engine

- checks all received models (`federated.guards.acceptance`);
- uses no knowledge that a receiver does not have;
- raises no error because of a peer's fault;
- gives the same bits for every order of arrival.
"""

import functools
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Float, Int

from fedcb2o.errors import RunError
from fedcb2o.federated.contacts import AgentState
from fedcb2o.federated.decisions import Decisions
from fedcb2o.federated.evaluation.metrics import EvaluationResult
from fedcb2o.federated.guards.acceptance import MAX_VALUE, is_acceptable
from fedcb2o.federated.local_update import TrainResult
from fedcb2o.federated.ragged import AgentIds
from fedcb2o.federated.run_spec import RunSpec
from fedcb2o.federated.selection import no_peers
from fedcb2o.federated.shortfall import Shortfall
from fedcb2o.rng import stream
from fedcb2o.simulation.clock import Clock

_LOG = logging.getLogger(__name__)

_WARNED: weakref.WeakSet["Engine"] = weakref.WeakSet()
"""Engines whose log says that peers refuse a model."""


class WorkerLostError(RunError):
    """A worker of an engine is lost; the run can continue from its last checkpoint."""


OnPhase = Callable[[int, str], None]
"""Callback (round, phase): "training", "crafting", "aggregating" or "evaluating".

The phase "aggregating" is LocalAggregation, Algorithm 2 from line 1 to line 7.
"""


class BenignEngine(Protocol):
    """Interface of the agents of a run, or of the agents of this process.

    `batches` has the ids in the run of the agents that one function call computes.
    """

    spec: RunSpec
    batches: list[AgentIds]

    def train_(self, n: int) -> list[TrainResult]:
        """Train the models of all agents (LocalUpdate); return the result of each batch."""

    def publish_(
        self, n: int, online: Bool[np.ndarray, " N"], max_abs: Float[np.ndarray, " N"]
    ) -> None:
        """Publish the models of all agents.

        `online` is True for agents that take part in the round. `max_abs` is the largest absolute
        value of each trained model; not finite for a broken one.
        """

    def aggregate_(
        self,
        n: int,
        states: Sequence[AgentState],
        active: Bool[np.ndarray, " N"],
        deadline: float | None,
        on_step: Callable[[str], None],
    ) -> tuple[list[AgentState], list[Decisions], Bool[np.ndarray, " N"]]:
        """Run LocalAggregation (Algorithm 2) for the active agents of round n.

        `deadline` is in seconds, for downloads; None without one. `on_step` receives "aggregate"
        after lines 1 to 6, and "mix" after line 7. Returns the new state and the decisions of each
        batch, and False for benign agents whose model is not finite.
        """

    def evaluate(self) -> EvaluationResult:
        """Return the test results of the benign agents of this process."""


class Engine(BenignEngine, Protocol):
    """Interface of agents of which a wrapper may play some, with False in `benign`."""

    benign: Bool[np.ndarray, " N"]

    def may_break(self, n: int) -> bool:
        """Return True in rounds in which others may break an agent's model, which is no error."""


@dataclass(frozen=True)
class Round:
    """The outcome of round n, from 0.

    `test_results` has those of the benign agents; None without an evaluation. `seconds` is the
    duration of each phase.
    """

    n: int
    train_loss: Float[np.ndarray, " N"]
    batch_decisions: Sequence[Decisions]
    batch_states: Sequence[AgentState]
    batches: Sequence[AgentIds]
    test_results: EvaluationResult | None
    seconds: dict[str, float]

    @functools.cached_property
    def decisions(self) -> Decisions:
        """The decisions of all agents, in the order of their ids."""
        return Decisions.concatenate(self.batch_decisions)

    @property
    def state(self) -> AgentState:
        """The state of all agents, in the order of their ids."""
        order = np.concatenate(self.batches).argsort()
        return AgentState.concatenate(self.batch_states).take(order)


def run_rounds(
    engine: Engine,
    state: AgentState,
    start: int,
    stop: int,
    evaluate_every: int = 1,
    on_phase: OnPhase = lambda n, phase: None,
    deadline: float | None = None,
    clock: Clock | None = None,
) -> Iterator[Round]:
    """Run the rounds of Algorithm 1 (alg:FedCB2O, lines 2 to 5), from `start` to before `stop`.

    The engine's models change in place. `state` is in the order of the agents' ids. With
    `evaluate_every` 0, nothing is evaluated; otherwise one evaluation is after the last round.
    `deadline` is in seconds, for the downloads of a round. With a `clock`, which the engine has
    too, the round is one of simulated time. RunError is raised if, without crafted models, a benign
    agent's training diverges, or its model is not finite after mixing.
    """
    batches = engine.batches
    agents = np.sort(np.concatenate(batches))
    states = [state.take(agents.searchsorted(batch)) for batch in batches]
    del state  # frees the tensors that no caller holds
    shortfall = Shortfall(engine.spec.algorithm, engine.spec.malicious_share)
    for n in range(start, stop):
        timer = PhaseTimer()
        if clock is not None:
            clock.begin_()
        # Line 3: LocalUpdate
        losses, is_active = train_and_publish_(engine, n, on_phase, timer, clock)
        on_phase(n, "aggregating")
        # Line 4: LocalAggregation, of all agents at once (batched_aggregation) or of one real peer
        # (algorithm2)
        states, decisions, is_finite = engine.aggregate_(n, states, is_active, deadline, timer.stop)
        # Crafted models may break a benign agent's model. That is a success of the attackers and
        # not an error: no agent receives the broken model in later rounds.
        broken = np.flatnonzero(engine.benign & ~is_finite)
        if len(broken) and not engine.may_break(n):
            raise RunError(
                f"the model of benign agent {broken[0]} is not finite after mixing finite models "
                f"in round {n + 1}: with a built-in rule take a smaller `training.gamma`; "
                "otherwise check your rule"
            )
        if clock is not None:
            clock.end_()
        shortfall.add(decisions, engine.benign)
        results = evaluate_if_due(engine, n, stop, evaluate_every, on_phase, timer)
        yield Round(n, losses, decisions, states, batches, results, timer.seconds)
    shortfall.log()


def train_and_publish_(
    engine: Engine, n: int, on_phase: OnPhase, timer: "PhaseTimer", clock: Clock | None = None
) -> tuple[Float[np.ndarray, " N"], Bool[np.ndarray, " N"]]:
    """Train all agents (LocalUpdate), and publish their models.

    The engine's models change in place. Returns the training loss of each agent, NaN for agents of
    other processes; and True for agents that aggregate: those online, except benign agents with a
    broken model. RunError is raised if a benign agent's training diverges without crafted models.
    """
    num_agents = engine.spec.num_agents
    on_phase(n, "training")
    losses = np.full(num_agents, np.nan)
    max_abs = np.zeros(num_agents)
    agents = np.concatenate(engine.batches)
    batch_losses, batch_max_abs, has_trained = zip(*engine.train_(n), strict=True)
    losses[agents] = np.concatenate(batch_losses)
    max_abs[agents] = np.concatenate(batch_max_abs)

    if not any(has_trained):
        _LOG.warning(
            "training changed no model in round %d: the gradients are 0 (a loss or a layer without "
            "slope), or the step size lambda2 * gamma is 0 or too small for float32.",
            n + 1,
        )

    is_finite = np.isfinite(max_abs)
    may_break = engine.may_break(n)
    trains = np.ones(num_agents, dtype=bool) if clock is None else clock.trains
    # An agent that does not train in the round has no loss.
    is_sound = ~engine.benign | (is_finite & (np.isfinite(losses) | ~trains))
    diverged = agents[~is_sound[agents]]
    if len(diverged) and not may_break:
        cure = ""
        if engine.spec.num_classes == 1:
            cure = ", and so do targets and features that are divided by their standard deviation"
        raise RunError(
            f"training diverged: the model or the loss of benign agent {diverged.min()} is not "
            f"finite in round {n + 1}; a smaller `training.gamma` usually helps{cure}"
        )
    timer.stop("train")
    is_refused = is_finite & ~is_acceptable(max_abs) & engine.benign
    if is_refused[agents].any():
        _warn_of_size(engine, n, agents[is_refused[agents]])

    # For all N agents in each process, which then agree on the agents online.
    online = (
        stream(engine.spec.seed, "online", n).random(num_agents) < engine.spec.agents.participation
    )
    if clock is not None:
        online = clock.answers
    if may_break:
        on_phase(n, "crafting")
    engine.publish_(n, online, max_abs)
    if may_break:
        timer.stop("craft")
    # An attacker with a broken model takes part: others get what it crafts.
    return losses, online & trains & (is_finite | ~engine.benign)


def evaluate_if_due(
    engine: Engine,
    n: int,
    stop: int,
    evaluate_every: int,
    on_phase: OnPhase,
    timer: "PhaseTimer",
) -> EvaluationResult | None:
    """Evaluate the benign agents' models, if the round is evaluated; else return None.

    Round `stop` - 1 is the last one, and always evaluated; with `evaluate_every` 0 none is.
    """
    done = n + 1
    if not evaluate_every or (done % evaluate_every and done != stop):
        return None
    on_phase(n, "evaluating")
    results = engine.evaluate()
    timer.stop("evaluate")
    return results


class PhaseTimer:
    """Durations of consecutive phases in seconds, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last_stop = time.perf_counter()

    def stop(self, name: str) -> None:
        """Record the time since the last stop, for the phase that ends now."""
        now = time.perf_counter()
        self.seconds[name] = now - self._last_stop
        self._last_stop = now


def _warn_of_size(engine: Engine, n: int, agents: Int[np.ndarray, " a"]) -> None:
    """Log once for an engine that peers refuse the models of benign agents."""
    # The models of agents that train alone are not sent.
    if engine.spec.algorithm.select is not no_peers and engine not in _WARNED:
        _WARNED.add(engine)
        _LOG.warning(
            "the model of benign agent %d holds numbers beyond %g in round %d, so that no peer "
            "accepts it: scale its samples or targets, such as by `standardise=True`, or take a "
            "smaller `training.gamma`.",
            agents.min(),
            MAX_VALUE,
            n + 1,
        )
