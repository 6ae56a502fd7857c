"""Last-layer excess: how far one class sets a model's last layer apart, against backdoors."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.federated.types import CriterionInput, batched

_LARGEST_TYPICAL = math.log(8)  # one row twice as far as the next, three quarters of the direction


@batched
def last_layer_excess(inputs: CriterionInput) -> Float[Tensor, "*a m"]:
    """Measure how far one class dominates the change of a model's last layer, for a peer.

    A trigger leads from all classes to one, so that the row of this class moves farther than any
    other, and against them. Let D [C, h] be the difference of the last linear layer to that of the
    agent's own model, less the mean of its rows, which the softmax ignores. r_1 >= r_2 >= ... are
    the norms of its rows, and u its leading left singular vector, of norm 1. The value is

        max(0, g - min(m, log 8)),    g = log(r_1 / r_2) - log(1 - max_c u_c^2),

    where m is the lower median of g over the received models. Peers with skewed labels have a large
    m. A label flip moves two rows alike, and has a small value. The size of D does not matter, and
    neither samples nor losses are read.

    After Yu, Fang, Zhang, Tian, Zhu, Zhang and Liu, "Lightweight and Fast Backdoor Model Detection"
    (arXiv 2605.18907), who look for outliers among the rows of a single model.

    The last linear layer is the last trained weight with a row per class.

    Args:
        inputs: View of one or several agents.

    Returns:
        Values, in nats, shape [*a, m]; 0 or more, and 0 for the agent's own model.

    Raises:
        ConfigError: The model has no such layer, or the data have fewer than three classes: the
            rows of two classes move alike.
    """
    layer = inputs.last_layer
    if layer is None:
        raise ConfigError(
            "`last_layer_excess` reads the last linear layer, and no trained weight of this model "
            "has a row for each class: take another criterion, or end the network in nn.Linear"
        )
    if layer.classes < 3:
        raise ConfigError(
            "`last_layer_excess` compares the rows of the last linear layer, and needs three "
            f"classes or more: the data have {layer.classes}; take another criterion"
        )
    heads = inputs.models[:, layer.weight]
    change = heads[inputs.received.rows].cpu().double()
    change = change - heads[inputs.own_entry.rows].cpu().double()
    change = change.view(*inputs.received.rows.shape, layer.classes, layer.width)
    change = change - change.mean(-2, keepdim=True)

    # Equal models, such as the agent's own, have no leading class.
    is_equal = (change == 0).all(-1).all(-1)
    first, second = change.norm(dim=-1).topk(2).values.unbind(-1)
    dominance: Tensor = (first / second).log() - (1 - _leading_share(change)).log()
    dominance = dominance.masked_fill(is_equal, 0.0).nan_to_num(nan=torch.inf)
    if not dominance.shape[-1]:
        return dominance
    typical = dominance.median(-1, keepdim=True).values.clamp(max=_LARGEST_TYPICAL)
    return torch.where(dominance > typical, dominance - typical, 0.0)


def _leading_share(change: Float[Tensor, "*a m C h"]) -> Float[Tensor, "*a m"]:
    """Return max_c u_c^2 of the leading left singular vector u; NaN if it is not finite."""
    # The smaller Gram matrix has the same vectors: heads of language models have many classes.
    is_finite = change.isfinite().all(-1).all(-1)[..., None, None]
    rows = change.masked_fill(~is_finite, 0.0)
    if rows.shape[-2] <= rows.shape[-1]:
        u = torch.linalg.eigh(rows @ rows.mT).eigenvectors[..., -1]
    else:
        u = (rows @ torch.linalg.eigh(rows.mT @ rows).eigenvectors[..., -1:]).squeeze(-1)
    squares = u.square()
    share: Tensor = squares.amax(-1) / squares.sum(-1)
    return share.masked_fill(~is_finite[..., 0, 0], torch.nan)
