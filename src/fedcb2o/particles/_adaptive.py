"""The adaptive dynamics: consensus hopping with restarts, for all active runs.

    theta^i ~ N(m, s^2 C)                                     for every particle i
    m, s, C <- weighted average, step size and covariance of the better half of the ensemble
    after a collapse a larger ensemble starts in the box, and looks for a smaller G

Each run has a `Hopper` (`particles.hopping`), the memory of the state. It changes in place.

Example:
    >>> Adaptive(delta_q=0.01).xtol is None
    True
"""

import dataclasses
import math
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedcb2o.errors import RunError
from fedcb2o.particles import settings
from fedcb2o.particles.ask_tell import EvaluationRequest, EvaluationSteps
from fedcb2o.particles.constraints import Constraints
from fedcb2o.particles.dynamics import ConsensusParams, Values
from fedcb2o.particles.hopping import Hopper, default_num_particles
from fedcb2o.particles.initialisation import Start, Stop
from fedcb2o.particles.local_search import MAX_DIM, search_locally
from fedcb2o.particles.system import Cluster, Ensembles, Evaluation, System

_EVALUATIONS_PER_DIM = 20_000  # default of maxfev, per coordinate
_PRECISION = {torch.float64: 1e-8, torch.float32: 1e-5}
_NUM_CANDIDATES = 3  # ends whose points are judged again if the best one is not confirmed
_SEARCH_LENGTH = 200  # evaluations of a local search, over d + 1
_CONFIRMABLE = 160  # budget from which candidates are judged again
_NUM_RUNNERS_UP = 5
_CONFIRMED = 1e-6  # relative difference of two evaluations of a point that counts as rounding
_BARRED_MESSAGE = (
    "L is smaller at points where G is infinite, so x does not minimise L: if these points are"
    " invalid, let L be infinite there too"
)


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """Parameters of the adaptive dynamics, which choose all others on the way.

    Particles are drawn about the consensus point. After a collapse a larger ensemble starts anew in
    the box, and looks for a smaller G (Fornasier, Huang, Klemenc and Malaspina, "From
    Consensus-Based Optimization to Evolution Strategies", arXiv 2602.11677).

    Attributes:
        delta_q: Points with L up to min L + delta_q count as minimisers.
        xtol: Spread at which an ensemble has collapsed, the root mean squared distance of the
            benign particles from the consensus point. By default, and at least, 1e-7 of the box
            (1e-5 for float32).
        agree: What independent searches must have in common for a success: "x", or the "value",
            where minimisers of equal value may be apart.

    Raises:
        ConfigError: A parameter is out of its range.
    """

    delta_q: float = 0.0
    xtol: float | None = None
    agree: str = "x"

    # Hopping has no time of its own. Adversaries and the history need one.
    dt: ClassVar[float] = 0.1
    needs_gradient: ClassVar[bool] = False
    keeps_x0: ClassVar[bool] = True
    can_split: ClassVar[bool] = False  # particles at one point stay together

    def __post_init__(self) -> None:
        """Check the parameters, and convert them to plain numbers."""
        settings.check_choices({"`agree`": (self.agree, ("x", "value"))})
        given = {"delta_q": self.delta_q}
        if self.xtol is not None:
            given["xtol"] = self.xtol
        for name, value in settings.check_positive(given, or_zero=True).items():
            object.__setattr__(self, name, value)

    def default_num_particles(self, dim: int) -> int:
        """Return the default number of particles, 4 (4 + 3 log d)."""
        return default_num_particles(dim)

    def default_limits(
        self, maxiter: int | None, maxfev: int | None, dim: int
    ) -> tuple[int | None, int | None]:
        """Return the largest numbers of steps and of evaluations."""
        if maxfev is None and maxiter is None:
            maxfev = _EVALUATIONS_PER_DIM * dim
        return maxiter, maxfev

    def init(self, start: Start, maxfev: int | None) -> tuple[Ensembles, tuple[str, ...]]:
        """Return the state before the first step, without remarks."""
        system = start.system
        walls = None
        if system.bounds is not None:
            walls = (_to_array(system.bounds[0]), _to_array(system.bounds[1]))
        hoppers = []
        for seed, benign in zip(start.seeds, system.benign(start.theta), strict=True):
            low, high = start.box or benign.aminmax(dim=0)
            hoppers.append(
                Hopper(
                    seed,
                    _to_array(low),
                    _to_array(high),
                    system.num_benign,
                    num_malicious=system.num_particles - system.num_benign,
                    walls=walls,
                    delta_q=self.delta_q,
                    precision=_PRECISION[start.theta.dtype],
                    xtol=self.xtol or 0.0,
                    budget=float(maxfev or math.inf),
                    can_search=start.finish and _is_searchable(system.clusters[0], len(low)),
                    has_first=start.has_first,
                    by_value=self.agree == "value",
                    is_exact=isinstance(system.clusters[0].lower, Constraints),
                )
            )
        return dataclasses.replace(start.ensembles(), memory=tuple(hoppers)), ()

    def ask(self, system: System, state: Ensembles, check_writes: bool) -> list[EvaluationRequest]:
        """Return the request for the values of the particles."""
        return system.ask(state, check_writes)

    def tell(
        self, system: System, state: Ensembles, values: list[Values], check_writes: bool
    ) -> tuple[Ensembles, Evaluation]:
        """Receive the values, and move the consensus points of all runs."""
        (item,) = values
        for run, hopper in enumerate(state.memory):
            lower = _to_array(item.lower[run])
            upper = None if item.upper is None else _to_array(item.upper[run])
            barred = None if item.barred_lower is None else item.barred_lower[run]
            hopper.update(_to_array(state.theta[run]), lower, upper)
            if barred is not None:
                hopper.least_barred = min(hopper.least_barred, float(barred.min()))
            if not hopper.has_value:
                raise RunError(
                    f"all {hopper.count} particles have NaN or infinite objectives: correct the"
                    " objectives, or start nearer"
                )
        for points, own in system.own:
            upper = None if own.upper is None else _to_array(own.upper[0])
            for hopper in state.memory:
                hopper.add_own(_to_array(points), _to_array(own.lower[0]), upper)
        system.own.clear()
        m = np.stack([hopper.m for hopper in state.memory])
        info = Evaluation(
            values,
            [torch.from_numpy(m).to(state.theta)],
            # Adversaries see the consensus point of the paper's default parameters.
            ConsensusParams(alpha=1000.0, beta=0.1, delta_q=self.delta_q),
            check_writes=check_writes,
            may_end=any(hopper.is_trusted for hopper in state.memory),
        )
        return system.count(state, values), info

    def terminate(self, state: Ensembles, spread: Tensor) -> Tensor:
        """Return whether the best end of each run [runs] is trusted."""
        return torch.tensor([hopper.is_trusted for hopper in state.memory])

    def refine(
        self, system: System, state: Ensembles, info: Evaluation, may_search: bool
    ) -> EvaluationSteps[Evaluation]:
        """Run the local searches that the ensembles ask for, and use the rest of a budget."""
        (cluster,) = system.clusters
        for run, hopper in enumerate(state.memory):
            dim = len(hopper.width)
            lower = cluster.lower
            if isinstance(lower, Constraints):
                lower = lower.for_runs(state.runs[run : run + 1])
            request = EvaluationRequest(
                state.theta, lower, cluster.upper, system.flat, own=system.own
            )
            # 1. A local search.
            first, hopper.search_from = hopper.search_from, None
            left = _num_left(hopper, state)
            limit = int(min(_SEARCH_LENGTH * (dim + 1), left))
            if first is not None and limit > dim + 1 and may_search:
                box = (hopper.low, hopper.low + hopper.width)
                found = yield from search_locally(
                    request, first, *box, hopper.walls, limit, hopper.rival
                )
                hopper.add_search(found)
                info = dataclasses.replace(info, may_end=info.may_end or hopper.is_trusted)
            # 2. A step of fewer particles than an ensemble has, the last one.
            left = _num_left(hopper, state)
            if 0 < left < system.evaluation_cost() and not system.adversaries:
                points = hopper.points()[: int(left)]
                theta = torch.from_numpy(points).to(state.theta)[None]
                values = yield dataclasses.replace(request, theta=theta)
                upper = None if values.upper is None else _to_array(values.upper[0])
                hopper.add_rest(points, _to_array(values.lower[0]), upper)
        return info

    def step(self, system: System, state: Ensembles, info: Evaluation) -> Ensembles:
        """Draw the particles of the next step."""
        points = np.stack([hopper.points() for hopper in state.memory])
        return system.replace_(state, info, torch.from_numpy(points).to(state.theta), self.dt)

    def fields(self, state: Ensembles) -> dict[str, Tensor]:
        """Return further fields of all active runs.

        They are the best points `x`, their recorded values `judged`, further `candidates`,
        consensus points, the numbers behind a success (`_evidence`), other ends, and whether L is
        less at a point where G is infinite (`barred`).
        """
        rows: list[tuple[Any, ...]] = []
        barred = []
        for hopper in state.memory:
            ranked = hopper.ranked_ends()
            best = ranked[0]
            ends = (ranked + [best] * _NUM_CANDIDATES)[:_NUM_CANDIDATES]
            points = [point for end in ends for point in (end.x, end.m)]
            barred.append(hopper.least_barred < best.lower - hopper.lower_tolerance)
            widest = best.radius * hopper.width.max()
            rows.append((best.x, [best.lower, best.upper], np.stack(points), best.m, [widest]))
        columns = [np.stack(column) for column in zip(*rows, strict=True)]
        x, judged, candidates, m, spread = columns
        like = state.theta
        return {
            "x": torch.from_numpy(x).to(like).unsqueeze(1),
            "judged": torch.from_numpy(judged),
            "candidates": torch.from_numpy(candidates).to(like),
            "consensus": torch.from_numpy(m).to(like).unsqueeze(1),
            "spread": torch.from_numpy(spread).to(like),
            "evidence": torch.tensor([_evidence(hopper) for hopper in state.memory]),
            "runners_up": torch.stack([_runners_up(hopper) for hopper in state.memory]),
            "barred": torch.tensor(barred),
            "is_confirmable": torch.tensor(
                [hopper.budget >= _CONFIRMABLE for hopper in state.memory]
            ),
            "extra": torch.tensor([hopper.extra for hopper in state.memory]),
        }

    def confirm_(
        self, final: dict[str, Tensor], at_x: list[Values], start: Start
    ) -> EvaluationSteps[bool]:
        """Replace x where a second evaluation differs from the first and another point is better.

        Objectives may be noisy, or corrupted in some evaluations. A point counts by the worse of
        its values. `x` of `final`, the fields of the ended runs, changes in place. `at_x` is the
        second evaluation. The result tells if points were judged again.
        """
        x = final["x"]
        judged = final["judged"].to(x.device)
        second = _stack(at_x[0])[:, 0]
        differs = (second - judged).abs() > _CONFIRMED * (1 + judged.abs())
        if not differs.any() or not final["is_confirmable"].all():
            return False

        candidates = final["candidates"]
        (cluster,) = start.system.clusters
        values = yield EvaluationRequest(
            candidates, cluster.lower, cluster.upper, start.system.flat
        )
        scores = _stack(values)
        scores[:, 0] = torch.maximum(torch.maximum(scores[:, 0], judged), second)
        for run in differs.any(1).nonzero().flatten().tolist():
            # The last key of lexsort decides first, so L does, and G where it is equal.
            order = np.lexsort(scores[run].T.flip(0).cpu().numpy())
            x[run, 0] = candidates[run, order[0]]
        return True

    def judge(
        self, final: dict[str, Tensor], at_x: list[Values], start: Start, stops: list[Stop]
    ) -> EvaluationSteps[tuple[Tensor, list[Stop]]]:
        """Return whether each run succeeded [runs], and why it ended.

        The searches that agree on x decide, the uniform points, and the constraints.
        """
        yield from ()
        lower = at_x[0].lower[:, 0]
        level = start.system.clusters[0].lower
        is_met = torch.ones(len(final["evidence"]), dtype=torch.bool)
        if isinstance(level, Constraints) and level.inner is None:
            is_met = (lower == 0).cpu()
        # Noise may exclude x in the second evaluation.
        is_met &= lower.isfinite().cpu()
        success = final["success"] & is_met & ~final["barred"]
        reasons = []
        for run, succeeded in enumerate(success.tolist()):
            count, needed, total, scouts, needed_scouts, single = final["evidence"][run].tolist()
            message = f"{count} of {total} independent searches ended at x"
            reason = Stop("success", message)
            if not succeeded:
                lacking = f"{message}, and {needed} are needed"
                if count >= needed and scouts >= needed_scouts:
                    lacking = f"{message}, and {single} at points of their own"
                elif count >= needed:
                    lacking = f"{message}, after {scouts} of {needed_scouts} uniform points"
                reason = Stop(stops[run].code, f"{stops[run].text}: {lacking}")
            if not is_met[run]:
                text = f"{stops[run].text or message}: no point meets the constraints"
                reason = Stop("infeasible", text)
            elif final["barred"][run]:
                reason = Stop("barred", _BARRED_MESSAGE)
            reasons.append(reason)
        return success, reasons


