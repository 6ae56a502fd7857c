"""The command for particles on R^d: minimize."""

import math
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcb2o.errors import ConfigError


class _Noise(StrEnum):
    """D(theta - m) of the particles' noise."""

    isotropic = "isotropic"
    anisotropic = "anisotropic"


class _Quantile(StrEnum):
    """The level of Q_beta."""

    plain = "plain"
    averaged = "averaged"


class _AdversaryKind(StrEnum):
    """Malicious particles that have a name."""

    static = "static"
    lure = "lure"
    tracking = "tracking"
    random = "random"
    oscillating = "oscillating"
    greedy = "greedy"


class _Animation(StrEnum):
    """The format of an animation."""

    gif = "gif"
    html = "html"


def minimize(
    problem: Annotated[
        str | None,
        typer.Argument(metavar="PROBLEM", help="A built-in problem (--list).", show_default=False),
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List the built-in problems, a line each.")
    ] = False,
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
        str | None, typer.Option(metavar="X,Y,...", help="The point about which particles start.")
    ] = None,
    spread: Annotated[
        float | None, typer.Option(help="How far from it they start, in each coordinate.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="X,Y,...", help="The answer to your own problem.")
    ] = None,
    num_particles: Annotated[int | None, typer.Option(help="N, of each cluster.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Weight parameter of exp(-alpha G).")] = None,
    beta: Annotated[
        float | None, typer.Option(help="Share of the ensemble in the sub-level set Q_beta.")
    ] = None,
    lambda1: Annotated[float | None, typer.Option(help="Drift to the consensus point.")] = None,
    sigma1: Annotated[float | None, typer.Option(help="Noise about the consensus point.")] = None,
    lambda2: Annotated[float | None, typer.Option(help="Drift down the gradient of L.")] = None,
    sigma2: Annotated[
        float | None, typer.Option(help="Noise of the size of that gradient.")
    ] = None,
    dt: Annotated[float | None, typer.Option(help="Step of time.")] = None,
    delta_q: Annotated[
        float | None, typer.Option(help="What Q_beta's level adds to the quantile of L.")
    ] = None,
    radius: Annotated[
        float | None, typer.Option(help="R: the ball whose particles make the consensus.")
    ] = None,
    noise: Annotated[_Noise | None, typer.Option(help="The kind of noise.")] = None,
    quantile: Annotated[
        _Quantile | None, typer.Option(help="q_beta, or averaged as in the paper.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Particles judged in a step, at random. Default: all.")
    ] = None,
    maxiter: Annotated[int | None, typer.Option(help="Steps at most.")] = None,
    maxfev: Annotated[
        int | None, typer.Option(help="Judged particles at most, in each run.")
    ] = None,
    xtol: Annotated[
        float | None, typer.Option(help="Stop at this spread about the consensus point.")
    ] = None,
    time_limit: Annotated[float | None, typer.Option(help="Stop after so many seconds.")] = None,
    seed: Annotated[int | None, typer.Option(help="The seed; of several runs, the first.")] = None,
    runs: Annotated[int | None, typer.Option(help="Independent runs, in one batch.")] = None,
    tol: Annotated[
        float, typer.Option(help="A run succeeds within this of the target in every coordinate.")
    ] = 0.1,
    adversary: Annotated[
        _AdversaryKind | None,
        typer.Option(
            help="Malicious particles: static at a bad minimiser of L, a lure at the minimiser of G, ..."
        ),
    ] = None,
    num_malicious: Annotated[int | None, typer.Option(help="How many. Default: 10.")] = None,
    mass: Annotated[
        float | None, typer.Option(help="Their share w_m. Default: all particles count alike.")
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(metavar="X,Y,...", help="Where they stand or start; tracking: their offset."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the files go. Default: runs/minimize-PROBLEM.")
    ] = None,
    animate: Annotated[_Animation | None, typer.Option(help="Also draw an animation.")] = None,
    no_figure: Annotated[
        bool, typer.Option("--no-figure", help="Write the result alone, as JSON.")
    ] = False,
) -> list[Path] | None:
    """Minimise G over the minimisers of L by particles (CB2O), under attack if you like; print and draw what comes.

    Settings that are not given are the problem's own, else those of fedcb2o.minimize in Python.

    Example: fedcb2o minimize circle --adversary static --num-malicious 10 --delta-q 0.01 --runs 20
    """
    import torch

    from fedcb2o.cli.minimize import summary
    from fedcb2o.cli.minimize.problem import build_adversaries, resolve_problem
    from fedcb2o.cli.minimize.recorder import run_recorded
    from fedcb2o.particles.objectives import problems

    if (
        "OMP_NUM_THREADS" not in os.environ
    ):  # steps are small: threads cost more than they bring, much on a busy machine
        torch.set_num_threads(1)

    if list_:
        listed = problems()
        for name, one in listed.items():
            print(f"{name:{max(map(len, listed))}}  {one.title}")
        return None
    points = (("--bounds", bounds), ("--at", at), ("--target", target), ("--x0", x0))
    box, place, answer, about = (_parse_numbers(name, text) for name, text in points)
    if box is not None and len(box) != 2:
        raise ConfigError(f"--bounds needs LOW,HIGH, such as -3,3, got {bounds!r}")
    chosen = resolve_problem(problem, lower, upper, dim, target=answer, box=box)
    groups = build_adversaries(adversary, num_malicious, mass, place, chosen)
    asked: dict[str, Any] = {
        "num_particles": num_particles, "alpha": alpha, "beta": beta, "lambda1": lambda1, "sigma1": sigma1,
        "lambda2": lambda2, "sigma2": sigma2, "dt": dt, "delta_q": delta_q, "radius": radius, "batch": batch,
        "maxiter": maxiter, "xtol": xtol, "time_limit": time_limit, "seed": seed, "runs": runs, "bounds": box,
        "x0": about, "spread": spread, "maxfev": maxfev,
    }  # fmt: skip
    asked |= {
        "noise": None if noise is None else noise.value,
        "quantile": None if quantile is None else quantile.value,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    if not 0 <= tol < math.inf:
        raise ConfigError(f"--tol must be at least 0 and finite, got {tol}")
    folder = Path("runs") / f"minimize-{chosen.name}" if out is None else out
    summary.make_folder(folder)
    result, watch, settings, warned = run_recorded(chosen, groups, given)
    for line in warned:
        print(line, file=sys.stderr)
    decay = watch.decay(chosen, result, settings)
    print(summary.describe(chosen, result, decay, tol))
    attack = None if adversary is None else {
        "kind": str(adversary), "num_particles": groups[0].num_particles, "mass": mass, "at": place,
    }  # fmt: skip
    paths = summary.write_files(
        folder,
        summary.to_json_table(chosen, result, settings, decay, tol, attack),
        lambda: watch.scene(
            chosen,
            result,
            settings,
            summary.figure_title(chosen, result, settings, groups, adversary),
        ),
        figure=not no_figure,
        animation=None if animate is None else str(animate),
    )
    print("Wrote", *paths, file=sys.stderr)
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
