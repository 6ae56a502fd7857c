"""Capture of the consensus point by malicious particles: tables and figures of docs/particles.md.

    .venv/bin/python paper/capture.py [--runs 3] [--figure docs/figures/capture.png]
    .venv/bin/python paper/capture.py --runs 10 --border docs/figures/capture-border.png

L = (|x|^2 - 1)^2, G = |x - (2, 0)|^2, target (1, 0). Isotropic noise, lambda1 = 1, sigma1 = 0.5,
alpha = 1000, beta = 0.05 unless it is varied, dt = 0.01, 600 steps, start N(0, I). Attackers are at
(-1, 0), a minimiser of L that is bad for G, or at (2, 0), the minimiser of G, with the share w_m of
the measure (eq:dyn_macro). Errors are distances of the last consensus point from the target: the
median over the runs, with the largest in brackets if it differs.

The second command measures the border of capture with delta_q = 0, N particles of equal mass, and
attackers at (-1, 0) that leave (beta - w_m) N benign particles in the sub-level set, for the plain
and the averaged quantile.
"""

import argparse
import dataclasses
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import fedcb2o
from fedcb2o.particles import Result, adversaries, problem
from fedcb2o.report._panels import LINE_STYLES, PALETTE, STYLE

CIRCLE = problem("circle")
SHARES = (0.0, 0.02, 0.04, 0.05, 0.06, 0.1, 0.3, 0.5)
LEVELS = (0.0, 0.001, 0.01, 0.1)
BETAS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
SIZES = (200, 1000, 10_000)
BENIGN_LEFT = (0, 1, 2, 3, 4, 5, 6, 8, 10, 16, 24, 32, 50, 100, 250, 500)  # (beta - w_m) N
RATIO_TICKS = (0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998)
BETA = 0.05
PAPER = fedcb2o.Paper(beta=BETA, sigma1=0.5, noise="isotropic", xtol=0.0)
Border = dict[
    str, dict[int, dict[int, tuple[torch.Tensor, bool]]]
]  # by quantile, N and benign left
Rows = dict[str, list[torch.Tensor]]


def run(changes: dict[str, Any], **settings: Any) -> Result:
    """Minimise on the circle, with changes of the default parameters."""
    return fedcb2o.minimize(
        CIRCLE.lower,
        CIRCLE.upper,
        2,
        initial=lambda draw, n, d: draw.standard_normal((n, d)),
        dynamics=dataclasses.replace(PAPER, **changes),
        maxiter=600,
        **settings,
    )


def distance(result: Result) -> torch.Tensor:
    """Return the error of every run, shape [runs]."""
    return (result.x - torch.tensor(CIRCLE.target)).norm(dim=-1)


def errors(
    point: tuple[float, ...], w_m: float, *, num_particles: int, runs: int, **changes: float
) -> torch.Tensor:
    """Return the error of every run, shape [runs], with attackers of mass w_m at a point."""
    attack = [adversaries.static(1, point, mass=w_m)] if w_m else []
    return distance(run(changes, adversaries=attack, num_particles=num_particles, runs=runs))


def border(quantile: str, num_particles: int, left: int, runs: int) -> tuple[torch.Tensor, bool]:
    """Return the errors if `left` benign particles are in the set, and whether `minimize` warns."""
    num_malicious = round(BETA * num_particles) - left
    attack = [adversaries.static(num_malicious, CIRCLE.bad)] if num_malicious else []
    result = run(
        {"quantile": quantile},
        adversaries=attack,
        num_particles=num_particles - num_malicious,
        runs=runs,
    )
    return distance(result), bool(result.notes)


def format_errors(values: torch.Tensor) -> str:
    """Format the median and, if it differs, the largest value."""
    median = f"{values.median():.2g}"
    largest = f"{values.max():.2g}"
    return median if median == largest else f"{median} ({largest})"


def print_table(title: str, head: tuple[float, ...], rows: Rows) -> None:
    """Print a table in Markdown."""
    print(f"\n| {title} | " + " | ".join(f"{value:g}" for value in head) + " |")
    print("|---" + "|---:" * len(head) + "|")
    for name, values in rows.items():
        print(f"| {name} | " + " | ".join(map(format_errors, values)) + " |", flush=True)


