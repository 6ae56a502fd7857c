"""Algorithms: a peer selection, a criterion or rule, and a mixing factor.

A function of keyword arguments makes an algorithm. Each argument is a named choice of a
configuration. FedCB2O is Algorithm 2, the discretisation of eq:fedcb2o_dynamics, and FedCBO that of
eq:fedcbo_dynamic; each has the variant of the paper's text and that of the released code. FedAssay
is the method that this project recommends.
"""

from fedcb2o.docstrings import share_entries
from fedcb2o.federated.algorithm2 import CriterionWeighing as CriterionWeighing
from fedcb2o.federated.algorithm2 import RuleWeighing as RuleWeighing
from fedcb2o.federated.algorithms._by_rule import by_rule
from fedcb2o.federated.algorithms._dec_lora import dec_lora, tad_lora
from fedcb2o.federated.algorithms._dfca import dfca
from fedcb2o.federated.algorithms._dfedavgm import dfedavgm
from fedcb2o.federated.algorithms._fedassay import fedassay
from fedcb2o.federated.algorithms._fedcb2o import fedcb2o
from fedcb2o.federated.algorithms._fedcbo import fedcbo
from fedcb2o.federated.algorithms._ifca import ifca
from fedcb2o.federated.algorithms._local_training import local_training
from fedcb2o.federated.run_spec import Algorithm as Algorithm
from fedcb2o.plugins import argument_descriptions

__all__ = [
    "by_rule",
    "dec_lora",
    "dfca",
    "dfedavgm",
    "fedassay",
    "fedcb2o",
    "fedcbo",
    "ifca",
    "local_training",
    "tad_lora",
]

_ARGUMENTS = {"selection": "Peer selection."}
for _name in __all__:
    # FedAssay is FedCB2O with other defaults.
    _shared = argument_descriptions(fedcb2o) if _name == "fedassay" else _ARGUMENTS
    share_entries(globals()[_name], _shared, "The algorithm.")
