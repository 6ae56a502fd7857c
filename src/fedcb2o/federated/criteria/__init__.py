"""Robustness criteria: a value for each received model, low is trusted; one that is no finite number is not at all.

A criterion is a function (judged) -> values of shape [m]; its further arguments are keywords. Losses and what comes of
them are in nats, whatever the other models are: so the agent's own model can be judged alone, and criteria combine.
"""

from fedcb2o.federated.criteria._class_loss_gap import class_loss_gap
from fedcb2o.federated.criteria._distance import distance
from fedcb2o.federated.criteria._perturbation_gap import perturbation_gap
from fedcb2o.federated.criteria._trigger_sensitivity import trigger_sensitivity
from fedcb2o.federated.criteria.class_losses import (
    average_loss,
    class_loss_entropy,
    worst_class_loss,
)
from fedcb2o.federated.criteria.combinations import is_batched as is_batched
from fedcb2o.federated.criteria.combinations import largest, weighted_sum

__all__ = [
    "average_loss",
    "class_loss_entropy",
    "class_loss_gap",
    "distance",
    "largest",
    "perturbation_gap",
    "trigger_sensitivity",
    "weighted_sum",
    "worst_class_loss",
]
