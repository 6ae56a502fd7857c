"""Problem and adversaries of `fedcb2o minimize`, from names, import paths and points."""

from collections.abc import Callable, Sequence
from typing import Any

from fedcb2o import plugins
from fedcb2o.errors import ConfigError
from fedcb2o.particles import Problem, adversaries, objectives
from fedcb2o.particles.adversaries import Adversary


def resolve_problem(
    name: str | None,
    lower: str | None,
    upper: str | None,
    dim: int | None,
    *,
    target: Sequence[float] | None = None,
    box: Sequence[float] | None = None,
) -> Problem:
    """Return a built-in problem, or the user's own."""
    if (name is None) == (lower is None):
        hint = "name a problem, or give --lower for your own"
        if name:
            hint = "name a problem or give --lower, not both"
        raise ConfigError(f"{hint}; `fedcb2o minimize --list` shows the built-in problems")
    if name is not None:
        for option, value in (("--upper", upper), ("--dim", dim), ("--target", target)):
            if value is not None:
                raise ConfigError(
                    f"{option} is for a --lower of your own; the problem `{name}` has its own"
                )
        return objectives.problem(name)

    if dim is None:
        raise ConfigError("--lower needs --dim, the number of coordinates")
    if dim < 1:
        raise ConfigError(f"--dim must be at least 1, got {dim}")
    if target is not None and len(target) != dim:
        raise ConfigError(f"--target must have --dim = {dim} coordinates, got {len(target)}")
    return Problem(
        name="own",
        title=f"L = {lower}, {f'G = {upper}' if upper else 'no G'}",
        lower=_user_objective("L", lower),
        upper=_user_objective("G", upper),
        dim=dim,
        target=tuple(target or ()),
        box=(box[0], box[1]) if box else (-3.0, 3.0),
    )


def _user_objective(kind: str, path: str | None) -> Callable[..., Any] | None:
    if path is None:
        return None
    if ":" not in path:
        raise ConfigError(
            f'the objective {kind} must be an import path "package.module:function", got {path!r}'
        )
    return plugins.resolve(f"objective {kind}", path, objectives)


def build_adversaries(
    kind: str | None,
    num_malicious: int | None,
    mass: float | None,
    at: Sequence[float] | None,
    problem: Problem,
) -> list[Adversary]:
    """Return at most one adversary of a problem.

    Without `kind` no particle is malicious. By default 10 particles are, at the problem's own
    position. An option without effect is a ConfigError.
    """
    if kind is None:
        for option, value in (("--num-malicious", num_malicious), ("--mass", mass), ("--at", at)):
            if value is not None:
                raise ConfigError(f"{option} needs --adversary")
        return []

    if at is not None and len(at) != problem.dim:
        raise ConfigError(f"--at must have {problem.dim} coordinates, got {len(at)}")
    n = num_malicious
    if n is None:
        n = 10
    point = None
    if at is not None:
        point = tuple(at)
    if kind == "static":
        place = _place(kind, point or problem.bad, "minimiser of L that is bad for G", problem)
        return [adversaries.static(n, place, mass=mass)]
    if kind == "lure":
        place = _place(kind, point or problem.lure, "minimiser of G", problem)
        return [adversaries.static(n, place, mass=mass)]
    if kind == "tracking":
        return [adversaries.tracking(n, point or (0.5,) * problem.dim, mass=mass)]
    if kind == "random":
        return [adversaries.random(n, initial=point, mass=mass)]
    if kind == "oscillating":
        low, high = ((end,) * problem.dim for end in problem.box)
        between = (point or problem.bad or low, problem.lure or high)
        return [adversaries.oscillating(n, between, period=2.0, mass=mass)]
    return [adversaries.greedy(n, initial=point, mass=mass)]


def _place(
    kind: str, point: tuple[float, ...] | None, description: str, problem: Problem
) -> tuple[float, ...]:
    if point is None:
        raise ConfigError(
            f"--adversary {kind} needs --at X,Y,...: no {description} is known for {problem.name}"
        )
    return point
