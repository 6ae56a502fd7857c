"""Alternative text of a figure, read from its drawn lines and bars.

>>> figure = Figure()
>>> _ = figure.subplots().bar(["a", "b"], [1.0, 2.0], label="loss")
>>> describe_figure(figure)
'a: loss 1; b: loss 2.'
"""

import re
from collections.abc import Iterator

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

MAX_DESCRIBED_VALUES = 24  # a panel with more bars is described by ranges
_MIN_CURVE_POINTS = 3  # a line with fewer points is described by its first value


def describe_figure(figure: Figure) -> str:
    """Describe each panel in one sentence, unless the figure has a label."""
    label = str(figure.get_label())
    if label:
        return _strip_math(label)
    panels = [ax for ax in figure.axes if ax.get_label() != "<colorbar>"]
    return _strip_math(" ".join(map(_describe_panel, panels)))


def _describe_panel(ax: Axes) -> str:
    is_upright = all(bars.orientation == "vertical" for bars in _bar_containers(ax))
    value_axis, group_axis = (ax.yaxis, ax.xaxis) if is_upright else (ax.xaxis, ax.yaxis)
    name = ax.get_title(loc="left") or ax.get_title() or value_axis.get_label_text()
    parts = [
        *_describe_lines(ax),
        *_describe_step_areas(ax),
        *_describe_bars(ax, value_axis, group_axis),
    ]
    if not parts:
        parts = [", ".join(text.get_text() for text in group_axis.get_ticklabels())]
    return ": ".join(filter(None, [name, "; ".join(parts)])) + "."


def _describe_lines(ax: Axes) -> Iterator[str]:
    """Describe the first and the last value of each named line."""
    x_label = ax.xaxis.get_label_text()
    for line in ax.lines:
        x, y = (np.asarray(data, dtype=float) for data in line.get_data())
        is_finite = np.isfinite(y)
        if _is_unnamed(line) or not is_finite.any():
            continue
        x = x[is_finite]
        y = y[is_finite]
        text = f"{line.get_label()} {_format_value(ax.yaxis, float(y[0]))}"
        if len(y) >= _MIN_CURVE_POINTS:
            text += f" to {_format_value(ax.yaxis, float(y[-1]))}"
            if x_label:
                text += f" ({x_label} {x[0]:g} to {x[-1]:g})"
        yield text


def _describe_step_areas(ax: Axes) -> Iterator[str]:
    """Describe the mean height of each area of steps."""
    for patch in ax.patches:
        if isinstance(patch, StepPatch) and not _is_unnamed(patch):
            values, _, baseline = patch.get_data()
            height = float(np.mean(np.subtract(values, baseline)))
            yield f"{patch.get_label()} {_format_value(ax.yaxis, height)} on average"


def _describe_bars(ax: Axes, value_axis: Axis, group_axis: Axis) -> list[str]:
    """Describe the bars by group, or many bars by their ranges."""
    ticks = [text.get_text().replace("\n", " ") for text in group_axis.get_ticklabels()]
    groups: dict[str, list[str]] = {tick: [] for tick in ticks}
    ranges = []
    count = 0
    for bars in _bar_containers(ax):
        heights = np.asarray(bars.datavalues, dtype=float)
        finite = heights[np.isfinite(heights)]
        name = str(bars.get_label()).replace(",", "")
        for tick, height in zip(ticks, heights, strict=False):
            if np.isfinite(height):
                groups[tick].append(f"{name} {_format_value(value_axis, float(height))}")
        if len(finite):
            low = _format_value(value_axis, finite.min())
            ranges.append(f"{name} {low} to {_format_value(value_axis, finite.max())}")
        count += len(finite)
    if count > MAX_DESCRIBED_VALUES:
        return ranges
    return [f"{tick}: {', '.join(texts)}" for tick, texts in groups.items() if texts]


def _bar_containers(ax: Axes) -> list[BarContainer]:
    return [container for container in ax.containers if isinstance(container, BarContainer)]


def _is_unnamed(artist: object) -> bool:
    return str(artist.get_label()).startswith("_")  # type: ignore[attr-defined]


def _format_value(axis: Axis, value: float) -> str:
    """Format a number like its axis: in percent or not."""
    if str(axis.get_major_formatter()(0.5)).endswith("%"):
        return f"{100 * value:.0f}%"
    return f"{value:.3g}"


def _strip_math(text: str) -> str:
    return re.sub(r"(?<!\\)\$|\\(?=\$)", "", text)
