"""Figures of sample images and of weights between agents."""

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from fedcb2o.records import Run, last_fifth
from fedcb2o.report._figures import figure_title, percent_formatter
from fedcb2o.report._panels import STYLE
from fedcb2o.report._table_formats import shorten_label

_BLUE = "#1B87D6"
WEIGHT_COLOURMAP = LinearSegmentedColormap.from_list("weights", [(_BLUE, 0.0), (_BLUE, 1.0)])
"""Colours of weights. Weight 0 is transparent, for light and dark pages."""
_MAX_DRAWN_AGENTS = 5000  # as a matrix, of 200 MiB
_MAX_NAMED_AGENTS = 30  # whose names fit next to a matrix
_WEIGHT_TICKS = (0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0)


def weight_norm() -> PowerNorm:
    """Return the scale of weights, a cube root: a linear one would hide the weights of peers."""
    return PowerNorm(1 / 3, vmin=0, vmax=1, clip=True)


def add_weight_colorbar(figure: Figure, ax: Axes, drawn: Any, **options: Any) -> None:
    """Add the colour scale of weights to a figure."""
    bar = figure.colorbar(drawn, ax=ax, ticks=_WEIGHT_TICKS, label="weight", **options)
    bar.ax.yaxis.set_major_formatter(percent_formatter())
    bar.ax.minorticks_off()
    if bar.solids is not None:
        bar.solids.set_rasterized(True)  # vector graphics would show seams between the colours


@mpl.rc_context(STYLE)
def sample_images(run: Run) -> Figure | None:
    """Draw the same images as each cluster sees them.

    Args:
        run: Run to draw.

    Returns:
        The figure, or None for data other than images.

    Raises:
        RunError: The file of samples is damaged.
    """
    images = run.samples(run.seeds[0]) if run.seeds else None
    if images is None:
        return None
    clusters, count = images.shape[:2]
    angles = run.about(run.seeds[0]).get("angles") or [None] * clusters
    figure = Figure(figsize=(0.8 * count + 1.1, 0.8 * clusters + 0.1))
    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02, wspace=0, hspace=0))
    axes = figure.subplots(clusters, count, squeeze=False)
    for cluster, row in enumerate(axes):
        for ax, image in zip(row, images[cluster], strict=True):
            ax.imshow(image, cmap="gray_r", vmin=0, vmax=images.max(), interpolation="nearest")
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set(visible=True, color="0.85")
        label = f"cluster {cluster + 1}"
        if angles[cluster] is not None:
            label += f"\n{angles[cluster]:g}°"
        row[0].set_ylabel(label, rotation=0, ha="right", va="center", labelpad=8)

    words = "in the form that agents see"
    if clusters > 1:
        words = f"the same as {clusters} clusters see them"
    figure.set_label(f"{count} sample images, {words}.")
    return figure


@mpl.rc_context(STYLE)
def weight_matrix(run: Run) -> Figure | None:
    """Draw the weights of received models, agents by peers.

    Weights are means over the last fifth of the rounds and over seeds with the same malicious
    agents. Agents are ordered by cluster, benign ones first. The diagonal is the weight of the
    agent's own model.

    Args:
        run: Run to draw.

    Returns:
        The figure, or None without recorded pairs or for more agents than it can show.
    """
    pairs = last_fifth(run.pairs)
    if pairs.empty or run.agents.agent.nunique() > _MAX_DRAWN_AGENTS:
        return None
    seed = run.seeds[0]
    agents = run.agents[run.agents.seed == seed].sort_values(["cluster", "malicious", "agent"])
    matrix = _mean_weights(run, pairs, seed, len(agents))
    order = agents.agent.to_numpy()

    figure = Figure(figsize=(4.0, 3.7), layout="constrained")
    ax = figure.subplots()
    drawn = ax.imshow(
        matrix[np.ix_(order, order)],
        cmap=WEIGHT_COLOURMAP,
        norm=weight_norm(),
        interpolation="nearest",
    )
    add_weight_colorbar(figure, ax, drawn, shrink=0.8)
    _label_groups(ax, agents.groupby(["cluster", "malicious"], sort=True).size())
    names = run.about(seed).get("names") or []
    if len(names) == len(order) <= _MAX_NAMED_AGENTS:
        malicious = agents.malicious.to_numpy(bool)
        _label_owners(ax, [names[agent] for agent in order], malicious)
    title = figure_title(run, run.title)
    ax.set(xlabel="peer whose model is received", ylabel="agent that mixes it in")
    ax.set_title(title)
    ax.tick_params(length=0)
    ax.grid(visible=False)
    ax.spines[:].set_visible(True)
    figure.set_label(f"{title}, weights between agents.")
    return figure


def _mean_weights(run: Run, pairs: pd.DataFrame, seed: int, count: int) -> np.ndarray:
    """Average the weights over rounds and seeds with equal roles."""
    roles = run.agents.groupby("seed")[["cluster", "malicious"]].apply(
        lambda table: table.to_numpy().tolist()
    )
    seeds = [other for other in run.seeds if roles[other] == roles[seed]]
    pairs = pairs[pairs.seed.isin(seeds)]
    rounds = len(pairs[["seed", "round"]].drop_duplicates())
    matrix = np.zeros((count, count))
    np.add.at(matrix, (pairs.agent, pairs.peer), pairs.weight.fillna(0) / rounds)
    return matrix


def _label_groups(ax: Axes, groups: "pd.Series[int]") -> None:
    """Separate and label clusters and roles; `groups` has their sizes."""
    sizes = groups.to_numpy()
    ends = np.cumsum(sizes)
    for end, (cluster, _), (next_cluster, _) in zip(
        ends[:-1], groups.index[:-1], groups.index[1:], strict=True
    ):
        width = 0.9 + 1.3 * (cluster != next_cluster)
        ax.axhline(end - 0.5, color="0", linewidth=width)
        ax.axvline(end - 0.5, color="0", linewidth=width)

    roles = ("benign", "malicious")
    names = [f"cluster {cluster + 1}\n{roles[malicious]}" for cluster, malicious in groups.index]
    middles = ends - sizes / 2 - 0.5
    ax.set_xticks(middles, names, rotation=90 * (len(groups) > 2), fontsize=9)
    ax.set_yticks(middles, names, fontsize=9)


def _label_owners(ax: Axes, names: Sequence[str], malicious: np.ndarray) -> None:
    """Label rows and columns by the agents' owners, with a star for malicious ones."""
    labels = [
        shorten_label(name).replace("$", r"\$") + " *" * bool(is_malicious)  # no mathematics
        for name, is_malicious in zip(names, malicious, strict=True)
    ]
    places = range(len(labels))
    size = 9 if len(labels) <= _MAX_NAMED_AGENTS // 2 else 6
    ax.set_xticks(places, labels, rotation=90, fontsize=size)
    ax.set_yticks(places, labels, fontsize=size)
