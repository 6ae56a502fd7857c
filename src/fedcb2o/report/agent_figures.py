"""Figures of what agents see and whom they believe: samples, and the weights between them."""

from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from fedcb2o.records import Run, last_fifth
from fedcb2o.report.figures import STYLE, figure_title, percent_formatter

_BLUE = "#1B87D6"
WEIGHT_COLOURMAP = LinearSegmentedColormap.from_list("weights", [(_BLUE, 0.0), (_BLUE, 1.0)])
"""No weight is no colour, on light paper as on dark."""
_WEIGHT_TICKS = (0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Of a scale of weights."""


def weight_norm() -> PowerNorm:
    """The scale of all weights on all pages: equal colours are equal weights. It is that of a cube root: else an
    agent's own weight hides those of its peers."""
    return PowerNorm(1 / 3, vmin=0, vmax=1, clip=True)


def add_weight_colorbar(figure: Figure, ax: Axes, drawn: Any, **look: Any) -> None:
    """What the colours of weights mean, beside them."""
    bar = figure.colorbar(drawn, ax=ax, ticks=_WEIGHT_TICKS, label="weight", **look)
    bar.ax.yaxis.set_major_formatter(percent_formatter())
    bar.ax.minorticks_off()
    if bar.solids is not None:
        bar.solids.set_rasterized(True)  # else a page shows seams between its colours


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
        row[0].set_ylabel(
            f"cluster {c + 1}{angle}", rotation=0, ha="right", va="center", labelpad=8
        )
    seen = (
        f"the same in {clusters} clusters, each in its rotation"
        if clusters > 1
        else "as agents see them"
    )
    figure.set_label(f"{count} sample images, {seen}.")
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
    same = run.agents.groupby("seed")[["cluster", "malicious"]].apply(
        lambda table: table.to_numpy().tolist()
    )
    pairs = pairs[pairs.seed.isin([s for s in run.seeds if same[s] == same[seed]])]
    rounds = len(pairs[["seed", "round"]].drop_duplicates())
    matrix = np.zeros((len(agents), len(agents)))
    np.add.at(matrix, (pairs.agent, pairs.peer), pairs.weight.fillna(0) / rounds)
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
    ends = np.cumsum(groups.to_numpy())
    middles = ends - groups.to_numpy() / 2 - 0.5
    names = [
        f"cluster {c + 1}\n{'malicious' if malicious else 'benign'}"
        for c, malicious in groups.index
    ]
    for end, (c, _), after in zip(ends[:-1], groups.index[:-1], groups.index[1:], strict=True):
        width = 2.2 if c != after[0] else 0.9
        ax.axhline(end - 0.5, color="0", linewidth=width)
        ax.axvline(end - 0.5, color="0", linewidth=width)
    many = len(groups) > 2
    ax.set_xticks(middles, names, rotation=90 if many else 0, fontsize=9)
    ax.set_yticks(middles, names, fontsize=9)
    ax.set(xlabel="peer whose model is received", ylabel="agent that mixes it in")
    ax.set_title(figure_title(run, run.title))
    ax.tick_params(length=0)
    ax.grid(visible=False)
    ax.spines[:].set_visible(True)
    figure.set_label(_describe_matrix(figure_title(run, run.title), matrix, agents))
    return figure


def _describe_matrix(title: str, matrix: np.ndarray, agents: pd.DataFrame) -> str:
    """The matrix in words: what the benign agents of each cluster give to whom."""
    rows = agents.sort_values("agent")
    cluster = rows.cluster.to_numpy()
    malicious = rows.malicious.to_numpy(bool)
    own = np.eye(len(rows), dtype=bool)
    sentences = []
    for c in np.unique(cluster):
        same = cluster == c
        kinds = {
            "their own models": own,
            "benign ones of their cluster": same & ~malicious & ~own,
            "malicious ones of it": same & malicious & ~own,
            "other clusters": ~same & ~own,
        }
        given = {
            to: (matrix * where)[same & ~malicious].sum(1).mean()
            for to, where in kinds.items()
            if where.any()
        }
        shares = ", ".join(f"{100 * share:.0f}% to {to}" for to, share in given.items())
        sentences.append(f"Benign agents of cluster {c + 1} give {shares}.")
    return f"{title}, weights between agents. {' '.join(sentences)}"
