"""Pre-steps to any robust rule: matrices P [j, m], so that the rule works on the rows of P X in place of the models X.

A pre-step is a function of the Gram matrix, or of the number m of models and a draw.
"""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.federated.aggregation.base import clip_byzantine_count, rule_signature
from fedcb2o.federated.aggregation.coordinatewise import half_minus_one
from fedcb2o.federated.aggregation.gram_rules import squared_distances

__all__ = ["bucketing", "nnm"]


@rule_signature("gram", max_byzantine=half_minus_one)
def nnm(gram: Float[Tensor, "m m"], *, f: int) -> Float[Tensor, "m m"]:
    """Nearest-neighbour mixing: each model becomes the mean of its m - f nearest, itself among them (Allouah et al.,
    "Fixing by mixing", AISTATS 2023). Needs m >= 2 f + 1.
    """
    m = len(gram)
    count = m - clip_byzantine_count(nnm, f, m)
    squared = squared_distances(gram).fill_diagonal_(-1.0)
    matrix = torch.zeros(m, m, dtype=torch.float64)
    return matrix.scatter_(
        1, squared.sort(dim=1, stable=True).indices[:, :count], 1 / max(1, count)
    )


def bucketing(m: int, draw: np.random.Generator, *, size: int = 2) -> Float[Tensor, "j m"]:
    """Bucketing: the means of random groups of `size` models, the last one maybe smaller (Karimireddy, He and Jaggi,
    "Byzantine-robust learning on heterogeneous datasets via bucketing", ICLR 2022, where 2 is recommended).
    """
    if size < 1:
        raise ConfigError(
            f"`size`, the number of models in a bucket, must be 1 or more, got {size}"
        )
    order = torch.from_numpy(draw.permutation(m))
    matrix = torch.zeros(-(-m // size), m, dtype=torch.float64)
    matrix[torch.arange(m) // size, order] = 1.0
    return matrix / matrix.sum(1, keepdim=True)
