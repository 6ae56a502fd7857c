"""Configurations: sections and their keys, TOML tables, and what a seed's rounds are built from."""

from fedcb2o.experiments.config.build import Prepared, module_of, neighbours_of, own_parts, prepare, terms_of
from fedcb2o.experiments.config.datasets import (
    aim_of,
    checked,
    dataset_of,
    digest_of,
    most_samples,
    population_of,
    shared_data,
)
from fedcb2o.experiments.config.settings import Component, Experiment, Part, load
from fedcb2o.experiments.config.tables import parse_value, presets

__all__ = [
    "Component",
    "Experiment",
    "Part",
    "Prepared",
    "aim_of",
    "checked",
    "dataset_of",
    "digest_of",
    "load",
    "module_of",
    "most_samples",
    "neighbours_of",
    "own_parts",
    "parse_value",
    "population_of",
    "prepare",
    "presets",
    "shared_data",
    "terms_of",
]
