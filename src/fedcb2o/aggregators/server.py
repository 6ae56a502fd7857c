"""An algorithm with a server, for experiments of centralised federated learning.

A configuration names it by `ALGORITHM`. The aggregators are the classes of this package that read
models alone, by name.

Example:
    >>> server(aggregator={"name": "TrMean"}, f=1).server.sent
    'gradients'
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from jaxtyping import Float
from torch import Tensor

from fedcb2o import aggregators, plugins
from fedcb2o.errors import ConfigError, require
from fedcb2o.federated.algorithms import local_training
from fedcb2o.federated.run_spec import Algorithm, ClusterModels, Server

ALGORITHM = "fedcb2o.aggregators.server:server"
"""Name of the algorithm in a configuration."""

_NAMES = [name for name in aggregators.__all__ if name[0].isupper() and name != "Aggregator"]


def server(
    *,
    aggregator: str | dict[str, Any],
    pre_aggregators: list[str | dict[str, Any]] = [],  # noqa: B006 - never written to
    f: int = 0,
    sent: Literal["gradients", "updates", "models"] = "gradients",
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
) -> Algorithm:
    """Let a server aggregate the vectors of agents, in place of exchange.

    Agents start each round at the server's model; `budget` and graph have no effect.

    Args:
        aggregator: Class of `fedcb2o.aggregators` that reads models alone, with its parameters.
        pre_aggregators: Classes of pre-aggregators, which come first, in this order.
        f: Number of attackers that all of them assume, at most what the models admit.
        sent: Vectors that agents send; see `run_spec.Server`.
        momentum: Momentum of each agent over the rounds, in [0, 1).
        dampening: Share of a new gradient that the momentum leaves out, in [0, 1).
        weight_decay: Rate at which the server's model decays, times the step size.

    Returns:
        The algorithm.

    Raises:
        ConfigError: An aggregator or a parameter is unknown, or a number is out of range.
    """
    require("momentum", momentum, 0 <= momentum < 1, "from 0 and below 1")
    require("dampening", dampening, 0 <= dampening < 1, "from 0 and below 1")
    steps = [_step(choice, f) for choice in (*pre_aggregators, aggregator)]

    def aggregate(
        vectors: Float[Tensor, "m d"], last: Float[Tensor, " d"], draw: np.random.Generator
    ) -> Float[Tensor, " d"]:
        for step in steps:
            vectors = step(last, draw)(vectors)
        return vectors

    whole = Server(
        aggregate=aggregate,
        sent=sent,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
    )
    return dataclasses.replace(local_training(), clusters=ClusterModels(1, server=whole))


def _step(choice: str | Mapping[str, Any], f: int) -> Callable[..., Any]:
    """Return the function (last aggregate, generator) -> aggregator, checked once."""
    given = {"name": choice} if isinstance(choice, str) else dict(choice)
    name = given.pop("name", None)
    if name not in _NAMES:
        hint = plugins.did_you_mean(str(name), _NAMES)
        raise ConfigError(f"there is no aggregator `{name}`.{hint} There is: {', '.join(_NAMES)}")
    kind = getattr(aggregators, name)
    known = inspect.signature(kind).parameters
    if len(inspect.signature(kind.__call__).parameters) > 2:
        raise ConfigError(f"a server has models alone, and the aggregator `{name}` reads more")
    for key in given:
        if key not in known or key in ("f", "clip_f", "m", "rng", "in_place"):
            hint = plugins.did_you_mean(key, known)
            raise ConfigError(f"the aggregator `{name}` has no parameter `{key}` here.{hint}")
    if "f" in known:  # without attackers fewer models arrive than `f` may need
        given |= {"f": f, "clip_f": True}
    kind(**given)

    def make(last: Float[Tensor, " d"], draw: np.random.Generator) -> Any:
        state = {"m": last, "rng": draw}
        return kind(**given, **{key: value for key, value in state.items() if key in known})

    return make
