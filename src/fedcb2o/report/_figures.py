"""Figures of runs: learning curves, received peers, source-class samples."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fedcb2o.errors import RunError
from fedcb2o.records import METRICS, OPTIONAL_METRICS, SOURCE_METRICS, STANDARD_METRICS, Run
from fedcb2o.report._panels import LINE_STYLES, MARKERS, Panels, draw_panels, method_colour
from fedcb2o.report._table_formats import shorten_label
from fedcb2o.report.tables import LABELS, by_source_count, pair_statistics, run_labels

_PEER_KINDS = {
    ("benign", "same"): ("#0072B2", "benign, same cluster"),
    ("malicious", "same"): ("#D55E00", "malicious, same cluster"),
    ("benign", "other"): ("#A6CEE8", "benign, other cluster"),
    ("malicious", "other"): ("#F9C9A0", "malicious, other cluster"),
}
_PANEL_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MAX_NUMBERED_CLUSTERS = 2  # with more clusters, bars have no numbers and short labels


@dataclass(frozen=True)
class Curve:
    """A curve over the rounds."""

    name: str
    # Rows with a `round`, a `seed` and metrics as fractions of 1; the mean over rows is drawn for
    # each round and seed.
    table: pd.DataFrame
    # T_G; 0 for none.
    criterion_from_round: int = 0
    # Names of the metrics that the run's configuration chose.
    custom_metrics: Collection[str] = ()


def figure6(*runs: Run) -> Figure:
    """Draw the paper's Figure 6 (fig:avg_select_time_mul_weights), one row per run.

    It shows how often benign agents received each kind of peer, and with which weight.

    Args:
        runs: Runs to draw.

    Returns:
        The figure.
    """
    return draw_panels(peer_panels(runs))


def curves(runs: Sequence[Run]) -> Figure:
    """Draw each metric over the rounds, mean over benign agents.

    The band is ± one standard deviation over seeds. A thin vertical line marks the round T_G from
    which a run uses its criterion.

    Args:
        runs: Runs to draw.

    Returns:
        The figure.

    Raises:
        RunError: No round was evaluated.
    """
    return draw_panels(curve_panels(learning_curves(runs)))


def source_counts(runs: Sequence[Run]) -> Figure | None:
    """Draw source accuracy and attack success by source-class samples in validation data.

    Args:
        runs: Runs to draw.

    Returns:
        The figure, or None without such samples.
    """
    panels = source_count_panels(runs)
    return draw_panels(panels) if panels.draw_functions else None


def peer_panels(runs: Sequence[Run]) -> Panels:
    """Build the panels of `figure6`, two per run."""
    tables = [pair_statistics(run) for run in runs]
    panels: list[Callable[[Axes], None]] = []
    for run, label, statistics in zip(runs, run_labels(runs), tables, strict=True):
        for value, words in (("frequency", "how often received"), ("share", "weight given")):
            letter = _PANEL_LETTERS[len(panels) % len(_PANEL_LETTERS)]
            title = f"({letter}) {figure_title(run, label)}: {words}"
            chance = _chance_frequency(run) if value == "frequency" and len(statistics) else None
            # Equal axes, so that runs compare by eye.
            top = _axis_maximum(tables, value)
            panels.append(partial(_draw_peer_kinds, statistics, value, title, chance, top))
    return Panels(panels, (4.75, 3.1), 2)


def learning_curves(runs: Sequence[Run]) -> list[Curve]:
    """Select the curves of benign agents, one per run."""
    selected = []
    for run, label in zip(runs, run_labels(runs), strict=True):
        benign = run.records[~run.records.malicious.astype(bool)]
        title = figure_title(run, label)
        selected.append(Curve(title, benign, run.criterion_from_round, run.custom_metrics))
    return selected


def curve_panels(lines: Sequence[Curve]) -> Panels:
    """Build one panel per metric over the rounds; RunError without an evaluated round."""
    tables = [line.table for line in lines]
    custom = [metric for line in lines for metric in line.custom_metrics]
    names = dict.fromkeys((*STANDARD_METRICS, *OPTIONAL_METRICS, *custom))
    metrics = [metric for metric in names if _is_measured(metric, tables)]
    if not metrics:
        raise RunError(
            "no round was evaluated yet: wait for the first `evaluate_every` rounds of the run"
        )
    panels = [
        partial(_draw_curves, lines, metric, LABELS.get(metric, metric)) for metric in metrics
    ]
    return Panels(panels, (3.9, 3.8), 3)


def attack_panels(curves: Mapping[str, Sequence[Curve]], metric: str) -> Panels:
    """Build one panel of a metric over the rounds per attack, for the width of an article."""
    columns = min(len(curves), 3)
    panels: list[Callable[[Axes], None]] = []
    for number, (attack, lines) in enumerate(curves.items()):
        # The name of the metric at the left panel serves the whole row.
        label = "" if number % columns else LABELS.get(metric, metric)
        title = shorten_label(attack).replace("$", r"\$")
        panels.append(partial(_draw_curves, lines, metric, title, y_label=label))
    return Panels(panels, (2.5, 2.2), columns)


def source_count_panels(runs: Sequence[Run]) -> Panels:
    """Build one panel per metric of the source class, none if its samples are not counted."""
    tables = [by_source_count(run) for run in runs]
    groups = sorted({str(name) for table in tables for name in table["samples"]})
    metrics = [metric for metric in SOURCE_METRICS if _is_measured(metric, tables)]
    width = max(4.6, 0.2 * len(runs) * len(groups))  # inches, for the numbers on the bars
    panels = [
        partial(_draw_source_counts, runs, tables, groups, metric) for metric in metrics if groups
    ]
    return Panels(panels, (width, 3.5), 2)


def _is_measured(metric: str, tables: Sequence[pd.DataFrame]) -> bool:
    return any(metric in table and table[metric].notna().any() for table in tables)


def _draw_curves(
    lines: Sequence[Curve], metric: str, title: str, ax: Axes, y_label: str = ""
) -> None:
    # Runs with a clock are compared at equal times.
    by_hours = all("hours" in line.table for line in lines)
    for i, line in enumerate(lines):
        columns = ["round", "seed", "hours", metric]
        measured = line.table.reindex(columns=columns).dropna(subset=metric)
        means = measured.groupby(["round", "seed"])[metric].mean().unstack("seed")
        if by_hours:
            hours = measured.groupby("round")["hours"].mean()
            means.index = pd.Index(hours.reindex(means.index))
        if not means.empty:
            _draw_curve(ax, means, line.name, i)
    ax.set_title(title)
    ax.set_ylabel(y_label)
    ax.set_xlabel("simulated hours" if by_hours else "round")
    if not by_hours:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))

    low, high = bottom, top = ax.get_ylim()
    if metric in METRICS and METRICS[metric].is_percent:
        ax.yaxis.set_major_formatter(percent_formatter())
        bottom = max(low, 0)
        top = min(high, 1.005)
    switches = sorted({line.criterion_from_round for line in lines} - {0})
    if by_hours:
        switches = []  # they are rounds
    ax.set_ylim(bottom, top + 0.05 * (high - low) * len(switches))
    for i, switch in enumerate(switches):
        ax.axvline(switch, color="0.35", linewidth=0.8)
        ax.annotate(
            f"$T_G = {switch}$",
            xy=(switch, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, -2 - 10 * i),
            textcoords="offset points",
            va="top",
            fontsize=8,
            color="0.35",
        )


def _draw_curve(ax: Axes, means: pd.DataFrame, name: str, i: int) -> None:
    """Draw the mean of columns with its band, in style i."""
    middle = means.mean(axis="columns")
    deviation = means.std(axis="columns", ddof=1).fillna(0.0)
    x = means.index.to_numpy()
    colour = method_colour(i)
    style = LINE_STYLES[i % len(LINE_STYLES)]
    ax.plot(
        x,
        middle,
        color=colour,
        linestyle=style,
        marker=MARKERS[i % len(MARKERS)],
        markersize=4.5,
        markevery=max(1, len(x) // 8),
        label=name,
    )
    low = middle - deviation
    high = middle + deviation
    ax.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def _draw_source_counts(
    runs: Sequence[Run], tables: Sequence[pd.DataFrame], groups: list[str], metric: str, ax: Axes
) -> None:
    width = 0.8 / len(runs)
    for i, (run, table, label) in enumerate(zip(runs, tables, run_labels(runs), strict=True)):
        values = table.set_index("samples")[metric].reindex(groups).to_numpy(float)
        x = np.arange(len(groups)) + (i - (len(runs) - 1) / 2) * width
        colour = method_colour(i)
        ax.bar(x, values, 0.92 * width, color=colour, label=figure_title(run, label))
        _annotate_values(ax, x, values, values)  # shows a bar of height 0
    ax.set_title(LABELS[metric])
    ax.set_xlim(-0.5, len(groups) - 0.5)
    ax.set_ylim(0, max(ax.get_ylim()[1], 0.05))
    ax.set_xticks(range(len(groups)), groups)
    ax.tick_params(axis="x", length=0)
    ax.set_xlabel("source-class samples in validation data")
    ax.yaxis.set_major_formatter(percent_formatter())


def _draw_peer_kinds(
    statistics: pd.DataFrame, value: str, title: str, chance: float | None, top: float, ax: Axes
) -> None:
    """Draw bars of one run by cluster and kind of peer."""
    clusters = sorted(statistics.cluster.unique())
    selections = {
        kind: statistics[(statistics.peer == kind[0]) & (statistics.relation == kind[1])]
        for kind in _PEER_KINDS
    }
    kinds = [kind for kind, rows in selections.items() if len(rows)]
    width = min(0.84 / max(len(kinds), 1), 0.3)
    has_numbers = len(clusters) <= _MAX_NUMBERED_CLUSTERS
    for i, kind in enumerate(kinds):
        groups = selections[kind].groupby("cluster")[value]
        means = groups.mean().reindex(clusters)
        deviations = groups.std(ddof=1).reindex(clusters).fillna(0.0)
        x = np.arange(len(clusters)) + (i - (len(kinds) - 1) / 2) * width
        colour, name = _PEER_KINDS[kind]
        ax.bar(x, means, 0.92 * width, color=colour, label=name)
        if deviations.any():
            ax.errorbar(x, means, deviations, fmt="none", ecolor="0.25", elinewidth=1)
        if has_numbers:
            _annotate_values(ax, x, means, means + deviations)

    suffix = "\nbenign" + " agents" * has_numbers
    ax.set_xticks(range(len(clusters)), [f"cluster {c + 1}{suffix}" for c in clusters])
    ax.set_xlim(-0.6, max(len(clusters), 1) - 0.4)
    ax.tick_params(axis="x", length=0)
    if chance is not None:
        style = LINE_STYLES[2]
        ax.axhline(
            chance, color="0.35", linewidth=1, linestyle=style, label="at random", zorder=1.5
        )
    ax.set_title(title)
    unit = "rounds" if value == "frequency" else "weight"
    ax.set_ylabel(f"share of {unit}, per peer")
    ax.yaxis.set_major_formatter(percent_formatter())
    ax.set_ylim(0, top)


def _axis_maximum(tables: Sequence[pd.DataFrame], value: str) -> float:
    """Compute an axis limit above the bars of all runs."""
    ends = [0.05]
    for statistics in tables:
        groups = statistics.groupby(["cluster", "peer", "relation"])[value]
        ends.extend((groups.mean() + groups.std(ddof=1).fillna(0.0)).dropna())
    return 1.14 * max(ends)


def _chance_frequency(run: Run) -> float:
    """Compute how often a random choice would receive a given peer."""
    agents = run.config.get("agents", {})
    peers = len(run.agents) / len(run.seeds) - 1
    return float(agents.get("budget", np.nan) * agents.get("participation", 1.0) / peers)


def _annotate_values(
    ax: Axes, x: Iterable[float], values: Iterable[float], tops: Iterable[float]
) -> None:
    """Write finite values in percent above bars that end at `tops`."""
    for position, value, top in zip(x, values, tops, strict=True):
        text = f"{100 * value:.0f}"
        if 0 < value < 0.005:
            text = "<1"
        if np.isfinite(value):
            ax.annotate(
                text,
                (position, top),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=8,
                color="0.2",
                bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},
            )


def percent_formatter() -> FuncFormatter:
    """Return a formatter of ticks in percent, with the necessary decimals."""
    return FuncFormatter(lambda value, _: f"{100 * value:g}%")


def figure_title(run: Run, label: str) -> str:
    """Return the title of a run with T_G, typeset by dollar signs."""
    label = shorten_label(label)
    if run.criterion_from_round and "T_G" not in label:
        label += f" (T_G = {run.criterion_from_round})"

    def replace(match: re.Match[str]) -> str:
        return f"$T_G = {match[2]}$" if match[2] else "$T_G$"

    return re.sub(r"T_G( ?= ?(\d+))?", replace, label.replace("$", r"\$"))
