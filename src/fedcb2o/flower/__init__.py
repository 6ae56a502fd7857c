"""FedCB2O in Flower: peers through a relay, robust rules and attacks (extra `flower`).

- `PeerRelay`, a server strategy, sends each client the models of the peers that it chose.
- `AgentMod`, a client mod, chooses these peers and mixes their models with an `Agent`.
- `RobustStrategy` and `FlandersStrategy` keep a server, which aggregates by a robust rule.
- `AttackMod` makes a client malicious.
- `output_metrics` computes a client's metrics by name, such as AUC.

A round of Algorithm 1 is a round of Flower: clients train (LocalUpdate), then evaluate
(LocalAggregation, and the user's own evaluation). The relay sees all models.
"""

from importlib.util import find_spec

if find_spec("flwr") is None:
    raise ModuleNotFoundError(
        "fedcb2o.flower needs Flower, in an environment of its own: pip install 'fedcb2o[flower]'"
    )

from fedcb2o.flower._mods import AgentMod, AttackMod, training_data
from fedcb2o.flower._numbers import output_metrics
from fedcb2o.flower._relay import PeerRelay
from fedcb2o.flower._robust import FlandersStrategy, RobustStrategy

__all__ = [
    "AgentMod",
    "AttackMod",
    "FlandersStrategy",
    "PeerRelay",
    "RobustStrategy",
    "output_metrics",
    "training_data",
]
