"""What malicious agents do: the attacks that a configuration names.

An attack on data is a function (shard, draw) -> shard, see `data_poisoning`; one on models, declared by `knows`, is a
function (view, draw) -> what the agent publishes, see `model_poisoning` and `gossip_attacks`. Further arguments are
keywords.
"""

from fedcb2o.federated.attacks.data_poisoning import TRIGGER as TRIGGER
from fedcb2o.federated.attacks.data_poisoning import (
    backdoor,
    blended,
    clean_label,
    feature_noise,
    label_flip,
    label_flips,
    random_labels,
    rarest_flip,
    shifted_labels,
    signal,
    spread_flip,
)
from fedcb2o.federated.attacks.data_poisoning import triggered_by as triggered_by
from fedcb2o.federated.attacks.model_poisoning import (
    alie,
    boosting,
    free_rider,
    gap_aware,
    gaussian_noise,
    hybrid_sparse,
    ipm,
    mimic,
    min_max,
    min_sum,
    not_finite,
    random_model,
    sign_flip,
    slow_drift,
)
from fedcb2o.federated.attacks.per_receiver import dissensus, echo, equivocation, spectral

__all__ = [
    "alie",
    "backdoor",
    "blended",
    "boosting",
    "clean_label",
    "dissensus",
    "echo",
    "equivocation",
    "feature_noise",
    "free_rider",
    "gap_aware",
    "gaussian_noise",
    "hybrid_sparse",
    "ipm",
    "label_flip",
    "label_flips",
    "mimic",
    "min_max",
    "min_sum",
    "not_finite",
    "random_labels",
    "random_model",
    "rarest_flip",
    "shifted_labels",
    "sign_flip",
    "signal",
    "slow_drift",
    "spectral",
    "spread_flip",
]
