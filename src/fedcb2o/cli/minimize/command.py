"""The command `fedcb2o minimize`: particles on R^d."""

import logging
import math
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedcb2o.errors import ConfigError

_LOGGER = logging.getLogger(__name__)


_Noise = StrEnum("_Noise", ["isotropic", "anisotropic"])
_Quantile = StrEnum("_Quantile", ["plain", "averaged", "smooth"])
_Dynamics = StrEnum("_Dynamics", ["adaptive", "paper"])
_AdversaryKind = StrEnum(
    "_AdversaryKind", ["static", "lure", "tracking", "random", "oscillating", "greedy"]
)
_Animation = StrEnum("_Animation", ["gif", "html"])


def minimize(
    context: typer.Context,
    problem: Annotated[
        str | None,
        typer.Argument(
            metavar="PROBLEM", help="Name of a built-in problem; see --list.", show_default=False
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the built-in problems.")] = False,
    lower: Annotated[
        str | None,
        typer.Option(metavar="FUNCTION", help="L of your own, MODULE:FUNCTION."),
    ] = None,
    upper: Annotated[
        str | None,
        typer.Option(
            metavar="FUNCTION",
            help="G of your own; without it, CBO of L.",
        ),
    ] = None,
    dim: Annotated[int | None, typer.Option(help="Number of coordinates.")] = None,
    bounds: Annotated[
        str | None, typer.Option(metavar="LOW,HIGH", help="Bounds of all coordinates.")
    ] = None,
    x0: Annotated[str | None, typer.Option(metavar="X,Y,...", help="Centre of the start.")] = None,
    spread: Annotated[
        float | None,
        typer.Option(help="Largest distance from --x0."),
    ] = None,
    target: Annotated[str | None, typer.Option(metavar="X,Y,...", help="Known solution.")] = None,
    num_particles: Annotated[int | None, typer.Option(help="Particles in a cluster.")] = None,
    dynamics: Annotated[
        _Dynamics | None,
        typer.Option(metavar="NAME", help="adaptive, or paper with your settings."),
    ] = None,
    alpha: Annotated[
        float | None, typer.Option(hidden=True, help="Weight parameter of exp(-alpha G).")
    ] = None,
    beta: Annotated[
        float | None,
        typer.Option(hidden=True, help="Share of the ensemble in the sub-level set Q_beta."),
    ] = None,
    lambda1: Annotated[
        float | None, typer.Option(hidden=True, help="Drift to the consensus point.")
    ] = None,
    sigma1: Annotated[
        float | None, typer.Option(hidden=True, help="Noise of the drift to the consensus point.")
    ] = None,
    lambda2: Annotated[
        float | None, typer.Option(hidden=True, help="Drift down the gradient of L.")
    ] = None,
    sigma2: Annotated[
        float | None, typer.Option(hidden=True, help="Noise in proportion to the gradient of L.")
    ] = None,
    dt: Annotated[float | None, typer.Option(hidden=True, help="Time of a step.")] = None,
    delta_q: Annotated[
        float | None, typer.Option(hidden=True, help="Addition to the quantile of L in Q_beta.")
    ] = None,
    radius: Annotated[
        float | None,
        typer.Option(
            hidden=True, help="Radius R of a ball about 0; particles outside it have no weight."
        ),
    ] = None,
    noise: Annotated[
        _Noise | None,
        typer.Option(hidden=True, help="Noise by distance, or by each coordinate's distance."),
    ] = None,
    quantile: Annotated[
        _Quantile | None,
        typer.Option(
            hidden=True, help="Level of Q_beta: q_beta, the paper's average, or a smooth edge."
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            hidden=True, help="Number of random particles in a step's consensus. Default: all."
        ),
    ] = None,
    maxiter: Annotated[
        int | None, typer.Option(hidden=True, help="Largest number of steps.")
    ] = None,
    maxfev: Annotated[int | None, typer.Option(help="Largest number of evaluations.")] = None,
    xtol: Annotated[
        float | None,
        typer.Option(hidden=True, help="Stop when the particles' spread is at most this."),
    ] = None,
    time_limit: Annotated[
        float | None, typer.Option(hidden=True, help="Stop after this number of seconds.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the first run.")] = None,
    runs: Annotated[int | None, typer.Option(help="Number of independent runs.")] = None,
    tol: Annotated[
        float,
        typer.Option(
            hidden=True, help="Largest error of a coordinate in a run that counts as correct."
        ),
    ] = 0.1,
    adversary: Annotated[
        _AdversaryKind | None,
        typer.Option(
            metavar="KIND",
            help="Malicious particles: static, lure, tracking, random, oscillating or greedy.",
        ),
    ] = None,
    num_malicious: Annotated[int | None, typer.Option(help="Their number. Default: 10.")] = None,
    mass: Annotated[
        float | None,
        typer.Option(
            hidden=True, help="Weight w_m of all malicious particles. Default: as other particles."
        ),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(metavar="X,Y,...", help="Their start, or offset (tracking)."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder, or runs/minimize-PROBLEM.")] = None,
    animate: Annotated[_Animation | None, typer.Option(help="Draw an animation too.")] = None,
    no_figure: Annotated[bool, typer.Option("--no-figure", help="Write no figure.")] = False,
) -> list[Path] | None:
    """Minimise a function G among the minimisers of a function L by particles (CB2O).

    Prints the result, and writes result.json and a figure. Defaults are those of the problem or
    of fedcb2o.minimize. The settings of the paper's dynamics are --alpha, --beta, --lambda1,
    --sigma1, --lambda2, --sigma2, --dt, --delta-q, --radius, --noise, --quantile and --batch.
    Further ones are --maxiter, --xtol, --time-limit, --mass and --tol.

    Example: fedcb2o minimize circle --adversary static --num-malicious 10 --runs 20
    """
    import torch

    from fedcb2o.cli.minimize import summary
    from fedcb2o.cli.minimize.problem import build_adversaries, resolve_problem
    from fedcb2o.cli.minimize.recorder import default_settings, run_recorded
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
    if box is not None and len(box) != 2:
        raise ConfigError(f"--bounds needs LOW,HIGH, such as -3,3, got {bounds!r}")
    chosen = resolve_problem(problem, lower, upper, dim, target=solution, box=box)
    groups = build_adversaries(adversary, num_malicious, mass, position, chosen)
    options = {**context.params, "bounds": box, "x0": _parse_numbers("--x0", x0)}
    overrides = {
        name: options[name] for name in default_settings() if options.get(name) is not None
    }
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
        animation=animate,
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
