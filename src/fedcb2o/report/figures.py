"""Figures from records, of panels: selection and weights (the paper's Figure 6), curves, results by validation data.

A panel draws on axes of its own, so that some are one figure in a file, and several, which wrap, on a page. Nothing
leaves state behind. Colours are those of Okabe and Ito (2008), which colour-blind readers tell apart; lines differ in
style and markers too.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fedcb2o.errors import RunError
from fedcb2o.records import OPTIONAL_METRICS, Run
from fedcb2o.report.tables import LABELS, METRICS, by_source_count, pair_statistics, run_labels

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
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")
LINE_STYLES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.5, 1.2, 1.5)))
MARKERS = (
    "osD^vPX*<"  # nine beside eight colours, so that a colour that comes again has another marker
)
_PEER_KINDS = {
    ("benign", "same"): ("#0072B2", "benign, same cluster"),
    ("malicious", "same"): ("#D55E00", "malicious, same cluster"),
    ("benign", "other"): ("#A6CEE8", "benign, other cluster"),
    ("malicious", "other"): ("#F9C9A0", "malicious, other cluster"),
}


@dataclass(frozen=True)
class Curve:
    """What is drawn over the rounds under one name.

    `table` has rows of a `round`, a `seed` and metrics as fractions of 1, of which the mean over rows is drawn for each
    round and seed; `switch` is T_G, 0 for none.
    """

    name: str
    table: pd.DataFrame
    criterion_from_round: int = 0


@dataclass(frozen=True)
class Panels:
    """What draws each panel, in the order of rows; the width and height of one in inches, and how many a row has."""

    draw_functions: Sequence[Callable[[Axes], None]]
    size: tuple[float, float]
    columns: int


def figure6(*runs: Run) -> Figure:
    """The paper's Figure 6 (fig:avg_select_time_mul_weights), a row a run.

    How often benign agents received each kind of peer, and with what weight.
    """
    return draw_panels(peer_panels(runs))


def curves(runs: Sequence[Run]) -> Figure:
    """Each metric over the rounds, mean over benign agents; the band is ± a standard deviation over seeds.

    A thin vertical line marks the round T_G from which a run uses its criterion.
    """
    return draw_panels(curve_panels(learning_curves(runs)))


def source_counts(runs: Sequence[Run]) -> Figure | None:
    """Source accuracy and attack success by how many source-class samples an agent validates on; None without any."""
    panels = source_count_panels(runs)
    return draw_panels(panels) if panels.draw_functions else None


@mpl.rc_context(STYLE)
def draw_panels(panels: Panels, single: Callable[[Axes], None] | None = None) -> Figure:
    """A figure of all panels, or of one of them, above a legend of all that they draw."""
    each = list(panels.draw_functions) if single is None else [single]
    columns = min(panels.columns, len(each))
    rows = -(-len(each) // columns)
    width, height = panels.size
    figure = Figure(
        figsize=(width * columns, height * rows + 0.1 + 0.2 * (len(each) == 1)),
        layout="constrained",
    )
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for draw, ax in zip(each, axes, strict=True):
        draw(ax)
    found = {
        label: handle
        for ax in figure.axes
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    fit = int(13 * width * columns / (6 + max(map(len, found), default=0)))  # by characters
    look: dict[str, Any] = {
        "ncols": max(1, min(len(found), fit)),
        "handlelength": 2.6,
        "columnspacing": 1.6,
    }
    if found:
        order = sorted(
            found, key=lambda label: isinstance(found[label], Line2D)
        )  # bars come before lines through them
        figure.legend(
            [found[label] for label in order], order, loc="outside lower center", fontsize=9, **look
        )
    return figure


def peer_panels(runs: Sequence[Run]) -> Panels:
    """For each run how often peers are received, and what weight they are given; see `figure6`."""
    found = [pair_statistics(run) for run in runs]
    panels: list[Callable[[Axes], None]] = []
    for run, label, statistics in zip(runs, run_labels(runs), found, strict=True):
        for value, what in (("frequency", "how often received"), ("share", "weight given")):
            letter = "abcdefghijklmnopqrstuvwxyz"[len(panels) % 26]
            chance = _chance_frequency(run) if value == "frequency" and len(statistics) else None
            title = f"({letter}) {figure_title(run, label)}: {what}"
            panels.append(
                partial(
                    _draw_peer_kinds, statistics, value, title, chance, _axis_maximum(found, value)
                )
            )
    return Panels(panels, (4.75, 3.1), 2)


def learning_curves(runs: Sequence[Run]) -> list[Curve]:
    """What benign agents of each run reached, under its title."""
    benign = (run.records[~run.records.malicious.astype(bool)] for run in runs)
    named = zip(runs, run_labels(runs), benign, strict=True)
    return [
        Curve(figure_title(run, label), table, _criterion_round(run)) for run, label, table in named
    ]


def curve_panels(lines: Sequence[Curve]) -> Panels:
    """A panel for each metric over the rounds; see `curves`. Raises RunError if no round was evaluated yet."""
    tables = [line.table for line in lines]
    shown = [
        m
        for m in (*METRICS, *OPTIONAL_METRICS)
        if any(m in table and table[m].notna().any() for table in tables)
    ]
    if not shown:
        raise RunError(
            "no round was evaluated yet: wait for the first `evaluate_every` rounds of the run"
        )
    return Panels([partial(_draw_curves, lines, metric) for metric in shown], (3.9, 3.8), 3)


def source_count_panels(runs: Sequence[Run]) -> Panels:
    """A panel for each metric of the source class, none where no agent knows its count; see `source_counts`."""
    tables = [by_source_count(run) for run in runs]
    bins = sorted({str(name) for table in tables for name in table["samples"]})
    shown = [
        metric for metric in METRICS[1:] if any(table[metric].notna().any() for table in tables)
    ]
    wide = max(4.6, 0.2 * len(runs) * len(bins))  # inches, for the numbers on the bars
    panels = [partial(_draw_source_counts, runs, tables, bins, metric) for metric in shown if bins]
    return Panels(panels, (wide, 3.5), 2)


def _draw_curves(lines: Sequence[Curve], metric: str, ax: Axes) -> None:
    for i, line in enumerate(lines):
        known = line.table.reindex(columns=["round", "seed", metric]).dropna(subset=metric)
        means = known.groupby(["round", "seed"])[metric].mean().unstack("seed")
        if means.empty:
            continue
        middle = means.mean(axis="columns")
        deviation = means.std(axis="columns", ddof=1).fillna(0.0)
        x = means.index.to_numpy()
        colour = PALETTE[i % len(PALETTE)]
        line_style = LINE_STYLES[
            (i + i // len(PALETTE)) % len(LINE_STYLES)
        ]  # another one when a colour comes again
        look: dict[str, Any] = {"linestyle": line_style, "marker": MARKERS[i % len(MARKERS)]}
        every = max(1, len(x) // 8)
        ax.plot(x, middle, color=colour, markersize=4.5, markevery=every, label=line.name, **look)
        ax.fill_between(
            x, middle - deviation, middle + deviation, color=colour, alpha=0.15, linewidth=0
        )
    ax.set_title(LABELS[metric])
    ax.set_xlabel("round")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    low, high = bottom, top = ax.get_ylim()
    if not metric.endswith("loss"):
        ax.yaxis.set_major_formatter(percent_formatter())
        bottom = max(low, 0)
        top = min(high, 1.005)
    switches = sorted({line.criterion_from_round for line in lines} - {0})
    ax.set_ylim(bottom, top + 0.05 * (high - low) * len(switches))
    for i, switch in enumerate(switches):
        ax.axvline(switch, color="0.35", linewidth=0.8)
        where: dict[str, Any] = {
            "xy": (switch, 1),
            "xycoords": ("data", "axes fraction"),
            "textcoords": "offset points",
        }
        ax.annotate(
            f"$T_G = {switch}$",
            xytext=(3, -2 - 10 * i),
            va="top",
            fontsize=8,
            color="0.35",
            **where,
        )


def _draw_source_counts(
    runs: Sequence[Run], tables: Sequence[pd.DataFrame], bins: list[str], metric: str, ax: Axes
) -> None:
    width = 0.8 / len(runs)
    for i, (run, table, label) in enumerate(zip(runs, tables, run_labels(runs), strict=True)):
        values = table.set_index("samples")[metric].reindex(bins).to_numpy(float)
        x = np.arange(len(bins)) + (i - (len(runs) - 1) / 2) * width
        ax.bar(
            x, values, 0.92 * width, color=PALETTE[i % len(PALETTE)], label=figure_title(run, label)
        )
        _annotate_values(
            ax, x, values, values
        )  # a bar of height 0 is seen by its number, one of nobody by none
    ax.set_title(LABELS[metric])
    ax.set_xlim(-0.5, len(bins) - 0.5)
    ax.set_ylim(0, max(ax.get_ylim()[1], 0.05))
    ax.set_xticks(range(len(bins)), bins)
    ax.tick_params(axis="x", length=0)
    ax.set_xlabel("source-class samples in validation data")
    ax.yaxis.set_major_formatter(percent_formatter())


def _draw_peer_kinds(
    statistics: pd.DataFrame, value: str, title: str, chance: float | None, top: float, ax: Axes
) -> None:
    """Grouped bars of one run: a group a cluster of selecting agents, a bar a kind of peer; ± over seeds."""
    clusters = sorted(statistics.cluster.unique())
    kinds = [
        kind
        for kind in _PEER_KINDS
        if ((statistics.peer == kind[0]) & (statistics.relation == kind[1])).any()
    ]
    width = min(0.84 / max(len(kinds), 1), 0.3)
    for i, kind in enumerate(kinds):
        mine = statistics[(statistics.peer == kind[0]) & (statistics.relation == kind[1])]
        groups = mine.groupby("cluster")[value]
        means = groups.mean().reindex(clusters)
        deviations = groups.std(ddof=1).reindex(clusters).fillna(0.0)
        x = np.arange(len(clusters)) + (i - (len(kinds) - 1) / 2) * width
        colour, name = _PEER_KINDS[kind]
        ax.bar(x, means, 0.92 * width, color=colour, label=name)
        if deviations.any():
            ax.errorbar(x, means, deviations, fmt="none", ecolor="0.25", elinewidth=1)
        if len(clusters) <= 2:
            _annotate_values(ax, x, means, means + deviations)
    ax.set_xticks(
        range(len(clusters)),
        [
            f"cluster {c + 1}\nbenign agents" if len(clusters) <= 2 else f"cluster {c + 1}\nbenign"
            for c in clusters
        ],
    )
    ax.set_xlim(-0.6, max(len(clusters), 1) - 0.4)
    ax.tick_params(axis="x", length=0)
    if chance is not None:
        ax.axhline(
            chance,
            color="0.35",
            linewidth=1,
            linestyle=LINE_STYLES[2],
            label="at random",
            zorder=1.5,
        )
    ax.set_title(title)
    ax.set_ylabel(f"share of {'rounds' if value == 'frequency' else 'weight'}, per peer")
    ax.yaxis.set_major_formatter(percent_formatter())
    ax.set_ylim(0, top)


def _axis_maximum(found: Sequence[pd.DataFrame], value: str) -> float:
    """Where the axis of a value ends in all runs: above the highest bar with its deviation."""
    ends = [0.05]
    for statistics in found:
        groups = statistics.groupby(["cluster", "peer", "relation"])[value]
        ends.extend((groups.mean() + groups.std(ddof=1).fillna(0.0)).dropna())
    return 1.14 * max(ends)


def _chance_frequency(run: Run) -> float:
    """How often choosing at random would receive a given peer."""
    agents = run.config.get("agents", {})
    peers = len(run.agents) / len(run.seeds) - 1
    return float(agents.get("budget", np.nan) * agents.get("participation", 1.0) / peers)


def _annotate_values(
    ax: Axes, x: Iterable[float], values: Iterable[float], tops: Iterable[float]
) -> None:
    """Values in percent over bars that end at `tops`; none for what is not a number."""
    look: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": 8, "color": "0.2"}
    look["bbox"] = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
    for at, value, top in zip(x, values, tops, strict=True):
        if np.isfinite(value):
            text = "<1" if 0 < value < 0.005 else f"{100 * value:.0f}"
            ax.annotate(text, (at, top), xytext=(0, 2), textcoords="offset points", **look)


def percent_formatter() -> FuncFormatter:
    """Ticks of fractions in percent, with decimals only where they are needed."""
    return FuncFormatter(lambda value, _: f"{100 * value:g}%")


def _criterion_round(run: Run) -> int:
    """T_G, where the run's criterion switches; else 0."""
    return int(run.config.get("algorithm", {}).get("criterion_from_round") or 0)


def figure_title(run: Run, label: str) -> str:
    """A title for a figure, with T_G set as in the paper, and added where the run's title does not tell it."""
    if _criterion_round(run) and "T_G" not in label:
        label += f" (T_G = {_criterion_round(run)})"
    return re.sub(
        r"T_G( ?= ?(\d+))?",
        lambda m: f"$T_G = {m[2]}$" if m[2] else "$T_G$",
        label.replace("$", r"\$"),
    )
