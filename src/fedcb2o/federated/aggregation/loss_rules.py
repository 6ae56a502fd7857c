"""Rules that read the losses of models on the agent's own data, and nothing else.

Example:
    >>> loss_clustering(torch.tensor([0.1, 0.3, 2.0, 0.2])).tolist() == [1 / 3, 1 / 3, 0.0, 1 / 3]
    True
"""

import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.errors import require
from fedcb2o.federated.aggregation.base import rule_signature
from fedcb2o.federated.aggregation.gram_rules import uniform_weights

__all__ = ["loss_clustering", "lpe_tsr"]

_MAX_LLOYD_ITERATIONS = 100


@rule_signature("values")
def lpe_tsr(losses: Float[Tensor, " m"], *, temperature: float = 1.0) -> Float[Tensor, " m"]:
    """Weigh the models by exp(-loss / temperature), normalised (LPE-TSR).

    Local performance evaluation with temperature-scaled softmax reweighting, the rule of DB-Robust
    DSGD (https://openreview.net/forum?id=WeDc8CiLSn). With alpha = 1 / temperature these are the
    weights of FedCBO. The authors' temperature could not be verified.

    Args:
        temperature: Above 0; a lower one concentrates the weights on the best models.

    Returns:
        Weights, shape [m]; 0 for a loss that is not finite.
    """
    require("temperature", temperature, temperature > 0, "above 0")
    scores = (-losses.double() / temperature).where(losses.isfinite(), -torch.inf)
    return torch.softmax(scores, 0).nan_to_num(0.0)


@rule_signature("values")
def loss_clustering(losses: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
    """Average the models in the better one of two clusters of losses.

    Kritharakis, Jakovetic, Makris and Tserpes, "Robust federated learning under adversarial attacks
    via loss-based client clustering" (arXiv 2508.12672, 2025), after the authors' released code:
    k-means with two clusters, which starts at the least and the largest loss. The agent's own data
    replace the server's.

    Returns:
        Weights, shape [m]; all 0 without a finite loss.
    """
    is_finite = losses.isfinite()
    values = losses.double()
    low = values.where(is_finite, torch.inf).amin()
    high = values.where(is_finite, -torch.inf).amax()
    members = is_finite
    for _ in range(_MAX_LLOYD_ITERATIONS):
        previous = members
        members = is_finite & ((values - low).abs() <= (values - high).abs())
        others = is_finite & ~members
        if torch.equal(previous, members) or not others.any():
            break
        low = values[members].mean()
        high = values[others].mean()
    return uniform_weights(members)