def _stack(values: Values) -> Tensor:
    """Return L and G [..., 2]; without G, 0 and L, as every point is feasible."""
    lower = values.lower.double()
    if values.upper is None:
        return torch.stack([torch.zeros_like(lower), lower], -1)
    return torch.stack([lower, values.upper.double()], -1)


def _num_left(hopper: Hopper, state: Ensembles) -> float:
    """Return the evaluations that a run may still use before those of its end."""
    return hopper.budget - state.num_evaluated - hopper.extra - num_final(hopper.budget)


def num_final(budget: int | float) -> int:
    """Return the evaluations after the last step: of x, and of candidates and the new x."""
    return 1 if budget < _CONFIRMABLE else 2 + 2 * _NUM_CANDIDATES


def best_values(state: Ensembles) -> Tensor:
    """Return L and G [runs, 1, 2] of the best ends; without G, L twice."""
    bests = [hopper.best for hopper in state.memory]
    values = [
        [end.lower if hopper.has_upper else end.upper, end.upper]
        for end, hopper in zip(bests, state.memory, strict=True)
    ]
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


def _evidence(hopper: Hopper) -> list[int]:
    """Return the numbers behind a success.

    They are the searches that ended at x, those needed, and all; the uniform points and those
    needed; and the searches that ended where no other one did.
    """
    ended = hopper.num_agreeing(hopper.best) if hopper.ends else 0
    counts = [ended, hopper.num_needed, len(hopper.ends)]
    return [*counts, hopper.num_scouts, hopper.num_scouts_needed, hopper.num_single]


def _runners_up(hopper: Hopper) -> Tensor:
    """Return up to five other ends with L, G and the searches that ended there [5, d + 3]."""
    rows = np.full((_NUM_RUNNERS_UP, len(hopper.width) + 3), np.nan)
    for row, (end, count) in zip(rows, hopper.distinct_ends()[1:], strict=False):
        row[:] = [*end.x, end.lower if hopper.has_upper else end.upper, end.upper, count]
    return torch.from_numpy(rows)


def _is_searchable(cluster: Cluster, dim: int) -> bool:
    """Return whether the objectives have a form for local searches."""
    if dim > MAX_DIM:
        return False
    if cluster.upper is None:
        return True
    return isinstance(cluster.lower, Constraints) and cluster.lower.inner is None


def _to_array(values: Tensor) -> np.ndarray:
    """Copy values, because the particles change in place."""
    return values.double().cpu().numpy().copy()
