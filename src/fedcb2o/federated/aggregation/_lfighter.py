"""LFighter, a rule by weights: it looks at the last layers alone, and parts them into two clusters."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from fedcb2o.federated.aggregation.base import rule_signature
from fedcb2o.federated.aggregation.gram_rules import squared_distances, uniform_weights

__all__ = ["lfighter"]


@rule_signature("values", gram_entries="none", own_rows=("before",))
def lfighter(heads: Float[Tensor, "m C h"]) -> Float[Tensor, " m"]:
    """LFighter, made for label flips: of the updates of the last layer, those of the two classes that change most are
    parted into two clusters by k-means, and the mean is over the models of the cluster that is large and less alike
    (Jebreel, Domingo-Ferrer, Sánchez and Blanco-Justicia, "LFighter: Defending against the label-flipping attack in
    federated learning", Neural Networks 2024, for data that are not extremely skewed).

    As in the authors' released code: weights and biases say which classes change most, and the weights are parted. The
    last row is the model before the round, from which the updates are. There a server's, with which all began; here
    others began elsewhere, and how far counts as update.
    """
    updates = (heads[:-1] - heads[-1]).double()
    m = len(updates)
    if m < 2:
        return torch.cat([torch.ones(m, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)])
    change = updates[:, :, :-1].norm(dim=-1).sum(0) + updates[:, :, -1].abs().sum(0)
    points = updates[:, change.argsort()[-2:], :-1].flatten(1)
    first = _two_means(points)
    good = max(first, ~first, key=lambda members: _dissimilarity(points[members], m))
    return torch.cat([uniform_weights(good), torch.zeros(1, dtype=torch.float64)])


def _two_means(points: Float[Tensor, "m e"]) -> Bool[Tensor, " m"]:
    """The first of two clusters by k-means: Lloyd's iteration with every pair of points as the first two centres, and
    the best of what comes out. For few points, and without chance."""
    products = points @ points.T
    squared = squared_distances(products)
    norms = products.diagonal()
    i, j = torch.triu_indices(len(points), len(points), 1)
    members = torch.stack(
        [squared[i] <= squared[j], squared[i] > squared[j]]
    )  # of each cluster, for each pair
    for _ in range(100):
        counts = members.sum(-1, keepdim=True)
        centres = members.double() / counts.clamp(min=1)
        along = centres @ products
        far = norms - 2 * along + (along * centres).sum(-1, keepdim=True)
        far = far.masked_fill(counts == 0, torch.inf)
        before = members
        members = torch.stack([far[0] <= far[1], far[0] > far[1]])
        if torch.equal(before, members):
            break
    return members[0, far.amin(0).sum(-1).argmin()]


def _dissimilarity(points: Float[Tensor, "n e"], m: int) -> float:
    """LFighter's dissimilarity of a cluster: its share of the m models times 1 - the mean over its models of their
    least cosine similarity in it."""
    unit = F.normalize(points, dim=-1)
    if len(points) == 0:
        return -1.0
    least = (unit @ unit.T - torch.eye(len(points), dtype=points.dtype)).amin(-1)
    return len(points) / m * (1 - float(least.mean()))
