"""The command `fedcb2o minimize`: particles on R^d."""

import logging
import math
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcb2o.errors import ConfigError

_LOGGER = logging.getLogger(__name__)


class _Noise(StrEnum):
    """Kind of noise D(theta - m)."""

    isotropic = "isotropic"
    anisotropic = "anisotropic"


class _Quantile(StrEnum):
    """Level of Q_beta."""

    plain = "plain"
    averaged = "averaged"


class _AdversaryKind(StrEnum):
    """Built-in malicious particles."""

    static = "static"
    lure = "lure"
    tracking = "tracking"
    random = "random"
    oscillating = "oscillating"
    greedy = "greedy"


class _Animation(StrEnum):
    """Format of an animation."""

    gif = "gif"
    html = "html"


def minimize(
    problem: Annotated[
        str | None,
        typer.Argument(metavar="PROBLEM", help="A built-in problem (--list).", show_default=False),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the built-in problems.")] = False,
    lower: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION", help="Your own L, [..., d] -> [...], by import path."
        ),
    ] = None,
    upper: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Your own G; without it, CBO.")
    ] = None,
    dim: Annotated[int | None, typer.Option(help="d, for your own L.")] = None,
    bounds: Annotated[
        str | None, typer.Option(metavar="LOW,HIGH", help="Particles stay inside.")
    ] = None,
    x0: Annotated[
        str | None, typer.Option(metavar="X,Y,...", help="Point around which the particles start.")
    ] = None,
    spread: Annotated[
        float | None, typer.Option(help="Largest distance from it in each coordinate.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="X,Y,...", help="Solution of your own problem.")
    ] = None,
    num_particles: Annotated[int | None, typer.Option(help="N, particles of each cluster.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Weight parameter of exp(-alpha G).")] = None,
    beta: Annotated[
        float | None, typer.Option(help="Share of the ensemble in the sub-level set Q_beta.")
    ] = None,
    lambda1: Annotated[float | None, typer.Option(help="Drift to the consensus point.")] = None,
    sigma1: Annotated[float | None, typer.Option(help="Noise of that drift.")] = None,
    lambda2: Annotated[float | None, typer.Option(help="Drift down the gradient of L.")] = None,
    sigma2: Annotated[
        float | None, typer.Option(help="Noise in proportion to that gradient.")
    ] = None,
    dt: Annotated[float | None, typer.Option(help="Step of time.")] = None,
    delta_q: Annotated[
        float | None, typer.Option(help="Addition to the quantile of L in Q_beta.")
    ] = None,
    radius: Annotated[
        float | None, typer.Option(help="R: only particles in this ball count for the consensus.")
    ] = None,
    noise: Annotated[_Noise | None, typer.Option(help="Kind of noise.")] = None,
    quantile: Annotated[
        _Quantile | None, typer.Option(help="q_beta, or averaged as in the paper.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Random particles of a step's consensus. Default: all.")
    ] = None,
    maxiter: Annotated[int | None, typer.Option(help="Largest number of steps.")] = None,
    maxfev: Annotated[
        int | None, typer.Option(help="Largest number of evaluated particles in each run.")
    ] = None,
    xtol: Annotated[
        float | None, typer.Option(help="Stop at this spread about the consensus point.")
    ] = None,
    time_limit: Annotated[float | None, typer.Option(help="Stop after these seconds.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the (first) run.")] = None,
    runs: Annotated[int | None, typer.Option(help="Independent runs, in one batch.")] = None,
    tol: Annotated[
        float, typer.Option(help="A run succeeds within this of the target in every coordinate.")
    ] = 0.1,
    adversary: Annotated[
        _AdversaryKind | None,
        typer.Option(
            help="Malicious particles: static at a bad minimiser of L, lure at that of G, ..."
        ),
    ] = None,
    num_malicious: Annotated[
        int | None, typer.Option(help="Number of malicious particles. Default: 10.")
    ] = None,
    mass: Annotated[
        float | None, typer.Option(help="Their share w_m. Default: equal shares for all particles.")
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(metavar="X,Y,...", help="Their (initial) position; tracking: their offset."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the files. Default: runs/minimize-PROBLEM.")
    ] = None,
    animate: Annotated[_Animation | None, typer.Option(help="Also draw an animation.")] = None,
    no_figure: Annotated[
        bool, typer.Option("--no-figure", help="Write only the result, as JSON.")
    ] = False,
) -> list[Path] | None:
    """Minimise G over the minimisers of L by particles (CB2O), attacked or not, and draw the run.

    Settings that you do not give are those of the problem, or of fedcb2o.minimize in Python.

    Example: fedcb2o minimize circle --adversary static --num-malicious 10 --delta-q 0.01 --runs 20
    """
    import torch

    from fedcb2o.cli.minimize import summary
    from fedcb2o.cli.minimize.problem import build_adversaries, resolve_problem
    from fedcb2o.cli.minimize.recorder import run_recorded
    from fedcb2o.particles import problems

    # Steps are small: threads cost more than they save, and much on a busy machine.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)

    if list_:
        built_in = problems()
        width = max(map(len, built_in))
        for name, item in built_in.items():
            print(f"{name:{width}}  {item.title}")
        return None

    # 1. The problem, the attack and the settings.
    box = _parse_numbers("--bounds", bounds)
    position = _parse_numbers("--at", at)
    solution = _parse_numbers("--target", target)
    centre = _parse_numbers("--x0", x0)
    if box is not None and len(box) != 2:
        raise ConfigError(f"--bounds needs LOW,HIGH, such as -3,3, got {bounds!r}")
    chosen = resolve_problem(problem, lower, upper, dim, target=solution, box=box)
    groups = build_adversaries(adversary, num_malicious, mass, position, chosen)
    options: dict[str, Any] = {
        "num_particles": num_particles,
        "alpha": alpha,
        "beta": beta,
        "lambda1": lambda1,
        "sigma1": sigma1,
        "lambda2": lambda2,
        "sigma2": sigma2,
        "dt": dt,
        "delta_q": delta_q,
        "radius": radius,
        "noise": noise and noise.value,
        "quantile": quantile and quantile.value,
        "batch": batch,
        "maxiter": maxiter,
        "maxfev": maxfev,
        "xtol": xtol,
        "time_limit": time_limit,
        "seed": seed,
        "runs": runs,
        "bounds": box,
        "x0": centre,
        "spread": spread,
    }
    overrides = {name: value for name, value in options.items() if value is not None}
    if not 0 <= tol < math.inf:
        raise ConfigError(f"--tol must be at least 0 and finite, got {tol}")

    # 2. The run.
    folder = out or Path("runs") / f"minimize-{chosen.name}"
    summary.make_folder(folder)
    result, recorder, settings, notes = run_recorded(chosen, groups, overrides)
    for note in notes:
        _LOGGER.warning("%s", note)

    # 3. Its summary.
    decay = recorder.decay(chosen, result, settings)
    print(summary.describe(chosen, result, decay, tol))
    attack = None
    if adversary is not None:
        attack = {
            "kind": str(adversary),
            "num_particles": groups[0].num_particles,
            "mass": mass,
            "at": position,
        }
    title = summary.figure_title(chosen, result, settings, groups, adversary)
    paths = summary.write_files(
        folder,
        summary.to_json_table(chosen, result, settings, decay, tol, attack),
        lambda: recorder.scene(chosen, result, settings, title),
        figure=not no_figure,
        animation=animate and animate.value,
    )
    _LOGGER.info("Wrote %s", " ".join(map(str, paths)))
    return paths


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
