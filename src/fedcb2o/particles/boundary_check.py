"""Check of a consensus at the edge of the start region.

Without bounds, particles may leave the region where they start, but not far: their noise shrinks
with their distance from the consensus point. A consensus point at the edge of the region is
compared with points further out.
"""

import itertools
import logging
import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedcb2o.particles.ask_tell import EvaluationRequest, EvaluationSteps
from fedcb2o.particles.dynamics import Values
from fedcb2o.particles.system import Cluster

_LOGGER = logging.getLogger(__name__)

# Share of the way from the middle of the region to its side from which a point is at the edge.
_EDGE_SHARE = 0.9
_STEP_SIZES = (0.1, 1.0)  # distances of the points further out, in half widths of the region
_MAX_SINGLE_COORDINATES = 32  # coordinates that are tried one by one, after all at once


def is_boundary_consensus(
    x: Float[Tensor, "r K d"],
    at_x: list[Values],
    start: tuple[Float[Tensor, "r d"], Float[Tensor, "r d"]],
    clusters: Sequence[Cluster],
    *,
    walls: tuple[Tensor, Tensor] | None,
    delta_q: float,
    flat: bool,
    limit: float = math.inf,
) -> EvaluationSteps[Bool[Tensor, "r K"]]:
    """Find consensus points at the edge of the start region that improve outside.

    L improves where it falls. G improves where it falls and L rises by at most delta_q. A side with
    a bound is not an edge. Points where L or G fails count as no improvement, with a warning.
    `at_x` has the values at `x` for each cluster, `start` the smallest and largest coordinates of
    the first ensemble, and `walls` the bounds of the particles, if there are any. If the
    comparison needs more than `limit` evaluations, a point at the edge counts as one to improve.
    """
    low, high = (side.unsqueeze(1) for side in start)
    middle = (low + high) / 2
    half = (high - low) / 2
    offset = x - middle
    at_edge = (offset.abs() > _EDGE_SHARE * half) & (half > 0)
    if walls is not None:
        # Beyond a bound no point is admissible, so that it cannot improve.
        at_edge &= torch.where(offset > 0, walls[1], walls[0]).isinf()
    improves = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    if not at_edge.any():
        return improves

    # 1. Directions outwards: in all edge coordinates at once, and in the furthest ones alone.
    step = torch.where(at_edge, offset.sign() * half, 0.0).unsqueeze(2)
    distance = (step * offset.unsqueeze(2) / half.square().unsqueeze(2)).nan_to_num(0.0)
    furthest = distance.topk(min(_MAX_SINGLE_COORDINATES, x.shape[2])).indices
    single = step.new_zeros(*x.shape[:2], furthest.shape[-1], x.shape[2])
    single.scatter_(3, furthest.movedim(2, 3), step.gather(3, furthest).movedim(2, 3))
    steps = torch.cat([step, single], 2)

    if len(clusters) * len(_STEP_SIZES) * steps.shape[2] > limit:
        return at_edge.any(2)

    # 2. Compare the values there with those at the consensus point.
    is_logged = False
    for k, size in itertools.product(range(len(clusters)), _STEP_SIZES):
        cluster = clusters[k]
        points = x[:, k, None] + size * steps[:, k]
        inner = at_x[k]
        try:
            outer = yield EvaluationRequest(points, cluster.lower, cluster.upper, flat)
        except Exception as error:  # a user's function may fail outside of its domain
            if not is_logged:
                _LOGGER.warning(
                    "The consensus is at the edge of where the particles started, and further out L"
                    " or G failed (%r): these points were not compared.",
                    error,
                )
            is_logged = True
            continue
        if outer.upper is None or inner.upper is None:
            better = outer.lower < inner.lower
        else:
            better = outer.lower < inner.lower - delta_q
            better |= (outer.lower <= inner.lower + delta_q) & (outer.upper < inner.upper)
        improves[:, k] |= better.any(1) & at_edge[:, k].any(1)
    return improves