def draw(path: Path, by_share: Rows, by_beta: Rows) -> None:
    """Draw the errors over the share of attackers, and over beta."""
    with rc_context(STYLE):
        figure = Figure(figsize=(9.6, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        _draw_medians(left, SHARES, by_share)
        _draw_medians(right, BETAS, by_beta)
        left.axvline(0.05, color="0.35", linewidth=0.8)
        left.annotate(
            "w_m = beta",
            (0.05, 4),
            xytext=(3, -3),
            textcoords="offset points",
            va="top",
            fontsize=8,
        )
        left.set_title("(a) Attackers at a bad minimiser of L")
        left.set_xlabel("share w_m of the attackers")
        right.set_title("(b) Attackers at the minimiser of G")
        right.set_xlabel("beta")
        figure.savefig(path, dpi=110)


def _draw_medians(ax: Axes, x: tuple[float, ...], rows: Rows) -> None:
    for k, (name, values) in enumerate(rows.items()):
        medians = [value.median() for value in values]
        style = {
            "color": PALETTE[k],
            "linestyle": LINE_STYLES[k],
            "marker": "osD^"[k],
            "markersize": 5,
        }
        ax.plot(x, medians, label=name, **style)
    ax.set_yscale("log")
    ax.set_ylim(2e-4, 4)
    ax.set_ylabel("distance to the target")
    ax.legend(fontsize=9)


def measure_border(runs: int) -> Border:
    """Measure the border and print it as a table, with a star where `minimize` warns."""
    measured: Border = {quantile: {n: {} for n in SIZES} for quantile in ("plain", "averaged")}
    heads = [f"{quantile}, N = {n:,}" for quantile in measured for n in SIZES]
    print("\n| (beta - w_m) N | " + " | ".join(heads) + " |")
    print("|---:" * (1 + len(heads)) + "|")
    for left in BENIGN_LEFT:
        cells = []
        for quantile, sizes in measured.items():
            for n, rows in sizes.items():
                cell = ""
                if left <= BETA * n:
                    rows[left] = border(quantile, n, left, runs)
                    cell = format_errors(rows[left][0]) + " \\*" * rows[left][1]
                cells.append(cell)
        print(f"| {left} | " + " | ".join(cells) + " |", flush=True)
    return measured


def _ratio_position(ratio: float) -> float:
    """Return the place of w_m / beta on an axis that is logarithmic in the distance to 1."""
    return -math.log10(max(1 - ratio, 1.1e-3))


def draw_border(path: Path, measured: Border) -> None:
    """Draw the error over w_m / beta."""
    with rc_context(STYLE):
        figure = Figure(figsize=(9.6, 4.1), layout="constrained")
        for ax, (quantile, sizes) in zip(
            figure.subplots(1, 2, sharey=True), measured.items(), strict=True
        ):
            for k, (n, rows) in enumerate(sizes.items()):
                _draw_border_line(ax, k, n, rows)
            ax.plot(
                [], [], "o", color="0.3", markerfacecolor="white", label="minimize warns (hollow)"
            )
            ax.set_yscale("log")
            ax.set_ylim(1e-4, 4)
            labels = [*(f"{tick:g}" for tick in RATIO_TICKS), "1"]
            ax.set_xticks(
                [_ratio_position(tick) for tick in (*RATIO_TICKS, 1)], labels, fontsize=8.5
            )
            ax.set_xlabel("w_m / beta")
            ax.set_title(
                f"({'a' if quantile == 'plain' else 'b'}) {quantile.capitalize()} quantile"
            )
        figure.axes[0].set_ylabel("distance to the target")
        figure.axes[1].legend(fontsize=9, loc="lower right")
        figure.savefig(path, dpi=110)


def _draw_border_line(ax: Axes, k: int, n: int, rows: dict[int, tuple[torch.Tensor, bool]]) -> None:
    """Draw medians and ranges for one N, with hollow markers where `minimize` warns."""
    x = [_ratio_position(1 - left / (BETA * n)) for left in rows]
    low, middle, high = (
        [float(getattr(values, name)()) for values, _ in rows.values()]
        for name in ("min", "median", "max")
    )
    style = {"color": PALETTE[k], "zorder": 3 - k}
    ax.plot(x, middle, linestyle=LINE_STYLES[k], label=f"N = {n:,}", **style)
    ax.vlines(x, low, high, linewidth=1, alpha=0.5, **style)
    for has_warning in (False, True):
        selected = [j for j, (_, warned) in enumerate(rows.values()) if warned == has_warning]
        points = [x[j] for j in selected], [middle[j] for j in selected]
        face = "white" if has_warning else PALETTE[k]
        marker = {"marker": "osD"[k], "markersize": 5.5, "markerfacecolor": face}
        ax.plot(*points, linestyle="none", **marker, **style)


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-particles", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--figure", type=Path)
    parser.add_argument(
        "--border", type=Path, help="measure only the border, and draw it in this file"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", fedcb2o.CaptureWarning)
    if arguments.border:
        draw_border(arguments.border, measure_border(arguments.runs))
        return

    size = {"num_particles": arguments.num_particles, "runs": arguments.runs}
    by_share = {}
    for level in LEVELS:
        by_share[f"delta_q = {level:g}"] = [
            errors(CIRCLE.bad, w_m, delta_q=level, **size) for w_m in SHARES
        ]
    print_table("attackers at (-1, 0), w_m =", SHARES, by_share)
    by_beta = {}
    for w_m in (0.0, 0.1, 0.3):
        by_beta[f"w_m = {w_m:g}"] = [errors(CIRCLE.lure, w_m, beta=beta, **size) for beta in BETAS]
    print_table("attackers at (2, 0), beta =", BETAS, by_beta)
    if arguments.figure:
        draw(arguments.figure, by_share, by_beta)


if __name__ == "__main__":
    main()
