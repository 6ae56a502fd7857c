"""DnC: removal of outliers along the direction of largest variance.

Shejwalkar and Houmansadr, "Manipulating the Byzantine: optimizing model poisoning attacks and
defenses for federated learning" (NDSS 2021), Algorithm 2. The authors sample 10,000 coordinates to
save time. The Gram matrix holds all coordinates at no further cost, so that nothing is sampled and
one iteration is enough.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.errors import require
from fedcb2o.federated.aggregation.base import rule_signature, validate_byzantine_count
from fedcb2o.federated.aggregation.gram_rules import row_mask, uniform_weights

__all__ = ["dnc"]


def _max_byzantine(m: int) -> int:
    """Return the limit: one model remains."""
    return m - 1


@rule_signature("gram", max_byzantine=_max_byzantine, by_distances=True)
def dnc(gram: Float[Tensor, "m m"], *, f: int, removed: float = 1.0) -> Float[Tensor, " m"]:
    """Average the models without those of the largest outlier scores (DnC).

    A score is the squared projection of the centred model onto the first right singular vector of
    all centred models. The largest ceil(`removed` * f) scores are removed, at most m - 1.
    Shejwalkar and Houmansadr, "Manipulating the Byzantine" (NDSS 2021), with all coordinates and
    one iteration.

    Args:
        removed: Models to remove for each assumed attacker, above 0 (c in the paper).

    Raises:
        ConfigError: `removed` is not above 0.
    """
    require("removed", removed, removed > 0, "above 0")
    m = len(gram)
    # A product that is whole except for rounding is not rounded up.
    count = math.ceil(removed * validate_byzantine_count(dnc, f, m) - 1e-9)
    g = gram.double()
    centred = g - g.mean(0) - g.mean(1, keepdim=True) + g.mean()
    # The first right singular vector's projections of the centred models are, up to a factor, the
    # leading eigenvector of their Gram matrix.
    scores = torch.linalg.eigh(centred).eigenvectors[:, -1].square()
    kept = scores.sort(stable=True).indices[: max(1, m - count)]
    return uniform_weights(row_mask(kept, m))
