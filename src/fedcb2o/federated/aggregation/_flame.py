"""FLAME: models that point elsewhere than the majority go, the others are clipped, and noise drowns what is left.

Nguyen et al., "FLAME: taming backdoors in federated learning" (USENIX Security 2022), Algorithm 1, which was at hand in
others' words alone: they agree on all but whether angles are between models, as here, or between updates. There a
server aggregates what all trained from one model; here that is the agent's model before the round, from which others
did not begin, so that disagreement counts as an update.
"""

import functools

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.federated.aggregation.base import rule_signature
from fedcb2o.federated.aggregation.gram_rules import clip_factors, squared_distances
from fedcb2o.federated.types import Reduction
from fedcb2o.rng import stream

__all__ = ["flame"]

NOISE_COLUMNS = (
    8192  # columns whose noise is drawn at once, so that it does not depend on the block that asks
)


@rule_signature("gram", own_rows=("before",))
def flame(
    gram: Float[Tensor, "m m"], draw: np.random.Generator, *, noise: float = 0.001
) -> Reduction:
    """FLAME: of the models that HDBSCAN by cosine distance finds in one cluster, more than half of all, the mean of the
    updates since the agent's model before the round, the last row, each clipped to the median S of the norms of all
    updates; and Gaussian noise of the standard deviation `noise` S (their lambda, 0.001 for images).
    """
    if not noise >= 0:
        raise ConfigError(f"`noise` must be 0 or more, got {noise}")
    m = len(gram) - 1
    norms = gram.diagonal()[:m].clamp(min=torch.finfo(gram.dtype).tiny).sqrt()
    members = majority_cluster(1 - gram[:m, :m] / (norms.unsqueeze(0) * norms.unsqueeze(1)))
    squared = squared_distances(gram)[m, :m]
    median = float(squared.sqrt().quantile(0.5)) if m else 0.0
    factor = clip_factors(squared[members], median) / max(1, int(members.sum()))
    rows = torch.cat([members.nonzero().flatten(), torch.tensor([m])])
    weights = torch.cat([factor, 1 - factor.sum().unsqueeze(0)])
    reduce = functools.partial(
        _noisy_average, weights=weights, std=noise * median, seed=int(draw.integers(2**63))
    )
    return Reduction(rows, reduce, takes_offset=True, weights=weights)


def majority_cluster(distances: Float[Tensor, "m m"]) -> Bool[Tensor, " m"]:
    """The cluster that HDBSCAN finds of m points whose clusters have more than m / 2 members: there is one, the first
    of so many that single linkage joins, with all that is as near as the last of them."""
    m = len(distances)
    of = torch.arange(m)
    found = torch.full((m,), m == 1)
    i, j = torch.triu_indices(m, m, 1)
    lengths, order = distances[i, j].sort(stable=True)
    last = torch.inf
    for length, a, b in zip(lengths.tolist(), i[order].tolist(), j[order].tolist(), strict=True):
        if length > last:
            break
        of[of == of[b]] = of[a].clone()
        if (joined := of == of[a]).sum() > m / 2:
            found = joined
            last = length
    return found


def _noisy_average(
    x: Float[Tensor, "k b"], first: int, *, weights: Float[Tensor, " k"], std: float, seed: int
) -> Float[Tensor, " b"]:
    """A block of columns of the average, from the column `first` on, and noise."""
    average = weights.to(x.device, x.dtype) @ x
    if not std > 0:
        return average
    start = first // NOISE_COLUMNS
    stop = -(-(first + len(average)) // NOISE_COLUMNS)
    drawn = np.concatenate(
        [
            stream(seed, "noise", k).standard_normal(NOISE_COLUMNS, np.float32)
            for k in range(start, stop)
        ]
    )
    drawn = drawn[first - start * NOISE_COLUMNS :][: len(average)]
    return average + std * torch.from_numpy(drawn).to(x.device, x.dtype)
