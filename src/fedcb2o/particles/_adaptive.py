"""The adaptive dynamics of all active runs: consensus hopping with restarts (`hopping`).

Each run has a `Hopper`, the memory of the state. It changes in place.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedcb2o.errors import RunError
from fedcb2o.particles import settings
from fedcb2o.particles.ask_tell import EvaluationSteps
from fedcb2o.particles.constraints import Constraints
from fedcb2o.particles.dynamics import ConsensusParams, EvaluationRequest, Values
from fedcb2o.particles.hopping import Hopper, default_num_particles
from fedcb2o.particles.initialisation import Start, Stop
from fedcb2o.particles.local_search import MAX_DIM, search_locally, to_array
from fedcb2o.particles.system import Cluster, Ensembles, Evaluation, System

_PRECISION = {torch.float64: 1e-8, torch.float32: 1e-5}
_NUM_CANDIDATES = 3  # ends whose points are judged again if the best one is not confirmed
_SEARCH_LENGTH = 200  # evaluations of a local search, over d + 1
_CONFIRMABLE = 160  # budget from which candidates are judged again
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
            benign particles from the consensus point; at least 1e-7 of the box (1e-5 for float32).
        agree: What independent searches must have in common for a success: "x", or the "value",
            where minimisers of equal value may be apart.

    Raises:
        ConfigError: A parameter is out of its range.
    """

    delta_q: float = 0.0
    xtol: float = 0.0
    agree: str = "x"

    dt: ClassVar[float] = 0.1  # for adversaries and the history, as hopping has no time
    max_steps: ClassVar[int | None] = None
    fewest_ensembles: ClassVar[int] = 1
    batch: ClassVar[int | None] = None
    radius: ClassVar[float] = math.inf
    needs_gradient: ClassVar[bool] = False
    keeps_x0: ClassVar[bool] = True
    can_split: ClassVar[bool] = False  # particles at one point stay together

    def __post_init__(self) -> None:
        settings.check_choices({"`agree`": (self.agree, ("x", "value"))})
        given = {"delta_q": self.delta_q, "xtol": self.xtol or 0.0}
        for name, value in settings.check_positive(given, or_zero=True).items():
            object.__setattr__(self, name, value)

    def default_num_particles(self, dim: int) -> int:
        """Return the default number of particles, 4 (4 + 3 log d)."""
        return default_num_particles(dim)

    def init(self, start: Start, maxfev: int | None) -> tuple[Ensembles, tuple[str, ...]]:
        """Return the state before the first step, without remarks."""
        system = start.system
        bounds = system.bounds
        walls = None if bounds is None else (to_array(bounds[0]), to_array(bounds[1]))
        hoppers = []
        for seed, benign in zip(start.seeds, system.benign(start.theta), strict=True):
            low, high = start.box or benign.aminmax(dim=0)
            hoppers.append(
                Hopper(
                    seed,
                    to_array(low),
                    to_array(high),
                    system.num_benign,
                    num_malicious=system.num_particles - system.num_benign,
                    walls=walls,
                    delta_q=self.delta_q,
                    precision=_PRECISION[start.theta.dtype],
                    xtol=self.xtol,
                    budget=float(maxfev or math.inf),
                    can_search=start.finish and _is_searchable(system.clusters[0], len(low)),
                    has_first=start.has_first,
                    by_value=self.agree == "value",
                    is_exact=isinstance(system.clusters[0].lower, Constraints),
                )
            )
        return dataclasses.replace(start.ensembles(), memory=tuple(hoppers)), ()

    def tell(
        self, system: System, state: Ensembles, values: list[Values], check_writes: bool
    ) -> Evaluation:
        """Receive the values, and move the consensus points of all runs."""
        (item,) = values
        for run, hopper in enumerate(state.memory):
            hopper.update(to_array(state.theta[run]), *_levels(item, run))
            if item.barred_lower is not None:
                # A smaller L with an infinite G makes the success doubtful, whatever follows.
                hopper.least_barred = min(hopper.least_barred, float(item.barred_lower[run].min()))
            if not hopper.has_value:
                count = hopper.count
                raise RunError(f"all {count} particles have NaN or infinite objectives")
        for points, own in system.own:
            for hopper in state.memory:
                hopper.add_own(to_array(points), *_levels(own, 0))
        system.own.clear()
        m = np.stack([hopper.m for hopper in state.memory])
        return Evaluation(
            values,
            [torch.from_numpy(m).to(state.theta)],
            # Adversaries see the consensus point of the paper's default parameters.
            ConsensusParams(alpha=1000.0, beta=0.1, delta_q=self.delta_q),
            check_writes=check_writes,
        )

    def terminate(self, state: Ensembles, spread: Tensor) -> Tensor:
        """Return whether the best end of each run [runs] is trusted."""
        return torch.tensor([hopper.is_trusted for hopper in state.memory])

    def refine(self, system: System, state: Ensembles, may_search: bool) -> EvaluationSteps[None]:
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
            budget = hopper.budget - state.num_evaluated - num_final(hopper.budget)
            first, hopper.search_from = hopper.search_from, None
            limit = int(min(_SEARCH_LENGTH * (dim + 1), budget - hopper.extra))
            if first is not None and limit > dim + 1 and may_search:
                box = (hopper.low, hopper.low + hopper.width)
                found = yield from search_locally(
                    request, first, *box, hopper.walls, limit, hopper.rival
                )
                hopper.add_search(found)
            # 2. A step of fewer particles than an ensemble has, the last one.
            left = budget - hopper.extra
            if 0 < left < system.evaluation_cost() and not system.adversaries:
                points = hopper.points()[: int(left)]
                theta = torch.from_numpy(points).to(state.theta)[None]
                values = yield dataclasses.replace(request, theta=theta)
                hopper.add_rest(points, *_levels(values, 0))

    def step(self, system: System, state: Ensembles, info: Evaluation) -> Ensembles:
        """Draw the particles of the next step."""
        points = np.stack([hopper.points() for hopper in state.memory])
        drawn = torch.from_numpy(points).to(state.theta)
        return system.step_(state, info, self.dt, lambda benign: benign.copy_(drawn))

    def best_values(self, system: System, state: Ensembles, info: Evaluation) -> Tensor:
        """Return L and G [runs, 1, 2] of the best ends; without G, L twice."""
        values = []
        for hopper in state.memory:
            best = hopper.best
            values.append([best.lower if hopper.has_upper else best.upper, best.upper])
        return torch.tensor(values, dtype=torch.float64).unsqueeze(1)

    def answers(
        self, system: System, state: Ensembles, m: Tensor, spread: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return x, the consensus points and the spreads of the best ends."""
        bests = [(hopper, hopper.best) for hopper in state.memory]
        rows = [([end.x], [end.m], [end.radius * hopper.width.max()]) for hopper, end in bests]
        columns = (np.array(column) for column in zip(*rows, strict=True))
        return tuple(torch.from_numpy(column).to(state.theta) for column in columns)  # type: ignore[return-value]

    def confirm_(
        self, ends: Sequence[Any], x: Tensor, at_x: list[Values], system: System
    ) -> EvaluationSteps[bool]:
        """Replace x where a second evaluation differs from the first and another point is better.

        Objectives may be noisy, or corrupted in some evaluations. A point counts by the worse of
        its values. `x` of the `ends` changes in place. `at_x` is the second evaluation. The result
        tells if points were judged again.
        """
        ranked = [end.hopper.ranked_ends() for end in ends]
        first = [[best.lower, best.upper] for best, *_ in ranked]
        judged = torch.tensor(first, dtype=torch.float64, device=x.device)
        second = _stack(at_x[0])[:, 0]
        differs = (second - judged).abs() > _CONFIRMED * (1 + judged.abs())
        is_confirmable = all(
            end.hopper.budget >= _CONFIRMABLE and end.stop.code != "interrupted" for end in ends
        )
        if not differs.any() or not is_confirmable:
            return False

        chosen = [(found + found[:1] * _NUM_CANDIDATES)[:_NUM_CANDIDATES] for found in ranked]
        points = np.array([[(end.x, end.m) for end in found] for found in chosen])
        candidates = torch.from_numpy(points).flatten(1, 2).to(x)
        scores = _stack((yield system.final_request(candidates, system.clusters[0])))
        scores[:, 0] = torch.maximum(torch.maximum(scores[:, 0], judged), second)
        for run in differs.any(1).nonzero().flatten().tolist():
            # The last key of lexsort decides first, so L does, and G where it is equal.
            order = np.lexsort(scores[run].T.flip(0).cpu().numpy())
            x[run, 0] = candidates[run, order[0]]
        return True

    def judge(
        self, ends: Sequence[Any], x: Tensor, at_x: list[Values], start: Start
    ) -> EvaluationSteps[tuple[Tensor, list[Stop]]]:
        """Return whether each run succeeded [runs], and why it ended.

        The searches that agree on x decide, the uniform points, and the constraints.
        """
        yield from ()
        lower = at_x[0].lower[:, 0]
        level = start.system.clusters[0].lower
        is_met = lower.isfinite()  # noise may exclude x in the second evaluation
        if isinstance(level, Constraints) and level.inner is None:
            is_met &= lower == 0
        success = []
        reasons = []
        for end, met in zip(ends, is_met.tolist(), strict=True):
            hopper = end.hopper
            best = hopper.best
            count = hopper.num_agreeing(best) if hopper.ends else 0
            is_barred = hopper.least_barred < best.lower - hopper.lower_tolerance
            success.append(end.agreed and met and not is_barred)
            message = f"{count} of {len(hopper.ends)} independent searches ended at x"
            reason = Stop("success", message)
            if not met:
                text = f"{end.stop.text or message}: no point meets the constraints"
                reason = Stop("infeasible", text)
            elif is_barred:
                reason = Stop("barred", _BARRED_MESSAGE)
            elif not success[-1]:
                lacking = f"and {hopper.num_single} at points of their own"
                if count < hopper.num_needed:
                    lacking = f"and {hopper.num_needed} are needed"
                elif hopper.num_scouts < (needed := hopper.num_scouts_needed):
                    lacking = f"after {hopper.num_scouts} of {needed} uniform points"
                reason = Stop(end.stop.code, f"{end.stop.text}: {message}, {lacking}")
            reasons.append(reason)
        return torch.tensor(success), reasons


def num_final(budget: int | float) -> int:
    """Return the evaluations after the last step: of x, and of candidates and the new x."""
    return 1 if budget < _CONFIRMABLE else 2 + 2 * _NUM_CANDIDATES


def _stack(values: Values) -> Tensor:
    """Return L and G [..., 2]; without G, 0 and L, as every point is feasible."""
    lower = values.lower.double()
    if values.upper is None:
        return torch.stack([torch.zeros_like(lower), lower], -1)
    return torch.stack([lower, values.upper.double()], -1)


def _levels(values: Values, run: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Return L and G of a run."""
    upper = None if values.upper is None else to_array(values.upper[run])
    return to_array(values.lower[run]), upper


def _is_searchable(cluster: Cluster, dim: int) -> bool:
    """Return whether the objectives have a form for local searches."""
    level = cluster.lower
    is_constrained = isinstance(level, Constraints) and level.inner is None
    return dim <= MAX_DIM and (is_constrained or cluster.upper is None)
