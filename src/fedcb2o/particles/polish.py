"""Local improvement of the answer of `minimize` that keeps L.

Example:
    >>> x = torch.zeros(1, 1, 1, dtype=torch.float64)
    >>> def hill(x):
    ...     return (x[..., 0] - 0.1) ** 2
    >>> cluster = Cluster(lambda x: 0 * x[..., 0], hill, False, slice(0, 1))
    >>> at_x = [EvaluationRequest(x, cluster.lower, cluster.upper).evaluate()]
    >>> better, _ = polish_points(x, at_x, [cluster], None, (x[0] - 1, x[0] + 1), False)
    >>> round(better.item(), 6)
    0.1
"""

import math

import numpy as np
import torch
from scipy import optimize
from torch import Tensor

from fedcb2o.particles.ask_tell import EvaluationRequest
from fedcb2o.particles.dynamics import Values
from fedcb2o.particles.system import Cluster

_EVALUATIONS_PER_DIM = 200
_FIRST_STEP = 0.01  # size of the first simplex, relative to the start region


def polish_points(
    x: Tensor,
    at_x: list[Values],
    clusters: list[Cluster],
    walls: tuple[Tensor, Tensor] | None,
    start: tuple[Tensor, Tensor],
    flat: bool,
) -> tuple[Tensor, Tensor]:
    """Decrease G by Nelder and Mead's method within the points whose L is not above that at x.

    Without G, L decreases. `start` has the smallest and largest coordinates of the first ensembles
    [runs, d], `walls` the bounds, if there are any. Returns points with values at most those at x,
    and the number of evaluations of each run.
    """
    better = x.clone()
    counts = torch.zeros(len(x), dtype=torch.long)
    for run in range(len(x)):
        width = (start[1] - start[0])[run].cpu().double().numpy()
        for k, cluster in enumerate(clusters):
            least = float(at_x[k].lower[run, 0])

            def value(point: np.ndarray, cluster: Cluster = cluster, least: float = least) -> float:
                theta = torch.from_numpy(point).to(x).reshape(1, 1, -1)
                if walls is not None and not ((theta >= walls[0]) & (theta <= walls[1])).all():
                    return math.inf
                values = EvaluationRequest(theta, cluster.lower, cluster.upper, flat).evaluate()
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
