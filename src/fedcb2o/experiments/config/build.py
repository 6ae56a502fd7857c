"""The algorithm, the graph and the user functions that a configuration names.

>>> from fedcb2o.experiments.config import load, user_functions
>>> user_functions(load("digits-fedassay"))
{}
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxtyping import Int
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.federated import algorithms, topology
from fedcb2o.rng import stream

_MODEL_READING_KEYS = {"criterion": "criterion", "rule": "rule", "pre_step": "pre-step"}
"""The keys of an algorithm whose functions read models, with their words in messages."""


def build_neighbours(
    experiment: Experiment, seed: int, cluster: Int[Tensor, " N"]
) -> tuple[Tensor, ...] | None:
    """Build the graph of contacts; None where every agent may ask all others."""
    if experiment.agents.graph is None:
        return None
    graph = experiment.agents.graph.bind("graph", topology)
    return topology.neighbours(graph, cluster, stream(seed, "graph"))


def build_algorithm(experiment: Experiment) -> algorithms.Algorithm:
    """Build the algorithm of an experiment.

    Errors in the functions of a user's own algorithm name it.
    """
    algorithm = experiment.algorithm.build()
    name = plugins.USER_FUNCTION.get(experiment.algorithm.bind("algorithm", algorithms))
    if name is None:
        return algorithm
    functions = {
        "select": algorithm.select,
        "criterion": algorithm.criterion,
        "rule": algorithm.rule,
    }
    wrapped: dict[str, Any] = {}
    for key, function in functions.items():
        if function is not None:
            wrapped[key] = plugins.wrap_user_function("algorithm", name, function)
    return dataclasses.replace(algorithm, **wrapped)


def user_functions(experiment: Experiment) -> dict[str, list[str]]:
    """List the users' functions that read models: import paths by kind.

    Kinds are attacks, criteria, rules, algorithms and models.
    """
    settings = experiment.settings()
    found: dict[str, list[str]] = {}

    def collect(kind: str, value: Any) -> None:
        if isinstance(value, str):
            if ":" in value and value not in found.setdefault(kind, []):
                found[kind].append(value)
        elif isinstance(value, Mapping):
            collect(kind, value.get("name"))
            for key, inner in value.items():
                if key in _MODEL_READING_KEYS or key == "of":  # "of": the parts of a combination
                    collect(_MODEL_READING_KEYS.get(key, kind), inner)
        elif isinstance(value, Sequence):
            for inner in value:
                collect(kind, inner)

    for kind in ("attack", "algorithm", "model"):
        collect(kind, settings.get(kind))
    return found


def imported_names(experiment: Experiment) -> list[str]:
    """List all values of an experiment of the form "module:function".

    They are sorted. A value that only looks alike, such as the device "cuda:1", is included.
    """

    def names(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            if ":" in value:
                yield value
        elif isinstance(value, Mapping):
            yield from names(list(value.values()))
        elif isinstance(value, Sequence):
            for inner in value:
                yield from names(inner)

    return sorted(set(names(experiment.settings())))
