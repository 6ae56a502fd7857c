"""Membership inference: whether the loss of a model on a sample tells that it was trained on it.

The attack scores each sample by minus its loss (Yeom et al., 2018). It is measured by its AUC, the
probability that a training sample has a higher score than another sample, and by its true positive
rate at 1% false positives (Carlini et al., 2022).
"""

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.data import Shard
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.inference import model_losses

_MAX_SAMPLES = 2000  # of a set
FALSE_POSITIVES = 0.01
"""Rate of false positives at which true positives are counted."""


def attack_auc(members: Float[np.ndarray, " n"], others: Float[np.ndarray, " m"]) -> float:
    """Compute the area under the ROC curve from scores; equal ones count half."""
    ordered = np.sort(others)
    smaller = ordered.searchsorted(members, "left")
    not_larger = ordered.searchsorted(members, "right")
    wins = (smaller.sum() + not_larger.sum()) / 2
    return float(wins / (len(members) * len(others)))


def true_positive_rate(members: Float[np.ndarray, " n"], others: Float[np.ndarray, " m"]) -> float:
    """Compute the true positive rate at 1% false positives, at 0 below 100 other samples."""
    allowed = int(FALSE_POSITIVES * len(others))
    # At most `allowed` of the other samples have a higher score.
    threshold = np.sort(others)[::-1][allowed]
    return float((members > threshold).mean())


def sample_losses(
    group: AgentGroup, k: int, theta: Float[Tensor, " d"], shard: Shard
) -> Float[np.ndarray, " n"]:
    """Compute the loss of a model on samples, at most 2000 evenly spaced ones."""
    spec = group.spec
    step = max(1, -(-len(shard) // _MAX_SAMPLES))
    losses = model_losses(
        spec.module,
        theta.unsqueeze(0),
        torch.zeros(1, dtype=torch.int64),
        Shard(shard.x[::step], shard.y[::step]),
        spec.num_classes,
        reference=group.reference(k),
        loss=spec.training.loss,
    )
    return losses.per_sample[0].numpy()


def leakage(
    group: AgentGroup, k: int, theta: Float[Tensor, " d"], train: Shard, test: Shard
) -> Mapping[str, float]:
    """Measure "auc" and "tpr" against a model of an agent; nothing for a broken one."""
    members = -sample_losses(group, k, theta, train)
    others = -sample_losses(group, k, theta, test)
    if not len(others) or not (np.isfinite(members).all() and np.isfinite(others).all()):
        return {}
    return {"auc": attack_auc(members, others), "tpr": true_positive_rate(members, others)}
