"""The driver behind `minimize`, `cb2o` and `Search`: ask, tell, terminate, step.

    state = dynamics.init(start)                     the first particles theta
    repeat:
        values = L and G at system.ask(state)        by functions, or by a user of `Search`
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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.particles._adaptive import Adaptive, num_final
from fedcb2o.particles._paper import Paper
from fedcb2o.particles.ask_tell import EvaluationSteps
from fedcb2o.particles.constraints import Constraints
from fedcb2o.particles.functions import forbid_writes
from fedcb2o.particles.hopping import Hopper
from fedcb2o.particles.initialisation import Start, Stop
from fedcb2o.particles.result import History, Result, RunnerUp, State
from fedcb2o.particles.system import Ensembles, Evaluation, System

_LOGGER = logging.getLogger(__name__)
Dynamics = Paper | Adaptive
# Step n, runs, m [runs, clusters, d], spreads [runs, clusters], L and G [runs, clusters, 2].
Record = tuple[int, Tensor, Tensor, Tensor, Tensor]
_EVALUATIONS_PER_DIM = 20_000  # default of maxfev, per coordinate
_NUM_RUNNERS_UP = 5
_MIN_CONSTANT = 10  # equal values of fewer particles may be chance


class RunEnd(NamedTuple):
    """A run at its end: tensors and numbers without the axis of runs."""

    x: Tensor
    consensus: Tensor
    spread: Tensor
    theta: Tensor
    theta_m: Tensor
    agreed: bool  # whether the dynamics ended the run
    stop: Stop
    nit: int
    nfev: int
    excluded: int
    hopper: Hopper | None  # memory of adaptive dynamics


def drive(
    start: Start,
    dynamics: Dynamics,
    callback: Callable[[State], Any] | None,
    *,
    maxiter: int | None,
    maxfev: int | None,
    time_limit: float,
    record_every: int,
) -> EvaluationSteps[Result]:
    """Take steps until all runs have ended, and return the result."""
    system = start.system
    if maxiter is None:
        maxiter = dynamics.max_steps
    if maxiter is None and maxfev is None:
        maxfev = _EVALUATIONS_PER_DIM * start.theta.shape[-1]
    state, notes = dynamics.init(start, maxfev)
    # glibc keeps freed memory for the next step, up to twice the largest block below 32 MiB that
    # was ever freed (mallopt(3), M_MMAP_THRESHOLD).
    torch.empty(31 * 2**20, dtype=torch.uint8)
    started = time.monotonic()
    records: list[Record] = []
    ends: dict[int, RunEnd] = {}
    info: Evaluation | None = None
    spent = Stop("maxfev", f"another step would evaluate more than maxfev = {maxfev} particles")
    try:
        for n in itertools.count():
            # 1. Ask for values, and find the consensus points.
            is_late = time.monotonic() - started > time_limit
            is_recorded = is_late or n == maxiter or n % record_every == 0
            # Copies for the check of writes cost memory and time, so that only some steps have
            # them.
            state, info = yield from _evaluate(system, state, dynamics, is_recorded)
            if isinstance(dynamics, Adaptive):
                yield from dynamics.refine(system, state, n != maxiter)
            if n == 0 and not start.is_fixed:
                _warn_of_constants(info)

            # 2. Look for a reason to stop all runs, or those whose evaluations are spent.
            stop = None
            if n == maxiter:
                stop = Stop("maxiter", f"maxiter = {maxiter} steps were taken")
            elif is_late:
                stop = Stop("time_limit", f"the time limit of {time_limit:g} s passed")
            if callback is not None and _callback_requests_stop(
                callback, start, state, info, dynamics.dt
            ):
                is_recorded = True
                stop = Stop("callback", "the callback stopped the run")
            ending = None
            if maxfev is not None and not stop:
                ending = _is_spent(system, state, is_recorded, maxfev)
                is_recorded |= bool(ending.any())
                stop = spent

            # 3. Record the spread, and end the runs that agree.
            if is_recorded or any(hopper.is_trusted for hopper in state.memory):
                # A record is of the whole ensemble, so that records do not depend on the batch.
                whole = info
                if state.batch is not None:
                    everyone = dataclasses.replace(state, batch=None)
                    everyone, whole = yield from _evaluate(
                        system, everyone, dynamics, info.check_writes
                    )
                    state = dataclasses.replace(everyone, batch=state.batch)
                spread = system.spread(state.theta, whole.m)
                best = dynamics.best_values(system, state, whole)
                records.append((n, state.runs, whole.m, spread, best))
                agreed = dynamics.terminate(state, spread)
                if ending is None:
                    ending = torch.full_like(agreed, stop is not None)
                ending = ending | agreed
                ends |= _end_runs(system, state, dynamics, whole.m, spread, agreed, ending, stop)
                if ending.all():
                    break
                if ending.any():  # runs that have ended cost nothing from here on
                    kept = (~ending).nonzero().squeeze(1)
                    state = state.for_runs(kept)
                    info = info.for_runs(kept)

            # 4. Take the step.
            state = dynamics.step(system, state, info)
    except KeyboardInterrupt:
        if info is None:  # nothing is known yet
            raise
        stop = Stop("interrupted", "the run was interrupted")
        spread = system.spread(state.theta, info.m)
        none = torch.zeros(len(state.runs), dtype=torch.bool)
        ends |= _end_runs(system, state, dynamics, info.m, spread, none, ~none, stop)

    in_order = [end for _, end in sorted(ends.items())]
    return (yield from _build_result(in_order, records, start, dynamics, notes, started))


def _evaluate(
    system: System, state: Ensembles, dynamics: Dynamics, check_writes: bool
) -> EvaluationSteps[tuple[Ensembles, Evaluation]]:
    """Evaluate the ensembles, and find their consensus points."""
    values = []
    for request in system.ask(state, check_writes):
        values.append((yield request))
    info = dynamics.tell(system, state, values, check_writes)
    return system.count(state, values), info


def _is_spent(system: System, state: Ensembles, is_recorded: bool, maxfev: int) -> Tensor:
    """Return whether another step of each run [runs] and its end would exceed `maxfev`."""
    cost = system.evaluation_cost(state.batch)
    cost += num_final(maxfev) if state.memory else len(system.clusters)
    if state.batch is not None:  # whole ensembles at a record and at the end
        cost += (1 + is_recorded) * system.evaluation_cost()
    extra = [hopper.extra for hopper in state.memory] or [0] * len(state.runs)
    return torch.tensor([state.num_evaluated + count + cost > maxfev for count in extra])


def _warn_of_constants(evaluation: Evaluation) -> None:
    """Warn of an objective that does not distinguish the particles of the first ensemble."""
    for values in evaluation.values:
        name, objective = "upper", values.upper
        if objective is None:
            name, objective = "lower", values.lower
        finite = objective[objective.isfinite()]
        if len(finite) >= _MIN_CONSTANT and finite.eq(finite[0]).all():
            text = "`%s` is %g at every particle of the first ensemble: m is their mean."
            _LOGGER.warning(text, name, finite[0])


def _callback_requests_stop(
    callback: Callable[[State], Any],
    start: Start,
    ensembles: Ensembles,
    evaluation: Evaluation,
    dt: float,
) -> bool:
    """Call a callback before a step; return whether all runs shall stop.

    A callback that writes into the particles, or returns no truth value, is a ConfigError.
    """
    system = start.system

    def of_all(name: str) -> Any:
        parts = [getattr(values, name) for values in evaluation.values]
        if evaluation.batch is not None or parts[0] is None:
            return None
        benign = zip(parts, system.clusters, strict=True)
        return start.squeeze_runs(torch.cat([part[:, c.rows] for part, c in benign], 1))

    x = start.squeeze(evaluation.m)
    parts = (system.benign(ensembles.theta), system.malicious(ensembles.theta))
    theta, theta_m = map(start.squeeze_runs, parts)
    values = (of_all("lower"), of_all("upper"))
    state = State(ensembles.n, ensembles.n * dt, x, theta, theta_m, *values, ensembles.runs)
    guarded = ((ensembles.theta, "particles"), (evaluation.m, "consensus points"))
    with forbid_writes("the callback", callback, guarded, evaluation.check_writes):
        try:
            answer = callback(state)
        except StopIteration:
            answer = True
    if answer is None:
        return False
    if isinstance(answer, Tensor | np.ndarray) and answer.shape == ():
        answer = answer.item()
    if not isinstance(answer, bool | np.bool_):
        got = type(answer).__name__
        raise ConfigError(f"`callback` must return True to stop, False or None, got a {got}")
    return bool(answer)


def _end_runs(
    system: System,
    state: Ensembles,
    dynamics: Dynamics,
    m: Tensor,
    spread: Tensor,
    agreed: Tensor,
    ending: Tensor,
    stop: Stop | None,
) -> dict[int, RunEnd]:
    """Return the runs that end at a step, by their indices.

    `agreed` tells of each active run if it reached a consensus, `ending` if it ends.
    """
    if not ending.any():
        return {}
    parts = dynamics.answers(system, state, m, spread)
    particles = (system.benign(state.theta), system.malicious(state.theta))
    ends = {}
    for row in ending.nonzero().flatten().tolist():
        hopper = state.memory[row] if state.memory else None
        reason = (bool(agreed[row]), stop or Stop("success", ""))
        nfev = state.num_evaluated + (hopper.extra if hopper else 0)
        x, consensus, radius, *ensembles = (part[row] for part in (*parts, *particles))
        counts = (state.n, nfev, int(state.excluded[row]))
        end = RunEnd(x, consensus, radius, ensembles[0], ensembles[1], *reason, *counts, hopper)
        ends[int(state.runs[row])] = end
    return ends


def _build_result(
    ends: list[RunEnd],
    records: list[Record],
    start: Start,
    dynamics: Dynamics,
    notes: tuple[str, ...],
    started: float,
) -> EvaluationSteps[Result]:
    """Combine the ended runs, in the order of the runs; see `minimize`."""
    system = start.system

    # 1. Evaluate the objectives at x, each cluster's at its own point.
    x = torch.stack([end.x for end in ends])
    for may_confirm in (isinstance(dynamics, Adaptive), False):
        at_x = []
        for k, cluster in enumerate(system.clusters):
            at_x.append((yield system.final_request(x[:, k : k + 1], cluster)))
        if not may_confirm or not (yield from dynamics.confirm_(ends, x, at_x, system)):  # type: ignore[union-attr]
            break
    lower = start.squeeze(torch.cat([values.lower for values in at_x], 1))
    uppers = [values.upper for values in at_x if values.upper is not None]
    upper = start.squeeze(torch.cat(uppers, 1)) if uppers else None
    fields: dict[str, Any] = {"lower": lower, "upper": upper, "fun": lower}
    constraints = system.clusters[0].lower
    if isinstance(constraints, Constraints):
        fields["constr"] = [
            start.squeeze(part.reshape(len(x), 1, -1)) for part in constraints.latest
        ]
        fields["constr_violation"] = start.squeeze_runs(constraints.latest_violation.reshape(-1))
        fields["fun"] = upper
        if constraints.latest_inner is not None:
            fields["fun"] = start.squeeze(constraints.latest_inner.reshape(len(x), 1))

    # 2. Decide which runs succeeded.
    success, reasons = yield from dynamics.judge(ends, x, at_x, start)
    per_run: dict[str, list[Any]] = {
        "status": [reason.code for reason in reasons],
        "message": [reason.text for reason in reasons],
        "seed": start.seeds,
        "runners_up": [_runners_up(end.hopper, x) for end in ends],
    }
    lists: dict[str, Any] = {
        name: values[0] if start.single_run else values for name, values in per_run.items()
    }

    # 3. Assemble the history.
    steps = torch.tensor([n for n, *_ in records])
    path = x.new_full((len(records), *x.shape), torch.nan)
    spreads = path[..., 0].clone()
    best = spreads.unsqueeze(-1).repeat(1, 1, 1, 2)
    for row, (_, runs, m, spread, least) in enumerate(records):
        recorded = runs.to(x.device)
        path[row, recorded] = m
        spreads[row, recorded] = spread
        best[row, recorded] = least.to(best)
    columns = (path, spreads, *best.unbind(-1))
    squeezed = (start.squeeze(column, 1, 2) for column in columns)

    def stack(name: str) -> Any:
        values = [getattr(end, name) for end in ends]
        return torch.stack(values) if isinstance(values[0], Tensor) else torch.tensor(values)

    names = ("nit", "excluded", "theta", "theta_m")
    return Result(
        x=start.squeeze(x),
        consensus=start.squeeze(stack("consensus")),
        **fields,
        **lists,
        success=start.squeeze_runs(success),
        nfev=start.squeeze_runs(stack("nfev") + system.num_final),
        spread=start.squeeze(stack("spread")),
        **{name: start.squeeze_runs(stack(name)) for name in names},
        history=History(steps, steps * dynamics.dt, *squeezed),
        notes=notes,
        seconds=time.monotonic() - started,
    )


def _runners_up(hopper: Hopper | None, like: Tensor) -> list[RunnerUp]:
    """Return up to five other ends of a run."""
    found = []
    for end, count in hopper.distinct_ends()[1 : 1 + _NUM_RUNNERS_UP] if hopper else ():
        lower = end.lower if hopper and hopper.has_upper else end.upper
        if np.isfinite([*end.x, lower, end.upper]).all():
            found.append(RunnerUp(torch.from_numpy(end.x).to(like), lower, end.upper, count))
    return found
