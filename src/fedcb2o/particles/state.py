"""What a callback of `minimize` is shown before a step, and what it answers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.particles.result import OutputShape
from fedcb2o.particles.system import Evaluation, System


@dataclasses.dataclass(frozen=True)
class State:
    """What a callback sees before step n: the consensus point `x`, the benign particles `theta` and their L and G.

    Shapes as in the result, for the runs that have not stopped, which `runs` names. Every particle's L and G are those
    of its own cluster; in a step that judges a random batch only, they are None. Copy what you keep: `theta` moves on.
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
    evaluation: Evaluation,
    n: int,
    dt: float,
    check_writes: bool,
) -> bool:
    """Whether the callback, shown the state before step n, wants all runs to stop."""
    own = evaluation.batch is None
    lower = [
        values.lower[:, each.rows]
        for each, values in zip(system.clusters, evaluation.values, strict=True)
    ]
    upper = [
        None if values.upper is None else values.upper[:, each.rows]
        for each, values in zip(system.clusters, evaluation.values, strict=True)
    ]
    state = State(
        n=n,
        t=n * dt,
        x=shape.squeeze(evaluation.m),
        theta=shape.squeeze_runs(system.benign),
        theta_m=shape.squeeze_runs(system.malicious),
        lower=shape.squeeze_runs(torch.cat(lower, 1)) if own else None,
        upper=shape.squeeze_runs(torch.cat(upper, 1)) if own and upper[0] is not None else None,  # type: ignore[arg-type]
        runs=system.runs,
    )
    with system.forbid_writes("the callback", callback, evaluation.m, check_writes):
        try:
            told = callback(state)
        except StopIteration:
            told = True
    try:
        return told is not None and bool(told)
    except RuntimeError as error:
        raise ConfigError(
            f"`callback` must return whether to stop, True or False, or None: {error}"
        ) from error
