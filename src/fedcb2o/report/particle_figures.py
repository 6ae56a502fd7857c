"""Figures of particles: where they go on the landscape of L and G, and how their distance to the target decays.

It draws plain arrays, a `Scene`, and knows nothing of who made them. Two panels: the landscape of the first two
coordinates (for d = 1 the graphs of L and G), and V over time (eq:V) against the rate of thm:main (García Trillos et
al., arXiv 2412.02535). Colours as in `figures`.
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
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from fedcb2o.report.decay import BENIGN_COLOURS, MALICIOUS_COLOUR, Decay, draw_decay, format_time
from fedcb2o.report.figures import LINE_STYLES, STYLE
from fedcb2o.report.html import STYLESHEET

_UPPER_COLOUR, _TARGET_COLOUR, _MINIMISER_COLOUR = "#CC79A7", "#F0E442", "0.15"
_GREYS = ListedColormap(
    mpl.colormaps["Greys"](np.linspace(0.55, 0.0, 256))
)  # dark is low, and black text still reads
_MINIMISER_SHARE = (
    0.01  # share of the square shown as "lowest L": what is seen of the minimisers of L
)


@dataclasses.dataclass(frozen=True)
class Scene:
    """What is to be seen of particles in d dimensions and of their K clusters, of the first run where there are many.

    Attributes:
        title: what it is.
        dim: d; of the arrays below all but the grid keep min(d, 2) coordinates.
        box: the square that is shown.
        grid: the coordinates at which L and G are known, the same along each axis; None where d is above 2.
        lower: L there, [K, s] or [K, s, s], the first coordinate along the last axis; None where d is above 2.
        upper: G there, [s] or [s, s]; None where there is no G.
        times: of the frames, [f].
        theta: the benign particles in them, [f, n, .].
        cluster: whose each is, [n].
        theta_m: the malicious particles, [f, n_m, .].
        m: the consensus points, [f, K, .].
        answers: those of the end, of all runs, [runs, K, .].
        target: where they should be, [K, .]; None where nobody knows.
        decay: V over time.
    """

    title: str
    dim: int
    box: tuple[float, float]
    grid: np.ndarray | None
    lower_values: np.ndarray | None
    upper_values: np.ndarray | None
    times: np.ndarray
    theta: np.ndarray
    cluster: np.ndarray
    theta_m: np.ndarray
    m: np.ndarray
    final_points: np.ndarray
    target: np.ndarray | None
    decay: Decay


@mpl.rc_context(STYLE)
def draw_landscape(scene: Scene) -> Figure:
    """The two panels: the particles on the landscape at several times, and the decay of V."""
    figure = Figure(figsize=(10.6, 5.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.12, 1.0))
    figure.suptitle(scene.title, x=0.01, ha="left", fontsize=11)
    _draw_background(left, scene)
    shown = _selected_frames(scene)
    for frame, opacity in zip(shown, np.linspace(0.22, 1.0, len(shown)), strict=True):
        last = frame == shown[-1]
        _draw_particles(
            left,
            scene,
            frame,
            opacity,
            f"t = {format_time(scene.times[frame])}",
            14.0 if last else 11.0,
        )
    _draw_consensus_paths(left, scene, len(scene.times))
    _draw_final_points(left, scene)
    _finish_axes(
        left,
        scene,
        "(a) Landscape"
        if scene.dim <= 2
        else f"(a) The first two of {scene.dim} coordinates, without landscape",
    )
    draw_decay(right, scene.decay)
    return figure


@mpl.rc_context(STYLE)
def write_animation(scene: Scene, path: Path, *, frames: int = 48, fps: int = 12) -> None:
    """Write the landscape with moving particles: a GIF, or an HTML page with its player, by the path's ending."""
    figure = Figure(figsize=(5.8, 5.6), layout="constrained", dpi=80)
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    _draw_background(axes, scene)
    _finish_axes(axes, scene, "", legend=False)
    wrapped = [textwrap.fill(line, 78) for line in scene.title.splitlines()]
    axes.set_title("\n".join(wrapped), fontsize=8.5)
    # What does not move is drawn once, into a picture that lies behind every frame.
    canvas.draw()  # type: ignore[no-untyped-call]
    still = np.array(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    figure.set_layout_engine("none")
    for each in figure.axes:
        each.set_axis_off()
        for artist in (*each.collections, *each.lines, each.title, each._left_title):  # type: ignore[attr-defined]
            artist.set_visible(False)
    figure.figimage(still, zorder=-1)
    drawn: list[Any] = []

    def draw(frame: int) -> list[Any]:
        for artist in drawn:
            artist.remove()
        drawn[:] = [
            *_draw_particles(axes, scene, frame, 0.9, "", 12.0),
            *_draw_consensus_paths(axes, scene, frame + 1),
            *_draw_final_points(axes, scene, with_final_points=False),
            axes.text(
                0.02,
                0.02,
                f"t = {format_time(scene.times[frame])}",
                transform=axes.transAxes,
                bbox=_PAPER,
            ),
        ]
        return drawn

    chosen = np.unique(np.linspace(0, len(scene.times) - 1, frames).round().astype(int)).tolist()
    gif = path.suffix == ".gif"
    shown = [*chosen, *chosen[-1:] * fps] if gif else chosen  # a GIF shows its end for a second
    movie = FuncAnimation(figure, draw, frames=shown, interval=1000 / fps, init_func=lambda: [])
    if gif:
        movie.save(path, writer=PillowWriter(fps=fps), dpi=80)
        return
    with mpl.rc_context({"animation.embed_limit": 50}):
        player = movie.to_jshtml(fps=fps, default_mode="once")
    player = re.sub(r"<link[^>]*>", "", player)  # icons from the network: the page stands alone
    for name, icon in _ICONS.items():
        player = player.replace(f'<i class="fa {name}"></i>', icon)
    player = player.replace(
        "<img ", f'<img alt="{html.escape(_describe_animation(scene), quote=True)}" '
    )
    player = player.replace('type="range"', 'type="range" aria-label="Frame"')
    page = _PAGE.format(
        title=html.escape(scene.title.splitlines()[0]), look=STYLESHEET, player=player
    )
    path.write_text(page, encoding="utf-8")


def _describe_animation(scene: Scene) -> str:
    """The animation in words: where the consensus points go, and where they should."""
    ways = [
        f"from {_format_point(way[0])} to {_format_point(way[-1])}"
        for way in scene.m.swapaxes(0, 1)
    ]
    targets = (
        ""
        if scene.target is None
        else f"; the target is {', '.join(map(_format_point, scene.target))}"
    )
    until = format_time(scene.times[-1])
    return f"Particles on the landscape until t = {until}; the consensus point goes {', '.join(ways)}{targets}."


def _format_point(point: np.ndarray) -> str:
    return f"({', '.join(f'{value:.3g}' for value in point)})"


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{look}</style></head><body><h1>{title}</h1><main>
{player}
<style>.animation, .anim-slider {{ max-width: 100%; }}</style></main></body></html>
"""
_ICONS = {  # of letters that every font has
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
_PAPER = {"boxstyle": "square,pad=0.25", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}


def _draw_background(ax: Axes, scene: Scene) -> None:
    """L in grey, where it is lowest in black, and G as lines; for d = 1 both as graphs."""
    if scene.grid is None or scene.lower_values is None:
        return
    if scene.dim == 1:
        _draw_graphs(ax, scene)
        return
    lower = np.ma.masked_invalid(scene.lower_values)
    every = lower.min(0)
    above = every - every.min()
    low, high = np.quantile(above.compressed(), [_MINIMISER_SHARE, 1.0])
    wide = high > 50 * low > 0
    norm: Any = LogNorm(low, high) if wide else Normalize(0, high)
    levels: Any = np.geomspace(low, high, 15) if wide else np.linspace(0, high, 15)
    filled = ax.contourf(
        scene.grid, scene.grid, np.maximum(above, levels[0]), levels, cmap=_GREYS, norm=norm
    )
    bar = ax.figure.colorbar(filled, ax=ax, shrink=0.7, pad=0.02, label="L − min L", aspect=30)
    bar.ax.yaxis.set_major_locator(LogLocator(numticks=6) if wide else MaxNLocator(5))
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    for own in lower:
        level = np.quantile(own.compressed(), _MINIMISER_SHARE)
        if level > own.min():
            ax.contourf(
                scene.grid, scene.grid, own, [own.min() - 1, level], colors=[_MINIMISER_COLOUR]
            )
    if scene.upper_values is not None:
        upper = np.ma.masked_invalid(scene.upper_values)
        look: dict[str, Any] = {"colors": [_UPPER_COLOUR], "linestyles": "solid", "linewidths": 0.9}
        if upper.min() < upper.max():
            values = MaxNLocator(9).tick_values(upper.min(), upper.max())[1:-1]
            lines = ax.contour(scene.grid, scene.grid, upper, values, **look)
            if sum(map(len, lines.allsegs)) > 50:  # G oscillates: fewer lines say more
                lines.remove()
                ax.contour(
                    scene.grid, scene.grid, upper, values[1::3], **{**look, "linewidths": 0.6}
                )
        if (best := _upper_minimiser(scene)) is not None:
            ax.plot(*best, "D", color=_UPPER_COLOUR, markeredgecolor="white", markersize=6)


def _upper_minimiser(scene: Scene) -> tuple[float, float] | None:
    """Where G is lowest on the grid, unless that is its edge."""
    if scene.dim != 2 or scene.upper_values is None or scene.grid is None:
        return None
    row, column = np.unravel_index(np.nanargmin(scene.upper_values), scene.upper_values.shape)
    edge = (0, len(scene.grid) - 1)
    return (
        None
        if row in edge or column in edge
        else (float(scene.grid[column]), float(scene.grid[row]))
    )


def _draw_graphs(ax: Axes, scene: Scene) -> None:
    assert scene.grid is not None
    assert scene.lower_values is not None
    for k, own in enumerate(scene.lower_values):
        ax.plot(
            scene.grid,
            own,
            color="0.45",
            linewidth=1.2,
            linestyle=LINE_STYLES[k % len(LINE_STYLES)],
            zorder=1,
        )
    low = np.nanmin(scene.lower_values)
    high = np.nanmax(scene.lower_values)
    ax.set_ylim(low - 0.08 * (high - low), high + 0.08 * (high - low))
    if scene.upper_values is not None:
        twin = ax.twinx()
        twin.plot(scene.grid, scene.upper_values, color=_UPPER_COLOUR, linewidth=1.2)
        twin.set_ylabel("G", color=_UPPER_COLOUR)
        twin.tick_params(axis="y", colors=_UPPER_COLOUR)
        twin.grid(visible=False)
        twin.set_zorder(ax.get_zorder() - 1)
        ax.patch.set_visible(False)


def _drawn_coordinates(
    scene: Scene, points: np.ndarray, k: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Where points [n, .] are drawn; for d = 1 on the graph of their cluster's L."""
    if scene.dim > 1 or scene.grid is None or scene.lower_values is None:
        return points[:, 0], points[:, -1] if points.shape[1] > 1 else np.zeros(len(points))
    return points[:, 0], np.interp(
        points[:, 0], scene.grid, scene.lower_values[k], left=np.nan, right=np.nan
    )


def _draw_particles(
    ax: Axes, scene: Scene, frame: int, opacity: float, label: str, size: float
) -> list[Any]:
    drawn: list[Any] = []
    for k in range(scene.m.shape[1]):
        x, y = _drawn_coordinates(scene, scene.theta[frame, scene.cluster == k], k)
        look: dict[str, Any] = {
            "color": BENIGN_COLOURS[k % len(BENIGN_COLOURS)],
            "alpha": opacity,
            "linewidths": 0,
            "zorder": 3,
        }
        drawn.append(
            ax.scatter(
                x,
                y,
                s=size * (2 if scene.dim == 1 else 1),
                label=label if k == 0 and label else None,
                **look,
            )
        )
    if scene.theta_m.shape[1]:
        x, y = _drawn_coordinates(scene, scene.theta_m[frame])
        drawn.append(
            ax.scatter(
                x,
                y,
                s=70,
                marker="X",
                color=MALICIOUS_COLOUR,
                alpha=opacity,
                edgecolors="white",
                linewidths=0.6,
                zorder=8,
            )
        )
    return drawn


def _draw_consensus_paths(ax: Axes, scene: Scene, until: int) -> list[Any]:
    """The consensus points' way, up to a frame."""
    drawn: list[Any] = []
    for k in range(scene.m.shape[1]):
        x, y = _drawn_coordinates(scene, scene.m[:until, k], k)
        look: dict[str, Any] = {"marker": ".", "markersize": 3.5} if scene.dim == 1 else {}
        outline = [withStroke(linewidth=3, foreground="white")]
        drawn += ax.plot(
            x,
            y,
            color="black",
            linewidth=0 if look else 1.3,
            path_effects=outline,
            zorder=4,
            **look,
        )
        drawn += ax.plot(
            x[-1:], y[-1:], "o", color="black", markeredgecolor="white", markersize=5.5, zorder=7
        )
    return drawn


def _draw_final_points(ax: Axes, scene: Scene, *, with_final_points: bool = True) -> list[Any]:
    """The answers of all runs, and the target."""
    drawn: list[Any] = []
    if with_final_points and len(scene.final_points) > 1:
        for k in range(scene.final_points.shape[1]):
            x, y = _drawn_coordinates(scene, scene.final_points[:, k], k)
            outline = [withStroke(linewidth=2.5, foreground="white")]
            look: dict[str, Any] = {
                "color": "black",
                "linewidths": 1,
                "path_effects": outline,
                "zorder": 6,
            }
            drawn.append(ax.scatter(x, y, s=28, marker="+", **look))
    if scene.target is not None:
        for k, point in enumerate(scene.target):
            x, y = _drawn_coordinates(scene, point[None], k)
            look = {
                "marker": "*",
                "s": 260,
                "color": _TARGET_COLOUR,
                "edgecolors": "black",
                "zorder": 5,
            }
            drawn.append(ax.scatter(x, y, **look))
    return drawn


def _finish_axes(ax: Axes, scene: Scene, title: str, *, legend: bool = True) -> None:
    ax.set_title(title)
    ax.grid(visible=False)
    ax.set_xlim(*scene.box)
    ax.set_xlabel("x" if scene.dim == 1 else "$x_1$")
    ax.set_ylabel("L" if scene.dim == 1 else "$x_2$")
    if scene.dim > 1:
        ax.set_ylim(*scene.box)
        ax.set_aspect("equal")
    if legend:
        entries = [*_scatter_entries(ax), *_legend_entries(scene)]
        look: dict[str, Any] = {
            "fontsize": 8.5,
            "handletextpad": 0.4,
            "columnspacing": 1.2,
            "handlelength": 1.4,
        }
        handles = [one for one, _ in entries]
        names = [name for _, name in entries]
        ax.legend(handles, names, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=4, **look)


def _scatter_entries(ax: Axes) -> list[tuple[Any, str]]:
    return list(zip(*ax.get_legend_handles_labels(), strict=True))


def _legend_entries(scene: Scene) -> list[tuple[Any, str]]:
    """The legend's entries beside the particles' times."""

    def line(name: str, **look: Any) -> tuple[Any, str]:
        return Line2D([], [], **{"linestyle": "none", **look}), name

    K = scene.m.shape[1]
    entries = []
    if K > 1:
        entries += [
            line(
                f"cluster {k + 1}",
                marker="o",
                color=BENIGN_COLOURS[k % len(BENIGN_COLOURS)],
                markersize=4,
            )
            for k in range(K)
        ]
    if scene.theta_m.shape[1]:
        entries.append(line("malicious", marker="X", color=MALICIOUS_COLOUR, markersize=6))
    path: dict[str, Any] = {} if scene.dim == 1 else {"linestyle": "-", "linewidth": 1.3}
    entries.append(line("consensus point", color="black", marker="o", markersize=5, **path))
    if len(scene.final_points) > 1:
        entries.append(
            line(
                f"answers of {len(scene.final_points)} runs",
                color="black",
                marker="+",
                markersize=5,
            )
        )
    if scene.target is not None:
        entries.append(
            line("target", color=_TARGET_COLOUR, marker="*", markeredgecolor="black", markersize=11)
        )
    if scene.lower_values is not None:
        one = scene.dim == 1
        solid: dict[str, Any] = (
            {"color": "0.45", "linewidth": 1.2}
            if one
            else {"color": _MINIMISER_COLOUR, "linewidth": 4}
        )
        entries.append(line("L" if one else "lowest L", linestyle="-", **solid))
    if scene.upper_values is not None:
        lowest: dict[str, Any] = (
            {} if _upper_minimiser(scene) is None else {"marker": "D", "markersize": 4}
        )
        entries.append(
            line(
                "G and its lowest" if lowest else "G",
                color=_UPPER_COLOUR,
                linestyle="-",
                linewidth=1,
                **lowest,
            )
        )
    return entries


def _selected_frames(scene: Scene) -> list[int]:
    """The frames to show: the start, where the particles' distance from the consensus has halved, is a fifth, the end.

    Where it never is, frames at equal times.
    """
    own = scene.m[:, scene.cluster]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a frame of nothing but NaN
        spread = np.sqrt(np.nanmean(np.square(scene.theta - own).sum(-1), 1))
    last = len(scene.times) - 1
    found = [int(np.argmax(spread <= share * spread[0])) for share in (0.5, 0.2)]
    between = found if all(found) else [last // 3, 2 * last // 3]
    return sorted({0, *between, last})
