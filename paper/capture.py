"""When malicious particles capture the consensus point, and what cures it: the tables and figures of docs/particles.md.

    .venv/bin/python paper/capture.py [--num-particles 10000] [--runs 3] [--figure docs/figures/capture.png]
    .venv/bin/python paper/capture.py --runs 10 --border docs/figures/capture-border.png

L = (|x|^2 - 1)^2, G = |x - (2, 0)|^2, target (1, 0). Isotropic noise, lambda1 = 1, sigma1 = 0.5, alpha = 1000,
beta = 0.05 unless it is varied, dt = 0.01, 600 steps, start N(0, I). Attackers stand at (-1, 0), a minimiser of L that
is bad for G, or at (2, 0), the minimiser of G, with the share w_m of the measure (eq:dyn_macro). Errors are distances
of the last consensus point from the target: the median over the runs, and in brackets the largest where it differs.

The second command measures the border: delta_q = 0, N particles that all count alike, so many of them at (-1, 0) that
(beta - w_m) N benign ones are left in the sub-level set of the plain quantile, and the same with the averaged one.
"""

import argparse
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure

import fedcb2o
from fedcb2o.particles import adversaries
from fedcb2o.particles.objectives import problem
from fedcb2o.particles.result import Result
from fedcb2o.report.figures import LINE_STYLES, PALETTE, STYLE

CIRCLE = problem("circle")
SHARES = (0.0, 0.02, 0.04, 0.05, 0.06, 0.1, 0.3, 0.5)
LEVELS = (0.0, 0.001, 0.01, 0.1)
BETAS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
SIZES = (200, 1000, 10_000)
LEFT = (0, 1, 2, 3, 4, 5, 6, 8, 10, 16, 24, 32, 50, 100, 250, 500)  # (beta - w_m) N
Border = dict[
    str, dict[int, dict[int, tuple[torch.Tensor, bool]]]
]  # by quantile, N and how many are left
SETTINGS: dict[str, Any] = {
    "alpha": 1000.0,
    "beta": 0.05,
    "sigma1": 0.5,
    "noise": "isotropic",
    "maxiter": 600,
    "xtol": 0.0,
}


def run(**settings: Any) -> Result:
    """The setting of this benchmark, with others where they are given."""
    return fedcb2o.minimize(
        CIRCLE.lower,
        CIRCLE.upper,
        2,
        initial=lambda draw, n, d: draw.standard_normal((n, d)),
        **{**SETTINGS, **settings},
    )


def distance(result: Result) -> torch.Tensor:
    """The error of every run, [runs]."""
    return (result.x - torch.tensor(CIRCLE.target)).norm(dim=-1)


def errors(
    at: tuple[float, ...], w_m: float, *, num_particles: int, runs: int, **settings: float
) -> torch.Tensor:
    """The error of every run, [runs], under attackers at a point with that share."""
    attack = [adversaries.static(1, at, mass=w_m)] if w_m else []
    return distance(run(adversaries=attack, num_particles=num_particles, runs=runs, **settings))


def border(quantile: str, num_particles: int, left: int, runs: int) -> tuple[torch.Tensor, bool]:
    """The error of every run where attackers leave so many of beta N, [runs], and whether `minimize` warns of that."""
    num_malicious = round(SETTINGS["beta"] * num_particles) - left
    attack = [adversaries.static(num_malicious, CIRCLE.bad)] if num_malicious else []
    found = run(
        adversaries=attack,
        num_particles=num_particles - num_malicious,
        runs=runs,
        quantile=quantile,
    )
    return distance(found), bool(found.notes)


def told(values: torch.Tensor) -> str:
    """Median and, where it differs, the largest."""
    middle = f"{values.median():.2g}"
    most = f"{values.max():.2g}"
    return middle if middle == most else f"{middle} ({most})"


def table(title: str, head: tuple[float, ...], rows: dict[str, list[torch.Tensor]]) -> None:
    """Print a table in Markdown."""
    print(f"\n| {title} | " + " | ".join(f"{value:g}" for value in head) + " |")
    print("|---" + "|---:" * len(head) + "|")
    for name, values in rows.items():
        print(f"| {name} | " + " | ".join(map(told, values)) + " |", flush=True)


