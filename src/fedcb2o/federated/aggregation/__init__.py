"""Aggregation rules: weights of the received models (Algorithm 2, line 6).

A rule is a function `(inputs) -> weights` of the received models [m], or of those and, last, the
agent's own model [m + 1]; the weights sum to 1. Its further arguments are keywords. A robust rule
declares a signature (`rule_signature`) and is applied by `robust_rule.apply_robust_rule`. A rule
with memory (`types.stateful`) also gets, and returns, its state.

A configuration names a rule by a name in `__all__`, or a user's own by "package.module:function".

Example:
    >>> import torch
    >>> models = torch.tensor([[0.0], [1.0], [2.0]])
    >>> apply(mean, models).tolist()
    [1.0]
"""

from collections.abc import Callable
from typing import Any

from fedcb2o.docstrings import share_entries
from fedcb2o.federated.aggregation import (
    _clair,
    _flame,
    _flanders,
    _lightyear,
    _sentinel,
    _wfagg,
    coordinatewise,
    gram_rules,
    last_layer,
    loss_rules,
    own_model_rules,
    preaggregation,
    sample_average,
    spread_rules,
)
from fedcb2o.federated.aggregation._clair import *  # noqa: F403
from fedcb2o.federated.aggregation._flame import *  # noqa: F403
from fedcb2o.federated.aggregation._flanders import *  # noqa: F403
from fedcb2o.federated.aggregation._flanders import filter_models as filter_models
from fedcb2o.federated.aggregation._flanders import replace_rejected as replace_rejected
from fedcb2o.federated.aggregation._lightyear import *  # noqa: F403
from fedcb2o.federated.aggregation._sentinel import *  # noqa: F403
from fedcb2o.federated.aggregation._wfagg import *  # noqa: F403
from fedcb2o.federated.aggregation.base import apply as apply
from fedcb2o.federated.aggregation.base import rule_signature as rule_signature
from fedcb2o.federated.aggregation.base import signature_of as signature_of
from fedcb2o.federated.aggregation.coordinatewise import *  # noqa: F403
from fedcb2o.federated.aggregation.gram_matrix import gram as gram
from fedcb2o.federated.aggregation.gram_rules import *  # noqa: F403
from fedcb2o.federated.aggregation.last_layer import *  # noqa: F403
from fedcb2o.federated.aggregation.loss_rules import *  # noqa: F403
from fedcb2o.federated.aggregation.own_model_rules import *  # noqa: F403
from fedcb2o.federated.aggregation.sample_average import *  # noqa: F403
from fedcb2o.federated.aggregation.sample_average import sample_weights as sample_weights
from fedcb2o.federated.aggregation.spread_rules import *  # noqa: F403
from fedcb2o.federated.types import BATCHED, STATEFUL

__all__: list[str] = []
__all__ += _clair.__all__
__all__ += _flame.__all__
__all__ += _flanders.__all__
__all__ += last_layer.__all__
__all__ += _lightyear.__all__
__all__ += _sentinel.__all__
__all__ += _wfagg.__all__
__all__ += coordinatewise.__all__
__all__ += gram_rules.__all__
__all__ += loss_rules.__all__
__all__ += own_model_rules.__all__
__all__ += sample_average.__all__
__all__ += spread_rules.__all__
__all__.sort()

_ARGUMENTS = {
    "block": "Columns of m models, shape [m, b].",
    "f": "Number of attackers to assume.",
    "losses": "Losses on the agent's own data, shape [m].",
    "draw": "Source of randomness.",
    "radius": "Largest norm of a difference, above 0.",
    "alpha": "Weight of the agent's own model, from 0 to 1.",
    "neighbours": "Number of nearest models in the score; by default m - f - 2.",
}
_LAST_ROW: dict[tuple[str, ...], str] = {
    ("own",): "; the agent's own model is last",
    ("before",): "; the model before the round is last",
}
_NEW_STATE = (
    "The new state, and the weights of the received models and the agent's own, shape [m + 1]."
)


def _share_entries(rule: Callable[..., Any], returns: str) -> None:
    last = _LAST_ROW.get(signature_of(rule).own_rows, "")
    agents = "one or several agents" if BATCHED.get(rule) else "one agent"
    inputs = {"gram": f"Gram matrix, shape [m, m]{last}.", "inputs": f"View of {agents}."}
    share_entries(rule, _ARGUMENTS | inputs, returns)


for _name in __all__:
    _rule = globals()[_name]
    _share_entries(_rule, _NEW_STATE if STATEFUL.get(_rule) else "Weights, shape [m].")
for _name in preaggregation.__all__:
    _share_entries(getattr(preaggregation, _name), "The mixing matrix, shape [m, m].")
