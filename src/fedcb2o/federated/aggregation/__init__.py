"""Rules: how much each received model counts in the average m_j (Algorithm 2, lines 5-6).

A rule is a function (judged) -> normalised weights of the received models [m], or of those and, last, of the
agent's own model [m + 1]; its further arguments are keywords. Robust rules, which declare a form, are made into such
by `by_form`; a rule with memory (`types.remembers`) also gets, and returns, what it keeps.
"""

from fedcb2o.federated.aggregation._flame import flame
from fedcb2o.federated.aggregation._foolsgold import foolsgold
from fedcb2o.federated.aggregation._lfighter import lfighter
from fedcb2o.federated.aggregation._lightyear import lightyear
from fedcb2o.federated.aggregation._sentinel import sentinel
from fedcb2o.federated.aggregation._wfagg import wfagg
from fedcb2o.federated.aggregation.base import RULE_SIGNATURE as RULE_SIGNATURE
from fedcb2o.federated.aggregation.base import apply as apply
from fedcb2o.federated.aggregation.base import rule_signature as rule_signature
from fedcb2o.federated.aggregation.base import signature_of as signature_of
from fedcb2o.federated.aggregation.coordinatewise import coordinate_median, meamed, trimmed_mean
from fedcb2o.federated.aggregation.gram_matrix import gram as gram
from fedcb2o.federated.aggregation.gram_rules import (
    balance,
    bulyan,
    centred_clipping,
    clipped_gossip,
    cs_plus,
    fltrust,
    geometric_median,
    krum,
    mean,
    monna,
    multi_krum,
    norm_clipping,
    sageflow,
    ubar,
)
from fedcb2o.federated.aggregation.sample_average import by_num_samples
from fedcb2o.federated.aggregation.sample_average import sample_weights as sample_weights

__all__ = [
    "balance",
    "bulyan",
    "by_num_samples",
    "centred_clipping",
    "clipped_gossip",
    "coordinate_median",
    "cs_plus",
    "flame",
    "fltrust",
    "foolsgold",
    "geometric_median",
    "krum",
    "lfighter",
    "lightyear",
    "meamed",
    "mean",
    "monna",
    "multi_krum",
    "norm_clipping",
    "sageflow",
    "sentinel",
    "trimmed_mean",
    "ubar",
    "wfagg",
]
