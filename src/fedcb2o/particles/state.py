"""The state that a callback of `minimize` receives before a step."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.particles.initialisation import OutputShape
from fedcb2o.particles.system import Ensembles, Evaluation, System
from fedcb2o.particles.write_guard import forbid_writes


@dataclasses.dataclass(frozen=True)
class State:
    """The state of all active runs before step n.

    Copy what you keep: `theta` changes in place.

    Attributes:
        n: Step.
        t: Time n dt.
        x: Consensus point, in the shape of the result.
        theta: Benign particles.
        theta_m: Malicious particles.
        lower: L of every particle in its own cluster; None in a step with a random batch.
        upper: G of every particle; None without G or in a step with a random batch.
        runs: Indices of the active runs.
    """

    n: int
    t: float
    x: Tensor
    theta: Tensor
    theta_m: Tensor
    lower: Tensor | None
    upper: Tensor | None
    runs: Tensor


def callback_requests_stop(
    callback: Callable[[State], Any],
    shape: OutputShape,
    system: System,
    ensembles: Ensembles,
    evaluation: Evaluation,
    dt: float,
) -> bool:
    """Call a callback before a step; return whether all runs shall stop.

    A callback that writes into the particles, or returns no truth value, is a ConfigError.
    """
    lower = None
    upper = None
    if evaluation.batch is None:
        clusters = list(zip(system.clusters, evaluation.values, strict=True))
        lowers = [values.lower[:, cluster.rows] for cluster, values in clusters]
        lower = shape.squeeze_runs(torch.cat(lowers, 1))
        uppers = [
            values.upper[:, cluster.rows]
            for cluster, values in clusters
            if values.upper is not None
        ]
        if uppers:
            upper = shape.squeeze_runs(torch.cat(uppers, 1))

    state = State(
        n=ensembles.n,
        t=ensembles.n * dt,
        x=shape.squeeze(evaluation.m),
        theta=shape.squeeze_runs(system.benign(ensembles.theta)),
        theta_m=shape.squeeze_runs(system.malicious(ensembles.theta)),
        lower=lower,
        upper=upper,
        runs=ensembles.runs,
    )
    guarded = ((ensembles.theta, "particles"), (evaluation.m, "consensus points"))
    with forbid_writes("the callback", callback, guarded, evaluation.check_writes):
        try:
            answer = callback(state)
        except StopIteration:
            answer = True
    if answer is None:
        return False
    if isinstance(answer, Tensor | np.ndarray) and answer.shape == ():
        answer = answer.item()
    if not isinstance(answer, bool | np.bool_):
        raise ConfigError(
            "`callback` must return whether to stop, True or False, or None, got a"
            f" {type(answer).__name__}"
        )
    return bool(answer)
