"""Robust federated learning without a server: consensus-based bi-level optimisation (CB2O, FedCB2O).

García Trillos et al., "Defending Against Diverse Attacks in Federated Learning Through Consensus-Based Bi-Level
Optimization" (arXiv 2412.02535).
"""

from fedcb2o.data.shard import Dataset, Shard
from fedcb2o.errors import ConfigError, DataError, FedCB2OError, RunError
from fedcb2o.experiments.config import Experiment, load, presets
from fedcb2o.experiments.run import run
from fedcb2o.records import Run
from fedcb2o.streams import stream

__all__ = [
    "ConfigError",
    "DataError",
    "Dataset",
    "Experiment",
    "FedCB2OError",
    "Run",
    "RunError",
    "Shard",
    "load",
    "presets",
    "run",
    "stream",
]
