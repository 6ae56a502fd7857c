"""Factor mixing: a harmless adapter whose factors spoil an average of factors."""

import numpy as np
from jaxtyping import Float
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.federated.adversary import AttackView, knows
from fedcb2o.nn.low_rank import require_pairs

__all__ = ["factor_mixing"]


@knows()
def factor_mixing(
    view: AttackView, draw: np.random.Generator, *, scale: float = -4.0
) -> Float[Tensor, " d"]:
    """Publish the trained adapters with B times `scale` and A divided by it.

    The product B A, and so each loss of the model, is that of honest training. An average of the
    factors with the weight w for attackers among models that agree has the product
    ((1 - w)^2 + w^2 + w (1 - w) (scale + 1 / scale)) B A: a negative scale shrinks the update, and
    reverses it if far below -1. The attack is this project's own; averages of products are immune.

    Args:
        scale: Factor of B, not 0.

    Raises:
        ConfigError: `scale` is 0, or the model has no low-rank adapters.
    """
    if not scale:
        raise ConfigError("`scale` must not be 0")
    require_pairs(view.factor_pairs, "the attack `factor_mixing`")
    theta = view.own.clone()
    for pair in view.factor_pairs:
        pair.a(theta).div_(scale)
        pair.b(theta).mul_(scale)
    return theta
