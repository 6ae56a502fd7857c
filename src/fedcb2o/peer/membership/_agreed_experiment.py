"""Experiment of a federation's settings, the only part of the membership that needs PyTorch."""

import math
from typing import TYPE_CHECKING

import torch

from fedcb2o import plugins, records
from fedcb2o.data import Dataset
from fedcb2o.errors import ConfigError
from fedcb2o.experiments.config import loading
from fedcb2o.experiments.config.network import count_parameters
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.peer.membership.federation_schema import AGREED_AGENT_KEYS

if TYPE_CHECKING:
    from fedcb2o.peer.membership.federation import Federation

_MAX_PARAMETERS = 2**31


def _missing_dataset() -> Dataset:
    """Stand for the data set, which each member provides; a call is a ConfigError."""
    raise ConfigError("a federation's file holds no data: each member brings its own, with --data")


def agreed_experiment(federation: "Federation") -> Experiment:
    """Return the experiment of `Federation.experiment`."""
    forbidden = [
        name for name in federation.user_functions if name not in federation.allowed_functions
    ]
    if forbidden:
        effect = plugins.describe_effect(forbidden[0])
        raise ConfigError(
            f"`experiment` names {forbidden[0][:100]!r}, {effect}, and allow it with --own"
        )
    settings = records.current_settings(federation.settings.model_dump(exclude_none=True))
    for key in settings["agents"]:
        if key not in AGREED_AGENT_KEYS:
            hint = plugins.did_you_mean(key, AGREED_AGENT_KEYS)
            raise ConfigError(f"there is no key `experiment.agents.{key[:100]}`.{hint}")

    agents = {
        "num_clusters": 1,
        "benign": federation.num_agents,
        "malicious": 0,
        "benign_samples": federation.most_samples,
        "malicious_samples": 1,
        **settings["agents"],
    }
    experiment = loading.load(
        {
            **settings,
            "name": federation.name,
            "seeds": [federation.seed],
            "rounds": federation.rounds,
            "data": {"name": _missing_dataset},
            "agents": agents,
        }
    )
    check_supported(experiment)
    outputs = len(federation.class_names) or math.prod(federation.data.target or ())
    dim = count_parameters(experiment, federation.shape, outputs)
    if dim is not None and dim > _MAX_PARAMETERS:
        raise ConfigError(
            f"`experiment.model` has {dim:,} parameters, and at most {_MAX_PARAMETERS:,} in a "
            "federation"
        )
    return experiment


def check_topology(federation: "Federation") -> None:
    """Raise ConfigError if the graph does not allow this federation's size."""
    if not set(federation.user_functions) - federation.allowed_functions:
        clusters = torch.zeros(federation.num_agents, dtype=torch.int64)
        federation.experiment.resolved.neighbours(federation.seed, clusters)


def check_supported(experiment: Experiment) -> None:
    """Raise ConfigError for an algorithm that real peers cannot run."""
    clusters = experiment.resolved.algorithm.clusters
    if clusters is not None:
        why = "has models of clusters" if clusters.per_agent else "has a coordinator"
        name = plugins.label(experiment.algorithm.name)
        raise ConfigError(f"`{name}` {why}, and real peers have none")
