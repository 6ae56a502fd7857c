"""Sentinel: similarity filter, weights by losses, and clipped layers.

Feng, Huertas Celdrán, Baltensperger, Martínez Beltrán, Sánchez Sánchez, Bovet and Stiller,
"Sentinel: an aggregation function to secure decentralized federated learning" (arXiv 2310.08097,
2023), after the code of one of its authors. Of the text, only the abstract was available.
"""

import functools

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from fedcb2o.errors import ConfigError
from fedcb2o.federated.contacts import match_history
from fedcb2o.federated.types import CriterionInput, Reduction, RuleOutput, RuleState, stateful

__all__ = ["sentinel"]

_MIN_LOSS = 0.001  # the agent's own loss counts as at least this


@stateful()
def sentinel(
    state: RuleState, inputs: CriterionInput, *, similarity: float = 0.5, trust: float = 0.1
) -> tuple[RuleState, RuleOutput | Float[Tensor, " k"]]:
    """Average similar models by their losses, and clip their layers (Sentinel).

    The weights are exp(-(L_i - L) / L). L_i is the average validation loss of all models from peer
    i that passed the similarity filter, and L that of the agent's own model. A layer of larger norm
    than the agent's own is scaled down to that norm. A peer under a new name has no history.

    The authors' code differs in two points, for reasons of its platform. It scales by the inverse
    ratio, which keeps larger layers and shrinks smaller ones. It ignores all peers in the first
    round.

    Args:
        state: Sum and number of the losses of each peer.
        similarity: Least cosine similarity to the agent's own model, the mean over layers.
        trust: Weights below this value, before normalisation, are set to 0.

    Returns:
        The new state, and a reduction; weights of 0 if the agent's own loss is not a number.

    Raises:
        ConfigError: The algorithm evaluates no losses.
    """
    if inputs.losses is None or inputs.own_losses is None:
        raise ConfigError(
            "the rule reads losses, and the algorithm evaluates none: set `needs_losses` = true"
        )

    # 1. The received models of other agents and the agent's own, similar ones only.
    is_other = inputs.received.ids != inputs.own_entry.ids
    everyone = inputs.received.with_own(inputs.own_entry)
    counts = torch.cat([is_other, torch.tensor([True])])
    rows = everyone.rows[counts]
    ids = everyone.ids[counts]
    losses = torch.cat([inputs.losses.mean, inputs.own_losses.mean])[counts]
    cosine, norms = layer_statistics(inputs, rows)
    is_similar = cosine >= similarity
    is_similar[-1] = True

    # 2. Weights by the average losses.
    state, average = _average_losses(state, inputs, ids[is_similar], losses[is_similar])
    own = average[-1]
    increase = (average - own).clamp(min=0) / own.clamp(min=_MIN_LOSS)
    weights = torch.exp(-increase).nan_to_num(0.0)
    weights = weights.where(weights >= trust, 0.0)
    if not weights.sum() > 0:  # the agent's own loss is not a number
        return state, torch.zeros(len(is_other) + 1, dtype=torch.float64)
    weights = weights / weights.sum()

    # 3. Clip each layer of each model to the norm of the agent's own layer.
    norms = norms[is_similar]
    factor = (norms[-1] / norms).nan_to_num(1.0).clamp(max=1.0)
    sizes = tuple(shape.numel() for shape in inputs.context.layer_shapes)
    reduce = functools.partial(
        _layerwise_average, weights=weights.unsqueeze(1) * factor, sizes=sizes
    )
    return state, RuleOutput(
        Reduction(rows[is_similar], reduce, takes_offset=True, weights=weights)
    )


def layer_statistics(
    inputs: CriterionInput, rows: Int[Tensor, " k"]
) -> tuple[Float[Tensor, " k"], Float[Tensor, "k l"]]:
    """Compute cosines to the last model, means over rows and layers, and norms of layers."""
    start = 0
    similarities = []
    norms = []
    # Layer by layer, so that no copy of all models is held.
    buffer_rows = rows.to(inputs.models.device)
    for shape in inputs.context.layer_shapes:
        stop = start + shape.numel()
        layer = inputs.models[:, start:stop][buffer_rows].cpu().view(len(rows), *(shape or (1,)))
        cosine = F.cosine_similarity(layer, layer[-1:], dim=-1).double()
        similarities.append(cosine.view(len(rows), -1).mean(1))
        norms.append(layer.flatten(1).double().norm(dim=1))
        start = stop
    return torch.stack(similarities).mean(0).clamp(min=0), torch.stack(norms, 1)


def _average_losses(
    state: RuleState, inputs: CriterionInput, ids: Int[Tensor, " k"], losses: Float[Tensor, " k"]
) -> tuple[RuleState, Float[Tensor, " k"]]:
    """Add this round's losses to the state; return each peer's average."""
    kept_ids, is_kept, position = match_history(state, inputs, ids)
    sums = torch.zeros(2, len(kept_ids), dtype=torch.float64)
    if is_kept.any():
        sums[:, position] = state["sums"][:, is_kept]
    current = torch.searchsorted(kept_ids, ids)
    sums[:, current] += torch.stack([losses, torch.ones_like(losses)])
    return {"ids": kept_ids, "sums": sums}, sums[0, current] / sums[1, current]


def _layerwise_average(
    x: Float[Tensor, "k b"], first: int, *, weights: Float[Tensor, "k l"], sizes: tuple[int, ...]
) -> Float[Tensor, " b"]:
    """Average a block of columns with weights that vary by layer."""
    average = x.new_empty(x.shape[1])
    start = 0
    for weight, size in zip(weights.T.to(x.device, x.dtype), sizes, strict=True):
        # A block of columns may begin or end within a layer.
        a = max(start - first, 0)
        b = min(start + size - first, x.shape[1])
        if a < b:
            average[a:b] = weight @ x[:, a:b]
        start += size
    return average
