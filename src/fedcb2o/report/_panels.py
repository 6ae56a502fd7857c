"""Style of figures, and panels above one legend.

A panel draws on given axes, so that several panels are one figure in a file and separate figures,
which wrap, on a page. No global state of matplotlib changes. The first colours are those of Okabe
and Ito (2008), which colour-blind readers can distinguish. No two methods have one colour; lines
also differ in style and marker.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import matplotlib.colors
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "legend.frameon": False,
    "figure.dpi": 150,
}
PALETTE = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#7F7F7F",
    "#000000",
    "#6A3D9A",
    "#8B4513",
    "#B2DF8A",
    "#B00020",
    "#00A6A6",
    "#9C9C00",
    "#F781BF",
    "#4D4D9F",
)
LINE_STYLES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.5, 1.2, 1.5)))
MARKERS = "osD^vPX*<"
_GOLDEN_RATIO = 0.6180339887
_LEGEND_WIDTH = 5.4  # inches, the width of a phone at the size of the text


@dataclass(frozen=True)
class Panels:
    """Panels of a figure."""

    # One function per panel, in the order of rows.
    draw_functions: Sequence[Callable[[Axes], None]]
    # Width and height of a panel in inches.
    size: tuple[float, float]
    # Number of panels per row.
    columns: int


def method_colour(i: int) -> str:
    """Return the colour of the method in position i, different for every position."""
    if i < len(PALETTE):
        return PALETTE[i]
    hue = (i * _GOLDEN_RATIO) % 1
    rgb = mpl.colors.hsv_to_rgb((hue, 0.75, 0.55 + 0.3 * (i % 2))).tolist()
    return mpl.colors.to_hex(tuple(rgb))


@mpl.rc_context(STYLE)
def draw_panels(
    panels: Panels, single: Callable[[Axes], None] | None = None, *, with_legend: bool = True
) -> Figure:
    """Draw panels, or a `single` one, above one legend of all their entries."""
    functions = list(panels.draw_functions)
    if single is not None:
        functions = [single]
    columns = min(panels.columns, len(functions))
    rows = -(-len(functions) // columns)
    width, height = panels.size
    total_height = height * rows + 0.1 + 0.2 * (len(functions) == 1)
    figure = Figure(figsize=(width * columns, total_height), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for draw, ax in zip(functions, axes[: len(functions)], strict=True):
        draw(ax)
    for ax in axes[len(functions) :]:
        figure.delaxes(ax)
    if with_legend:
        _add_legend(figure, _legend_entries(figure), width * columns)
    return figure


@mpl.rc_context(STYLE)
def draw_legend(figure: Figure) -> Figure | None:
    """Draw the legend of a figure as a figure of its own; None without entries."""
    entries = _legend_entries(figure)
    if not entries:
        return None
    columns = max(1, min(len(entries), _legend_columns(entries, _LEGEND_WIDTH)))
    height = 0.15 + 0.22 * -(-len(entries) // columns)
    legend = Figure(figsize=(_LEGEND_WIDTH, height), label=f"Legend: {', '.join(entries)}")
    _add_legend(legend, entries, _LEGEND_WIDTH, loc="center left")
    return legend


def _legend_entries(figure: Figure) -> dict[str, Any]:
    """Return the artists of a figure by label; bars come before lines through them."""
    handles: dict[str, Any] = {}
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles[label] = handle
    labels = sorted(handles, key=lambda label: isinstance(handles[label], Line2D))
    return {label: handles[label] for label in labels}


def _legend_columns(entries: Iterable[str], width: float) -> int:
    """Return the number of columns of a legend that fit in `width` inches, by characters."""
    return int(13 * width / (6 + max(map(len, entries))))


def _add_legend(
    figure: Figure, entries: dict[str, Any], width: float, loc: Any = "outside lower center"
) -> None:
    """Add one legend of all axes to a figure of `width` inches."""
    if not entries:
        return
    figure.legend(
        list(entries.values()),
        list(entries),
        loc=loc,
        fontsize=9,
        ncols=max(1, min(len(entries), _legend_columns(entries, width))),
        handlelength=2.6,
        columnspacing=1.6,
    )
