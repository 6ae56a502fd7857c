"""Sentinel: dissimilar models go, the others count by how much worse their loss is than the agent's own, and no layer
is larger than the agent's.

Feng, Huertas Celdrán, Baltensperger, Martínez Beltrán, Sánchez Sánchez, Bovet and Stiller, "Sentinel: an aggregation
function to secure decentralized federated learning" (arXiv 2310.08097, 2023). As in the code of one of its authors; of
the text the abstract alone was at hand.
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

_MIN_LOSS = 0.001  # the own loss counts as at least that


@stateful()
def sentinel(
    state: RuleState, inputs: CriterionInput, *, similarity: float = 0.5, trust: float = 0.1
) -> tuple[RuleState, RuleOutput | Float[Tensor, " k"]]:
    """The average of the own model and the received ones of a cosine `similarity` to it or more, the mean over layers,
    with weights exp(-(L_i - L) / L) and at most 1, of which those below `trust` are 0. L_i are the averages of the
    validation losses of all models that passed from that peer, L those of the own. Layers of a larger norm than the
    own one's are scaled down to it.

    Its code scales by the inverse ratio, which keeps larger layers and shrinks smaller ones, and passes over all peers
    in the first round, for reasons of its platform; this does neither. A peer under a new name has no past.
    """
    if inputs.losses is None or inputs.own_losses is None:
        raise ConfigError(
            "the rule looks at losses, and the algorithm evaluates none: set `judges` = true"
        )
    others = inputs.received.ids != inputs.own_entry.ids
    everyone = inputs.received.with_own(inputs.own_entry)
    seen = torch.cat([others, torch.tensor([True])])
    rows = everyone.rows[seen]
    ids = everyone.ids[seen]
    losses = torch.cat([inputs.losses.mean, inputs.own_losses.mean])[seen]
    alike, norms = layer_statistics(inputs, rows)
    passed = alike >= similarity
    passed[-1] = True
    state, average = _average_losses(state, inputs, ids[passed], losses[passed])
    own = average[-1]
    worse = (average - own).clamp(min=0) / own.clamp(min=_MIN_LOSS)
    weights = torch.exp(-worse).nan_to_num(0.0)
    weights = weights.where(weights >= trust, 0.0)
    if not weights.sum() > 0:  # the own loss is no number
        return state, torch.zeros(len(others) + 1, dtype=torch.float64)
    weights = weights / weights.sum()
    norms = norms[passed]
    factor = (norms[-1] / norms).nan_to_num(1.0).clamp(max=1.0)  # of each model and layer
    sizes = tuple(shape.numel() for shape in inputs.context.layer_shapes)
    reduce = functools.partial(
        _layerwise_average, weights=weights.unsqueeze(1) * factor, sizes=sizes
    )
    return state, RuleOutput(Reduction(rows[passed], reduce, takes_offset=True, weights=weights))


def layer_statistics(
    inputs: CriterionInput, rows: Int[Tensor, " k"]
) -> tuple[Float[Tensor, " k"], Float[Tensor, "k l"]]:
    """The cosine similarity of some models to the last of them, the mean over layers and at least 0, and the norm of
    each layer. That of a layer is the mean over its rows, as in their code."""
    start = 0
    alike = []
    norms = []
    for shape in inputs.context.layer_shapes:
        stop = start + shape.numel()
        part = (
            inputs.models[:, start:stop][rows.to(inputs.models.device)]
            .cpu()
            .view(len(rows), *(shape or (1,)))
        )
        alike.append(
            F.cosine_similarity(part, part[-1:], dim=-1).double().view(len(rows), -1).mean(1)
        )
        norms.append(part.flatten(1).double().norm(dim=1))
        start = stop
    return torch.stack(alike).mean(0).clamp(min=0), torch.stack(norms, 1)


def _average_losses(
    state: RuleState, inputs: CriterionInput, ids: Int[Tensor, " k"], losses: Float[Tensor, " k"]
) -> tuple[RuleState, Float[Tensor, " k"]]:
    """What it keeps then, the sum and the number of each peer's losses, and their average for those that passed now."""
    whose, known, there = match_history(state, inputs, ids)
    sums = torch.zeros(2, len(whose), dtype=torch.float64)
    if known.any():
        sums[:, there] = state["sums"][:, known]
    here = torch.searchsorted(whose, ids)
    sums[:, here] += torch.stack([losses, torch.ones_like(losses)])
    return {"ids": whose, "sums": sums}, sums[0, here] / sums[1, here]


def _layerwise_average(
    x: Float[Tensor, "k b"], first: int, *, weights: Float[Tensor, "k l"], sizes: tuple[int, ...]
) -> Float[Tensor, " b"]:
    """A block of columns of the average whose weights differ from layer to layer, from the column `first` on."""
    made = x.new_empty(x.shape[1])
    start = 0
    weights = weights.T.to(x.device, x.dtype)
    for weight, size in zip(weights, sizes, strict=True):
        a = max(start - first, 0)
        b = min(start + size - first, x.shape[1])
        if a < b:
            made[a:b] = weight @ x[:, a:b]
        start += size
    return made
