"""Figures of one node's rounds, each a matplotlib Figure of its own; the look is that of the other reports."""

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
from fedcb2o.report.agent_figures import WEIGHT_COLOURMAP, add_weight_colorbar, weight_norm
from fedcb2o.report.figures import LINE_STYLES, MARKERS, PALETTE, STYLE

_WIDTH, _HEIGHT = (
    4.7,
    3.2,
)  # inches: two figures side by side on a wide page, one below the other on a narrow one
_MAX_ROWS, _MAX_COLUMNS = 40, 240  # peers and columns that a figure shows at most
_GREY, _AMBER = "#88888840", "#F2A03DB0"  # let light paper through, and dark
OUTCOME_COLOURS = {
    "taken": PALETTE[0],
    "refused": PALETTE[1],
    "late": PALETTE[4],
    "no answer": "#AAAAAA",
}
"""What became of an agent's asking a peer, and how it is drawn."""
SCORES = {
    "accuracy": "accuracy",
    "source_accuracy": "source class",
    "attack_success_rate": "attack success",
}


def outcomes(line: RoundRecord) -> dict[int, str]:
    """What became of each peer that was asked in a round."""
    taken = {each.id for each in line.received}
    late = set(line.late)
    return {
        peer: "taken"
        if peer in taken
        else "refused"
        if peer in line.refused
        else "late"
        if peer in late
        else "no answer"
        for peer in line.asked
    }


def _busiest_peers(recorded: PeerRecords) -> list[int]:
    """The peers that a figure shows: all, or of very many those that were asked most, in the order of ids."""
    asked = Counter(peer for line in recorded.rounds for peer in line.asked)
    return sorted(sorted(recorded.peers, key=lambda peer: (-asked[peer], peer))[:_MAX_ROWS])


