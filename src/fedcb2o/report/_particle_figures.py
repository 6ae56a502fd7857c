"""Figures of particles: the landscape of L and G, and decay.

The figures draw plain arrays, a `Scene`, in two panels. The first is the landscape of the first two
coordinates (for d = 1 the graphs of L and G). The second is V over time (eq:V) with the rate of
thm:main (García Trillos et al., arXiv 2412.02535).
"""

import dataclasses
import html
import re
import textwrap
import warnings
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from fedcb2o.report._decay import (
    BENIGN_COLOURS,
    MALICIOUS_COLOUR,
    Decay,
    draw_decay,
    format_time,
)
from fedcb2o.report._html import render_animation
from fedcb2o.report._panels import LINE_STYLES, STYLE

_UPPER_COLOUR = "#CC79A7"
_TARGET_COLOUR = "#F0E442"
_MINIMISER_COLOUR = "0.15"
_GREYS = ListedColormap(mpl.colormaps["Greys"](np.linspace(0.55, 0.0, 256)))
"""Greys from dark, for low values, to white; black text stays readable."""
_MINIMISER_SHARE = 0.01  # share of the square that is shown as minimisers of L
_MAX_CONTOUR_SEGMENTS = 50  # beyond, G oscillates and has fewer lines
_TEXT_BOX = {
    "boxstyle": "square,pad=0.25",
    "facecolor": "white",
    "edgecolor": "none",
    "alpha": 0.85,
}
_ICONS = {
    "fa-minus": "−",
    "fa-fast-backward": "|‹",
    "fa-step-backward": "‹",
    "fa-play fa-flip-horizontal": "◀",
    "fa-pause": "||",
    "fa-play": "▶",
    "fa-step-forward": "›",
    "fa-fast-forward": "›|",
    "fa-plus": "+",
}
"""Characters of every font that replace the icons of matplotlib's player."""


@dataclasses.dataclass(frozen=True)
class Scene:
    """Particles in d dimensions and K clusters, of one run."""

    title: str
    # d; the arrays below, except on the grid, have min(d, 2) coordinates.
    dim: int
    # Ends of the square that is shown.
    box: tuple[float, float]
    # Coordinates at which L and G are known, equal along each axis; None for d > 2.
    grid: np.ndarray | None
    # L on the grid, shape [K, s] or [K, s, s], with the first coordinate along the last axis; None
    # for d > 2.
    lower_values: np.ndarray | None
    # G on the grid, shape [s] or [s, s]; None without a G.
    upper_values: np.ndarray | None
    # Times of the frames, shape [f].
    times: np.ndarray
    # Benign particles, shape [f, n, min(d, 2)].
    theta: np.ndarray
    # Cluster of each benign particle, shape [n].
    cluster: np.ndarray
    # Malicious particles, shape [f, n_m, min(d, 2)].
    theta_m: np.ndarray
    # Consensus points, shape [f, K, min(d, 2)].
    m: np.ndarray
    # Final consensus points of all runs, shape [runs, K, min(d, 2)].
    final_points: np.ndarray
    # Target of each cluster, shape [K, min(d, 2)]; None if unknown.
    target: np.ndarray | None
    decay: Decay


@mpl.rc_context(STYLE)
def draw_landscape(scene: Scene) -> Figure:
    """Draw the particles at several times, and the decay of V."""
    figure = Figure(figsize=(10.6, 5.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.12, 1.0))
    figure.suptitle(scene.title, x=0.01, ha="left", fontsize=11)
    _draw_background(left, scene)
    frames = _selected_frames(scene)
    for frame, opacity in zip(frames, np.linspace(0.22, 1.0, len(frames)), strict=True):
        label = f"t = {format_time(scene.times[frame])}"
        _draw_particles(left, scene, frame, opacity, label, 12.0)
    _draw_consensus_paths(left, scene, len(scene.times))
    _draw_final_points(left, scene)
    title = "(a) Landscape"
    if scene.dim > 2:
        title = f"(a) The first two of {scene.dim} coordinates, without landscape"
    _finish_axes(left, scene, title)
    _add_landscape_legend(left, scene)
    draw_decay(right, scene.decay)
    return figure


