"""Configurations: sections and their keys, TOML tables, and what a seed's rounds are built from."""

from fedcb2o.experiments.config.datasets import (
    build_population,
    dataset_digest,
    dataset_tensors,
    load_dataset,
    max_samples,
    validate_shard,
)
from fedcb2o.experiments.config.loading import load
from fedcb2o.experiments.config.network import build_module
from fedcb2o.experiments.config.prepared_seed import PreparedSeed, build_run_spec, prepare_seed
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.experiments.config.tables import parse_value, presets
from fedcb2o.federated.sections import Component, Section

__all__ = [
    "Component",
    "Experiment",
    "PreparedSeed",
    "Section",
    "build_module",
    "build_population",
    "build_run_spec",
    "dataset_digest",
    "dataset_tensors",
    "load",
    "load_dataset",
    "max_samples",
    "parse_value",
    "prepare_seed",
    "presets",
    "validate_shard",
]
