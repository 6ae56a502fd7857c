"""Figures of one node's rounds, in the style of the other reports."""

from collections import Counter
from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fedcb2o.peer.report.peer_records import PeerRecords, RoundRecord
from fedcb2o.records import METRICS
from fedcb2o.report._agent_figures import WEIGHT_COLOURMAP, add_weight_colorbar, weight_norm
from fedcb2o.report._panels import LINE_STYLES, MARKERS, PALETTE, STYLE

_WIDTH, _HEIGHT = 4.7, 3.2  # inches: two figures side by side on a wide page
_LEGEND_LETTERS = 36  # of three entries in one row
_MAX_ROWS, _MAX_COLUMNS = 40, 240  # of peers and rounds in a figure
_MAX_CURVES = 6
_GREY, _AMBER = "#88888840", "#F2A03DB0"  # translucent, for light and dark pages
_REST = "#AAAAAA"
OUTCOMES = (
    "averaged", "not averaged", "refused", "late", "behind", "no model", "relay down", "no answer",
)  # fmt: skip
"""Outcomes of asking a peer."""
SCORES = {
    name: metric.label
    for name, metric in METRICS.items()
    if metric.is_percent and name in RoundRecord.model_fields
}
"""Metrics in percent of an agent's own model, with their labels."""


def outcomes(record: RoundRecord) -> dict[int, str]:
    """Return the outcome of asking each peer in a round, of `OUTCOMES`."""
    result = dict.fromkeys(record.asked, "no answer")
    groups = {
        "late": record.late,
        "behind": record.behind,
        "no model": record.no_model,
        "relay down": record.relay_down,
        "refused": record.refused,
        "averaged": [model.id for model in record.received if not model.unused_reason],
        "not averaged": [model.id for model in record.received if model.unused_reason],
    }
    for outcome, peers in groups.items():
        result.update((peer, outcome) for peer in peers if peer in result)
    return result


def _busiest_peers(records: PeerRecords) -> list[int]:
    """Return the peers of a figure, at most those asked most."""
    asked = Counter(peer for record in records.rounds for peer in record.asked)
    by_requests = sorted(records.peers, key=lambda peer: (-asked[peer], peer))
    return sorted(by_requests[:_MAX_ROWS])


