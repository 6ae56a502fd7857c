"""LFighter: clusters of the last layers, of which one counts."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from fedcb2o.federated.aggregation.base import rule_signature
from fedcb2o.federated.aggregation.gram_rules import squared_distances, uniform_weights

__all__ = ["lfighter"]

_MAX_LLOYD_ITERATIONS = 100


@rule_signature("values", gram_entries="none", own_rows=("before",))
def lfighter(heads: Float[Tensor, "m C h"]) -> Float[Tensor, " m"]:
    """Average the models of one of two clusters of last-layer updates (LFighter).

    The rule was made for label flips. It takes the updates of the last layer in the two classes
    that change most, and splits them into two clusters by k-means. The cluster that is large and
    less similar counts. Jebreel, Domingo-Ferrer, Sánchez and Blanco-Justicia, "LFighter: Defending
    against the label-flipping attack in federated learning" (Neural Networks 2024), for data that
    are not extremely skewed.

    As in the authors' released code, weights and biases decide which classes change most, and the
    weights are clustered. In the paper all clients start the round at the server's model. Here
    other agents started elsewhere, and that distance counts as update.

    Args:
        heads: Last layers of the models, shape [m, C, h + 1]; that before the round is last.
    """
    updates = (heads[:-1] - heads[-1]).double()
    m = len(updates)
    zero = torch.zeros(1, dtype=torch.float64)
    if m < 2:
        return torch.cat([torch.ones(m, dtype=torch.float64), zero])

    change = updates[:, :, :-1].norm(dim=-1).sum(0) + updates[:, :, -1].abs().sum(0)
    # The two classes that change most, by their weights without the bias.
    points = updates[:, change.argsort()[-2:], :-1].flatten(1)
    first = _two_means(points)
    # The cluster that is large and less similar counts.
    selected = max(first, ~first, key=lambda members: _dissimilarity(points[members], m))
    return torch.cat([uniform_weights(selected), zero])


def _two_means(points: Float[Tensor, "m e"]) -> Bool[Tensor, " m"]:
    """Return the first of two clusters by k-means, the best one from every pair of few points."""
    products = points @ points.T
    squared = squared_distances(products)
    norms = products.diagonal()
    # Lloyd's iteration starts at every pair of points, because one start could end in a bad
    # minimum.
    i, j = torch.triu_indices(len(points), len(points), 1)
    # Members of each cluster, for each pair of first centres, shape [2, pairs, m].
    members = torch.stack([squared[i] <= squared[j], squared[i] > squared[j]])
    for _ in range(_MAX_LLOYD_ITERATIONS):
        counts = members.sum(-1, keepdim=True)
        centres = members.double() / counts.clamp(min=1)
        along = centres @ products
        distance = norms - 2 * along + (along * centres).sum(-1, keepdim=True)
        # An empty cluster has no centre, and attracts no point.
        distance = distance.masked_fill(counts == 0, torch.inf)

        previous = members
        members = torch.stack([distance[0] <= distance[1], distance[0] > distance[1]])
        if torch.equal(previous, members):
            break
    return members[0, distance.amin(0).sum(-1).argmin()]


def _dissimilarity(points: Float[Tensor, "n e"], m: int) -> float:
    """Return a cluster's share of the models times 1 - its similarity."""
    if len(points) == 0:
        return -1.0
    unit = F.normalize(points, dim=-1)
    least = (unit @ unit.T - torch.eye(len(points), dtype=points.dtype)).amin(-1)
    return len(points) / m * (1 - float(least.mean()))
