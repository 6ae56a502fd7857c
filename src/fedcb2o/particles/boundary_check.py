"""Did a run come to a consensus because it found a minimiser, or because it could not get further?

Particles that start without bounds may leave the region where they start, but they do not go far: their noise shrinks
with their distance from the consensus point. So where that lies at the edge of the region, it is compared with points
further out.
"""

import itertools

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedcb2o.particles.ask_tell import EvaluationRequest, EvaluationSteps
from fedcb2o.particles.dynamics import Values
from fedcb2o.particles.system import Cluster

_EDGE_SHARE = 0.9  # of the way from the middle of the region to its side: the last tenth, and all that is beyond
_STEP_SIZES = (0.1, 1.0)  # of that way: how much further out the points lie
_MAX_SINGLE_COORDINATES = 32  # coordinates that are tried by themselves, beside all at once


def is_boundary_consensus(
    x: Float[Tensor, "r K d"],
    at_x: list[Values],
    start: tuple[Float[Tensor, "r d"], Float[Tensor, "r d"]],
    clusters: list[Cluster],
    *,
    walls: tuple[Tensor, Tensor] | None,
    delta_q: float,
    flat: bool,
) -> EvaluationSteps[Bool[Tensor, "r K"]]:
    """Whether a consensus point lies at the edge of the region where the particles were at the `start`, from the least
    to the largest coordinate, and L falls further out or, where L does not rise by more than delta_q, G does.

    It is no edge where `walls` keep the particles in. Where L or G fails further out, nothing is known of there.
    """
    low, high = (side.unsqueeze(1) for side in start)
    middle = (low + high) / 2
    half = (high - low) / 2
    away = x - middle
    at_edge = (away.abs() > _EDGE_SHARE * half) & (half > 0)
    if walls is not None:
        at_edge &= torch.where(away > 0, walls[1], walls[0]).isinf()
    further = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    if not at_edge.any():
        return further
    step = torch.where(at_edge, away.sign() * half, 0.0).unsqueeze(2)
    furthest = (
        (step * away.unsqueeze(2) / half.square().unsqueeze(2))
        .nan_to_num(0.0)
        .topk(min(_MAX_SINGLE_COORDINATES, x.shape[2]))
        .indices
    )
    alone = step.new_zeros(*x.shape[:2], furthest.shape[-1], x.shape[2])
    alone.scatter_(3, furthest.movedim(2, 3), step.gather(3, furthest).movedim(2, 3))
    steps = torch.cat([step, alone], 2)
    for k, size in itertools.product(range(len(clusters)), _STEP_SIZES):
        each = clusters[k]
        here = at_x[k]
        try:
            there = yield EvaluationRequest(
                x[:, k, None] + size * steps[:, k], each.lower, each.upper, flat
            )
        except Exception:  # a user's function may fail outside of its domain
            continue
        if there.upper is None or here.upper is None:
            better = there.lower < here.lower
        else:
            better = there.lower < here.lower - delta_q
            better |= (there.lower <= here.lower + delta_q) & (there.upper < here.upper)
        further[:, k] |= better.any(1) & at_edge[:, k].any(1)
    return further
