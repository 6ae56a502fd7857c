"""Summary of a run of `minimize`: text, a JSON file and figures."""

import dataclasses
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.errors import RunError
from fedcb2o.particles import Problem, Result
from fedcb2o.particles.adversaries import Adversary
from fedcb2o.records import atomic_write
from fedcb2o.report._decay import Decay
from fedcb2o.report._particle_figures import Scene, draw_landscape, write_animation


def target_errors(problem: Problem, result: Result) -> np.ndarray | None:
    """Return each run's largest error of a coordinate, over all clusters; None without target."""
    if not problem.target:
        return None
    runs = len(result.message) if isinstance(result.message, list) else 1
    distances = np.abs(result.x.cpu().numpy() - np.array(problem.target, dtype=float))
    largest: np.ndarray = np.nan_to_num(distances, nan=np.inf).reshape(runs, -1).max(1)
    return largest


def figure_title(
    problem: Problem,
    result: Result,
    settings: Mapping[str, Any],
    groups: Sequence[Adversary],
    kind: str | None,
) -> str:
    """Return a figure's title: the problem and its most important settings."""
    clusters = problem.num_clusters
    N = result.theta.shape[-2]
    size = f"N = {N}"
    if clusters > 1:
        size = f"N = {clusters} × {N // clusters}"
    parts = [size]
    if settings["dynamics"] == "adaptive":
        parts.append("adaptive dynamics")
    else:
        parts.append(f"α = {settings['alpha']:g}")
    if problem.upper is not None and settings["dynamics"] != "adaptive":
        parts.append(f"β = {settings['beta']:g}")
    if problem.upper is not None:
        parts.append(f"δq = {settings['delta_q']:g}")
    if settings["dynamics"] != "adaptive":
        parts.append(f"{settings['noise']} noise σ₁ = {settings['sigma1']:g}")
    if groups:
        n = groups[0].num_particles
        mass = groups[0].mass
        if mass is None:
            mass = n / (n + N)
        parts.append(f"{n} malicious ({kind}), w_m = {mass:.3g}")
    return f"{problem.title}\n{', '.join(parts)}"


def describe(problem: Problem, result: Result, decay: Decay, tol: float) -> str:
    """Describe the result, its error and the fitted rate.

    A run is successful if its error is at most `tol`.
    """
    lines = [repr(dataclasses.replace(result, notes=()))]
    errors = target_errors(problem, result)
    if errors is not None:
        is_clustered = isinstance(problem.target[0], Sequence)
        points = problem.target
        if not is_clustered:
            points = (points,)
        target = ", ".join(map(_format_point, points))
        if isinstance(result.message, list):
            successes = int((errors <= tol).sum())
            lines.append(
                f"{successes} of {len(errors)} runs ({successes / len(errors):.0%}) came within"
                f" {tol:g} of the target {target}; median error {np.median(errors):.3g}"
                " (largest coordinate)"
            )
        else:
            lines.append(f"error {errors[0]:.3g} (largest coordinate) from the target {target}")
            lines += _explain_tolerance(problem, result)

    if all(map(math.isfinite, decay.fitted_rates)):
        rates = ", ".join(f"{rate:.3g}" for rate in decay.fitted_rates)
        lines.append(
            f"V, towards {decay.reference_name}: fitted rate {rates}; {decay.legend_label}"
        )
    return "\n".join(lines)


def _explain_tolerance(problem: Problem, result: Result) -> list[str]:
    """Return a line if G is less at x than at the target because L is larger at x."""
    if problem.upper is None or result.upper is None or not callable(problem.lower):
        return []
    target = torch.tensor([problem.target], dtype=torch.float64)
    excess = float(result.lower) - float(problem.lower(target))
    gain = float(problem.upper(target)) - float(result.upper)
    if excess <= 0 or gain <= 0:
        return []
    return [
        f"G at x is {gain:.3g} less than at the target, and L {excess:.3g} more: a smaller delta_q"
        " admits a smaller L only"
    ]


def to_json_table(
    problem: Problem,
    result: Result,
    settings: Mapping[str, Any],
    decay: Decay,
    tol: float,
    attack: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the result for a JSON file, without ensembles.

    It has the settings, the solutions, V, and the history of a single run.
    """
    errors = target_errors(problem, result)
    has_runs = isinstance(result.message, list)
    hidden = ("callback", "adversaries", "args")
    plain_settings = {
        name: _to_json(value) for name, value in settings.items() if name not in hidden
    }
    plain_settings["num_particles"] = result.theta.shape[-2] // problem.num_clusters
    table: dict[str, Any] = {
        "problem": problem.name,
        "title": problem.title,
        "dim": problem.dim,
        "settings": plain_settings,
        "adversary": attack,
    }

    names = ("x", "lower", "upper", "success", "message", "nit", "nfev", "excluded", "spread")
    for name in (*names, "seed"):
        table[name] = _to_json(getattr(result, name))
    table["notes"] = list(result.notes)
    table["seconds"] = result.seconds
    table["target"] = _to_json(problem.target) or None
    table["error"] = None
    table["tol"] = tol
    table["success_rate"] = None
    if errors is not None:
        table["error"] = errors.tolist()
        if not has_runs:
            table["error"] = errors[0]
        table["error"] = _to_json(table["error"])
        table["success_rate"] = float((errors <= tol).mean())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the median of runs that all diverged
        median = np.nanmedian(decay.V, 1)
    table["decay"] = {
        "towards": decay.reference_name,
        "t": _to_json(decay.t),
        "V": _to_json(median if decay.V.shape[2] > 1 else median[:, 0]),
        "fitted_rate": _to_json(list(decay.fitted_rates)),
        "fitted_in": _to_json(list(decay.fit_windows)),
        "theory": decay.legend_label,
    }
    table["history"] = None
    if not has_runs:
        history = dataclasses.asdict(result.history)
        table["history"] = {name: _to_json(value) for name, value in history.items()}
    table["fedcb2o"] = version("fedcb2o")
    return table


def make_folder(out: Path) -> None:
    """Make the folder of the output files."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"cannot make the folder {out}: {error.strerror}; choose another --out"
        ) from error


def write_files(
    out: Path,
    table: Mapping[str, Any],
    make_scene: Callable[[], Scene],
    *,
    figure: bool,
    animation: str | None,
) -> list[Path]:
    """Write the JSON file, the figure and the animation.

    `make_scene` is called only for a figure or an animation, which takes seconds.
    """
    paths = [out / "result.json"]
    text = json.dumps(table, indent=1, allow_nan=False, ensure_ascii=False)
    atomic_write(paths[0], (text + "\n").encode())
    if not (figure or animation):
        return paths

    scene = make_scene()
    if figure:
        paths.append(out / "landscape.png")
        atomic_write(
            paths[-1], lambda file: draw_landscape(scene).savefig(file, format="png", dpi=100)
        )
    if animation:
        paths.append(out / f"landscape.{animation}")
        paths[-1].unlink(missing_ok=True)  # a link of this name is not followed
        write_animation(scene, paths[-1])
    return paths


def _format_point(point: Sequence[float]) -> str:
    numbers = [f"{value:.6g}" for value in point]
    if len(numbers) >= 6:
        numbers = [*numbers[:3], "...", numbers[-1]]
    return f"({', '.join(numbers)})"


def _to_json(value: Any) -> Any:
    """Convert a value to JSON: null for non-finite numbers, names for functions."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | float | int | bool):
        return value
    if callable(value):
        return plugins.label(value)
    return str(value)
