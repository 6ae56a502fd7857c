"""Experiments: configurations, runs and grids.

>>> from fedcb2o.experiments import load
>>> load("digits-fedassay").rounds
25
"""

from fedcb2o.experiments.config.loading import load
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.experiments.config.tables import presets
from fedcb2o.experiments.runs import _trained_models
from fedcb2o.experiments.runs._runner import run
from fedcb2o.records import set_model_reader

__all__ = ["Experiment", "load", "presets", "run"]

# Records read models without an import of this package.
set_model_reader(lambda: _trained_models)
