"""Particles on the landscape of L and G, attackers among them, and the decay of V.

    python examples/landscape.py                                  # the figure of docs/particles.md
    python examples/landscape.py waves-1d --attack none --animate film.gif
    python examples/landscape.py circle --attack tracking --malicious 20 --delta-q 0

Left, L in grey, contours of G, particles from early (faint) to late, attackers as crosses, the
consensus point as a line, the target as a star. Right, V (eq:V), half the mean squared distance of
the benign particles from the target, its fitted rate, and the band of thm:main (García Trillos et
al., arXiv 2412.02535). `--animate` writes a film too: FILE.gif, or FILE.html with a player.
Change the script for problems and settings of your own. It needs matplotlib.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import fedcb2o
from fedcb2o.particles import Problem, State, adversaries, problem, problems, theory

STYLE: Any = {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
COLOURS = ("#0072B2", "#009E73", "#56B4E9", "#7F7F7F")  # of the clusters
ATTACKER, UPPER, TARGET = "#D55E00", "#CC79A7", "#F0E442"
GREYS = mpl.colors.ListedColormap(mpl.colormaps["Greys"](np.linspace(0.55, 0.0, 256)))
GRID_POINTS = 181
FRAMES_PER_SECOND = 12
VARTHETA = 0.25  # of thm:main, for the band


def attackers(kind: str, n: int, case: Problem, mass: float | None) -> list[fedcb2o.Adversary]:
    """Return the malicious particles of a kind."""
    bad = case.bad or (case.box[0],) * case.dim
    lure = case.lure or (case.box[1],) * case.dim
    kinds = {
        "none": lambda: None,
        "static": lambda: adversaries.static(n, bad, mass=mass),  # a minimiser of L, bad for G
        "lure": lambda: adversaries.static(n, lure, mass=mass),  # the minimiser of G
        "tracking": lambda: adversaries.tracking(n, (0.5,) * case.dim, mass=mass),
        "random": lambda: adversaries.random(n, mass=mass),
        "oscillating": lambda: adversaries.oscillating(n, (bad, lure), period=2.0, mass=mass),
    }
    group = kinds[kind]()
    return [] if group is None else [group]


@dataclasses.dataclass
class Film:
    """A callback that keeps every step: times, particles, attackers and consensus points."""

    times: list[float] = dataclasses.field(default_factory=list)
    theta: list[np.ndarray] = dataclasses.field(default_factory=list)
    theta_m: list[np.ndarray] = dataclasses.field(default_factory=list)
    m: list[np.ndarray] = dataclasses.field(default_factory=list)

    def __call__(self, state: State) -> None:
        """Keep copies: the particles change in place."""
        self.times.append(state.t)
        self.theta.append(state.theta.numpy().copy())
        self.theta_m.append(state.theta_m.numpy().copy())
        self.m.append(np.atleast_2d(state.x.numpy().copy()))


def draw_background(ax: Axes, case: Problem) -> Any:
    """Draw L and G, and return L on the grid for d = 1."""
    line = torch.linspace(*case.box, GRID_POINTS, dtype=torch.float64)
    points = torch.stack(torch.meshgrid(*[line] * case.dim, indexing="xy"), -1)
    lowers = [case.lower] if callable(case.lower) else case.lower
    lower = np.stack([function(points).numpy() for function in lowers])
    upper = None if case.upper is None else case.upper(points).numpy()
    if case.dim == 1:
        ax.plot(line, lower[0], color="0.45", label="L")
        if upper is not None:
            twin = ax.twinx()
            twin.plot(line, upper, color=UPPER)
            twin.set_ylabel("G", color=UPPER)
        ax.set(xlabel="x", ylabel="L")
        return line.numpy(), lower[0]

    height = lower.min(0) - lower.min()
    low, high = np.quantile(height, [0.01, 1.0])  # the lowest hundredth is drawn dark
    levels, norm = np.linspace(0, high, 15), mpl.colors.Normalize(0, high)
    if high > 50 * low > 0:
        levels, norm = np.geomspace(low, high, 15), mpl.colors.LogNorm(low, high)
    height = np.maximum(height, levels[0])
    filled = ax.contourf(line, line, height, levels, cmap=GREYS, norm=norm)
    ax.figure.colorbar(filled, ax=ax, shrink=0.7, pad=0.02, label="L - min L", format="%.2g")
    ax.contourf(line, line, height, [-1, max(low, 1e-300)], colors="0.15")
    if upper is not None:
        ax.contour(line, line, upper, 7, colors=UPPER, linewidths=0.8)
        ax.plot([], [], color=UPPER, label="G")
    ax.set(xlabel="$x_1$", ylabel="$x_2$", xlim=case.box, ylim=case.box, aspect="equal")
    return None


def draw_particles(
    ax: Axes, film: Film, frame: int, case: Problem, graph: Any, *, alpha: float = 1.0
) -> list[Any]:
    """Draw the particles of one step, the path of the consensus points, and the target."""

    def xy(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if graph is None:
            return points[:, 0], points[:, 1]
        return points[:, 0], np.interp(points[:, 0], *graph)

    clusters = film.m[0].shape[0]
    artists: list[Any] = []
    for k, theta in enumerate(np.array_split(film.theta[frame], clusters)):
        colour = COLOURS[k % len(COLOURS)]
        artists += ax.plot(*xy(theta), ".", color=colour, markersize=4, alpha=alpha, zorder=3)
    artists += ax.plot(*xy(film.theta_m[frame]), "X", color=ATTACKER, alpha=alpha, zorder=6)
    for k in range(clusters):
        path = np.stack([m[k] for m in film.m[: frame + 1]])
        if graph is None:
            artists += ax.plot(*xy(path), color="white", linewidth=3, zorder=4)
            artists += ax.plot(*xy(path), color="black", linewidth=1.3, zorder=4)
        artists += ax.plot(*xy(path[-1:]), "o", color="black", markersize=5, zorder=7)
    target = np.array(case.target, dtype=float).reshape(-1, case.dim)
    look: Any = {"markersize": 16, "color": TARGET, "markeredgecolor": "black", "zorder": 5}
    artists += ax.plot(*xy(target), "*", **look)
    return artists


def draw_decay(ax: Axes, film: Film, case: Problem, dynamics: fedcb2o.Paper, covered: bool) -> None:
    """Draw V over time with its fitted rate, and the band of the theorem if it covers the run."""
    t = torch.tensor(film.times, dtype=torch.float64)
    targets = torch.tensor(case.target, dtype=torch.float64).reshape(-1, case.dim)
    for k, target in enumerate(targets):
        parts = [np.array_split(theta, len(targets))[k] for theta in film.theta]
        V = theory.V(torch.from_numpy(np.stack(parts)), target)
        level = max(0.05 * float(V[0]), 1.2 * float(V.min()))
        last = int((level >= V).nonzero()[0, 0])
        window = slice(0, max(3, last + 1))
        fitted = float(theory.fit_decay_rate(t[window], V[window]))
        ax.plot(t, V, color=COLOURS[k % len(COLOURS)], linewidth=2, label=f"V, rate {fitted:.3g}")
        offset = (V[window].log() + fitted * t[window]).mean()
        ax.plot(t[window], (offset - fitted * t[window]).exp(), "--", color=ATTACKER)
    noise: Any = {"sigma1": dynamics.sigma1, "noise": dynamics.noise}
    rate = theory.contraction_rate(lambda1=dynamics.lambda1, dim=case.dim, **noise)
    if covered and rate > 0 and dynamics.noise == "isotropic":
        low, high = theory.decay_bounds(t, float(V[0]), vartheta=VARTHETA, rate=rate)
        label = f"theory: 2λ₁ - dσ₁² = {rate:.3g} (band: ϑ = {VARTHETA})"
        ax.fill_between(t, low, high, color="0.87", label=label, zorder=1)
    ax.set(yscale="log", ylim=(float(V.min()) / 3, 3 * float(V.max())))
    ax.set(xlabel="time t", ylabel="V, half the mean squared distance")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13))


def draw_figure(film: Film, case: Problem, dynamics: fedcb2o.Paper, title: str) -> Figure:
    """Draw the landscape with the particles of several steps, and the decay of V."""
    figure = Figure(figsize=(10.6, 5.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.12, 1.0))
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    graph = draw_background(left, case)
    start = np.linalg.norm(film.theta[0] - film.m[0][:1], axis=1).mean()
    distance = [
        np.linalg.norm(theta - m[:1], axis=1).mean()
        for theta, m in zip(film.theta, film.m, strict=True)
    ]
    middle = [int(np.argmax(np.array(distance) <= share * start)) for share in (0.5, 0.2)]
    frames = sorted({0, *middle, len(film.times) - 1})
    for frame, alpha in zip(frames, np.linspace(0.22, 1.0, len(frames)), strict=True):
        draw_particles(left, film, frame, case, graph, alpha=alpha)
        label = f"t = {film.times[frame]:.3g}"
        left.plot([], [], ".", color=COLOURS[0], alpha=alpha, label=label)
    if len(film.theta_m[0]):
        left.plot([], [], "X", color=ATTACKER, label="malicious")
    left.plot([], [], "*", color=TARGET, label="target")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=4, fontsize=8.5)
    covered = callable(case.lower) and case.upper is not None and not dynamics.needs_gradient
    draw_decay(right, film, case, dynamics, covered and dynamics.batch is None)
    return figure


def write_film(film: Film, case: Problem, title: str, path: Path, frames: int = 48) -> None:
    """Write the moving particles as a GIF, or as a page with a player."""
    figure = Figure(figsize=(5.8, 5.6), dpi=80, layout="constrained")
    ax = figure.subplots()
    graph = draw_background(ax, case)
    ax.set_title(title, fontsize=8.5)
    moving: list[Any] = []

    def draw(frame: int) -> list[Any]:
        for artist in moving:
            artist.remove()
        moving[:] = draw_particles(ax, film, frame, case, graph)
        return moving

    steps = np.unique(np.linspace(0, len(film.times) - 1, frames).round().astype(int)).tolist()
    movie = FuncAnimation(figure, draw, frames=steps, init_func=list)
    if path.suffix == ".gif":
        movie.save(path, writer=PillowWriter(fps=FRAMES_PER_SECOND))
    else:
        path.write_text(movie.to_jshtml(fps=FRAMES_PER_SECOND, default_mode="once"), "utf-8")


@mpl.rc_context(STYLE)
def main() -> None:
    """Run, draw and print."""
    names = [name for name, item in problems().items() if item.dim <= 2]
    kinds = ["none", "static", "lure", "tracking", "random", "oscillating"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problem", nargs="?", default="circle", choices=names)
    parser.add_argument("--attack", default="static", choices=kinds)
    parser.add_argument("--malicious", type=int, default=60, metavar="N")
    parser.add_argument("--mass", type=float, help="weight w_m of all malicious particles")
    parser.add_argument("--benign", type=int, default=540, metavar="N")
    parser.add_argument("--delta-q", type=float, default=0.01)
    parser.add_argument("--sigma1", type=float, default=0.5)
    parser.add_argument("--maxiter", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("landscape.png"))
    parser.add_argument("--animate", type=Path, metavar="FILE")
    options = parser.parse_args()

    case = problem(options.problem)
    published = case.settings.get("dynamics", fedcb2o.Paper(beta=0.05))
    dynamics = dataclasses.replace(
        published, noise="isotropic", sigma1=options.sigma1, delta_q=options.delta_q, batch=None
    )
    film = Film()
    result = fedcb2o.minimize(
        case.lower,
        case.upper,
        case.dim,
        clusters=case.settings.get("clusters", False),
        dynamics=dynamics,
        num_particles=options.benign,
        adversaries=attackers(options.attack, options.malicious, case, options.mass),
        initial=case.settings.get("initial"),
        maxiter=options.maxiter,
        seed=options.seed,
        callback=film,
    )
    print(result)
    share = 0 if options.attack == "none" else options.malicious
    title = f"{case.title}\n{options.benign} particles, {share} malicious ({options.attack}), "
    title += f"δq = {dynamics.delta_q:g}, β = {dynamics.beta:g}, isotropic σ₁ = {dynamics.sigma1:g}"
    draw_figure(film, case, dynamics, title).savefig(options.out, dpi=100)
    if options.animate is not None:
        write_film(film, case, title, options.animate)


if __name__ == "__main__":
    main()
