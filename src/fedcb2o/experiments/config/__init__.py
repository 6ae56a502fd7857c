"""Configurations: sections and their keys, TOML tables, and what a seed's rounds are built from."""

from fedcb2o.experiments.config.build import (
    PreparedSeed,
    build_module,
    build_neighbours,
    build_run_spec,
    prepare_seed,
    user_functions,
)
from fedcb2o.experiments.config.datasets import (
    attack_goal,
    build_population,
    dataset_digest,
    dataset_tensors,
    load_dataset,
    max_samples,
    validate_shard,
)
from fedcb2o.experiments.config.settings import Component, Experiment, Section, load
from fedcb2o.experiments.config.tables import parse_value, presets

__all__ = [
    "Component",
    "Experiment",
    "PreparedSeed",
    "Section",
    "attack_goal",
    "build_module",
    "build_neighbours",
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
    "user_functions",
    "validate_shard",
]
