"""Experiments: what is run, on which data, with which seeds."""

from fedcb2o.experiments.config.settings import Experiment, load
from fedcb2o.experiments.config.tables import presets
from fedcb2o.experiments.runs.runner import run

__all__ = ["Experiment", "load", "presets", "run"]