@mpl.rc_context(STYLE)
def write_animation(scene: Scene, path: Path, *, frames: int = 48, fps: int = 12) -> None:
    """Write the landscape with moving particles.

    A `path` with another suffix than .gif gets an HTML page with a player. `frames` is the largest
    number of frames, `fps` their number per second.
    """
    figure, axes = _still_landscape(scene)
    artists: list[Any] = []

    def draw(frame: int) -> list[Any]:
        for artist in artists:
            artist.remove()
        time = f"t = {format_time(scene.times[frame])}"
        artists[:] = [
            *_draw_particles(axes, scene, frame, 0.9, "", 12.0),
            *_draw_consensus_paths(axes, scene, frame + 1),
            *_draw_final_points(axes, scene, with_final_points=False),
            axes.text(0.02, 0.02, time, transform=axes.transAxes, bbox=_TEXT_BOX),
        ]
        return artists

    steps = np.linspace(0, len(scene.times) - 1, frames).round().astype(int)
    shown = np.unique(steps).tolist()
    is_gif = path.suffix == ".gif"
    if is_gif:
        shown += shown[-1:] * fps  # a GIF shows its end for one second
    movie = FuncAnimation(figure, draw, frames=shown, interval=1000 / fps, init_func=lambda: [])
    if is_gif:
        movie.save(path, writer=PillowWriter(fps=fps), dpi=80)
        return
    # Megabytes; the default of matplotlib would leave out the last frames.
    with mpl.rc_context({"animation.embed_limit": 50}):
        player = movie.to_jshtml(fps=fps, default_mode="once")
    page = render_animation(scene.title.splitlines()[0], _standalone_player(player, scene))
    path.write_text(page, encoding="utf-8")


