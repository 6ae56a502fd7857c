"""What a callback of `minimize` is shown before a step, and what it answers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.particles.result import Shape
from fedcb2o.particles.system import Look, System


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


def asks_to_stop(
    callback: Callable[[State], Any], shape: Shape, system: System, look: Look, n: int, dt: float, closely: bool
) -> bool:
    """Whether the callback, shown the state before step n, wants all runs to stop."""
    own = look.batch is None
    lower = [values.lower[:, each.rows] for each, values in zip(system.clusters, look.values, strict=True)]
    upper = [
        None if values.upper is None else values.upper[:, each.rows]
        for each, values in zip(system.clusters, look.values, strict=True)
    ]
    state = State(
        n=n,
        t=n * dt,
        x=shape.of(look.m),
        theta=shape.of_runs(system.benign),
        theta_m=shape.of_runs(system.malicious),
        lower=shape.of_runs(torch.cat(lower, 1)) if own else None,
        upper=shape.of_runs(torch.cat(upper, 1)) if own and upper[0] is not None else None,  # type: ignore[arg-type]
        runs=system.runs,
    )
    with system.unwritten("the callback", callback, look.m, closely):
        try:
            told = callback(state)
        except StopIteration:
            told = True
    try:
        return told is not None and bool(told)
    except RuntimeError as error:
        raise ConfigError(f"`callback` must return whether to stop, True or False, or None: {error}") from error
