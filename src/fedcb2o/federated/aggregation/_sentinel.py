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
from fedcb2o.federated.contacts import recalled
from fedcb2o.federated.types import Judged, Reduction, State, Weighed, remembers

__all__ = ["sentinel"]

LEAST = 0.001  # the own loss counts as at least that


@remembers()
def sentinel(
    state: State, judged: Judged, *, similarity: float = 0.5, trust: float = 0.1
) -> tuple[State, Weighed | Float[Tensor, " k"]]:
    """The average of the own model and the received ones of a cosine `similarity` to it or more, the mean over layers,
    with weights exp(-(L_i - L) / L) and at most 1, of which those below `trust` are 0. L_i are the averages of the
    validation losses of all models that passed from that peer, L those of the own. Layers of a larger norm than the
    own one's are scaled down to it.

    Its code scales by the inverse ratio, which keeps larger layers and shrinks smaller ones, and passes over all peers
    in the first round, for reasons of its platform; this does neither. A peer under a new name has no past.
    """
    if judged.losses is None or judged.own is None:
        raise ConfigError("the rule looks at losses, and the algorithm evaluates none: set `judges` = true")
    others = judged.received.ids != judged.me.ids
    everyone = judged.received.with_own(judged.me)
    seen = torch.cat([others, torch.tensor([True])])
    rows, ids = everyone.rows[seen], everyone.ids[seen]
    losses = torch.cat([judged.losses.mean, judged.own.mean])[seen]
    alike, norms = layers_of(judged, rows)
    passed = alike >= similarity
    passed[-1] = True
    state, average = _averages(state, judged, ids[passed], losses[passed])
    own = average[-1]
    worse = (average - own).clamp(min=0) / own.clamp(min=LEAST)
    weights = torch.exp(-worse).nan_to_num(0.0)
    weights = weights.where(weights >= trust, 0.0)
    if not weights.sum() > 0:  # the own loss is no number
        return state, torch.zeros(len(others) + 1, dtype=torch.float64)
    weights, norms = weights / weights.sum(), norms[passed]
    factor = (norms[-1] / norms).nan_to_num(1.0).clamp(max=1.0)  # of each model and layer
    sizes = tuple(shape.numel() for shape in judged.local.layers)
    reduce = functools.partial(_by_layers, weights=weights.unsqueeze(1) * factor, sizes=sizes)
    return state, Weighed(Reduction(rows[passed], reduce, placed=True, weights=weights))


def layers_of(judged: Judged, rows: Int[Tensor, " k"]) -> tuple[Float[Tensor, " k"], Float[Tensor, "k l"]]:
    """The cosine similarity of some models to the last of them, the mean over layers and at least 0, and the norm of
    each layer. That of a layer is the mean over its rows, as in their code."""
    start, alike, norms = 0, [], []
    for shape in judged.local.layers:
        stop = start + shape.numel()
        part = judged.pool[:, start:stop][rows.to(judged.pool.device)].cpu().view(len(rows), *(shape or (1,)))
        alike.append(F.cosine_similarity(part, part[-1:], dim=-1).double().view(len(rows), -1).mean(1))
        norms.append(part.flatten(1).double().norm(dim=1))
        start = stop
    return torch.stack(alike).mean(0).clamp(min=0), torch.stack(norms, 1)


def _averages(
    state: State, judged: Judged, ids: Int[Tensor, " k"], losses: Float[Tensor, " k"]
) -> tuple[State, Float[Tensor, " k"]]:
    """What it keeps then, the sum and the number of each peer's losses, and their average for those that passed now."""
    whose, known, there = recalled(state, judged, ids)
    sums = torch.zeros(2, len(whose), dtype=torch.float64)
    if known.any():
        sums[:, there] = state["sums"][:, known]
    here = torch.searchsorted(whose, ids)
    sums[:, here] += torch.stack([losses, torch.ones_like(losses)])
    return {"ids": whose, "sums": sums}, sums[0, here] / sums[1, here]


def _by_layers(
    x: Float[Tensor, "k b"], first: int, *, weights: Float[Tensor, "k l"], sizes: tuple[int, ...]
) -> Float[Tensor, " b"]:
    """A block of columns of the average whose weights differ from layer to layer, from the column `first` on."""
    made, start, weights = x.new_empty(x.shape[1]), 0, weights.T.to(x.device, x.dtype)
    for weight, size in zip(weights, sizes, strict=True):
        a, b = max(start - first, 0), min(start + size - first, x.shape[1])
        if a < b:
            made[a:b] = weight @ x[:, a:b]
        start += size
    return made