def draw(
    path: Path, by_share: dict[str, list[torch.Tensor]], by_beta: dict[str, list[torch.Tensor]]
) -> None:
    """Write the figure."""
    with rc_context(STYLE):
        figure = Figure(figsize=(9.6, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for ax, x, rows in ((left, SHARES, by_share), (right, BETAS, by_beta)):
            for k, (name, values) in enumerate(rows.items()):
                look = {
                    "color": PALETTE[k],
                    "linestyle": LINE_STYLES[k],
                    "marker": "osD^"[k],
                    "markersize": 5,
                }
                ax.plot(x, [each.median() for each in values], label=name, **look)
            ax.set_yscale("log")
            ax.set_ylim(2e-4, 4)
            ax.set_ylabel("distance to the target")
            ax.legend(fontsize=9)
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


def measure_border(runs: int) -> Border:
    """Measure the border and print it as a table, with a star where `minimize` warns."""
    found: Border = {quantile: {n: {} for n in SIZES} for quantile in ("plain", "averaged")}
    print(
        "\n| (beta - w_m) N | "
        + " | ".join(f"{quantile}, N = {n:,}" for quantile in found for n in SIZES)
        + " |"
    )
    print("|---:" * (1 + 2 * len(SIZES)) + "|")
    for left in LEFT:
        cells = []
        for quantile, sizes in found.items():
            for n, rows in sizes.items():
                if left <= SETTINGS["beta"] * n:
                    rows[left] = border(quantile, n, left, runs)
                cells.append(told(rows[left][0]) + " \\*" * rows[left][1] if left in rows else "")
        print(f"| {left} | " + " | ".join(cells) + " |", flush=True)
    return found


def draw_border(path: Path, found: Border) -> None:
    """Write the figure of the border: the error over w_m / beta, whose axis is logarithmic in the distance to 1."""
    ticks, end = (
        (0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998),
        1.1e-3,
    )  # where 1 itself is shown

    def place(ratio: float) -> float:
        return -math.log10(max(1 - ratio, end))

    with rc_context(STYLE):
        figure = Figure(figsize=(9.6, 4.1), layout="constrained")
        for ax, (quantile, sizes) in zip(
            figure.subplots(1, 2, sharey=True), found.items(), strict=True
        ):
            for k, (n, rows) in enumerate(sizes.items()):
                x = [place(1 - left / (SETTINGS["beta"] * n)) for left in rows]
                low, middle, high = (
                    [float(getattr(errors, name)()) for errors, _ in rows.values()]
                    for name in ("min", "median", "max")
                )
                look = {"color": PALETTE[k], "zorder": 3 - k}
                ax.plot(x, middle, linestyle=LINE_STYLES[k], label=f"N = {n:,}", **look)
                ax.vlines(x, low, high, linewidth=1, alpha=0.5, **look)
                for warned in (False, True):
                    at = [
                        j for j, (_, is_warned) in enumerate(rows.values()) if is_warned == warned
                    ]
                    face = "white" if warned else PALETTE[k]
                    points = [x[j] for j in at], [middle[j] for j in at]
                    ax.plot(
                        *points,
                        linestyle="none",
                        marker="osD"[k],
                        markersize=5.5,
                        markerfacecolor=face,
                        **look,
                    )
            ax.plot(
                [], [], "o", color="0.3", markerfacecolor="white", label="minimize warns (hollow)"
            )
            ax.set_yscale("log")
            ax.set_ylim(1e-4, 4)
            ax.set_xticks(
                [*map(place, ticks), place(1)],
                [*(f"{tick:g}" for tick in ticks), "1"],
                fontsize=8.5,
            )
            ax.set_xlabel("w_m / beta")
            ax.set_title(
                f"({'a' if quantile == 'plain' else 'b'}) {quantile.capitalize()} quantile"
            )
        figure.axes[0].set_ylabel("distance to the target")
        figure.axes[1].legend(fontsize=9, loc="lower right")
        figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-particles", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--border", type=Path, help="measure the border alone, and draw it there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", fedcb2o.CaptureWarning)
    if arguments.border:
        draw_border(arguments.border, measure_border(arguments.runs))
        return
    size = {"num_particles": arguments.num_particles, "runs": arguments.runs}
    by_share = {
        f"delta_q = {level:g}": [errors(CIRCLE.bad, w_m, delta_q=level, **size) for w_m in SHARES]
        for level in LEVELS
    }
    table("attackers at (-1, 0), w_m =", SHARES, by_share)
    by_beta = {
        f"w_m = {w_m:g}": [errors(CIRCLE.lure, w_m, beta=beta, **size) for beta in BETAS]
        for w_m in (0.0, 0.1, 0.3)
    }
    table("attackers at (2, 0), beta =", BETAS, by_beta)
    if arguments.figure:
        draw(arguments.figure, by_share, by_beta)


if __name__ == "__main__":
    main()
