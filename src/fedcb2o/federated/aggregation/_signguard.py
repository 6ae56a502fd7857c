"""SignGuard: filters by norm and by statistics of signs.

Xu, Huang, Song and Lan, "Byzantine-robust federated learning through collaborative malicious
gradient filtering" (ICDCS 2022), after several public implementations, which agree. In the paper, a
server aggregates updates of one model. Here the agent's model before the round takes its place.
Other agents did not start there, so a disagreement between agents counts as an update.
"""

import math

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedcb2o.errors import require
from fedcb2o.federated.types import CriterionInput, RuleOutput, RuleState, stateful

__all__ = ["signguard"]

_LEAST_BANDWIDTH = 1e-3  # the sign statistics are shares of coordinates


@stateful(uses_previous=True)
def signguard(
    state: RuleState,
    inputs: CriterionInput,
    *,
    sampled: float = 0.1,
    lowest: float = 0.1,
    highest: float = 3.0,
) -> tuple[RuleState, RuleOutput]:
    """Average the clipped updates of models with usual norms and signs (SignGuard).

    The first filter passes updates whose norm is from `lowest` to `highest` times the median norm.
    The second passes the largest cluster of mean shift in the shares of positive, zero and negative
    coordinates, among random coordinates. The updates that pass both are clipped to the median norm
    and averaged. The agent's own model is one of the models.

    Args:
        state: Not used; the rule reads the model before the round.
        sampled: Share of the coordinates whose signs are counted, above 0 and at most 1.
        lowest: Smallest norm that passes, in median norms.
        highest: Largest norm that passes, in median norms.

    Returns:
        The state, and the weights of the received models, the agent's own and, as the rest, its
        model before the round.
    """
    require("sampled", sampled, 0 < sampled <= 1, "above 0 and at most 1")
    assert inputs.previous is not None
    models = inputs.models[inputs.received.with_own(inputs.own_entry).rows]
    is_own = inputs.received.ids == inputs.own_entry.ids  # an agent may sample itself
    counts = torch.cat([~is_own, torch.ones(1, dtype=torch.bool)])
    updates = (models - inputs.models[int(inputs.previous)]).cpu()[counts]

    norms = updates.double().norm(dim=1)
    median = float(norms.median())
    passed = (norms >= lowest * median) & (norms <= highest * median)
    size = max(1, math.ceil(sampled * updates.shape[1]))
    columns = inputs.context.draw.choice(updates.shape[1], size, replace=False)
    passed &= largest_sign_cluster(updates[:, torch.from_numpy(columns)])

    weights = torch.zeros(len(counts), dtype=torch.float64)
    if passed.any():
        factors = (median / norms).nan_to_num(1.0, posinf=1.0).clamp(max=1.0)
        weights[counts] = (factors * passed) / passed.sum()
    else:
        # Without an update that passes, the agent's own model stays.
        weights[-1] = 1.0
    return state, RuleOutput(weights, previous_weight=float(1 - weights.sum()))


def largest_sign_cluster(updates: Float[Tensor, "m k"]) -> Bool[Tensor, " m"]:
    """Select the first largest cluster in shares of positive, zero and negative coordinates."""
    from sklearn.cluster import MeanShift, estimate_bandwidth  # takes a second to import

    signs = [(updates > 0), (updates == 0), (updates < 0)]
    shares = torch.stack([sign.double().mean(1) for sign in signs], 1).numpy()
    bandwidth = max(estimate_bandwidth(shares, quantile=0.5), _LEAST_BANDWIDTH)
    labels = MeanShift(bandwidth=bandwidth).fit_predict(shares)
    # Of equally large clusters, the first that mean shift finds wins.
    return torch.from_numpy(labels == np.bincount(labels).argmax())
