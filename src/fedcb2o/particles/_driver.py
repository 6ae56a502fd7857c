"""The driver behind `minimize`, `cb2o` and `Search`: ask, tell, terminate, step.

    state = dynamics.init(start)                     the first particles theta
    repeat:
        values = L and G at dynamics.ask(state)      by functions, or by a user of `Search`
        state, info = dynamics.tell(state, values)   consensus points m
        end the runs of dynamics.terminate(state)
        state = dynamics.step(state, info)           the next particles theta

The dynamics are `Paper` or `Adaptive`, a frozen dataclass of parameters. The state is a frozen
dataclass of tensors, `Ensembles`.
"""

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedcb2o.particles import settings
from fedcb2o.particles._adaptive import Adaptive, best_values, num_final
from fedcb2o.particles.ask_tell import EvaluationSteps
from fedcb2o.particles.initialisation import Start, Stop
from fedcb2o.particles.result import (
    Dynamics,
    Record,
    Result,
    build_result,
    count_points,
    finish_runs,
    least_values,
)
from fedcb2o.particles.state import State, callback_requests_stop
from fedcb2o.particles.system import Ensembles, Evaluation, System

_LOGGER = logging.getLogger(__name__)
_MIN_CONSTANT = 10  # equal values of fewer particles may be chance


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a run, and the steps between two records; see `minimize`."""

    maxiter: int | None
    maxfev: int | None
    time_limit: float
    record_every: int

    def __post_init__(self) -> None:
        """Check the limits, and convert them to plain numbers."""
        numbers = settings.check_positive({"time_limit": self.time_limit}, finite=False)
        checked = {
            **numbers,
            "maxiter": settings.check_optional_count("`maxiter`", self.maxiter, 0),
            "maxfev": settings.check_optional_count("`maxfev`", self.maxfev),
            "record_every": settings.check_count("`record_every`", self.record_every),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def drive(
    start: Start,
    dynamics: Dynamics,
    limits: Limits,
    *,
    callback: Callable[[State], Any] | None,
) -> EvaluationSteps[Result]:
    """Take steps until all runs have ended, and return the result."""
    system = start.system
    maxiter, maxfev = dynamics.default_limits(limits.maxiter, limits.maxfev, start.theta.shape[-1])
    state, notes = dynamics.init(start, maxfev)
    _keep_freed_memory()
    started = time.monotonic()
    records: list[Record] = []
    ends: list[dict[str, Tensor]] = []
    stops: list[Stop] = [Stop("success", "")]
    info: Evaluation | None = None
    try:
        for n in itertools.count():
            # 1. Ask for values, and find the consensus points.
            is_late = time.monotonic() - started > limits.time_limit
            is_recorded = is_late or n == maxiter or n % limits.record_every == 0
            # Copies for the check of writes cost memory and time, so that only some steps have
            # them.
            values = []
            for request in dynamics.ask(system, state, is_recorded):
                values.append((yield request))
            state, info = dynamics.tell(system, state, values, is_recorded)
            if isinstance(dynamics, Adaptive):
                info = yield from dynamics.refine(system, state, info, n != maxiter)
            if n == 0 and not start.is_fixed:
                _warn_of_constants(info)

            # 2. Look for a reason to stop all runs, or those whose evaluations are spent.
            stop = None
            if n == maxiter:
                stop = Stop("maxiter", f"maxiter = {maxiter} steps were taken")
            elif is_late:
                stop = Stop("time_limit", f"the time limit of {limits.time_limit:g} s passed")
            if callback is not None and callback_requests_stop(
                callback, start.shape, system, state, info, dynamics.dt
            ):
                is_recorded = True
                stop = Stop("callback", "the callback stopped the run")
            is_spent = None
            if maxfev is not None and not stop:
                is_spent = _is_spent(system, state, dynamics, is_recorded, maxfev)
                is_recorded |= bool(is_spent.any())

            # 3. Record the spread, and end the runs that agree.
            if is_recorded or info.may_end:
                # A record is of the whole ensemble, so that records do not depend on the batch.
                whole = info
                if state.batch is not None:
                    state, whole = yield from _evaluate_whole(system, state, dynamics, info)
                spread = system.spread(state.theta, whole.m)
                best = best_values(state) if state.memory else least_values(system, whole)
                records.append(Record(n, state.runs, whole.m, spread, best))
                agreed = dynamics.terminate(state, spread)
                ending = agreed
                if stop:
                    ending = torch.ones_like(agreed)
                elif is_spent is not None:
                    ending = agreed | is_spent
                    stop = Stop(
                        "maxfev",
                        f"another step would evaluate more than maxfev = {maxfev} particles",
                    )
                if ending.any():
                    stops.append(stop or stops[0])
                    fields = {**dynamics.fields(state), "stop": _numbers(agreed, len(stops) - 1)}
                    ends.append(finish_runs(system, state, whole.m, spread, agreed, ending, fields))
                    if ending.all():
                        break
                    # Runs that have ended cost nothing from here on.
                    kept = (~ending).nonzero().squeeze(1)
                    state = state.for_runs(kept)
                    info = info.for_runs(kept)

            # 4. Take the step.
            state = dynamics.step(system, state, info)
    except KeyboardInterrupt:
        if info is None:  # nothing is known yet
            raise
        stops.append(Stop("interrupted", "the run was interrupted"))
        spread = system.spread(state.theta, info.m)
        none = torch.zeros(len(state.runs), dtype=torch.bool)
        fields = {**dynamics.fields(state), "stop": _numbers(none, len(stops) - 1)}
        fields["is_confirmable"] = none
        ends.append(finish_runs(system, state, info.m, spread, none, ~none, fields))

    steps = build_result(
        ends,
        records,
        start,
        dynamics,
        stops=stops,
        notes=notes,
        seconds=time.monotonic() - started,
    )
    return (yield from count_points(steps))


def _numbers(like: Tensor, value: int) -> Tensor:
    return torch.full(like.shape, value, dtype=torch.long)


def _is_spent(
    system: System, state: Ensembles, dynamics: Dynamics, is_recorded: bool, maxfev: int
) -> Tensor:
    """Return whether another step of each run [runs] and its end would exceed `maxfev`."""
    cost = system.evaluation_cost(state.batch)
    if state.batch is not None:  # whole ensembles at a record and at the end
        cost += (1 + is_recorded) * system.evaluation_cost()
    cost += num_final(maxfev) if state.memory else len(system.clusters)
    extra = [hopper.extra for hopper in state.memory] or [0] * len(state.runs)
    return torch.tensor([state.num_evaluated + count + cost > maxfev for count in extra])


def _evaluate_whole(
    system: System, state: Ensembles, dynamics: Dynamics, info: Evaluation
) -> EvaluationSteps[tuple[Ensembles, Evaluation]]:
    """Evaluate the whole ensemble at a step with a random batch; the batch stays."""
    everyone = dataclasses.replace(state, batch=None)
    values = []
    for request in dynamics.ask(system, everyone, info.check_writes):
        values.append((yield request))
    everyone, whole = dynamics.tell(system, everyone, values, info.check_writes)
    return dataclasses.replace(everyone, batch=state.batch), whole


def _keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next step.

    glibc keeps up to twice the largest block below 32 MiB that was ever freed (mallopt(3),
    M_MMAP_THRESHOLD).
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


def _warn_of_constants(evaluation: Evaluation) -> None:
    """Warn of an objective that does not distinguish the particles of the first ensemble."""
    for values in evaluation.values:
        name = "upper"
        objective = values.upper
        if objective is None:
            name = "lower"
            objective = values.lower
        finite = objective[objective.isfinite()]
        if len(finite) >= _MIN_CONSTANT and finite.eq(finite[0]).all():
            _LOGGER.warning(
                "`%s` is %g at every particle of the first ensemble: no particle is better than"
                " another, and the consensus is their mean.",
                name,
                finite[0],
            )
