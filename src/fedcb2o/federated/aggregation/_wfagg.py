"""WFAgg: three filters vote on each model.

Cajaraville-Aboy, Fernández-Vilas, Díaz-Redondo and Fernández-Veiga, "Byzantine-robust aggregation
for securing decentralized federated learning" (arXiv 2409.17754, 2024), after public code of an
unknown author that has all parts. Of the text, only the abstract was available.
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
    """Mix the agent's own model with models that pass filters (WFAgg).

    Of k received models, the first filter passes the k - f - 1 nearest to their coordinate-wise
    median, and the second as many of the largest cosine similarity to it. The third passes models
    that moved as before: the squared and the cosine distance from the peer's previous model are
    within one standard deviation of their weighted means over the two moves before. A model's
    weight is 0.4 for each of the first two filters and 0.2 for the third; below 0.6 it is 0.
    Without a model, the agent's own model stays.

    Each agent keeps one model of every known peer, d numbers each, in memory and in each
    checkpoint. A peer that is not asked in every round may have moved for several rounds. The
    authors' values of `smoothing` and `transient` could not be verified.

    Args:
        state: Last model and last three moves of each known peer.
        f: Number of attackers to assume; by default the attackers' share, rounded up.
        smoothing: Share of the received models, from 0 to 1.
        transient: First round in which moves are measured.
    """
    if not 0 <= smoothing <= 1:
        raise ConfigError(
            f"`smoothing`, the share of the received models, must be from 0 to 1, got {smoothing}"
        )
    # An agent may sample itself; its own model needs no vote.
    is_other = inputs.received.ids != inputs.own_entry.ids
    ids = inputs.received.ids[is_other]
    rows = inputs.received.rows[is_other]
    models = inputs.models[rows].cpu()

    # 1. Update the history of each peer.
    kept_ids, kept_models, moves = _recall_history(state, inputs, ids)
    current = torch.searchsorted(kept_ids, ids)
    if inputs.n >= transient:
        latest = movement(kept_models[current], models).unsqueeze(-1)
        moves[current] = torch.cat([moves[current][..., 1:], latest], -1)
    kept_models[current] = models

    # 2. Count the votes, in fifths.
    votes = torch.zeros(len(is_other) + 1, dtype=torch.float64)
    if len(ids):
        if f is None:
            # A product that is whole except for rounding is not rounded up.
            f = math.ceil(inputs.context.malicious_share * len(ids) - 1e-9)
        count = max(1, len(ids) - f - 1)
        squared, cosine = distances_from_median(inputs.models, rows)
        near = _smallest(squared, count).double()
        similar = _smallest(cosine, count).double()
        # Whole fifths, so that the limit of 0.6 is exact.
        fifths = 2 * near + 2 * similar + is_steady(moves[current]).double()
        votes[:-1][is_other] = fifths.where(fifths >= 3, 0.0)

    # 3. Mix with the agent's own model.
    total = votes.sum()
    weights = smoothing * votes / total if total > 0 else votes
    weights[-1] = 1 - weights.sum()
    return {"ids": kept_ids, "models": kept_models, "moves": moves}, weights


def distances_from_median(
    models: Float[Tensor, "p d"], rows: Int[Tensor, " m"]
) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"]]:
    """Compute the squared and the cosine distances of models from their coordinate-wise median."""
    squared, along, norms = torch.zeros(3, len(rows), dtype=torch.float64)
    median_norm = torch.zeros((), dtype=torch.float64)
    for _, block in column_blocks(models, rows):
        median = coordinate_median(block).cpu().double()
        x = block.cpu().double()
        squared += (x - median).square().sum(1)
        along += x @ median
        norms += x.square().sum(1)
        median_norm += median @ median
    cosine = (along / (norms * median_norm).sqrt()).nan_to_num(0.0)
    return squared, 1 - cosine


def movement(previous: Float[Tensor, "k d"], current: Float[Tensor, "k d"]) -> Float[Tensor, "k 2"]:
    """Compute squared and cosine distances to successors; NaN without a previous model."""
    moves = torch.zeros(len(current), 2, dtype=torch.float64)
    for k, (a, b) in enumerate(zip(previous, current, strict=True)):
        a, b = a.double(), b.double()  # one peer at a time, because models may be large
        moves[k] = torch.stack([(b - a).square().sum(), 1 - a @ b / (a.norm() * b.norm())])
    return moves


def is_steady(moves: Float[Tensor, "k 2 3"]) -> Bool[Tensor, " k"]:
    """Test if the last of three moves is like the two moves before; False for NaN.

    The mean is that of the public code: of the exponentially weighted means (alpha = 0.01) of the
    two moves, the later one first. The standard deviation of two values is |a - b| / sqrt(2) for
    any weights.
    """
    earlier, later, latest = moves.unbind(-1)
    mean = (later + (earlier + 0.99 * later) / 1.99) / 2
    within: Tensor = (latest - mean).abs() <= (later - earlier).abs() / math.sqrt(2)
    return within.all(-1)


def _smallest(values: Float[Tensor, " m"], count: int) -> Bool[Tensor, " m"]:
    selected = torch.zeros(len(values), dtype=torch.bool)
    selected[values.sort(stable=True).indices[:count]] = True
    return selected


def _recall_history(
    state: RuleState, inputs: CriterionInput, ids: Int[Tensor, " m"]
) -> tuple[Int[Tensor, " k"], Float[Tensor, "k d"], Float[Tensor, "k 2 3"]]:
    """Return ids, last models and moves of all peers; NaN if missing."""
    kept_ids, is_kept, position = match_history(state, inputs, ids)
    models = torch.full((len(kept_ids), inputs.models.shape[1]), torch.nan)
    moves = torch.full((len(kept_ids), 2, 3), torch.nan, dtype=torch.float64)
    if is_kept.any():
        models[position] = state["models"][is_kept]
        moves[position] = state["moves"][is_kept]
    return kept_ids, models, moves
