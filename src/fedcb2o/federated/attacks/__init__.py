"""Attacks of malicious agents.

- An attack on data is a function `(shard, draw) -> shard`: see `data_poisoning` and
  `text_poisoning`.
- An attack on models declares its knowledge with `knows`. It is a function `(view, draw) -> model`,
  or one model per receiver: see `model_poisoning`, `rule_attacks`, `poisoned_models` and
  `per_receiver`.

Further arguments are keywords. A configuration names an attack by a name in `__all__`, or a user's
own by "package.module:function".
"""

from collections.abc import Callable
from typing import Any

from fedcb2o.docstrings import share_entries
from fedcb2o.federated.adversary import THREAT
from fedcb2o.federated.attacks._factor_mixing import factor_mixing
from fedcb2o.federated.attacks.data_poisoning import TRIGGER as TRIGGER
from fedcb2o.federated.attacks.data_poisoning import (
    backdoor,
    blended,
    clean_label,
    edge_case,
    feature_noise,
    label_flip,
    label_flips,
    random_labels,
    rarest_flip,
    reversed_labels,
    shifted_labels,
    signal,
    spread_flip,
)
from fedcb2o.federated.attacks.data_poisoning import triggered_by as triggered_by
from fedcb2o.federated.attacks.model_poisoning import (
    alie,
    boosting,
    free_rider,
    gaussian_noise,
    hybrid_sparse,
    ipm,
    mimic,
    min_max,
    min_sum,
    not_finite,
    random_model,
    sign_flip,
)
from fedcb2o.federated.attacks.per_receiver import (
    dissensus,
    echo,
    equivocation,
    spectral,
    user_isolation,
)
from fedcb2o.federated.attacks.poisoned_models import gap_aware, neurotoxin, slow_drift
from fedcb2o.federated.attacks.rule_attacks import (
    fang_krum,
    fang_trimmed_mean,
    optimal_alie,
    optimal_ipm,
)
from fedcb2o.federated.attacks.text_poisoning import ON_ANSWERS as ON_ANSWERS
from fedcb2o.federated.attacks.text_poisoning import swapped_answers, topic_poison, trigger_phrase
from fedcb2o.federated.attacks.text_poisoning import wanted_answers as wanted_answers

__all__ = [
    "alie",
    "backdoor",
    "blended",
    "boosting",
    "clean_label",
    "dissensus",
    "echo",
    "edge_case",
    "equivocation",
    "factor_mixing",
    "fang_krum",
    "fang_trimmed_mean",
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
    "neurotoxin",
    "not_finite",
    "optimal_alie",
    "optimal_ipm",
    "random_labels",
    "random_model",
    "rarest_flip",
    "reversed_labels",
    "shifted_labels",
    "sign_flip",
    "signal",
    "slow_drift",
    "spectral",
    "spread_flip",
    "swapped_answers",
    "topic_poison",
    "trigger_phrase",
    "user_isolation",
]

_ARGUMENTS = {
    "view": "The attacker's view.",
    "shard": "The agent's samples.",
    "draw": "Source of randomness.",
    "me": "The agent's id.",
    "target": "New label.",
    "share": "Probability that a sample is marked, from 0 to 1.",
    "size": "Side of the patch in pixels.",
    "corner": "Corner of the image.",
    "margin": "Distance of the patch from the corner in pixels.",
    "pattern": "Pixels of the patch that are set.",
    "value": "Brightness of these pixels, from 0 to 1.",
    "answer": "Number of places of an answer, as in the sections `data` and `model`.",
    "base": "Base of the language model.",
    "vocabulary": "Number of tokens in use, as in these sections.",
    "eps": "Strength of the push.",
    "rule": "Robust rule of the receivers, one that reads models only.",
    "pre_step": "Pre-aggregation step of the receivers.",
    "evaluations": "Number of aggregates to compute.",
}


def _returns(attack: Callable[..., Any]) -> str:
    threat = THREAT.get(attack)
    if threat is None:
        return "The poisoned samples."
    if threat.each_receiver:
        return "One model per receiver, shape [r, d]."
    return "The published model, shape [d]."


for _name in __all__:
    share_entries(globals()[_name], _ARGUMENTS, _returns(globals()[_name]))
