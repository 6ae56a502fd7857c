"""The command `fedcb2o minimize`: a problem, a run, and its result."""

import dataclasses
import json
import math
import os
import re
from collections.abc import Sequence
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Option

from fedcb2o.cli.runs import parse_settings
from fedcb2o.errors import ConfigError

if TYPE_CHECKING:
    from fedcb2o.particles import Adaptive, Paper, Problem, Result

_Dynamics = StrEnum("_Dynamics", ["adaptive", "paper"])
_OPTIONS = ("x0", "spread", "num_particles", "maxiter", "maxfev", "time_limit", "seed", "runs")
_RESULTS = (
    "x",
    "lower",
    "upper",
    "success",
    "status",
    "message",
    "nit",
    "nfev",
    "excluded",
    "spread",
)


def minimize(
    context: Context,
    problem: Annotated[
        str | None, Argument(metavar="PROBLEM", help="Name of a built-in problem; see --list.")
    ] = None,
    list_: Annotated[bool, Option("--list", help="List the built-in problems.")] = False,
    lower: Annotated[
        str | None, Option(metavar="FUNCTION", help="L of your own, MODULE:FUNCTION.")
    ] = None,
    upper: Annotated[
        str | None, Option(metavar="FUNCTION", help="G of your own; without it, CBO of L.")
    ] = None,
    constraint: Annotated[
        list[str] | None,
        Option(
            metavar="CONDITION",
            help="Constraint, MODULE:FUNCTION<=NUMBER, or with >= or =. Repeatable.",
        ),
    ] = None,
    dim: Annotated[int | None, Option(help="Number of coordinates.")] = None,
    bounds: Annotated[
        str | None, Option(metavar="LOW,HIGH", help="Bounds of all coordinates.")
    ] = None,
    x0: Annotated[str | None, Option(metavar="X,Y,...", help="Centre of the start.")] = None,
    spread: Annotated[float | None, Option(help="Largest distance from --x0.")] = None,
    num_particles: Annotated[int | None, Option(help="Particles in a cluster.")] = None,
    dynamics: Annotated[_Dynamics | None, Option(metavar="NAME", help="adaptive or paper.")] = None,
    changes: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="KEY=VALUE",
            help="Parameter of the dynamics, such as beta=0.05. Repeatable.",
        ),
    ] = None,
    maxiter: Annotated[int | None, Option(help="Largest number of steps.")] = None,
    maxfev: Annotated[int | None, Option(help="Largest number of evaluations.")] = None,
    time_limit: Annotated[float | None, Option(help="Largest number of seconds.")] = None,
    seed: Annotated[int | None, Option(help="Seed of the first run.")] = None,
    runs: Annotated[int | None, Option(help="Number of independent runs.")] = None,
    tol: Annotated[
        float, Option(help="Largest error of a coordinate in a run that counts as correct.")
    ] = 0.1,
    out: Annotated[Path | None, Option(help="JSON file of the result.")] = None,
) -> list[Path] | None:
    """Minimise a function G among the minimisers of a function L by particles (CB2O).

    Prints the result. Defaults are those of the problem or of fedcb2o.minimize. Parameters for
    --set are those of fedcb2o.Adaptive (delta_q, xtol) and of fedcb2o.Paper: alpha, beta, lambda1,
    sigma1, lambda2, sigma2, dt, noise, radius, quantile, batch and update too.

    Examples: fedcb2o minimize circle-ackley --runs 100 --tol 0.01,
    fedcb2o minimize --lower mine:cost --constraint "mine:load<=2.5" --dim 3
    """
    import torch

    from fedcb2o import particles

    # Steps are small: threads cost more than they save, and much on a busy machine.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)

    if list_:
        built_in = particles.problems()
        width = max(map(len, built_in))
        for name, item in built_in.items():
            print(f"{name:{width}}  {item.title}")
        return None

    # 1. The problem and the settings.
    box = _parse_numbers("--bounds", bounds)
    if box is not None and len(box) != 2:
        raise ConfigError(f"--bounds needs LOW,HIGH, such as -3,3, got {bounds!r}")
    if not 0 <= tol < math.inf:
        raise ConfigError(f"--tol must be at least 0 and finite, got {tol}")
    chosen = _resolve_problem(problem, lower, upper, dim)
    options = {**context.params, "x0": _parse_numbers("--x0", x0)}
    settings = {name: options[name] for name in _OPTIONS if options[name] is not None}
    if box is not None:
        settings["bounds"] = box
    published = chosen.settings
    if dynamics == "adaptive":  # in place of the published settings
        published = {name: value for name, value in published.items() if name == "clusters"}
    settings = {**published, **settings}
    if constraint:
        settings["constraints"] = [_parse_constraint(text) for text in constraint]
    settings["dynamics"] = _build_dynamics(dynamics, settings, parse_settings(changes), chosen)

    # 2. The run, and its result.
    result = particles.minimize(chosen.lower, chosen.upper, chosen.dim, **settings)
    errors = _errors(chosen, result)
    print(result)
    if len(errors) > 1:
        count = sum(error <= tol for error in errors)
        print(
            f"{count} of {len(errors)} runs ({count / len(errors):.0%}) came within {tol:g} of the"
            f" target {_format_point(chosen.target)}"
        )
    elif errors:
        print(
            f"error {errors[0]:.3g} (largest coordinate) from the target"
            f" {_format_point(chosen.target)}"
        )
    if out is None:
        return None
    _write(out, {"problem": chosen.name, "dynamics": settings["dynamics"]}, result, errors)
    return [out]


