"""Experiments: what is run, on which data, with which seeds."""

from fedcb2o.experiments.config import Experiment, load, presets
from fedcb2o.experiments.run import run

__all__ = ["Experiment", "load", "presets", "run"]