def _still_landscape(scene: Scene) -> tuple[Figure, Axes]:
    """Draw what does not move once, into an image behind every frame."""
    figure = Figure(figsize=(5.8, 5.6), layout="constrained", dpi=80)
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    _draw_background(axes, scene)
    _finish_axes(axes, scene, "")
    lines = [textwrap.fill(line, 78) for line in scene.title.splitlines()]
    axes.set_title("\n".join(lines), fontsize=8.5)
    canvas.draw()  # type: ignore[no-untyped-call]
    image = np.array(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    figure.set_layout_engine("none")
    for ax in figure.axes:
        ax.set_axis_off()
        still: Any = (*ax.collections, *ax.lines, ax.title, ax._left_title)  # type: ignore[attr-defined]
        for artist in still:
            artist.set_visible(False)
    figure.figimage(image, zorder=-1)
    return figure, axes


def _standalone_player(player: str, scene: Scene) -> str:
    """Remove the network from matplotlib's player, and describe it for screen readers."""
    player = re.sub(r"<link[^>]*>", "", player)
    for name, icon in _ICONS.items():
        player = player.replace(f'<i class="fa {name}"></i>', icon)
    description = html.escape(_describe_animation(scene), quote=True)
    player = player.replace("<img ", f'<img alt="{description}" ')
    return player.replace('type="range"', 'type="range" aria-label="Frame"')


def _describe_animation(scene: Scene) -> str:
    """Describe the ways of the consensus points, and the target."""
    paths = []
    for path in scene.m.swapaxes(0, 1):
        paths.append(f"from {_format_point(path[0])} to {_format_point(path[-1])}")
    text = (
        f"Particles on the landscape until t = {format_time(scene.times[-1])}; the consensus point "
        f"goes {', '.join(paths)}"
    )
    if scene.target is not None:
        text += f"; the target is {', '.join(map(_format_point, scene.target))}"
    return f"{text}."


def _format_point(point: np.ndarray) -> str:
    return f"({', '.join(f'{value:.3g}' for value in point)})"


def _draw_background(ax: Axes, scene: Scene) -> None:
    """Draw L in grey and G as lines; for d = 1 graphs."""
    if scene.grid is None or scene.lower_values is None:
        return
    if scene.dim == 1:
        _draw_graphs(ax, scene)
        return
    lower = np.ma.masked_invalid(scene.lower_values)
    _draw_lower_heights(ax, scene.grid, lower)
    for values in lower:
        level = np.quantile(values.compressed(), _MINIMISER_SHARE)
        if level > values.min():
            levels = [values.min() - 1, level]
            ax.contourf(scene.grid, scene.grid, values, levels, colors=[_MINIMISER_COLOUR])
    ax.plot([], [], color=_MINIMISER_COLOUR, linewidth=4, label="lowest L")
    if scene.upper_values is not None:
        _draw_upper_contours(ax, scene.grid, np.ma.masked_invalid(scene.upper_values))
        ax.plot([], [], color=_UPPER_COLOUR, linewidth=1, label="G")
        minimiser = _upper_minimiser(scene)
        if minimiser is not None:
            look: dict[str, Any] = {"markeredgecolor": "white", "markersize": 6}
            ax.plot(*minimiser, "D", color=_UPPER_COLOUR, label="lowest G", **look)


def _draw_lower_heights(ax: Axes, grid: np.ndarray, lower: Any) -> None:
    """Draw the height of L above its minimum in greys, on a log scale where it spans much."""
    minimum = lower.min(0)
    height = minimum - minimum.min()
    low, high = np.quantile(height.compressed(), [_MINIMISER_SHARE, 1.0])
    levels: Any = np.linspace(0, high, 15)
    norm: Any = Normalize(0, high)
    locator: Any = MaxNLocator(5)
    if high > 50 * low > 0:
        levels = np.geomspace(low, high, 15)
        norm = LogNorm(low, high)
        locator = LogLocator(numticks=6)
    height = np.maximum(height, levels[0])
    filled = ax.contourf(grid, grid, height, levels, cmap=_GREYS, norm=norm)
    bar = ax.figure.colorbar(filled, ax=ax, shrink=0.7, pad=0.02, label="L − min L", aspect=30)
    bar.ax.yaxis.set_major_locator(locator)
    bar.ax.yaxis.set_minor_formatter(NullFormatter())


def _draw_upper_contours(ax: Axes, grid: np.ndarray, upper: Any) -> None:
    """Draw G as contour lines, fewer of them where it oscillates."""
    if not upper.min() < upper.max():
        return
    look: dict[str, Any] = {"colors": [_UPPER_COLOUR], "linestyles": "solid"}
    levels = MaxNLocator(9).tick_values(upper.min(), upper.max())[1:-1]
    lines = ax.contour(grid, grid, upper, levels, linewidths=0.9, **look)
    if sum(map(len, lines.allsegs)) > _MAX_CONTOUR_SEGMENTS:
        lines.remove()
        ax.contour(grid, grid, upper, levels[1::3], linewidths=0.6, **look)


def _upper_minimiser(scene: Scene) -> tuple[float, float] | None:
    """Find the minimiser of G on the grid, unless at its edge."""
    if scene.dim != 2 or scene.upper_values is None or scene.grid is None:
        return None
    row, column = np.unravel_index(np.nanargmin(scene.upper_values), scene.upper_values.shape)
    edge = (0, len(scene.grid) - 1)
    if row in edge or column in edge:
        return None
    return float(scene.grid[column]), float(scene.grid[row])


def _draw_graphs(ax: Axes, scene: Scene) -> None:
    assert scene.grid is not None
    assert scene.lower_values is not None
    for k, values in enumerate(scene.lower_values):
        style = LINE_STYLES[k % len(LINE_STYLES)]
        look: dict[str, Any] = {"color": "0.45", "linewidth": 1.2, "linestyle": style}
        ax.plot(scene.grid, values, zorder=1, label="L", **look)
    low = np.nanmin(scene.lower_values)
    high = np.nanmax(scene.lower_values)
    ax.set_ylim(low - 0.08 * (high - low), high + 0.08 * (high - low))
    if scene.upper_values is not None:
        twin = ax.twinx()
        twin.plot(scene.grid, scene.upper_values, color=_UPPER_COLOUR, linewidth=1.2)
        ax.plot([], [], color=_UPPER_COLOUR, linewidth=1, label="G")
        twin.set_ylabel("G", color=_UPPER_COLOUR)
        twin.tick_params(axis="y", colors=_UPPER_COLOUR)
        twin.grid(visible=False)
        twin.set_zorder(ax.get_zorder() - 1)
        ax.patch.set_visible(False)


def _drawn_coordinates(
    scene: Scene, points: np.ndarray, k: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Compute drawn coordinates of points; for d = 1 on L's graph."""
    x = points[:, 0]
    if scene.dim == 1 and scene.grid is not None and scene.lower_values is not None:
        y: np.ndarray = np.interp(x, scene.grid, scene.lower_values[k], left=np.nan, right=np.nan)
        return x, y
    if points.shape[1] == 1:
        return x, np.zeros(len(points))
    return x, points[:, -1]


def _draw_particles(
    ax: Axes, scene: Scene, frame: int, opacity: float, label: str, size: float
) -> list[Any]:
    artists: list[Any] = []
    if scene.dim == 1:
        size *= 2
    for k in range(scene.m.shape[1]):
        x, y = _drawn_coordinates(scene, scene.theta[frame, scene.cluster == k], k)
        dots = ax.scatter(
            x,
            y,
            s=size,
            label=label * (k == 0),
            color=BENIGN_COLOURS[k % len(BENIGN_COLOURS)],
            alpha=opacity,
            linewidths=0,
            zorder=3,
        )
        artists.append(dots)
    if scene.theta_m.shape[1]:
        x, y = _drawn_coordinates(scene, scene.theta_m[frame])
        crosses = ax.scatter(
            x,
            y,
            s=70,
            marker="X",
            label="malicious",
            color=MALICIOUS_COLOUR,
            alpha=opacity,
            edgecolors="white",
            linewidths=0.6,
            zorder=8,
        )
        artists.append(crosses)
    return artists


def _draw_consensus_paths(ax: Axes, scene: Scene, end: int) -> list[Any]:
    """Draw the paths of the consensus points up to a frame."""
    look: dict[str, Any] = {"linewidth": 1.3}
    if scene.dim == 1:
        look = {"linewidth": 0, "marker": ".", "markersize": 3.5}
    artists: list[Any] = []
    for k in range(scene.m.shape[1]):
        x, y = _drawn_coordinates(scene, scene.m[:end, k], k)
        outline = [withStroke(linewidth=3, foreground="white")]
        artists += ax.plot(x, y, color="black", path_effects=outline, zorder=4, **look)
        end_look: dict[str, Any] = {"markeredgecolor": "white", "markersize": 5.5, "zorder": 7}
        artists += ax.plot(x[-1:], y[-1:], "o", color="black", label="consensus point", **end_look)
    return artists


def _draw_final_points(ax: Axes, scene: Scene, *, with_final_points: bool = True) -> list[Any]:
    """Draw the final points of all runs, and the target."""
    artists: list[Any] = []
    if with_final_points and len(scene.final_points) > 1:
        for k in range(scene.final_points.shape[1]):
            x, y = _drawn_coordinates(scene, scene.final_points[:, k], k)
            outline = [withStroke(linewidth=2.5, foreground="white")]
            crosses = ax.scatter(
                x,
                y,
                s=28,
                marker="+",
                label=f"answers of {len(scene.final_points)} runs",
                color="black",
                linewidths=1,
                path_effects=outline,
                zorder=6,
            )
            artists.append(crosses)
    if scene.target is not None:
        for k, point in enumerate(scene.target):
            x, y = _drawn_coordinates(scene, point[None], k)
            look: dict[str, Any] = {"s": 260, "edgecolors": "black", "zorder": 5}
            star = ax.scatter(x, y, marker="*", color=_TARGET_COLOUR, label="target", **look)
            artists.append(star)
    return artists


def _finish_axes(ax: Axes, scene: Scene, title: str) -> None:
    ax.set_title(title)
    ax.grid(visible=False)
    ax.set_xlim(*scene.box)
    if scene.dim == 1:
        ax.set(xlabel="x", ylabel="L")
        return
    ax.set(xlabel="$x_1$", ylabel="$x_2$", ylim=scene.box)
    ax.set_aspect("equal")


def _add_landscape_legend(ax: Axes, scene: Scene) -> None:
    """Add a legend with one entry for each label, that of the last artist."""
    clusters = scene.m.shape[1]
    if clusters > 1:
        for k in range(clusters):
            colour = BENIGN_COLOURS[k % len(BENIGN_COLOURS)]
            ax.scatter([], [], s=16, color=colour, label=f"cluster {k + 1}")
    handles, labels = ax.get_legend_handles_labels()
    entries = dict(zip(labels, handles, strict=True))
    ax.legend(
        entries.values(),
        entries.keys(),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        ncols=4,
        fontsize=8.5,
        markerscale=0.7,
        handletextpad=0.4,
        columnspacing=1.2,
        handlelength=1.4,
    )


def _selected_frames(scene: Scene) -> list[int]:
    """Select the first, the last and two middle frames.

    Frames at equal times replace the middle ones if the distance never falls so far.
    """
    own_consensus = scene.m[:, scene.cluster]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a frame of NaN only
        squares = np.square(scene.theta - own_consensus).sum(-1)
        distance = np.sqrt(np.nanmean(squares, 1))
    last = len(scene.times) - 1
    middle = [int(np.argmax(distance <= share * distance[0])) for share in (0.5, 0.2)]
    if not all(middle):
        middle = [last // 3, 2 * last // 3]
    return sorted({0, *middle, last})
