"""A matrix as a picture: a number in every cell, darker for worse; readable with 20 rows and 20 columns.

The colours run from light to dark in one hue, or from one hue to another through white where values have signs, so that
colour-blind readers see them as others do. They are the same in all pictures, and most of them are spent between 0 and
20 points, where what is to be told apart lies.
"""

from collections.abc import Collection
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from fedcb2o.report.figures import STYLE

_CELL_WIDTH, _CELL_HEIGHT, _COLUMN_GAP = (
    0.56,
    0.42,
    0.25,
)  # of a cell in inches, and of a gap between columns in cells
MAX_NAME_LENGTH = 40  # characters of a name
_SHADE_SCALE = (
    (0.0, 0.05, 0.1, 0.2, 0.5, 1.0),
    (0.0, 0.28, 0.5, 0.75, 0.9, 1.0),
)  # points that are worse, and how dark


@mpl.rc_context(STYLE)
def draw_heat_map(
    means: pd.DataFrame,
    half_widths: pd.DataFrame,
    shades: pd.DataFrame,
    *,
    colours: str = "Oranges",
    signed: bool = False,
    bold: pd.DataFrame | None = None,
    failed: pd.DataFrame | None = None,
    marked: pd.DataFrame | None = None,
    separated: Collection[str] = (),
) -> Figure:
    """Rows by columns of fractions, in percent: the mean in every cell, half of its interval below it.

    `shades` say how bad a cell is, from 0 to 1; `signed` ones have one hue below 0 and another above. `bold`, `failed`
    and `noted` (a dagger) are true for the cells that are so; cells without a value are blank. Columns named in `apart`
    stand a little apart from the others.
    """
    values = means.to_numpy(float)
    names = list(means.columns)
    spreads = half_widths.to_numpy(float)
    dark = shade_intensity(shades).to_numpy(float)
    parted = [
        i > 0 and (names[i] in separated) != (names[i - 1] in separated) for i in range(len(names))
    ]
    x = [j + _COLUMN_GAP * sum(parted[: j + 1]) for j in range(len(names))]
    inches = (
        (x[-1] + 1) * _CELL_WIDTH + 0.085 * max(map(len, _shorten(means.index))) + 0.6,
        (len(means) + 0.2) * _CELL_HEIGHT,
    )
    figure = Figure(
        figsize=(inches[0], inches[1] + 0.06 * max(map(len, _shorten(names))) + 0.4),
        layout="constrained",
    )
    ax = figure.subplots()
    palette = mpl.colormaps[colours]
    for (i, j), value in np.ndenumerate(values):
        known = bool(np.isfinite(value))
        colour = (
            tuple(palette((1 + dark[i, j]) / 2 if signed else dark[i, j]))
            if known
            else (1.0, 1.0, 1.0, 1.0)
        )
        ax.add_patch(Rectangle((x[j], i), 1, 1, facecolor=colour, edgecolor="white", linewidth=1.5))
        ink = "white" if _luminance(colour) < 0.45 else "0.1"
        if known:
            heavy = bold is not None and bool(bold.iloc[i, j])
            mark = "†" if marked is not None and bool(marked.iloc[i, j]) else ""
            _draw_number(
                ax, (x[j] + 0.5, float(i)), value, float(spreads[i, j]), ink, signed, heavy, mark
            )
        elif failed is not None and bool(failed.iloc[i, j]):
            ax.text(
                x[j] + 0.5,
                i + 0.5,
                "failed",
                ha="center",
                va="center",
                fontsize=7,
                color="0.35",
                style="italic",
            )
    ax.set(xlim=(0, x[-1] + 1), ylim=(len(means), 0))
    ax.set_xticks(
        [each + 0.5 for each in x], _shorten(names), rotation=38, ha="left", rotation_mode="anchor"
    )
    ax.set_yticks(np.arange(len(means)) + 0.5, _shorten(means.index))
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    return figure


def _draw_number(
    ax: Axes,
    top: tuple[float, float],
    mean: float,
    half: float,
    ink: str,
    signed: bool,
    heavy: bool,
    mark: str,
) -> None:
    """A mean in percent, and half of its interval below where there is one."""
    x, y = top
    look: dict[str, Any] = {"ha": "center", "va": "center", "color": ink}
    spread = np.isfinite(half)
    text = f"{100 * mean:{'+' if signed else ''}z.1f}".replace("-", "−")
    text = text.removesuffix(".0") if abs(mean) > 0.9995 else text
    ax.text(
        x,
        y + (0.4 if spread else 0.5),
        text + mark,
        fontsize=9,
        weight="bold" if heavy else "normal",
        **look,
    )
    if spread:
        ax.text(x, y + 0.76, f"±{100 * half:.1f}", fontsize=6.5, **look)


def shade_intensity(shades: pd.DataFrame) -> pd.DataFrame:
    """How far along the colours: from 0 to 1, with the sign of the shade."""
    return shades.map(lambda shade: np.sign(shade) * np.interp(abs(shade), *_SHADE_SCALE)).astype(
        float
    )


def _luminance(colour: tuple[float, ...]) -> float:
    """How bright a colour is, from 0 to 1 (ITU-R BT.709)."""
    return float(np.dot(colour[:3], (0.2126, 0.7152, 0.0722)))


def _shorten(names: Collection[object]) -> list[str]:
    texts = [
        name if len(name) <= MAX_NAME_LENGTH else f"{name[: MAX_NAME_LENGTH - 1]}…"
        for name in map(str, names)
    ]
    return [text.replace("$", r"\$") for text in texts]  # no formula
