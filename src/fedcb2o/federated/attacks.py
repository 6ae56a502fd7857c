"""What malicious agents do: the attacks that a configuration names.

An attack on data is a function (shard, draw) -> shard, see `data_poisoning`; one on models, declared by `knows`, is a
function (view, draw) -> what the agent publishes, see `model_poisoning` and `gossip_attacks`. Further arguments are
keywords.
"""

from fedcb2o import plugins
from fedcb2o.federated import data_poisoning, gossip_attacks, model_poisoning

ROOMS = (data_poisoning, model_poisoning, gossip_attacks)
__all__ = sorted(name for room in ROOMS for name in room.__all__)
__getattr__ = plugins.found_in(*ROOMS)
