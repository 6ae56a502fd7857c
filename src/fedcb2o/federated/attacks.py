"""What malicious agents do to their own data.

An attack is a function (shard, draw) -> shard; its further arguments are keywords.
"""

import numpy as np
import torch

from fedcb2o.data.shard import Shard

__all__ = ["label_flip"]


def label_flip(shard: Shard, draw: np.random.Generator, *, source: int, target: int) -> Shard:
    """Label every sample of class `source` as class `target`; the features stay as they are (eq:MaliAgentObj)."""
    return Shard(shard.x, torch.where(shard.y == source, target, shard.y))