def _build_dynamics(
    name: str | None, settings: dict[str, Any], parameters: dict[str, Any], problem: "Problem"
) -> "Paper | Adaptive":
    """Return the dynamics by name, of the problem, or those that have all parameters."""
    from fedcb2o.particles import Adaptive, Paper
    from fedcb2o.plugins import did_you_mean

    base = settings.get("dynamics")
    if base is None or (name is not None and name != type(base).__name__.lower()):
        shared = {field.name for field in dataclasses.fields(Adaptive)}
        is_adaptive = callable(problem.lower) and parameters.keys() <= shared
        if name is not None:
            is_adaptive = name == "adaptive"
        base = Adaptive() if is_adaptive else Paper()
    valid = [field.name for field in dataclasses.fields(base)]
    for key in parameters:
        if key not in valid:
            kind = type(base).__name__
            raise ConfigError(
                f"--set {key}: {kind} dynamics have no such parameter."
                f"{did_you_mean(key, valid)} They have {', '.join(valid)}"
            )
    return dataclasses.replace(base, **parameters)


def _resolve_problem(
    name: str | None, lower: str | None, upper: str | None, dim: int | None
) -> "Problem":
    """Return a built-in problem, or the user's own."""
    from fedcb2o.particles import Problem, objectives

    if (name is None) == (lower is None):
        hint = "name a problem, or give --lower for your own"
        if name:
            hint = "name a problem or give --lower, not both"
        raise ConfigError(f"{hint}; `fedcb2o minimize --list` shows the built-in problems")
    if name is not None:
        for option, value in (("--upper", upper), ("--dim", dim)):
            if value is not None:
                raise ConfigError(
                    f"{option} is for a --lower of your own; the problem `{name}` has its own"
                )
        return objectives.problem(name)
    if dim is None:
        raise ConfigError("--lower needs --dim, the number of coordinates")
    if dim < 1:
        raise ConfigError(f"--dim must be at least 1, got {dim}")
    title = f"L = {lower}, {f'G = {upper}' if upper else 'no G'}"
    own = (_user_objective("L", lower), _user_objective("G", upper))
    return Problem("own", title, *own, dim, target=())


def _parse_constraint(text: str) -> Any:
    """Convert "module:function<=1" to a constraint of SciPy's."""
    from scipy.optimize import NonlinearConstraint

    match = re.fullmatch(r"\s*(.+?)\s*(<=|>=|=)\s*([^<>=]+?)\s*", text)
    try:
        number = float(match[3]) if match else math.nan
    except ValueError:
        number = math.nan
    if match is None or not math.isfinite(number):
        raise ConfigError(
            f"--constraint needs MODULE:FUNCTION<=NUMBER, or with >= or =, got {text!r}"
        )
    low = -math.inf if match[2] == "<=" else number
    high = math.inf if match[2] == ">=" else number
    return NonlinearConstraint(_user_objective("constraint", match[1]), low, high)


def _user_objective(kind: str, path: str | None) -> Any:
    from fedcb2o import plugins
    from fedcb2o.particles import objectives

    if path is None:
        return None
    if ":" not in path:
        raise ConfigError(
            f'the objective {kind} must be an import path "package.module:function", got {path!r}'
        )
    return plugins.resolve(f"objective {kind}", path, objectives)


def _errors(problem: "Problem", result: "Result") -> list[float]:
    """Return each run's largest error of a coordinate, over all clusters; empty without target."""
    import numpy as np

    if not problem.target:
        return []
    runs = len(result.message) if isinstance(result.message, list) else 1
    distances = np.abs(result.x.cpu().numpy() - np.array(problem.target, dtype=float))
    largest: list[float] = np.nan_to_num(distances, nan=np.inf).reshape(runs, -1).max(1).tolist()
    return largest


def _write(path: Path, head: dict[str, Any], result: "Result", errors: list[float]) -> None:
    """Write the result without ensembles as JSON; null stands for non-finite numbers."""
    from fedcb2o.records import atomic_write

    table = {
        **head,
        **{name: result[name] for name in (*_RESULTS, "seed", "notes", "seconds")},
        "error": errors if len(errors) > 1 else next(iter(errors), None),
        "fedcb2o": version("fedcb2o"),
    }
    text = json.dumps(_to_json(table), indent=1, allow_nan=False, ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, (text + "\n").encode())


def _to_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {"name": type(value).__name__, **dataclasses.asdict(value)}
    if isinstance(value, dict):
        return {name: _to_json(item) for name, item in value.items()}
    if hasattr(value, "tolist"):  # a tensor
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _format_point(point: Sequence[Any]) -> str:
    if isinstance(point[0], Sequence):
        return ", ".join(map(_format_point, point))
    numbers = [f"{value:.6g}" for value in point]
    if len(numbers) >= 6:
        numbers = [*numbers[:3], "...", numbers[-1]]
    return f"({', '.join(numbers)})"


def _parse_numbers(option: str, text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"{option} needs numbers with commas, such as -1,0, got {text!r}"
        ) from error
    if not all(map(math.isfinite, values)):
        raise ConfigError(f"{option} needs finite numbers, got {text!r}")
    return values
