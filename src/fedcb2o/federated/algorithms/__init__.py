"""Algorithms: a selection, a rule and a mixing factor, put together under the paper's names.

An algorithm is made by a function of keyword arguments, each of which is a named choice of a configuration. Where
the paper's text and the authors' released code differ, both are choices. FedCB2O is the discretisation of
eq:fedcb2o_dynamics, FedCBO that of eq:fedcbo_dynamic.
"""

from fedcb2o.federated.algorithm_spec import Algorithm as Algorithm
from fedcb2o.federated.algorithms._by_rule import by_rule
from fedcb2o.federated.algorithms._dfca import dfca
from fedcb2o.federated.algorithms._dfedavgm import dfedavgm
from fedcb2o.federated.algorithms._fedcb2o import fedcb2o
from fedcb2o.federated.algorithms._fedcbo import fedcbo
from fedcb2o.federated.algorithms._ifca import ifca
from fedcb2o.federated.algorithms._local_training import local_training

__all__ = ["by_rule", "dfca", "dfedavgm", "fedcb2o", "fedcbo", "ifca", "local_training"]
