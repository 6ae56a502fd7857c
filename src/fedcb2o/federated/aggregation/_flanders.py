"""FLANDERS: leave out the models that a forecast from past rounds does not expect.

Gabrielli, Tolomei, Belli and Miori, "Protecting Federated Learning from Extreme Model Poisoning
Attacks via Multidimensional Time Series Anomaly Detection" (arXiv 2303.16668), with Flower's
baseline `flanders`. The models of a round are a matrix X_n, one row per peer. The forecast is a
matrix autoregression, X_{n+1} = A X_n B^T.
"""

import math

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.federated.aggregation.sample_average import sample_weights
from fedcb2o.federated.contacts import match_history
from fedcb2o.federated.types import CriterionInput, RuleState, stateful

__all__ = ["flanders"]


@stateful()
def flanders(
    state: RuleState,
    inputs: CriterionInput,
    *,
    f: int | None = None,
    num_sampled: int = 500,
    window: int = 2,
    ridge: float = 1.0,
) -> tuple[RuleState, Float[Tensor, " k"]]:
    """Average the models nearest to a forecast from past rounds (FLANDERS).

    The f received models farthest from the forecast are left out. The others and the agent's own
    model are weighed by their numbers of samples. In the first round every model counts.

    Args:
        state: Sampled parameters of each peer in the last rounds.
        f: Number of models to leave out; by default the attackers' share, rounded up.
        num_sampled: Number of parameters that the forecast reads, at random but always the same.
        window: Number of past rounds in the forecast, 1 or more; 1 expects the last models again.
        ridge: Regularisation of A and B, in units of the mean square of the parameters.
    """
    received = inputs.received
    # An agent may sample itself. Its own model is not compared with a forecast.
    is_other = received.ids != inputs.own_entry.ids
    ids = received.ids[is_other]
    if f is None:
        # A product that is whole except for rounding is not rounded up.
        f = math.ceil(inputs.context.malicious_share * len(ids) - 1e-9)
    # A peer under a new identity has no past.
    if "ids" in state:
        _, is_known, _ = match_history(state, inputs, ids)
        history = state["history"][:, is_known]
        state = {**state, "ids": state["ids"][is_known], "history": history}

    state, is_kept = filter_models(
        state,
        ids,
        inputs.models[received.rows[is_other]],
        inputs.theta,
        inputs.context.draw,
        f=f,
        num_sampled=num_sampled,
        window=window,
        ridge=ridge,
    )
    weights = sample_weights(received, inputs.own_entry)
    weights[:-1][is_other] *= is_kept
    weights /= weights.sum()
    rows = torch.cat([received.rows, inputs.own_entry.rows.view(1)])
    columns = inputs.models[rows][:, state["columns"]]
    # A rejected model must not become the past from which the next forecast is made.
    return replace_rejected(state, ids[~is_kept], weights @ columns.cpu().double()), weights


def filter_models(
    state: RuleState,
    ids: Int[Tensor, " m"],
    models: Float[Tensor, "m d"],
    reference: Float[Tensor, " d"],
    draw: np.random.Generator,
    *,
    f: int,
    num_sampled: int = 500,
    window: int = 2,
    ridge: float = 1.0,
) -> tuple[RuleState, Bool[Tensor, " m"]]:
    """Return which models are near the forecast, and remember all of them.

    In the first round `draw` chooses the parameters that the forecast reads. `reference` is the
    past of a peer without a past.
    """
    for name, value in (("num_sampled", num_sampled), ("window", window)):
        if value < 1:
            raise ConfigError(f"`{name}` must be 1 or more, got {value}")
    if f < 0 or not ridge > 0:
        raise ConfigError(f"`f` must be 0 or more and `ridge` above 0, got {f} and {ridge}")

    # 1. The past of all known peers.
    columns = state.get("columns")
    if columns is None:
        size = min(num_sampled, models.shape[1])
        # A system of all parameters could not be solved; the choice is kept, or past and present
        # would differ.
        columns = torch.from_numpy(np.sort(draw.choice(models.shape[1], size, replace=False)))
    current = models[:, columns].cpu().double()
    expected = reference[columns].cpu().double()
    known = state.get("ids", ids[:0])
    past = state.get("history", current.new_zeros(0, 0, len(columns)))
    # Peers that sent nothing this round stay in the matrix: the forecast relates all peers.
    everyone = torch.from_numpy(np.union1d(known, ids))
    history = expected.repeat(len(past), len(everyone), 1)
    history[:, torch.searchsorted(everyone, known)] = past
    position = torch.searchsorted(everyone, ids)

    # 2. The models nearest to the forecast.
    is_kept = torch.ones(len(ids), dtype=torch.bool)
    if len(history) and len(ids):
        distances = (current - forecast(history, ridge=ridge)[position]).norm(dim=1)
        nearest = distances.sort(stable=True).indices[: max(1, len(ids) - f)]
        is_kept = torch.zeros_like(is_kept).index_fill_(0, nearest, True)

    # 3. The new past.
    latest = expected.repeat(len(everyone), 1)
    if len(history):
        latest = history[-1].clone()
    latest[position] = current
    history = torch.cat([history, latest[None]])[-window:]
    return {"ids": everyone, "columns": columns, "history": history}, is_kept


def replace_rejected(
    state: RuleState, ids: Int[Tensor, " r"], aggregate: Float[Tensor, " s"]
) -> RuleState:
    """Remember the `aggregate` of sampled parameters in place of the models left out."""
    history = state["history"].clone()
    history[-1, torch.searchsorted(state["ids"], ids)] = aggregate.cpu().double()
    return {**state, "history": history}


def forecast(
    history: Float[Tensor, "t k s"], *, ridge: float = 1.0, iterations: int = 100
) -> Float[Tensor, "k s"]:
    """Forecast the next matrix by a matrix autoregression of order 1.

    A and B minimise the squared errors of X_{n+1} = A X_n B^T over the history plus `ridge` times
    their squared entries, by alternating least squares from identity matrices. `ridge` is in units
    of the mean square of the entries. A history of one matrix is its own forecast.
    """
    scale = history.double().square().mean().sqrt()
    # One matrix shows no movement, and zeros have no scale.
    if len(history) == 1 or not scale > 0:
        return history[-1]
    x = history.double() / scale
    before, after = x[:-1], x[1:]
    num_columns = x.shape[2]
    b = torch.eye(num_columns, dtype=x.dtype)
    rows_after = after.reshape(-1, num_columns)
    result = x[-1]
    for _ in range(iterations):
        right = before @ b.T
        a = _regress((after @ right.mT).sum(0), (right @ right.mT).sum(0), ridge)
        # By the push-through identity, the system has one unknown per row in place of a column.
        left = (a @ before).reshape(-1, num_columns)
        b = _regress(rows_after.T, left @ left.T, ridge) @ left
        previous = result
        result = a @ x[-1] @ b.T
        if (result - previous).norm() <= 1e-6 * previous.norm():
            break
    return result * scale


def _regress(
    right_side: Float[Tensor, "p n"], gram: Float[Tensor, "n n"], ridge: float
) -> Float[Tensor, "p n"]:
    """Return right_side (gram + ridge I)^-1."""
    system = gram + ridge * torch.eye(len(gram), dtype=gram.dtype)
    solution: Tensor = torch.linalg.solve(system, right_side, left=False)
    return solution
