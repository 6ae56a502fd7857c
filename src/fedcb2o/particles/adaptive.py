"""The adaptive dynamics of `minimize`: the hopping ensembles of all active runs.

Example:
    >>> EVALUATIONS_PER_DIM
    20000
"""

import dataclasses
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcb2o.errors import RunError
from fedcb2o.particles.ask_tell import EvaluationRequest, EvaluationSteps
from fedcb2o.particles.dynamics import ConsensusParams, Values
from fedcb2o.particles.hopping import Hopper
from fedcb2o.particles.system import Cluster, Evaluation, System

_NUM_AGREEING = 2  # independent ensembles behind a success
_NUM_AGREEING_WITHOUT_G = 3  # there no ensemble challenges another
DT = 0.1  # time of a step, for adversaries and the history
EVALUATIONS_PER_DIM = 20_000  # default of maxfev, per coordinate
_PRECISION = {torch.float64: 1e-8, torch.float32: 1e-5}
_NUM_CANDIDATES = 3  # ends whose points are judged again if the best one is not confirmed
CONFIRMATION = 2 + 2 * _NUM_CANDIDATES  # evaluations after the last step
_CONFIRMED = 1e-6  # relative difference of two evaluations of a point that counts as rounding


class AdaptiveDynamics:
    """The hopping ensembles of the active runs.

    There is one hopper per active run.
    """

    def __init__(
        self,
        system: System,
        box: tuple[Tensor, Tensor] | None,
        *,
        delta_q: float,
        xtol: float | None,
        maxfev: int | None,
    ) -> None:
        """Start the ensembles.

        Ensembles start in `box`, by default in that of the first ensemble of a run. Without `xtol`
        an ensemble has collapsed at the precision of the dtype. `maxfev` is per run.
        """
        walls = None
        if system.bounds is not None:
            walls = (_to_array(system.bounds[0]), _to_array(system.bounds[1]))
        precision = _PRECISION[system.theta.dtype]
        self.hoppers = []
        self._barred = [math.inf] * len(system.seeds)  # least L where G is infinite, of each run
        for seed, benign in zip(system.seeds, system.benign, strict=True):
            low, high = box or benign.aminmax(dim=0)
            self.hoppers.append(
                Hopper(
                    seed,
                    _to_array(low),
                    _to_array(high),
                    system.num_benign,
                    num_malicious=system.malicious.shape[1],
                    walls=walls,
                    delta_q=delta_q,
                    precision=precision,
                    xtol=xtol or 0.0,
                    budget=float(maxfev or math.inf),
                )
            )

    def update(self, system: System, evaluation: Evaluation) -> Evaluation:
        """Move the consensus points of all runs."""
        values = evaluation.values[0]
        for run, hopper in enumerate(self.hoppers):
            upper = None
            if values.upper is not None:
                upper = _to_array(values.upper[run])
            lower = _to_array(values.lower[run])
            if values.barred_lower is not None:
                least = float(values.barred_lower[run].min())
                self._barred[run] = min(self._barred[run], least)
            hopper.update(_to_array(system.theta[run]), lower, upper)
            if not hopper.has_value:
                raise RunError(
                    f"all {hopper.count} particles have NaN or infinite objectives: correct the"
                    " objectives, or start nearer"
                )
        m = np.stack([hopper.m for hopper in self.hoppers])
        return dataclasses.replace(evaluation, m=torch.from_numpy(m).to(system.theta).unsqueeze(1))

    def step_(
        self, system: System, n: int, evaluation: Evaluation, params: ConsensusParams
    ) -> None:
        """Draw the particles of the next step.

        They replace those of `system` in place. `params` are those of the consensus point in the
        view of adversaries.
        """
        points = np.stack([hopper.points() for hopper in self.hoppers])
        system.replace_(n, evaluation, params, torch.from_numpy(points).to(system.theta), DT)

    def keep_runs(self, kept: Tensor) -> None:
        """Continue with a part of the runs."""
        self.hoppers = [self.hoppers[run] for run in kept.tolist()]
        self._barred = [self._barred[run] for run in kept.tolist()]

    def agreed(self) -> Tensor:
        """Return whether independent ensembles of each run [runs] agree on the best end."""
        return torch.tensor(
            [_num_agreeing(hopper) >= _num_needed(hopper) for hopper in self.hoppers]
        )

    def fields(self, like: Tensor) -> dict[str, Tensor]:
        """Return the fields of the result of all active runs.

        They are the best points `x`, their recorded values `judged`, further `candidates`,
        consensus points, the numbers of agreeing, of needed and of all ended ensembles, and whether
        L is less at a point where G is infinite (`barred`). Their dtype and device are those of
        `like`.
        """
        rows: list[tuple[Any, ...]] = []
        barred = []
        for hopper, least in zip(self.hoppers, self._barred, strict=True):
            ranked = hopper.ranked_ends()
            best = ranked[0]
            ends = (ranked + [best] * _NUM_CANDIDATES)[:_NUM_CANDIDATES]
            points = [point for end in ends for point in (end.x, end.m)]
            barred.append(least < best.lower - hopper.lower_tolerance)
            widest = best.radius * hopper.width.max()
            rows.append((best.x, [best.lower, best.upper], np.stack(points), best.m, [widest]))
        columns = [np.stack(column) for column in zip(*rows, strict=True)]
        x, judged, candidates, m, spread = columns
        return {
            "x": torch.from_numpy(x).to(like).unsqueeze(1),
            "judged": torch.from_numpy(judged),
            "candidates": torch.from_numpy(candidates).to(like),
            "consensus": torch.from_numpy(m).to(like).unsqueeze(1),
            "spread": torch.from_numpy(spread).to(like),
            "agreeing": torch.tensor([_num_agreeing(hopper) for hopper in self.hoppers]),
            "needed": torch.tensor([_num_needed(hopper) for hopper in self.hoppers]),
            "barred": torch.tensor(barred),
            "ensembles": torch.tensor([len(hopper.ends) for hopper in self.hoppers]),
        }


