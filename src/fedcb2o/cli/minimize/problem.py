"""What to minimise and who attacks, from names, import paths and points."""

from collections.abc import Callable, Sequence
from typing import Any

import fedcb2o.particles.objectives as room
from fedcb2o import plugins
from fedcb2o.errors import ConfigError
from fedcb2o.particles import adversaries as kinds
from fedcb2o.particles.adversaries import Adversary
from fedcb2o.particles.objectives import Problem


def resolve_problem(
    name: str | None,
    lower: str | None,
    upper: str | None,
    dim: int | None,
    *,
    target: Sequence[float] | None = None,
    box: Sequence[float] | None = None,
) -> Problem:
    """A built-in problem, or the user's own by the import paths of L and G. Raises ConfigError for what cannot be."""
    if (name is None) == (lower is None):
        both = (
            "name a problem or give --lower, not both"
            if name
            else "name a problem, or give --lower for your own"
        )
        raise ConfigError(f"{both}; `fedcb2o minimize --list` shows what is built in")
    if name is not None:
        for option, value in (("--upper", upper), ("--dim", dim), ("--target", target)):
            if value is not None:
                raise ConfigError(
                    f"{option} is for a --lower of your own; the problem `{name}` has its own"
                )
        return room.problem(name)
    if dim is None:
        raise ConfigError("--lower needs --dim, the number of coordinates")
    if dim < 1:
        raise ConfigError(f"--dim must be at least 1, got {dim}")
    if target is not None and len(target) != dim:
        raise ConfigError(f"--target must have --dim = {dim} coordinates, got {len(target)}")
    objectives = [
        None if path is None else _user_objective(option, path)
        for option, path in (("L", lower), ("G", upper))
    ]
    title = f"L = {lower}" + (f", G = {upper}" if upper else ", no G")
    return Problem(
        "own",
        title,
        objectives[0],
        objectives[1],
        dim,
        tuple(target or ()),
        (box[0], box[1]) if box else (-3.0, 3.0),
    )


def _user_objective(kind: str, path: str) -> Callable[..., Any]:
    if ":" not in path:
        raise ConfigError(
            f'the objective {kind} must be an import path "package.module:function", got {path!r}'
        )
    return plugins.resolve(f"objective {kind}", path, room)


def build_adversaries(
    kind: str | None,
    num_malicious: int | None,
    mass: float | None,
    at: Sequence[float] | None,
    problem: Problem,
) -> list[Adversary]:
    """The attackers of a problem. Raises ConfigError for an attack that the problem has no place for."""
    if kind is None:
        for option, value in (("--num-malicious", num_malicious), ("--mass", mass), ("--at", at)):
            if value is not None:
                raise ConfigError(f"{option} needs --adversary")
        return []
    n = 10 if num_malicious is None else num_malicious
    if at is not None and len(at) != problem.dim:
        raise ConfigError(f"--at must have {problem.dim} coordinates, got {len(at)}")
    point = None if at is None else tuple(at)
    if kind in ("static", "lure"):
        where, what = (problem.bad, "minimiser of L that is bad for G") if kind == "static" else (
            problem.lure, "minimiser of G")  # fmt: skip
        if point is None and where is None:
            raise ConfigError(
                f"--adversary {kind} needs --at X,Y,...: no {what} is known for {problem.name}"
            )
        return [kinds.static(n, point or where or (), mass=mass)]
    if kind == "tracking":
        return [kinds.tracking(n, point or (0.5,) * problem.dim, mass=mass)]
    if kind == "random":
        return [kinds.random(n, initial=point, mass=mass)]
    if kind == "oscillating":
        low, high = ((end,) * problem.dim for end in problem.box)
        return [
            kinds.oscillating(
                n, (point or problem.bad or low, problem.lure or high), period=2.0, mass=mass
            )
        ]
    return [kinds.greedy(n, initial=point, mass=mass)]
