"""Local searches by derivatives, for smooth problems: SciPy's SLSQP by finite differences.

A search asks for values like every other part of `minimize`. It has an objective without
constraints, or with a `Constraints` as L. SLSQP runs in a thread of its own, because its functions
must return; the values come from the generator's caller.
"""

import dataclasses
import math
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import optimize

from fedcb2o.particles.ask_tell import EvaluationSteps
from fedcb2o.particles.cloud import Array
from fedcb2o.particles.dynamics import EvaluationRequest

MAX_DIM = 100  # coordinates up to which SLSQP's matrices are small
_DIFFERENCE = 1.5e-8  # step of the finite differences, relative to the box
_CENTRAL = 6e-6  # step of central differences
_TOLERANCE = 1e-12  # of SLSQP, relative to the values
_MAX_RUNS = 4  # runs by central differences, which restart with another scale
_GAIN = 1e-9  # relative decrease of the objective that another run is worth
_FARTHEST = 1e6  # distance at which a search without bounds ends, relative to the box
_MAX_REPAIRS = 4  # steps back into the feasible set
_NEARLY_ACTIVE = 1e-6  # scaled distance from a constraint that a repair keeps


class Found(NamedTuple):
    """The end of a local search, and all its evaluated points."""

    x: Array
    lower: float
    upper: float
    is_settled: bool  # whether SLSQP converged, to a better point than the first one
    is_unfinished: bool  # whether a better point was found when the limit ended the search
    points: Array  # all points [n, d] with L and G [n]
    lowers: Array
    uppers: Array


class _StopError(Exception):
    """Signal to the thread: the budget is spent, or values are not finite."""


_Ask = Callable[[Array], tuple[Array, Array]]


def to_array(values: torch.Tensor) -> Array:
    """Copy values, because the particles change in place."""
    return values.double().cpu().numpy().copy()


