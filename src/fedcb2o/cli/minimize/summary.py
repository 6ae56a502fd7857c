"""What is said of a run of `minimize`: in words, in a JSON file and in figures."""

import dataclasses
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.errors import RunError
from fedcb2o.particles.adversaries import Adversary
from fedcb2o.particles.objectives import Problem
from fedcb2o.particles.result import Result
from fedcb2o.records import atomic_write
from fedcb2o.report.decay import Decay
from fedcb2o.report.particle_figures import Scene, draw_landscape, write_animation


def target_errors(problem: Problem, result: Result) -> np.ndarray | None:
    """The largest error of a coordinate in each run, over all clusters, [runs]; None where no target is known."""
    if not problem.target:
        return None
    runs = len(result.message) if isinstance(result.message, list) else 1
    apart = np.abs(result.x.cpu().numpy() - np.array(problem.target, dtype=float))
    largest: np.ndarray = np.nan_to_num(apart, nan=np.inf).reshape(runs, -1).max(1)
    return largest


def figure_title(
    problem: Problem,
    result: Result,
    settings: Mapping[str, Any],
    groups: Sequence[Adversary],
    kind: str | None,
) -> str:
    """A figure's title: the problem, and the settings that matter most."""
    clusters = 1 if callable(problem.lower) else len(problem.lower)
    N = result.theta.shape[-2]
    parts = [
        f"N = {N}" if clusters == 1 else f"N = {clusters} × {N // clusters}",
        f"α = {settings['alpha']:g}",
    ]
    if problem.upper is not None:
        parts += [f"β = {settings['beta']:g}", f"δq = {settings['delta_q']:g}"]
    parts.append(f"{settings['noise']} noise σ₁ = {settings['sigma1']:g}")
    if groups:
        n = groups[0].num_particles
        mass = n / (n + N) if groups[0].mass is None else groups[0].mass
        parts.append(f"{n} malicious ({kind}), w_m = {mass:.3g}")
    return f"{problem.title}\n{', '.join(parts)}"


def describe(problem: Problem, result: Result, decay: Decay, tol: float) -> str:
    """The result in words: its own first, then the error to the target, or how many runs came near it, and the rate."""
    lines = [repr(dataclasses.replace(result, notes=()))]
    error = target_errors(problem, result)
    if error is not None:
        where = ", ".join(
            map(
                _format_point,
                problem.target if isinstance(problem.target[0], Sequence) else [problem.target],
            )
        )
        if isinstance(result.message, list):
            near = int((error <= tol).sum())
            lines.append(
                f"{near} of {len(error)} runs ({near / len(error):.0%}) came within {tol:g} of the target {where};"
                f" median error {np.median(error):.3g} (largest coordinate)"
            )
        else:
            lines.append(f"error {error[0]:.3g} (largest coordinate) from the target {where}")
    if all(map(math.isfinite, decay.fitted_rates)):
        rates = ", ".join(f"{rate:.3g}" for rate in decay.fitted_rates)
        lines.append(
            f"V, towards {decay.reference_name}: fitted rate {rates}; {decay.legend_label}"
        )
    return "\n".join(lines)


def to_json_table(
    problem: Problem,
    result: Result,
    settings: Mapping[str, Any],
    decay: Decay,
    tol: float,
    attack: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The result for a JSON file: settings, answers, V; the way there only of a single run. No ensembles."""
    error = target_errors(problem, result)
    many = isinstance(result.message, list)
    hidden = ("callback", "adversaries", "args")
    table: dict[str, Any] = {
        "problem": problem.name,
        "title": problem.title,
        "dim": problem.dim,
        "settings": {
            name: _to_json(value) for name, value in settings.items() if name not in hidden
        }
        | {
            "num_particles": result.theta.shape[-2]
            // (1 if callable(problem.lower) else len(problem.lower))
        },
        "adversary": attack,
    }
    for name in (
        "x",
        "lower",
        "upper",
        "success",
        "message",
        "nit",
        "nfev",
        "excluded",
        "spread",
        "seed",
    ):
        table[name] = _to_json(getattr(result, name))
    table |= {
        "notes": list(result.notes),
        "seconds": result.seconds,
        "target": _to_json(problem.target) or None,
    }
    table["error"] = None if error is None else _to_json(error if many else error[0])
    table["tol"] = tol
    table["success_rate"] = None if error is None else float((error <= tol).mean())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the median of runs that all diverged
        middle = np.nanmedian(decay.V, 1)
    table["decay"] = {
        "towards": decay.reference_name, "t": _to_json(decay.t), "V": _to_json(middle if decay.V.shape[2] > 1 else middle[:, 0]),
        "fitted_rate": _to_json(list(decay.fitted_rates)), "fitted_in": _to_json(list(decay.fit_windows)), "theory": decay.legend_label,
    }  # fmt: skip
    history = dataclasses.asdict(result.history)
    table["history"] = None if many else {name: _to_json(value) for name, value in history.items()}
    table["fedcb2o"] = version("fedcb2o")
    return table


def make_folder(out: Path) -> None:
    """Make the folder that files go to. Raises RunError if it cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"cannot make the folder {out}: {error.strerror}; choose another --out"
        ) from error


def write_files(
    out: Path,
    table: Mapping[str, Any],
    scene: Callable[[], Scene],
    *,
    figure: bool,
    animation: str | None,
) -> list[Path]:
    """Write the JSON, the figure and the animation into a folder that is there, and return their paths."""
    paths = [out / "result.json"]
    atomic_write(
        paths[0], (json.dumps(table, indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode()
    )
    if figure or animation:
        drawn = scene()
        if figure:
            paths.append(out / "landscape.png")
            atomic_write(
                paths[-1], lambda path: draw_landscape(drawn).savefig(path, format="png", dpi=100)
            )
        if animation:
            paths.append(out / f"landscape.{animation}")
            write_animation(drawn, paths[-1])
    return paths


def _format_point(point: Sequence[float]) -> str:
    shown = [f"{value:.6g}" for value in point]
    return f"({', '.join(shown if len(shown) < 6 else [*shown[:3], '...', shown[-1]])})"


def _to_json(value: Any) -> Any:
    """As JSON has it: lists and numbers, null for what is not finite; a function by its name."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_to_json(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int | bool):
        return value
    return plugins.label(value) if callable(value) else str(value)
