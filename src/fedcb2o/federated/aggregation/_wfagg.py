"""WFAgg: three filters, of which each has a say: near the median, alike to it, and as steady as before.

Cajaraville-Aboy, Fernández-Vilas, Díaz-Redondo and Fernández-Veiga, "Byzantine-robust aggregation for securing
decentralized federated learning" (arXiv 2409.17754, 2024). As in public code that has all of its parts, by whom is not
known; of the text the abstract alone was at hand.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.federated.aggregation.coordinatewise import coordinate_median
from fedcb2o.federated.aggregation.gram_matrix import column_blocks
from fedcb2o.federated.contacts import match_history
from fedcb2o.federated.types import CriterionInput, RuleState, stateful

__all__ = ["wfagg"]


@stateful()
def wfagg(
    state: RuleState,
    inputs: CriterionInput,
    *,
    f: int | None = None,
    smoothing: float = 0.8,
    transient: int = 3,
) -> tuple[RuleState, Float[Tensor, " k"]]:
    """1 - `smoothing` times the own model and `smoothing` times an average of the received ones, in which a model
    counts 0.4 where it is among the k - f - 1 of k nearest to their coordinate-wise median, 0.4 where it is among as
    many of the most alike to it by cosine, and 0.2 where it moved as before; with less than 0.6 it does not count.
    Where none counts, the own model stays.

    It moved as before where the squared and the cosine distance from the model that the same peer sent before are both
    within a standard deviation of their weighted means over the two times before, from round `transient` on. So each
    agent keeps a model of every peer that it knows, d numbers for each, in memory and in each checkpoint. A peer that
    is not asked in every round may have moved for several. Which `smoothing` and `transient` the authors have could not
    be verified.
    """
    if not 0 <= smoothing <= 1:
        raise ConfigError(
            f"`smoothing`, the share of the received models, must be from 0 to 1, got {smoothing}"
        )
    others = inputs.received.ids != inputs.own_entry.ids
    ids = inputs.received.ids[others]
    rows = inputs.received.rows[others]
    models = inputs.models[rows].cpu()
    whose, kept, moves = _recall_history(state, inputs, ids)
    here = torch.searchsorted(whose, ids)
    if inputs.n >= transient:
        moves[here] = torch.cat(
            [moves[here][..., 1:], movement(kept[here], models).unsqueeze(-1)], -1
        )
    kept[here] = models
    said = torch.zeros(len(others) + 1, dtype=torch.float64)
    if len(ids):
        assumed = math.ceil(inputs.context.malicious_share * len(ids) - 1e-9) if f is None else f
        count = max(1, len(ids) - assumed - 1)
        near, alike = (_smallest(far, count) for far in distances_from_median(inputs.models, rows))
        fifths = 2 * near.double() + 2 * alike.double() + is_steady(moves[here]).double()
        said[:-1][others] = fifths.where(fifths >= 3, 0.0)
    total = said.sum()
    weights = smoothing * said / total if total > 0 else said
    weights[-1] = 1 - weights.sum()
    return {"ids": whose, "models": kept, "moves": moves}, weights


def distances_from_median(
    models: Float[Tensor, "p d"], rows: Int[Tensor, " m"]
) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"]]:
    """The squared and the cosine distances of some models from their coordinate-wise median."""
    squared, along, norms = torch.zeros(3, len(rows), dtype=torch.float64)
    norm = torch.zeros((), dtype=torch.float64)
    for _, block in column_blocks(models, rows):
        median = coordinate_median(block).cpu().double()
        x = block.cpu().double()
        squared += (x - median).square().sum(1)
        along += x @ median
        norms += x.square().sum(1)
        norm += median @ median
    return squared, 1 - (along / (norms * norm).sqrt()).nan_to_num(0.0)


def movement(previous: Float[Tensor, "k d"], current: Float[Tensor, "k d"]) -> Float[Tensor, "k 2"]:
    """The squared and the cosine distance from each model to the next; NaN where there was none."""
    found = torch.zeros(len(current), 2, dtype=torch.float64)
    for k, (a, b) in enumerate(zip(previous, current, strict=True)):
        a, b = a.double(), b.double()  # one after the other: models may be large
        found[k] = torch.stack([(b - a).square().sum(), 1 - a @ b / (a.norm() * b.norm())])
    return found


def is_steady(moves: Float[Tensor, "k 2 3"]) -> Bool[Tensor, " k"]:
    """Whether the last of three moves is as the two before it; not where there are fewer.

    The means are that code's: of the exponentially weighted means (alpha = 0.01) of the two, the later first; of two
    values the standard deviation is |a - b| / sqrt(2), whatever their weights.
    """
    earlier, later, now = moves.unbind(-1)
    mean = (later + (earlier + 0.99 * later) / 1.99) / 2
    within: Tensor = (now - mean).abs() <= (later - earlier).abs() / math.sqrt(2)
    return within.all(-1)


def _smallest(values: Float[Tensor, " m"], count: int) -> Bool[Tensor, " m"]:
    chosen = torch.zeros(len(values), dtype=torch.bool)
    chosen[values.sort(stable=True).indices[:count]] = True
    return chosen


def _recall_history(
    state: RuleState, inputs: CriterionInput, ids: Int[Tensor, " m"]
) -> tuple[Int[Tensor, " k"], Float[Tensor, "k d"], Float[Tensor, "k 2 3"]]:
    """Whom the agent knows and meets now, the model that each sent last, and its last three moves; NaN where there is
    none."""
    whose, known, there = match_history(state, inputs, ids)
    models = torch.full((len(whose), inputs.models.shape[1]), torch.nan)
    moves = torch.full((len(whose), 2, 3), torch.nan, dtype=torch.float64)
    if known.any():
        models[there], moves[there] = state["models"][known], state["moves"][known]
    return whose, models, moves