@mpl.rc_context(STYLE)
def draw_scores(lines: Sequence[RoundRecord]) -> Figure | None:
    """Accuracy on the agent's own test set over the rounds; in a simulation the source class and the attack too."""
    found = {name: [getattr(line, key) for line in lines] for key, name in SCORES.items()}
    figure = _draw_curves("Accuracy", lines, found)
    if figure is not None:
        figure.axes[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    return figure


@mpl.rc_context(STYLE)
def draw_losses(lines: Sequence[RoundRecord]) -> Figure | None:
    """The loss in training, and the trained model's on the samples by which the agent judges others' models."""
    return _draw_curves(
        "Losses",
        lines,
        {
            "in training": [line.train_loss for line in lines],
            "on the samples that judge": [line.own_loss for line in lines],
        },
    )


@mpl.rc_context(STYLE)
def draw_traffic(lines: Sequence[RoundRecord]) -> Figure | None:
    """Megabytes that came in and that went out, from the first round on."""
    incoming = np.cumsum([line.incoming_bytes / 1e6 for line in lines])
    outgoing = np.cumsum([line.sent / 1e6 for line in lines])
    figure = _draw_curves("Bytes", lines, {"in": incoming.tolist(), "out": outgoing.tolist()})
    if figure is not None:
        figure.axes[0].set_ylabel("MB so far")
        figure.axes[0].set_ylim(bottom=0)
    return figure


@mpl.rc_context(STYLE)
def draw_phases(lines: Sequence[RoundRecord]) -> Figure | None:
    """Where the seconds of a round went, one phase upon the other; what no phase has is waiting."""
    names = list(dict.fromkeys(name for line in lines for name in line.seconds if name != "round"))[
        : len(PALETTE)
    ]
    if not names:
        return None
    parts = {name: np.array([line.seconds.get(name, 0.0) for line in lines]) for name in names}
    if (
        parts.keys() >= {"exchange", "aggregate"}
        and (parts["exchange"] <= parts["aggregate"]).all()
    ):
        parts["aggregate"] = parts["aggregate"] - parts["exchange"]  # which is a part of it
    total = np.array([line.duration_seconds for line in lines])
    rest = np.maximum(total - sum(parts.values()), 0)
    if rest.sum() > 0.01 * total.sum():
        parts["between"] = rest
    figure, ax = _new_panel()
    edges = _round_edges(lines)
    bottom = np.zeros(len(lines))
    for (name, height), colour in zip(
        parts.items(), [*PALETTE[: len(names)], "#AAAAAA"], strict=False
    ):
        ax.stairs(
            bottom + height,
            edges,
            baseline=bottom,
            fill=True,
            color=colour,
            label=name.replace("$", r"\$"),
        )
        bottom = bottom + height
    ax.set_title("Seconds of a round")
    _label_rounds(ax, lines)
    figure.legend(
        *ax.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        fontsize=8.5,
        handlelength=1.2,
    )
    return figure


@mpl.rc_context(STYLE)
def draw_outcomes(recorded: PeerRecords) -> Figure | None:
    """How often each peer was asked, and what became of it."""
    peers = _busiest_peers(recorded)
    told = [outcomes(line) for line in recorded.rounds]
    counts = {
        fate: np.array([sum(each.get(peer) == fate for each in told) for peer in peers])
        for fate in OUTCOME_COLOURS
    }
    if not any(count.any() for count in counts.values()):
        return None
    figure, ax = _new_peer_panel(recorded, peers)
    left = np.zeros(len(peers))
    for fate, count in counts.items():
        if count.any():
            ax.barh(
                np.arange(len(peers)),
                count,
                0.7,
                left=left,
                color=OUTCOME_COLOURS[fate],
                label=fate,
            )
            left = left + count
    ax.set_title("What became of asking")
    ax.set_xlabel("rounds in which it was asked")
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    figure.legend(
        *ax.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        fontsize=8.5,
        handlelength=1.2,
    )
    return figure


@mpl.rc_context(STYLE)
def draw_response_times(
    recorded: PeerRecords, seconds: Mapping[int, Sequence[float]]
) -> Figure | None:
    """How fast each peer answered: the median, and the range of the middle eight in ten."""
    peers = _busiest_peers(recorded)
    if not any(seconds.get(peer) for peer in peers):
        return None
    figure, ax = _new_peer_panel(recorded, peers)
    for y, peer in enumerate(peers):
        if seconds.get(peer):
            low, middle, high = np.quantile(seconds[peer], [0.1, 0.5, 0.9])
            ax.plot(
                [low, high],
                [y, y],
                color=PALETTE[5],
                linewidth=4,
                alpha=0.55,
                solid_capstyle="round",
            )
            ax.plot([middle], [y], "o", color=PALETTE[0], markersize=5)
    ax.set_xlim(left=0)
    ax.set_title("How fast peers answered")
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.set_xlabel("seconds until its model was there and checked")
    return figure


@mpl.rc_context(STYLE)
def draw_weights(recorded: PeerRecords) -> Figure | None:
    """The weight that each model got, round by round: a row a peer, the agent's own first; neighbouring rounds are
    averaged where they are too many for a page."""
    lines = recorded.rounds
    peers = _busiest_peers(recorded)
    if not lines or not peers:
        return None
    given, marks = weights_by_round(lines, recorded.info.id, peers)
    k = -(-len(lines) // _MAX_COLUMNS)
    starts = np.arange(0, len(lines), k)
    counted = np.add.reduceat(np.isfinite(given), starts, axis=1)
    mean = np.add.reduceat(np.nan_to_num(given), starts, axis=1) / np.maximum(counted, 1)
    mean[counted == 0] = np.nan
    worst = np.maximum.reduceat(marks, starts, axis=1)
    figure = Figure(figsize=(2 * _WIDTH, 1.5 + 0.24 * (len(peers) + 1)), layout="constrained")
    ax = figure.subplots()
    grid = (
        np.append(_round_edges(lines)[:-1][starts], _round_edges(lines)[-1]),
        np.arange(len(peers) + 2) - 0.5,
    )
    blank = np.where(np.isfinite(mean) | (worst == 0), np.nan, worst)
    marked = ListedColormap([_GREY, _AMBER])
    ax.pcolormesh(*grid, blank, cmap=marked, vmin=1, vmax=2, rasterized=True)
    drawn = ax.pcolormesh(*grid, mean, cmap=WEIGHT_COLOURMAP, norm=weight_norm(), rasterized=True)
    add_weight_colorbar(figure, ax, drawn, aspect=12, pad=0.01)
    names = [f"{recorded.info.name} (itself)", *map(recorded.info.name_of, peers)]
    ax.set_yticks(range(len(names)), [_shorten(name) for name in names], fontsize=9)
    ax.set_ylim(len(names) - 0.5, -0.5)
    _label_rounds(ax, lines)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False)
    ax.set_facecolor("white")
    ax.spines[:].set_visible(True)
    shares = [
        f"{name} {100 * share:.0f}%"
        for name, share in zip(names, np.nan_to_num(given).mean(1), strict=True)
    ]
    figure.set_label(f"Weight in the average, mean over {len(lines)} rounds: {', '.join(shares)}.")
    keys = [
        Patch(color=_AMBER, label="refused", linewidth=0),
        Patch(color=_GREY, label="asked, nothing taken", linewidth=0),
    ]
    figure.legend(handles=keys, loc="outside lower center", ncols=2, fontsize=8.5, handlelength=1.2)
    return figure


def weights_by_round(
    lines: Sequence[RoundRecord], me: int, peers: Sequence[int]
) -> tuple[Float[np.ndarray, "p n"], Float[np.ndarray, "p n"]]:
    """The weight of the agent's own model (first row) and of each peer's in each round, NaN where there is none; and
    where there is none, 2 for what was refused, 1 for what was asked for in vain, else 0."""
    place = {peer: row for row, peer in enumerate([me, *peers])}
    given = np.full((len(place), len(lines)), np.nan)
    marks = np.zeros((len(place), len(lines)))
    for n, line in enumerate(lines):
        given[0, n] = np.nan if line.own_weight is None else line.own_weight
        for peer, fate in outcomes(line).items():
            if peer in place and fate != "taken":
                marks[place[peer], n] = 2 if fate == "refused" else 1
        for each in line.received:
            if each.id in place and each.weight is not None:
                given[place[each.id], n] = each.weight
    return given, marks


def _draw_curves(
    title: str, lines: Sequence[RoundRecord], values: Mapping[str, Sequence[float | None]]
) -> Figure | None:
    """Values over the rounds; those of which there are none are left out."""
    shown = {
        name: column
        for name, column in values.items()
        if any(value is not None for value in column)
    }
    if not shown:
        return None
    figure, ax = _new_panel()
    ax.set_title(title)
    rounds = np.array([line.round for line in lines])
    for i, (name, column) in enumerate(shown.items()):
        y = np.array([np.nan if value is None else value for value in column], dtype=float)
        known = np.isfinite(y)
        ax.plot(
            rounds[known], y[known], color=PALETTE[i], linestyle=LINE_STYLES[i], marker=MARKERS[i], markersize=4,
            markevery=max(1, int(known.sum()) // 8), label=name,
        )  # fmt: skip
    _label_rounds(ax, lines)
    figure.legend(
        *ax.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=3,
        fontsize=9,
        handlelength=2.6,
    )
    return figure


def _new_panel() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    return figure, figure.subplots()


def _new_peer_panel(recorded: PeerRecords, peers: Sequence[int]) -> tuple[Figure, Axes]:
    """Room for something to say of each peer, a row each, the first on top."""
    figure = Figure(figsize=(_WIDTH, 1.1 + 0.24 * len(peers)), layout="constrained")
    ax = figure.subplots()
    ax.set_yticks(
        range(len(peers)), [_shorten(recorded.info.name_of(peer)) for peer in peers], fontsize=9
    )
    ax.set_ylim(len(peers) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    ax.grid(visible=True, axis="x")
    return figure, ax


def _round_edges(lines: Sequence[RoundRecord]) -> Float[np.ndarray, " n1"]:
    """Where the column of each round begins; a gap between rounds widens the one before it."""
    rounds = np.array([line.round for line in lines], dtype=float)
    return np.append(rounds - 0.5, rounds[-1] + 0.5)


def _label_rounds(ax: Axes, lines: Sequence[RoundRecord]) -> None:
    edges = _round_edges(lines)
    ax.set_xlim(edges[0], edges[-1])
    ax.set_xlabel("round")
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))


def _shorten(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:23]}…"
