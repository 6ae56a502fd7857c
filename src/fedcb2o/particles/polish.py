"""Local improvement of the answer of `minimize` that keeps L.

Example:
    >>> x = torch.zeros(1, 1, 1, dtype=torch.float64)
    >>> def hill(x):
    ...     return (x[..., 0] - 0.1) ** 2
    >>> from fedcb2o.particles.system import Cluster
    >>> cluster = Cluster(lambda x: 0 * x[..., 0], hill, False, slice(0, 1))
    >>> at_x = [EvaluationRequest(x, cluster.lower, cluster.upper).evaluate()]
    >>> system = System(x, [cluster], (), flat=False, bounds=None)
    >>> better, _ = polish_points(x, at_x, system, (x[0] - 1, x[0] + 1))
    >>> round(better.item(), 6)
    0.1
"""

import dataclasses
import math

import numpy as np
import torch
from scipy import optimize
from torch import Tensor

from fedcb2o.particles.ask_tell import EvaluationRequest
from fedcb2o.particles.constraints import Constraints
from fedcb2o.particles.dynamics import Values
from fedcb2o.particles.system import System

_EVALUATIONS_PER_DIM = 200
_FIRST_STEP = 0.01  # size of the first simplex, relative to the start region


def polish_points(
    x: Tensor,
    at_x: list[Values],
    system: System,
    extent: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Decrease G by Nelder and Mead's method within the points whose L is not above that at x.

    Without G, L decreases. `extent` has the smallest and largest coordinates of the first ensembles
    [runs, d]. Returns points with values at most those at x, and the number of evaluations of each
    run.
    """
    better = x.clone()
    walls = system.bounds
    counts = torch.zeros(len(x), dtype=torch.long)
    for run in range(len(x)):
        width = (extent[1] - extent[0])[run].cpu().double().numpy()
        for k, cluster in enumerate(system.clusters):
            least = float(at_x[k].lower[run, 0])
            lower = cluster.lower
            if isinstance(lower, Constraints):  # each run has its own scale of the violations
                lower = lower.for_runs(torch.tensor([run]))
            request = EvaluationRequest(x, lower, cluster.upper, system.flat)

            def value(
                point: np.ndarray,
                request: EvaluationRequest = request,
                least: float = least,
            ) -> float:
                theta = torch.from_numpy(point).to(x).reshape(1, 1, -1)
                if walls is not None and not ((theta >= walls[0]) & (theta <= walls[1])).all():
                    return math.inf
                values = dataclasses.replace(request, theta=theta).evaluate()
                if values.upper is None:
                    return float(values.lower)
                # A point with a larger L is outside of the set in which G decreases.
                if float(values.lower) > least:
                    return math.inf
                return float(values.upper)

            first = x[run, k].cpu().double().numpy()
            simplex = np.vstack([first, first + np.diag(_FIRST_STEP * width)])
            best = value(first)
            if not math.isfinite(best):
                continue
            found = optimize.minimize(
                value,
                first,
                method="Nelder-Mead",
                options={
                    "maxfev": _EVALUATIONS_PER_DIM * len(first),
                    "initial_simplex": simplex,
                    "xatol": 1e-10,
                    "fatol": 0.0,
                },
            )
            counts[run] += found.nfev + 1
            if found.fun < best:
                better[run, k] = torch.from_numpy(found.x).to(x)
    return better, counts