@mpl.rc_context(STYLE)
def draw_scores(rounds: Sequence[RoundRecord]) -> Figure | None:
    """Draw the accuracy and the metrics of a simulated attack.

    None without values.
    """
    values = {name: [getattr(record, key) for record in rounds] for key, name in SCORES.items()}
    gains = [record.comparable_gain for record in rounds]
    values["training alone"] = [gain.alone if gain else None for gain in gains]
    figure = _draw_curves("Accuracy", rounds, values)
    if figure is not None:
        figure.axes[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    return figure


@mpl.rc_context(STYLE)
def draw_metrics(rounds: Sequence[RoundRecord]) -> Figure | None:
    """Draw the metrics that the member chose, the first ones of many.

    None without values.
    """
    names = list(dict.fromkeys(name for record in rounds for name in record.metrics))
    values = {name: [record.metrics.get(name) for record in rounds] for name in names[:_MAX_CURVES]}
    return _draw_curves("Chosen metrics", rounds, values)


@mpl.rc_context(STYLE)
def draw_losses(rounds: Sequence[RoundRecord]) -> Figure | None:
    """Draw the training loss and the validation loss.

    None without values.
    """
    values = {
        "training": [record.train_loss for record in rounds],
        "validation": [record.own_loss for record in rounds],
    }
    return _draw_curves("Losses", rounds, values)


@mpl.rc_context(STYLE)
def draw_contributions(records: PeerRecords) -> Figure | None:
    """Draw the summed contributions of the peers that contributed most, of either sign.

    None without contributions.
    """
    sums: dict[int, list[float]] = {peer: [0.0] for peer in records.peers}
    for record in records.rounds:
        found = {model.id: model.contribution or 0.0 for model in record.received}
        for peer, values in sums.items():
            values.append(values[-1] + found.get(peer, 0.0))
    # More curves than these have no colours that differ.
    largest = sorted(sums, key=lambda peer: -abs(sums[peer][-1]))[:_MAX_CURVES]
    curves = {
        records.info.name_of(peer): sums[peer][1:] for peer in sorted(largest) if any(sums[peer])
    }
    return _draw_curves("Sum of contributions", records.rounds, curves)


@mpl.rc_context(STYLE)
def draw_phases(rounds: Sequence[RoundRecord]) -> Figure | None:
    """Draw the duration of each round by phase.

    None without durations.
    """
    recorded = dict.fromkeys(name for record in rounds for name in record.seconds)
    names = [name for name in recorded if name != "round"][: len(PALETTE)]
    if not names:
        return None
    phases = {
        name: np.array([record.seconds.get(name, 0.0) for record in rounds]) for name in names
    }
    if phases.keys() >= {"exchange", "aggregate"}:
        without_exchange = phases["aggregate"] - phases["exchange"]
        # The exchange is part of the aggregation.
        if (without_exchange >= 0).all():
            phases["aggregate"] = without_exchange
    total = np.array([record.duration_seconds for record in rounds])
    rest = np.maximum(total - sum(phases.values()), 0)
    if rest.sum() > 0.01 * total.sum():
        phases["between"] = rest

    figure, ax = _new_panel()
    edges = _round_edges(rounds)
    bottom = np.zeros(len(rounds))
    colours = [*PALETTE[: len(names)], _REST]
    for (name, height), colour in zip(phases.items(), colours, strict=False):
        # Matplotlib reads text between dollars as mathematics.
        label = name.replace("$", r"\$")
        top = bottom + height
        ax.stairs(top, edges, baseline=bottom, fill=True, color=colour, label=label)
        bottom = top
    ax.set_title("Seconds of a round")
    _label_rounds(ax, rounds)
    _add_legend(figure, ax, ncols=4)
    return figure


@mpl.rc_context(STYLE)
def draw_weights(records: PeerRecords) -> Figure | None:
    """Draw the weight of each model in each round, its own first.

    Neighbouring rounds are averaged if there are too many for a page. None without rounds or peers.
    """
    rounds = records.rounds
    peers = _busiest_peers(records)
    if not rounds or not peers:
        return None

    weights, marks = weights_by_round(rounds, records.info.id, peers)
    rounds_per_column = -(-len(rounds) // _MAX_COLUMNS)
    starts = np.arange(0, len(rounds), rounds_per_column)
    # Rounds without a weight do not count in the mean of a column.
    count = np.add.reduceat(np.isfinite(weights), starts, axis=1)
    mean = np.add.reduceat(np.nan_to_num(weights), starts, axis=1) / np.maximum(count, 1)
    mean[count == 0] = np.nan
    worst = np.maximum.reduceat(marks, starts, axis=1)

    size = (2 * _WIDTH, 1.5 + 0.24 * (len(peers) + 1))
    figure = Figure(figsize=size, layout="constrained")
    ax = figure.subplots()
    edges = _round_edges(rounds)
    x = np.append(edges[:-1][starts], edges[-1])
    y = np.arange(len(peers) + 2) - 0.5
    unweighted = np.where(np.isfinite(mean) | (worst == 0), np.nan, worst)
    mark_colours = ListedColormap([_GREY, _AMBER])
    ax.pcolormesh(x, y, unweighted, cmap=mark_colours, vmin=1, vmax=2, rasterized=True)
    image = ax.pcolormesh(x, y, mean, cmap=WEIGHT_COLOURMAP, norm=weight_norm(), rasterized=True)
    add_weight_colorbar(figure, ax, image, aspect=12, pad=0.01)

    names = [f"{records.info.name} (itself)", *map(records.info.name_of, peers)]
    ax.set_yticks(range(len(names)), [_shorten(name) for name in names], fontsize=9)
    ax.set_ylim(len(names) - 0.5, -0.5)
    _label_rounds(ax, rounds)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False)
    ax.set_facecolor("white")
    ax.spines[:].set_visible(True)

    means = np.nan_to_num(weights).mean(1)
    shares = [f"{name} {100 * share:.0f}%" for name, share in zip(names, means, strict=True)]
    text = f"Weight in the average, mean over {len(rounds)} rounds: {', '.join(shares)}."
    figure.set_label(text)
    keys = [
        Patch(color=_AMBER, label="refused", linewidth=0),
        Patch(color=_GREY, label="asked, nothing received", linewidth=0),
    ]
    figure.legend(handles=keys, loc="outside lower center", ncols=2, fontsize=8.5, handlelength=1.2)
    return figure


def weights_by_round(
    rounds: Sequence[RoundRecord], agent_id: int, peers: Sequence[int]
) -> tuple[Float[np.ndarray, "p n"], Float[np.ndarray, "p n"]]:
    """Return the weights of all models, and marks of missing ones.

    The first row is the agent's own model. A missing weight is NaN. Its mark is 2 for a refused
    model, 1 for a model that was asked for in vain, otherwise 0.
    """
    rows = {peer: row for row, peer in enumerate([agent_id, *peers])}
    shape = (len(rows), len(rounds))
    weights = np.full(shape, np.nan)
    marks = np.zeros(shape)
    for n, record in enumerate(rounds):
        if record.own_weight is not None:
            weights[0, n] = record.own_weight
        for peer, outcome in outcomes(record).items():
            if peer in rows and outcome not in ("averaged", "not averaged"):
                marks[rows[peer], n] = 2 if outcome == "refused" else 1
        for model in record.received:
            if model.id in rows and model.weight is not None:
                weights[rows[model.id], n] = model.weight
    return weights, marks


def _draw_curves(
    title: str, rounds: Sequence[RoundRecord], values: Mapping[str, Sequence[float | None]]
) -> Figure | None:
    """Draw values over the rounds, without curves that have no value."""
    curves = {
        name: column
        for name, column in values.items()
        if any(value is not None for value in column)
    }
    if not curves:
        return None
    figure, ax = _new_panel()
    ax.set_title(title)
    x = np.array([record.round for record in rounds])
    for i, (name, column) in enumerate(curves.items()):
        y = np.array([np.nan if value is None else value for value in column], dtype=float)
        is_finite = np.isfinite(y)
        ax.plot(
            x[is_finite],
            y[is_finite],
            color=PALETTE[i],
            linestyle=LINE_STYLES[i],
            marker=MARKERS[i],
            markersize=4,
            markevery=max(1, int(is_finite.sum()) // 8),
            label=name,
        )
    _label_rounds(ax, rounds)
    ncols = 3 if sum(map(len, curves)) <= _LEGEND_LETTERS else 2
    _add_legend(figure, ax, ncols=ncols, fontsize=9, handlelength=2.6)
    return figure


def _add_legend(
    figure: Figure, ax: Axes, *, ncols: int, fontsize: float = 8.5, handlelength: float = 1.2
) -> None:
    figure.legend(
        *ax.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=ncols,
        fontsize=fontsize,
        handlelength=handlelength,
    )


def _new_panel() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    return figure, figure.subplots()


def _round_edges(rounds: Sequence[RoundRecord]) -> Float[np.ndarray, " n1"]:
    """Return the edges of each round's column; gaps widen columns."""
    numbers = np.array([record.round for record in rounds], dtype=float)
    return np.append(numbers - 0.5, numbers[-1] + 0.5)


def _label_rounds(ax: Axes, rounds: Sequence[RoundRecord]) -> None:
    edges = _round_edges(rounds)
    ax.set_xlim(edges[0], edges[-1])
    ax.set_xlabel("round")
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))


def _shorten(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:23]}…"
