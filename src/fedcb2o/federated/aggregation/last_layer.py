"""Rules by the last linear layer, where a label flip shows most: LFighter and FoolsGold."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from fedcb2o.errors import ConfigError
from fedcb2o.federated.aggregation.base import rule_signature
from fedcb2o.federated.aggregation.gram_rules import squared_distances, uniform_weights
from fedcb2o.federated.contacts import match_history
from fedcb2o.federated.types import CriterionInput, RuleState, stateful

__all__ = ["foolsgold", "lfighter"]


def last_layers(inputs: CriterionInput, rows: Int[Tensor, " k"]) -> Float[Tensor, "k C h"]:
    """Extract the last linear layer of each model: per class its weights and, last, its bias."""
    layer = inputs.last_layer
    if layer is None or layer.bias is None:
        raise ConfigError(
            "the rule reads the last linear layer, and this model has none with a row and a bias "
            "for each class"
        )
    weights = inputs.models[:, layer.weight][rows].cpu().view(-1, layer.classes, layer.width)
    biases = inputs.models[:, layer.bias][rows].cpu().unsqueeze(-1)
    return torch.cat([weights, biases], -1)


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


@stateful(uses_previous=True)
def foolsgold(
    state: RuleState, inputs: CriterionInput, *, confidence: float = 1.0
) -> tuple[RuleState, Float[Tensor, " k"]]:
    """Weigh models by the learning rates alpha_i of FoolsGold: updates of sybils are more alike.

    Fung, Yoon and Beschastnikh, "The Limitations of Federated Learning in Sybil Settings" (RAID
    2020), Algorithm 1.

    The state is the sum of the updates of each received peer in the last linear layer (the
    indicative features), counted from the agent's model before the round. A peer under a new name
    has no history. The state takes 4 C (h + 1) bytes per peer that the agent ever received, for C
    classes and h units below the last layer, in memory and in each checkpoint.

    Args:
        state: State after the agent's previous round.
        confidence: Factor kappa in the logit.
    """
    everyone = inputs.received.with_own(inputs.own_entry)
    assert inputs.previous is not None
    rows = torch.cat([everyone.rows, inputs.previous.view(1)])
    layers = last_layers(inputs, rows).flatten(1)

    ids, is_kept, position = match_history(state, inputs, everyone.ids)
    history = layers.new_zeros(len(ids), layers.shape[1])
    history[position] = state.get("sums", layers[:0])[is_kept]
    current = torch.searchsorted(ids, everyone.ids)
    history[current] += layers[:-1] - layers[-1]
    return {"ids": ids, "sums": history}, learning_rates(history[current].double(), confidence)


def learning_rates(history: Float[Tensor, "k h"], confidence: float = 1.0) -> Float[Tensor, " k"]:
    """Compute the learning rates alpha_i of summed updates, scaled to sum to 1, or all 0."""
    cosine = F.normalize(history, dim=1) @ F.normalize(history, dim=1).T
    cosine = cosine.fill_diagonal_(-torch.inf)

    # Pardoning: an agent whose largest similarity is smaller than that of another is not penalised.
    largest = cosine.amax(1)
    is_smaller = largest.unsqueeze(0) > largest.unsqueeze(1)
    pardon = torch.where(is_smaller, largest.unsqueeze(1) / largest.unsqueeze(0), 1.0)
    alpha = (1 - (cosine * pardon).amax(1)).clamp(0, 1)

    tiny = torch.finfo(alpha.dtype).tiny
    alpha = alpha / alpha.amax().clamp(min=tiny)
    # The logit spreads rates near 0 and 1; those at the ends are infinite, and are clamped below.
    alpha = confidence * (alpha.logit() + 0.5)
    alpha = alpha.nan_to_num(nan=0.0, posinf=1.0, neginf=0.0).clamp(0, 1)
    return alpha / alpha.sum().clamp(min=tiny)
