"""Configurations: sections and their keys, TOML tables, and what a seed's rounds are built from."""

from fedcb2o.experiments.config.datasets import load_dataset
from fedcb2o.experiments.config.loading import load
from fedcb2o.experiments.config.network import build_module
from fedcb2o.experiments.config.prepared_seed import prepare_seed

__all__ = ["build_module", "load", "load_dataset", "prepare_seed"]
