"""Robustness criteria G: one value per model. In every criterion, low is trusted.

A criterion is a function `(inputs) -> values [m]`; its further arguments are keywords. A model
whose value is not finite is not trusted. Losses and values derived from them are in nats.
As alpha is per unit of the criterion, a criterion in other units needs another alpha.

The value of a model does not depend on the other received models, except in
`class_loss_excess`, `last_layer_excess` and `perturbation_gap` with `against` = "majority", where
the agent's own model has the value 0. So the agent's own model can be evaluated alone, and criteria
combine.

A configuration names a criterion by a name in `__all__`, or a user's own by
"package.module:function".
"""

from fedcb2o.docstrings import share_entries
from fedcb2o.federated.criteria._class_loss_excess import class_loss_excess
from fedcb2o.federated.criteria._distance import distance
from fedcb2o.federated.criteria._last_layer_excess import last_layer_excess
from fedcb2o.federated.criteria._perturbation_gap import perturbation_gap
from fedcb2o.federated.criteria._prompt_sensitivity import prompt_sensitivity
from fedcb2o.federated.criteria._trigger_sensitivity import trigger_sensitivity
from fedcb2o.federated.criteria.class_losses import (
    average_loss,
    class_loss_entropy,
    class_loss_gap,
    worst_class_loss,
)
from fedcb2o.federated.criteria.combinations import is_batched as is_batched
from fedcb2o.federated.criteria.combinations import largest, weighted_sum
from fedcb2o.federated.types import BATCHED

__all__ = [
    "average_loss",
    "class_loss_entropy",
    "class_loss_excess",
    "class_loss_gap",
    "distance",
    "largest",
    "last_layer_excess",
    "perturbation_gap",
    "prompt_sensitivity",
    "trigger_sensitivity",
    "weighted_sum",
    "worst_class_loss",
]

for _name in __all__:
    _criterion = globals()[_name]
    if BATCHED.get(_criterion):
        _inputs = {"inputs": "View of one or several agents."}
        share_entries(_criterion, _inputs, "Values, shape [*a, m].")
    else:
        share_entries(_criterion, {"inputs": "View of one agent."}, "Values, shape [m].")
