"""FLAME: filtering by cosine distance, clipping, and noise.

Nguyen et al., "FLAME: taming backdoors in federated learning" (USENIX Security 2022), Algorithm 1.
Only descriptions by others were available. They agree on all parts except one: angles are between
models, as here, or between updates. In the paper, a server aggregates models that all clients
trained from one model. Here the agent's model before the round takes its place. Other agents did
not start there, so a disagreement between agents counts as an update.
"""

import functools

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedcb2o.errors import require
from fedcb2o.federated.aggregation.base import rule_signature
from fedcb2o.federated.aggregation.gram_rules import squared_distances
from fedcb2o.federated.aggregation.own_model_rules import clip_factors
from fedcb2o.federated.types import Reduction
from fedcb2o.rng import stream

__all__ = ["flame"]

NOISE_COLUMNS = 8192  # noise is drawn in chunks, so that it does not depend on the block of columns


@rule_signature("gram", own_rows=("before",))
def flame(
    gram: Float[Tensor, "m m"], draw: np.random.Generator, *, noise: float = 0.001
) -> Reduction:
    """Average the clipped updates of the majority cluster and add Gaussian noise (FLAME).

    HDBSCAN by cosine distance finds one cluster of more than half of the models. Their updates
    since the agent's model before the round are clipped to S, the median norm of all updates.
    Nguyen et al., "FLAME: taming backdoors in federated learning" (USENIX Security 2022).

    Args:
        noise: Standard deviation of the noise in units of S (lambda in the paper, 0.001 for
            images).

    Returns:
        A reduction of the models in the cluster and the model before the round.
    """
    require("noise", noise, noise >= 0, "0 or more")
    m = len(gram) - 1
    # A model of zeros has no angle, and must not divide by 0.
    norms = gram.diagonal()[:m].clamp(min=torch.finfo(gram.dtype).tiny).sqrt()
    cosines = gram[:m, :m] / (norms.unsqueeze(0) * norms.unsqueeze(1))
    members = majority_cluster(1 - cosines)

    squared = squared_distances(gram)[m, :m]
    median = float(squared.sqrt().quantile(0.5)) if m else 0.0
    factor = clip_factors(squared[members], median) / max(1, int(members.sum()))
    rows = torch.cat([members.nonzero().flatten(), torch.tensor([m])])
    # Updates are counted from the model before the round, which has the rest of the weight.
    weights = torch.cat([factor, 1 - factor.sum().unsqueeze(0)])

    seed = int(draw.integers(2**63))
    reduce = functools.partial(_noisy_average, weights=weights, std=noise * median, seed=seed)
    return Reduction(rows, reduce, takes_offset=True, weights=weights)


def majority_cluster(distances: Float[Tensor, "m m"]) -> Bool[Tensor, " m"]:
    """Find the cluster of HDBSCAN with more than m / 2 members, if there is one.

    It is the first of that size under single linkage, with all points that are as near as its last
    one.
    """
    m = len(distances)
    labels = torch.arange(m)
    cluster = torch.full((m,), m == 1)
    i, j = torch.triu_indices(m, m, 1)
    lengths, order = distances[i, j].sort(stable=True)

    last = torch.inf
    edges = zip(lengths.tolist(), i[order].tolist(), j[order].tolist(), strict=True)
    for length, a, b in edges:
        # Points that are as near as the last member belong to the cluster, too.
        if length > last:
            break
        # Single linkage: the next shortest edge joins the clusters at its ends.
        labels[labels == labels[b]] = labels[a].clone()
        joined = labels == labels[a]
        # Two clusters cannot both have more than half of the models: at most one exists.
        if joined.sum() > m / 2:
            cluster = joined
            last = length
    return cluster


def _noisy_average(
    x: Float[Tensor, "k b"], first: int, *, weights: Float[Tensor, " k"], std: float, seed: int
) -> Float[Tensor, " b"]:
    """Average a block of columns that starts at column `first`, and add noise."""
    average = weights.to(x.device, x.dtype) @ x
    if not std > 0:
        return average
    # Noise is drawn in chunks by column number, so that it does not depend on the blocks.
    start = first // NOISE_COLUMNS
    stop = -(-(first + len(average)) // NOISE_COLUMNS)
    chunks = [
        stream(seed, "noise", k).standard_normal(NOISE_COLUMNS, np.float32)
        for k in range(start, stop)
    ]
    offset = first - start * NOISE_COLUMNS
    noise = np.concatenate(chunks)[offset:][: len(average)]
    return average + std * torch.from_numpy(noise).to(x.device, x.dtype)
