"""Figures from records: selection and weights (the paper's Figure 6), curves, samples, weights between agents.

Each function returns a matplotlib Figure of its own and leaves no state behind. Colours are those of Okabe and Ito
(2008), which colour-blind readers tell apart; lines differ in style and markers too.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fedcb2o.errors import RunError
from fedcb2o.records import SOMETIMES, Run, last_fifth
from fedcb2o.report.tables import LABELS, METRICS, by_source_count, labels, pair_statistics

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
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")
LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.5, 1.2, 1.5)))
MARKERS = "osD^vPX*"
KINDS = {
    ("benign", "same"): ("#0072B2", "benign, same cluster"),
    ("malicious", "same"): ("#D55E00", "malicious, same cluster"),
    ("benign", "other"): ("#A6CEE8", "benign, other cluster"),
    ("malicious", "other"): ("#F9C9A0", "malicious, other cluster"),
}


@mpl.rc_context(STYLE)
def figure6(*runs: Run) -> Figure:
    """The paper's Figure 6 (fig:avg_select_time_mul_weights), a row a run.

    How often benign agents received each kind of peer, and with what weight.
    """
    figure = Figure(figsize=(9.5, 0.7 + 2.9 * len(runs)), layout="constrained")
    axes = figure.subplots(len(runs), 2, squeeze=False, sharey="col")
    panels = (("frequency", "how often received"), ("share", "weight given"))
    for row, (run, label) in enumerate(zip(runs, labels(runs), strict=True)):
        statistics = pair_statistics(run)
        for column, (value, what) in enumerate(panels):
            _pair_bars(axes[row, column], statistics, value)
            letter = "abcdefghijklmnopqrstuvwxyz"[(2 * row + column) % 26]
            axes[row, column].set_title(f"({letter}) {_title(run, label)}: {what}")
        if len(statistics):
            agents, peers = run.config.get("agents", {}), len(run.agents) / len(run.seeds) - 1
            chance = agents.get("budget", np.nan) * agents.get("participation", 1.0) / peers
            axes[row, 0].axhline(chance, color="0.35", linewidth=1, linestyle=LINES[2], label="at random", zorder=1.5)
    for ax, what in zip(axes.T, ("share of rounds, per peer", "share of weight, per peer"), strict=True):
        for each in ax:
            each.set_ylabel(what)
            each.yaxis.set_major_formatter(_percent())
            each.margins(y=0.12)
            each.set_ylim(bottom=0)
    found = {label: handle for ax in axes[:, 0] for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    order = [name for name in (*(name for _, name in KINDS.values()), "at random") if name in found]
    look: dict[str, Any] = {"ncols": len(order), "fontsize": 9, "handlelength": 1.4, "columnspacing": 1.6}
    figure.legend([found[name] for name in order], order, loc="outside upper center", **look)
    return figure


@mpl.rc_context(STYLE)
def curves(runs: Sequence[Run]) -> Figure:
    """Each metric over the rounds, mean over benign agents; the band is ± a standard deviation over seeds.

    A thin vertical line marks the round T_G from which a run uses its criterion.
    """
    tables = [run.records[~run.records.malicious.astype(bool)] for run in runs]
    shown = [m for m in (*METRICS, *SOMETIMES) if any(m in table and table[m].notna().any() for table in tables)]
    if not shown:
        raise RunError("no round was evaluated yet: wait for the first `evaluate_every` rounds of the run")
    figure = Figure(figsize=(max(5.0, 3.9 * len(shown)), 3.9), layout="constrained")
    axes = figure.subplots(1, len(shown), squeeze=False)[0]
    for ax, metric in zip(axes, shown, strict=True):
        for i, (run, table, label) in enumerate(zip(runs, tables, labels(runs), strict=True)):
            means = (
                table.reindex(columns=["round", "seed", metric])
                .dropna(subset=metric)
                .groupby(["round", "seed"])[metric]
                .mean()
                .unstack("seed")
            )
            if means.empty:
                continue
            middle, deviation = means.mean(axis="columns"), means.std(axis="columns", ddof=1).fillna(0.0)
            x, colour = means.index.to_numpy(), COLOURS[i % len(COLOURS)]
            look: dict[str, Any] = {"linestyle": LINES[i % len(LINES)], "marker": MARKERS[i % len(MARKERS)]}
            every = max(1, len(x) // 8)
            ax.plot(x, middle, color=colour, markersize=4.5, markevery=every, label=_title(run, label), **look)
            ax.fill_between(x, middle - deviation, middle + deviation, color=colour, alpha=0.15, linewidth=0)
        ax.set_title(LABELS[metric])
        ax.set_xlabel("round")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        low, high = ax.get_ylim()
        bottom, top = low, high
        if not metric.endswith("loss"):
            ax.yaxis.set_major_formatter(_percent())
            bottom, top = max(low, 0), min(high, 1.005)
        switches = sorted({_switch(run) for run in runs} - {0})
        ax.set_ylim(bottom, top + 0.05 * (high - low) * len(switches))
        for i, switch in enumerate(switches):
            ax.axvline(switch, color="0.35", linewidth=0.8)
            where: dict[str, Any] = {
                "xy": (switch, 1),
                "xycoords": ("data", "axes fraction"),
                "textcoords": "offset points",
            }
            ax.annotate(f"$T_G = {switch}$", xytext=(3, -2 - 10 * i), va="top", fontsize=8, color="0.35", **where)
    found = dict(pair for ax in axes for pair in zip(*ax.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=min(len(runs), 5), handlelength=3)
    return figure


@mpl.rc_context(STYLE)
def sample_images(run: Run) -> Figure | None:
    """The same images as each cluster sees them, a row a cluster with its angle; None where the data are no images."""
    images = run.samples(run.seeds[0]) if run.seeds else None
    if images is None:
        return None
    clusters, count = images.shape[:2]
    angles = run.about(run.seeds[0]).get("angles") or [None] * clusters
    figure = Figure(figsize=(0.8 * count + 1.1, 0.8 * clusters + 0.1))
    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02, wspace=0, hspace=0))
    axes = figure.subplots(clusters, count, squeeze=False)
    for c, row in enumerate(axes):
        for ax, image in zip(row, images[c], strict=True):
            ax.imshow(image, cmap="gray_r", vmin=0, vmax=images.max(), interpolation="nearest")
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set(visible=True, color="0.85")
        angle = "" if angles[c] is None else f"\n{angles[c]}°"
        row[0].set_ylabel(f"cluster {c + 1}{angle}", rotation=0, ha="right", va="center", labelpad=8)
    return figure


@mpl.rc_context(STYLE)
def weight_matrix(run: Run) -> Figure | None:
    """The weight that each agent (row) gave to each peer (column), mean over the last fifth of rounds and over seeds.

    Agents are ordered by cluster, benign ones first; the diagonal is an agent's weight of its own model. None
    where nothing is recorded yet.
    """
    pairs = last_fifth(run.pairs)
    if pairs.empty:
        return None
    seed = run.seeds[0]
    agents = run.agents[run.agents.seed == seed].sort_values(["cluster", "malicious", "agent"])
    groups = agents.groupby(["cluster", "malicious"], sort=True).size()
    # Only seeds in which the same agents are malicious can be averaged.
    same = run.agents.groupby("seed")[["cluster", "malicious"]].apply(lambda table: table.to_numpy().tolist())
    pairs = pairs[pairs.seed.isin([s for s in run.seeds if same[s] == same[seed]])]
    rounds = len(pairs[["seed", "round"]].drop_duplicates())
    matrix = np.zeros((len(agents), len(agents)))
    np.add.at(matrix, (pairs.agent, pairs.peer), pairs.weight.fillna(0) / rounds)
    order = agents.agent.to_numpy()
    figure = Figure(figsize=(7.2, 6.2), layout="constrained")
    ax = figure.subplots()
    # A square root scale: else an agent's own weight hides those of its peers.
    norm = PowerNorm(0.5, vmin=0, vmax=max(matrix.max(), 1e-9))
    drawn = ax.imshow(matrix[np.ix_(order, order)], cmap="Blues", norm=norm, interpolation="nearest")
    bar = figure.colorbar(drawn, ax=ax, shrink=0.75, label="mean weight, last fifth of the rounds")
    bar.ax.yaxis.set_major_formatter(_percent())
    ends = np.cumsum(groups.to_numpy())
    middles = ends - groups.to_numpy() / 2 - 0.5
    names = [f"cluster {c + 1}\n{'malicious' if malicious else 'benign'}" for c, malicious in groups.index]
    for end, (c, _), after in zip(ends[:-1], groups.index[:-1], groups.index[1:], strict=True):
        width = 2.2 if c != after[0] else 0.9
        ax.axhline(end - 0.5, color="black", linewidth=width)
        ax.axvline(end - 0.5, color="black", linewidth=width)
    many = len(groups) > 4
    ax.set_xticks(middles, names, rotation=90 if many else 0, fontsize=9)
    ax.set_yticks(middles, names, fontsize=9)
    ax.set(xlabel="peer whose model is received", ylabel="agent that mixes it in")
    ax.set_title(_title(run, run.title))
    ax.tick_params(length=0)
    ax.grid(visible=False)
    ax.spines[:].set_visible(True)
    return figure


@mpl.rc_context(STYLE)
def source_counts(runs: Sequence[Run]) -> Figure | None:
    """Source accuracy and attack success by how many source-class samples an agent validates on; None without any."""
    tables = [by_source_count(run) for run in runs]
    bins = sorted({str(name) for table in tables for name in table["samples"]})
    shown = [metric for metric in METRICS[1:] if any(table[metric].notna().any() for table in tables)]
    if not bins or not shown:
        return None
    wide = max(4.6, 0.2 * len(runs) * len(bins))  # inches, for the numbers on the bars
    figure = Figure(figsize=(wide * len(shown) + 0.4, 3.6), layout="constrained")
    axes = figure.subplots(1, len(shown), squeeze=False)[0]
    width = 0.8 / len(runs)
    for ax, metric in zip(axes, shown, strict=True):
        for i, (run, table, label) in enumerate(zip(runs, tables, labels(runs), strict=True)):
            values = table.set_index("samples")[metric].reindex(bins).to_numpy(float)
            x = np.arange(len(bins)) + (i - (len(runs) - 1) / 2) * width
            ax.bar(x, values, 0.92 * width, color=COLOURS[i % len(COLOURS)], label=_title(run, label))
            _numbers(ax, x, values, values)  # a bar of height 0 is seen by its number, one of nobody by none
        ax.set_title(LABELS[metric])
        ax.set_xlim(-0.5, len(bins) - 0.5)
        ax.set_ylim(0, max(ax.get_ylim()[1], 0.05))
        ax.set_xticks(range(len(bins)), bins)
        ax.tick_params(axis="x", length=0)
        ax.set_xlabel("source-class samples in validation data")
        ax.yaxis.set_major_formatter(_percent())
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(runs), 5))
    return figure


def _pair_bars(ax: Axes, statistics: pd.DataFrame, value: str) -> None:
    """Grouped bars of one run: a group a cluster of selecting agents, a bar a kind of peer; ± over seeds."""
    clusters = sorted(statistics.cluster.unique())
    kinds = [kind for kind in KINDS if ((statistics.peer == kind[0]) & (statistics.relation == kind[1])).any()]
    width = min(0.84 / max(len(kinds), 1), 0.3)
    for i, kind in enumerate(kinds):
        mine = statistics[(statistics.peer == kind[0]) & (statistics.relation == kind[1])]
        groups = mine.groupby("cluster")[value]
        means, deviations = groups.mean().reindex(clusters), groups.std(ddof=1).reindex(clusters).fillna(0.0)
        x = np.arange(len(clusters)) + (i - (len(kinds) - 1) / 2) * width
        colour, name = KINDS[kind]
        ax.bar(x, means, 0.92 * width, color=colour, label=name)
        if deviations.any():
            ax.errorbar(x, means, deviations, fmt="none", ecolor="0.25", elinewidth=1)
        if len(clusters) <= 2:
            _numbers(ax, x, means, means + deviations)
    ax.set_xticks(
        range(len(clusters)),
        [f"cluster {c + 1}\nbenign agents" if len(clusters) <= 2 else f"cluster {c + 1}\nbenign" for c in clusters],
    )
    ax.set_xlim(-0.6, max(len(clusters), 1) - 0.4)
    ax.tick_params(axis="x", length=0)


def _numbers(ax: Axes, x: Iterable[float], values: Iterable[float], tops: Iterable[float]) -> None:
    """Values in percent over bars that end at `tops`; none for what is not a number."""
    look: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": 8, "color": "0.2"}
    look["bbox"] = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
    for at, value, top in zip(x, values, tops, strict=True):
        if np.isfinite(value):
            text = "<1" if 0 < value < 0.005 else f"{100 * value:.0f}"
            ax.annotate(text, (at, top), xytext=(0, 2), textcoords="offset points", **look)


def _percent() -> FuncFormatter:
    """Ticks of fractions in percent, with decimals only where they are needed."""
    return FuncFormatter(lambda value, _: f"{100 * value:g}%")


def _switch(run: Run) -> int:
    """T_G, where the run's criterion switches; else 0."""
    return int(run.config.get("algorithm", {}).get("criterion_from_round") or 0)


def _title(run: Run, label: str) -> str:
    """A title for a figure, with T_G set as in the paper, and added where the run's title does not tell it."""
    if _switch(run) and "T_G" not in label:
        label += f" (T_G = {_switch(run)})"
    return re.sub(r"T_G( ?= ?(\d+))?", lambda m: f"$T_G = {m[2]}$" if m[2] else "$T_G$", label.replace("$", r"\$"))