def search_locally(
    request: EvaluationRequest,
    first: Array,
    low: Array,
    high: Array,
    walls: tuple[Array, Array] | None,
    limit: int,
    rival: float = math.inf,
) -> EvaluationSteps[Found]:
    """Minimise from a point [d], with at most `limit` evaluations.

    `request` has the objectives. `low` and `high` [d] are the box, whose widths are the units.
    An end whose objective is at most `rival` is improved by central differences.
    """
    # Units of the box: SLSQP takes all coordinates for comparable.
    width = np.where(high > low, high - low, 1.0)
    is_free = high > low
    records: list[tuple[Array, Array, Array]] = []
    questions: SimpleQueue[Any] = SimpleQueue()
    answers: SimpleQueue[Any] = SimpleQueue()

    def ask(offsets: Array) -> tuple[Array, Array]:
        """Return the values [n] and scaled residuals [n, m] at offsets from `first`."""
        if not abs(offsets).max(initial=0.0) < _FARTHEST:  # without a minimum, or NaN
            raise _StopError
        points = np.repeat(first[None], len(offsets), 0)
        points[:, is_free] += offsets * width[is_free]
        points = points.clip(*sides)
        # SLSQP waits here, in its thread, until the caller of the generator has the values.
        questions.put(points)
        answer: tuple[Array, Array] | None = answers.get()
        if answer is None:
            raise _StopError
        return answer

    sides: Any = walls or (-math.inf, math.inf)
    ends = [(side - first)[is_free] / width[is_free] for side in sides]

    def solve() -> None:
        try:
            questions.put(_solve(ask, ends[0], ends[1], rival))
        except _StopError:
            questions.put(False)
        except Exception as error:  # raised again in the caller's thread
            questions.put(error)

    thread = threading.Thread(target=solve, daemon=True)
    thread.start()
    try:
        # The limit may end a search outside of the feasible set by little: the rest is for repairs.
        spare = 0 if request.upper is None else min(_MAX_REPAIRS + 2 * len(first), limit // 2)
        left = limit - spare
        is_spent = False
        while isinstance(question := questions.get(), np.ndarray):
            # A part of a gradient would be useless, so that a search ends before it.
            if len(question) > left:
                left += 0 if is_spent else spare
                is_spent = True
                answers.put(None)
                continue
            # Counted before the evaluation, since the caller may not return.
            left -= len(question)
            theta = torch.from_numpy(question).to(request.theta)[None]
            values = yield dataclasses.replace(request, theta=theta)
            lower = to_array(values.lower[0])
            upper = lower
            residuals = np.zeros((len(question), 0))
            if values.upper is not None:
                upper = to_array(values.upper[0])
                residuals = to_array(request.lower.latest_residuals)  # type: ignore[attr-defined]
                residuals = residuals.reshape(-1, residuals.shape[-1])
            records.append((to_array(theta[0]), lower, upper))
            # SLSQP would go on from NaN, and never leave it.
            is_finite = np.isfinite(upper).all() and np.isfinite(residuals).all()
            answers.put((upper, residuals) if is_finite and np.isfinite(lower).all() else None)
    finally:
        answers.put(None)
        thread.join()
    if isinstance(question, Exception):
        raise question
    points, lowers, uppers = (np.concatenate(parts) for parts in zip(*records, strict=True))
    # SLSQP may end at a worse point than one on its way.
    best = np.lexsort((uppers, lowers))[0]
    is_better = best > 0 and (lowers[best], uppers[best]) < (lowers[0], uppers[0])
    reasons = (bool(question and is_better), bool(is_spent and is_better))
    end = (points[best], float(lowers[best]), float(uppers[best]), *reasons)
    return Found(*end, points, lowers, uppers)


def _solve(ask: _Ask, low: Array, high: Array, rival: float) -> bool:
    """Run SLSQP, and repair its end. Return whether it converged."""
    z = np.zeros(len(low))
    problem = _Differences(ask, low, high)
    # The first step is a part of the box, whatever the unit of the objective.
    scale = max(float(np.abs(problem.slope(z)[0]).max()), 1e-300)
    constraints: Any = ()
    if problem.at(z)[1].size:
        constraints = {
            "type": "ineq",
            "fun": lambda z: -problem.at(z)[1],
            "jac": lambda z: -problem.slope(z)[1],
        }

    def run(z: Array) -> Any:
        return optimize.minimize(
            lambda z: problem.at(z)[0] / scale,
            z,
            jac=lambda z: problem.slope(z)[0] / scale,
            bounds=list(zip(low.tolist(), high.tolist(), strict=True)),
            constraints=constraints,
            method="SLSQP",
            options={"ftol": _TOLERANCE, "maxiter": 200 + 20 * len(z)},
        )

    try:
        found = run(z)
        z = found.x.clip(low, high)
        for _ in range(_MAX_RUNS):
            value = problem.at(z)[0]
            if found.status or value > rival:
                break
            problem.is_central = True
            scale = max(float(np.abs(problem.slope(z)[0]).max()), 1e-6 * scale)
            z = run(z).x.clip(low, high)
            if value - problem.at(z)[0] <= _GAIN * (1 + abs(value)):
                break
    except _StopError:
        if constraints:
            _repair(problem.nearly_best(), problem)
        raise
    if constraints:
        _repair(z, problem)
    return bool(found.status == 0)


class _Differences:
    """Values and finite differences of a problem, each evaluated once."""

    def __init__(self, ask: _Ask, low: Array, high: Array) -> None:
        self.low = low
        self.high = high
        self.is_central = False
        self._ask = ask
        self._memory: dict[bytes, tuple[float, Array]] = {}
        self._slopes: dict[tuple[bytes, bool], tuple[Array, Array]] = {}

    def at(self, z: Array) -> tuple[float, Array]:
        """Return the objective and the residuals [m]."""
        key = z.tobytes()
        if key not in self._memory:
            values, residuals = self._ask(z[None])
            self._memory[key] = (float(values[0]), residuals[0])
        return self._memory[key]

    def nearly_best(self) -> Array:
        """Return the best point that a repair may reach, or the first point."""
        near = [(f, z) for z, (f, excess) in self._memory.items() if excess.max() <= _NEARLY_ACTIVE]
        return np.frombuffer(min(near)[1]) if near else np.zeros(len(self.low))

    def slope(self, z: Array) -> tuple[Array, Array]:
        """Return their gradients [d] and [m, d]."""
        key = (z.tobytes(), self.is_central)
        if key not in self._slopes:
            value, residual = self.at(z)
            step = (_CENTRAL if self.is_central else _DIFFERENCE) * np.maximum(1.0, abs(z))
            # At a wall the difference is taken inwards.
            ahead = np.where(z + step > self.high, -step, step)
            points = z + np.diag(ahead)
            if self.is_central:  # one-sided at a wall
                points = np.concatenate([points, (z - np.diag(ahead)).clip(self.low, self.high)])
            values, residuals = self._ask(points)
            dim = len(z)
            offsets = (points.reshape(-1, dim, dim) - z).diagonal(axis1=1, axis2=2)
            size = offsets[0] - (offsets[1] if self.is_central else 0.0)
            values = values.reshape(-1, dim)
            residuals = residuals.reshape(len(values), dim, -1)
            start = (values[1], residuals[1]) if self.is_central else (value, residual)
            self._slopes[key] = ((values[0] - start[0]) / size, (residuals[0] - start[1]).T / size)
        return self._slopes[key]


def _repair(z: Array, problem: _Differences) -> None:
    """Take the shortest steps into the feasible set, which rounding has left."""
    first = z
    margin = 1e-14
    for _ in range(_MAX_REPAIRS):
        excess = problem.at(z)[1]
        # A point far outside is no matter of rounding: the search has failed there.
        if excess.max() <= 0 or excess.max() > _NEARLY_ACTIVE:
            return
        slopes = problem.slope(first)[1]
        is_active = excess > -_NEARLY_ACTIVE
        margin = max(10 * margin, float(excess.max()) / 2)
        # The shortest step moves the objective the least. More constraints than coordinates may be
        # active, so that equations would have no solution.
        active = optimize.LinearConstraint(slopes[is_active], ub=-excess[is_active] / margin - 1)
        found = optimize.minimize(lambda s: s @ s, 0 * z, constraints=active, method="SLSQP")
        z = (z + margin * found.x).clip(problem.low, problem.high)
