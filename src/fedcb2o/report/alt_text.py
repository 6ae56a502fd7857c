"""What a figure shows, in words for those who do not see it: read off the figure, so that it says what is drawn."""

import re
from collections.abc import Iterator

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

MAX_DESCRIBED_VALUES = 24  # values of a panel that are told one by one


def describe_figure(figure: Figure) -> str:
    """A sentence for each panel: where its lines begin and end, how high its bars are. A figure that was given a label
    of its own says that instead."""
    own = str(figure.get_label())
    sentences = (
        [own]
        if own
        else [_describe_panel(ax) for ax in figure.axes if ax.get_label() != "<colorbar>"]
    )
    return _strip_math(" ".join(sentences))


def _describe_panel(ax: Axes) -> str:
    upright = all(bars.orientation == "vertical" for bars in _bar_containers(ax))
    values, along = (ax.yaxis, ax.xaxis) if upright else (ax.xaxis, ax.yaxis)
    name = ax.get_title(loc="left") or ax.get_title() or values.get_label_text()
    found = (
        list(_describe_lines(ax))
        + list(_describe_step_areas(ax))
        + _describe_bars(ax, values, along)
    )
    if not found:
        found = [", ".join(text.get_text() for text in along.get_ticklabels())]
    return ": ".join(filter(None, [name, "; ".join(found)])) + "."


def _describe_lines(ax: Axes) -> Iterator[str]:
    """Where each line that has a name begins and ends."""
    what = ax.xaxis.get_label_text()
    for line in ax.lines:
        x, y = (np.asarray(data, dtype=float) for data in line.get_data())
        known = np.isfinite(y)
        if _is_unnamed(line) or not known.any():
            continue
        first, last = (_format_value(ax.yaxis, float(y[known][end])) for end in (0, -1))
        over = f" ({what} {x[known][0]:g} to {x[known][-1]:g})" if what and known.sum() > 2 else ""
        yield f"{line.get_label()} {first}" + (f" to {last}{over}" if known.sum() > 2 else "")


def _describe_step_areas(ax: Axes) -> Iterator[str]:
    """The mean height of each area of steps."""
    for patch in ax.patches:
        if isinstance(patch, StepPatch) and not _is_unnamed(patch):
            values, _, baseline = patch.get_data()
            height = float(np.mean(np.subtract(values, baseline)))
            yield f"{patch.get_label()} {_format_value(ax.yaxis, height)} on average"


def _describe_bars(ax: Axes, values: Axis, along: Axis) -> list[str]:
    """How long bars are, group by group; where these are very many, between what."""
    ticks = [text.get_text().replace("\n", " ") for text in along.get_ticklabels()]
    groups: dict[str, list[str]] = {tick: [] for tick in ticks}
    ranges = []
    count = 0
    for bars in _bar_containers(ax):
        heights = np.asarray(bars.datavalues, dtype=float)
        known = heights[np.isfinite(heights)]
        name = str(bars.get_label()).replace(",", "")
        for tick, height in zip(ticks, heights, strict=False):
            if np.isfinite(height):
                groups[tick].append(f"{name} {_format_value(values, float(height))}")
        if len(known):
            ranges.append(
                f"{name} {_format_value(values, known.min())} to {_format_value(values, known.max())}"
            )
        count += len(known)
    told = [f"{tick}: {', '.join(each)}" for tick, each in groups.items() if each]
    return told if count <= MAX_DESCRIBED_VALUES else ranges


def _bar_containers(ax: Axes) -> list[BarContainer]:
    return [each for each in ax.containers if isinstance(each, BarContainer)]


def _is_unnamed(artist: object) -> bool:
    return str(artist.get_label()).startswith("_")  # type: ignore[attr-defined]


def _format_value(axis: Axis, value: float) -> str:
    """A number as its axis has it: in percent or not."""
    if str(axis.get_major_formatter()(0.5)).endswith("%"):
        return f"{100 * value:.0f}%"
    return f"{value:.3g}"


def _strip_math(text: str) -> str:
    """Without the marks of formulas."""
    return re.sub(r"(?<!\\)\$|\\(?=\$)", "", text)
