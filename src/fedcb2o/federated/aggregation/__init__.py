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
from fedcb2o.federated.aggregation import preaggregation
from fedcb2o.federated.aggregation._clair import clair
from fedcb2o.federated.aggregation._dnc import dnc
from fedcb2o.federated.aggregation._flame import flame
from fedcb2o.federated.aggregation._flanders import filter_models as filter_models
from fedcb2o.federated.aggregation._flanders import flanders
from fedcb2o.federated.aggregation._flanders import replace_rejected as replace_rejected
from fedcb2o.federated.aggregation._foolsgold import foolsgold
from fedcb2o.federated.aggregation._lfighter import lfighter
from fedcb2o.federated.aggregation._lightyear import lightyear
from fedcb2o.federated.aggregation._sentinel import sentinel
from fedcb2o.federated.aggregation._signguard import signguard
from fedcb2o.federated.aggregation._wfagg import wfagg
from fedcb2o.federated.aggregation.base import RULE_SIGNATURE as RULE_SIGNATURE
from fedcb2o.federated.aggregation.base import apply as apply
from fedcb2o.federated.aggregation.base import evaluate_rule as evaluate_rule
from fedcb2o.federated.aggregation.base import gram_and_mixing as gram_and_mixing
from fedcb2o.federated.aggregation.base import rule_signature as rule_signature
from fedcb2o.federated.aggregation.base import signature_of as signature_of
from fedcb2o.federated.aggregation.coordinatewise import coordinate_median, meamed, trimmed_mean
from fedcb2o.federated.aggregation.gram_matrix import gram as gram
from fedcb2o.federated.aggregation.gram_rules import (
    bulyan,
    geometric_median,
    krum,
    mean,
    multi_krum,
    sageflow,
)
from fedcb2o.federated.aggregation.loss_rules import loss_clustering, lpe_tsr
from fedcb2o.federated.aggregation.own_model_rules import (
    balance,
    centred_clipping,
    clipped_gossip,
    cs_plus,
    fltrust,
    monna,
    norm_clipping,
    ubar,
)
from fedcb2o.federated.aggregation.sample_average import by_num_samples
from fedcb2o.federated.aggregation.sample_average import sample_weights as sample_weights
from fedcb2o.federated.aggregation.spread_rules import caf, mda, smea
from fedcb2o.federated.types import BATCHED, STATEFUL

__all__ = [
    "balance",
    "bulyan",
    "by_num_samples",
    "caf",
    "centred_clipping",
    "clair",
    "clipped_gossip",
    "coordinate_median",
    "cs_plus",
    "dnc",
    "flame",
    "flanders",
    "fltrust",
    "foolsgold",
    "geometric_median",
    "krum",
    "lfighter",
    "lightyear",
    "loss_clustering",
    "lpe_tsr",
    "mda",
    "meamed",
    "mean",
    "monna",
    "multi_krum",
    "norm_clipping",
    "sageflow",
    "sentinel",
    "signguard",
    "smea",
    "trimmed_mean",
    "ubar",
    "wfagg",
]

_ARGUMENTS = {
    "block": "Columns of m models, shape [m, b].",
    "f": "Number of attackers to assume.",
    "losses": "Losses on the agent's own data, shape [m].",
    "draw": "Source of randomness.",
    "radius": "Largest norm of a difference, above 0.",
    "alpha": "Weight of the agent's own model, from 0 to 1.",
    "neighbours": "Number of nearest models in the score; by default m - f - 2.",
}
_LAST_ROW = {
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
