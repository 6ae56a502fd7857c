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
from fedcb2o.federated.attacks import (
    _factor_mixing,
    data_poisoning,
    model_poisoning,
    per_receiver,
    poisoned_models,
    rule_attacks,
    text_poisoning,
)
from fedcb2o.federated.attacks._factor_mixing import *  # noqa: F403
from fedcb2o.federated.attacks.data_poisoning import *  # noqa: F403
from fedcb2o.federated.attacks.data_poisoning import TRIGGER as TRIGGER
from fedcb2o.federated.attacks.data_poisoning import triggered_by as triggered_by
from fedcb2o.federated.attacks.model_poisoning import *  # noqa: F403
from fedcb2o.federated.attacks.per_receiver import *  # noqa: F403
from fedcb2o.federated.attacks.poisoned_models import *  # noqa: F403
from fedcb2o.federated.attacks.rule_attacks import *  # noqa: F403
from fedcb2o.federated.attacks.text_poisoning import *  # noqa: F403
from fedcb2o.federated.attacks.text_poisoning import ON_ANSWERS as ON_ANSWERS
from fedcb2o.federated.attacks.text_poisoning import wanted_answers as wanted_answers

__all__: list[str] = []
__all__ += _factor_mixing.__all__
__all__ += data_poisoning.__all__
__all__ += model_poisoning.__all__
__all__ += per_receiver.__all__
__all__ += poisoned_models.__all__
__all__ += rule_attacks.__all__
__all__ += text_poisoning.__all__
__all__.sort()

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
