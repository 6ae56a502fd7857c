"""Heat maps of matrices with a number in every cell.

Colours run from light to dark in one hue, so that colour-blind readers see the same order. All maps
have the same scale. Most of it is between 0 and 20 points, where differences matter.
"""

from collections.abc import Collection
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from fedcb2o.report._panels import STYLE

_CELL_WIDTH = 0.56  # inches
_CELL_HEIGHT = 0.42  # inches
_COLUMN_GAP = 0.25  # cells
MAX_NAME_LENGTH = 40  # characters
# Distances to a good value, and the shades for them.
_SHADE_SCALE = ((0.0, 0.05, 0.1, 0.2, 0.5, 1.0), (0.0, 0.28, 0.5, 0.75, 0.9, 1.0))
_WHITE = (1.0, 1.0, 1.0, 1.0)
_MIN_BRIGHTNESS_FOR_BLACK = 0.45


@mpl.rc_context(STYLE)
def draw_heat_map(
    means: pd.DataFrame,
    half_widths: pd.DataFrame,
    *,
    shades: pd.DataFrame | None = None,
    failed: pd.DataFrame | None = None,
    marked: pd.DataFrame | None = None,
    separated: Collection[str] = (),
) -> Figure:
    """Draw a matrix in percent, with half the interval below means.

    `shades` are distances to the best, by default `means`; NaN is blank. `marked` cells have a
    dagger, and `separated` columns a gap to the others.
    """
    names = [str(name) for name in means.columns]
    rows = _shorten(means.index)
    columns = _shorten(names)
    x = _column_positions(names, separated)
    width = (x[-1] + 1) * _CELL_WIDTH + 0.085 * max(map(len, rows)) + 0.6
    height = (len(means) + 0.2) * _CELL_HEIGHT + 0.06 * max(map(len, columns)) + 0.4
    figure = Figure(figsize=(width, height), layout="constrained")
    ax = figure.subplots()

    palette = mpl.colormaps["Oranges"]
    distances = (means if shades is None else shades).to_numpy(float)
    intensities = np.interp(np.nan_to_num(distances).clip(min=0.0), *_SHADE_SCALE)
    spreads = half_widths.to_numpy(float)
    for (i, j), value in np.ndenumerate(means.to_numpy(float)):
        has_value = bool(np.isfinite(value))
        colour = tuple(palette(intensities[i, j])) if has_value else _WHITE
        ax.add_patch(Rectangle((x[j], i), 1, 1, facecolor=colour, edgecolor="white", linewidth=1.5))
        if has_value:
            text = _percent(value)
            if _is_set(marked, i, j):
                text += "†"
            ink = "white" if _luminance(colour) < _MIN_BRIGHTNESS_FOR_BLACK else "0.1"
            _draw_number(ax, (x[j] + 0.5, float(i)), text, float(spreads[i, j]), ink)
        elif _is_set(failed, i, j):
            _draw_failed(ax, (x[j] + 0.5, i + 0.5))

    ax.set(xlim=(0, x[-1] + 1), ylim=(len(means), 0))
    centres = [position + 0.5 for position in x]
    ax.set_xticks(centres, columns, rotation=38, ha="left", rotation_mode="anchor")
    ax.set_yticks(np.arange(len(means)) + 0.5, rows)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    return figure


def _column_positions(names: list[str], separated: Collection[str]) -> list[float]:
    """Compute the left edge of each column, in cells."""
    positions = []
    gaps = 0
    for j, name in enumerate(names):
        if j > 0 and (name in separated) != (names[j - 1] in separated):
            gaps += 1
        positions.append(j + _COLUMN_GAP * gaps)
    return positions


def _is_set(flags: pd.DataFrame | None, i: int, j: int) -> bool:
    return flags is not None and bool(flags.iloc[i, j])


def _percent(value: float) -> str:
    text = f"{100 * value:z.1f}".replace("-", "−")
    return text.removesuffix(".0") if abs(value) > 0.9995 else text


def _draw_number(ax: Axes, top: tuple[float, float], text: str, half: float, color: str) -> None:
    """Draw a mean, and half its interval below it."""
    x, y = top
    look: dict[str, Any] = {"ha": "center", "va": "center", "color": color}
    if np.isfinite(half):
        ax.text(x, y + 0.76, f"±{100 * half:.1f}", fontsize=6.5, **look)
        y -= 0.1
    ax.text(x, y + 0.5, text, fontsize=9, **look)


def _draw_failed(ax: Axes, centre: tuple[float, float]) -> None:
    x, y = centre
    ax.text(x, y, "failed", ha="center", va="center", fontsize=7, color="0.35", style="italic")


def _luminance(colour: tuple[float, ...]) -> float:
    """Compute the brightness of a colour, from 0 to 1 (ITU-R BT.709)."""
    return float(np.dot(colour[:3], (0.2126, 0.7152, 0.0722)))


def _shorten(names: Collection[object]) -> list[str]:
    shortened = []
    for name in map(str, names):
        if len(name) > MAX_NAME_LENGTH:
            name = f"{name[: MAX_NAME_LENGTH - 1]}…"
        shortened.append(name.replace("$", r"\$"))  # no mathematics
    return shortened
