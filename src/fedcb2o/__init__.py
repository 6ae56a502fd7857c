"""Robust federated learning without a server: consensus-based bi-level optimisation (CB2O, FedCB2O).

García Trillos et al., "Defending Against Diverse Attacks in Federated Learning Through Consensus-Based Bi-Level
Optimization" (arXiv 2412.02535).
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedcb2o.data.arrays import dataset
    from fedcb2o.data.shard import Dataset, Shard
    from fedcb2o.errors import ConfigError, DataError, FedCB2OError, RunError
    from fedcb2o.experiments.bench import bench
    from fedcb2o.experiments.config import Experiment, load
    from fedcb2o.experiments.run import run
    from fedcb2o.experiments.tables import presets
    from fedcb2o.federated.types import knows
    from fedcb2o.particles.adversaries import Adversary
    from fedcb2o.particles.minimize import CaptureWarning, minimize
    from fedcb2o.particles.objectives import from_numpy, from_point
    from fedcb2o.particles.scipy_method import cb2o
    from fedcb2o.particles.search import Search
    from fedcb2o.records import Run
    from fedcb2o.streams import stream
    from fedcb2o.tracking import track

    __version__: str

__all__ = [
    "Adversary",
    "CaptureWarning",
    "ConfigError",
    "DataError",
    "Dataset",
    "Experiment",
    "FedCB2OError",
    "Run",
    "RunError",
    "Search",
    "Shard",
    "bench",
    "cb2o",
    "dataset",
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

# Imported when first asked for: PyTorch takes a second, and the command line answers before and catches Ctrl-C.
_HOMES = {
    "data.arrays": ("dataset",),
    "data.shard": ("Dataset", "Shard"),
    "errors": ("ConfigError", "DataError", "FedCB2OError", "RunError"),
    "experiments.bench": ("bench",),
    "experiments.config": ("Experiment", "load"),
    "experiments.tables": ("presets",),
    "experiments.run": ("run",),
    "federated.types": ("knows",),
    "particles.adversaries": ("Adversary",),
    "particles.minimize": ("CaptureWarning", "minimize"),
    "particles.objectives": ("from_numpy", "from_point"),
    "particles.scipy_method": ("cb2o",),
    "particles.search": ("Search",),
    "records": ("Run",),
    "streams": ("stream",),
    "tracking": ("track",),
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # which takes as long as all else here

        return version("fedcb2o")
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"fedcb2o.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
