"""Robust federated learning without a server, by consensus-based bi-level optimisation.

García Trillos et al., "Defending Against Diverse Attacks in Federated Learning Through
Consensus-Based Bi-Level Optimization" (arXiv 2412.02535): CB2O and FedCB2O.

Example:
    >>> import fedcb2o
    >>> result = fedcb2o.minimize(lambda x: (x - 1).square().sum(-1), dim=2, seed=1)
    >>> bool(result.success)
    True
"""

import importlib
from typing import TYPE_CHECKING

from fedcb2o import _mkl

_mkl.set_reproducible()  # before the first product

if TYPE_CHECKING:
    from fedcb2o import aggregators, data
    from fedcb2o.agent import Agent, Decision
    from fedcb2o.data import Dataset, Owners, Shard, dataset, datasets
    from fedcb2o.errors import ConfigError, DataError, FedCB2OError, RunError
    from fedcb2o.experiments.config.loading import load
    from fedcb2o.experiments.config.settings import Experiment
    from fedcb2o.experiments.config.tables import presets
    from fedcb2o.experiments.grid._grid_runner import bench
    from fedcb2o.experiments.runs._runner import run
    from fedcb2o.federated.adversary import knows
    from fedcb2o.particles import (
        Adaptive,
        Adversary,
        CaptureWarning,
        Paper,
        Search,
        cb2o,
        from_numpy,
        from_point,
        minimize,
    )
    from fedcb2o.records import Run
    from fedcb2o.rng import stream
    from fedcb2o.tracking import track

    __version__: str

__all__ = [
    "Adaptive",
    "Adversary",
    "Agent",
    "CaptureWarning",
    "ConfigError",
    "DataError",
    "Dataset",
    "Decision",
    "Experiment",
    "FedCB2OError",
    "Owners",
    "Paper",
    "Run",
    "RunError",
    "Search",
    "Shard",
    "aggregators",
    "bench",
    "cb2o",
    "data",
    "dataset",
    "datasets",
    "from_numpy",
    "from_point",
    "knows",
    "load",
    "minimize",
    "presets",
    "run",
    "stream",
    "track",
]

# Imported at their first use: PyTorch takes a second to import, and the command line must answer
# and catch Ctrl-C before that.
_HOMES = {
    "agent": ("Agent", "Decision"),
    "data": ("Dataset", "Owners", "Shard", "dataset", "datasets"),
    "errors": ("ConfigError", "DataError", "FedCB2OError", "RunError"),
    "experiments.grid._grid_runner": ("bench",),
    "experiments.config.settings": ("Experiment",),
    "experiments.config.loading": ("load",),
    "experiments.config.tables": ("presets",),
    "experiments.runs._runner": ("run",),
    "federated.adversary": ("knows",),
    "particles": (
        "Adaptive",
        "Adversary",
        "CaptureWarning",
        "Paper",
        "Search",
        "cb2o",
        "from_numpy",
        "from_point",
        "minimize",
    ),
    "records": ("Run",),
    "rng": ("stream",),
    "tracking": ("track",),
}

_MODEL_READER = "fedcb2o.experiments.runs._trained_models"


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # slow to import

        return version("fedcb2o")
    if name in ("aggregators", "data"):
        return importlib.import_module(f"fedcb2o.{name}")
    for home, names in _HOMES.items():
        if name in names:
            module = importlib.import_module(f"fedcb2o.{home}")
            if name == "Run":  # its models are read by `experiments`, which `records` cannot import
                module.set_model_reader(lambda: importlib.import_module(_MODEL_READER))
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