def confirm_(
    final: dict[str, Tensor], at_x: Values, cluster: Cluster, flat: bool
) -> EvaluationSteps[bool]:
    """Replace x where a second evaluation differs from the first and another point is better.

    Objectives may be noisy, or corrupted in some evaluations. A point counts by the worse of its
    values. `x` of `final`, the fields of the ended runs, changes in place. `at_x` is the second
    evaluation. The result tells if points were judged again.
    """
    x = final["x"]
    judged = final["judged"].to(x.device)
    second = _stack(at_x)[:, 0]
    differs = (second - judged).abs() > _CONFIRMED * (1 + judged.abs())
    if not differs.any():
        return False

    candidates = final["candidates"]
    values = yield EvaluationRequest(candidates, cluster.lower, cluster.upper, flat)
    scores = _stack(values)
    scores[:, 0] = torch.maximum(torch.maximum(scores[:, 0], judged), second)
    for run in differs.any(1).nonzero().flatten().tolist():
        # The last key of lexsort decides first, so L does, and G where it is equal.
        order = np.lexsort(scores[run].T.flip(0).cpu().numpy())
        x[run, 0] = candidates[run, order[0]]
    return True


def _stack(values: Values) -> Tensor:
    """Return L and G [..., 2]; without G, 0 and L, as every point is feasible."""
    lower = values.lower.double()
    if values.upper is None:
        return torch.stack([torch.zeros_like(lower), lower], -1)
    return torch.stack([lower, values.upper.double()], -1)


def _num_needed(hopper: Hopper) -> int:
    """Return the number of agreeing ensembles behind a success."""
    return _NUM_AGREEING if hopper.has_upper else _NUM_AGREEING_WITHOUT_G


def _num_agreeing(hopper: Hopper) -> int:
    if len(hopper.ends) < _NUM_AGREEING:
        return 0
    return hopper.num_agreeing(hopper.ranked_ends()[0])


def _to_array(values: Tensor) -> np.ndarray:
    """Copy values, because the particles change in place."""
    return values.double().cpu().numpy().copy()
