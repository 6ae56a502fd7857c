"""The figure of docs/sublevel.md, from the values that paper/sublevel.py stores."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedcb2o.report._panels import MARKERS, PALETTE, STYLE
from fedcb2o.report._statistics import interval_half_width

BETAS = (0.25, 0.5, 0.75, 1.0)
BUDGET = 6
BORDER_ATTACKS = {"flip": "flips of the own cluster", "trash": "random models", "sybils": "sybils"}
BORDER_TITLES = ("(a) Label flip", "(b) Random models", "(c) Sybils that flip")
MIN_CASES = 20  # a mean of fewer cases is not shown
BAR_STYLE: dict[str, Any] = {"markersize": 5, "capsize": 2, "elinewidth": 1}
Series = pd.Series


def border_name(own: str, beta: float, places: int = 0, delta_q: float = 0.0) -> str:
    """Return the name of a defence of the border."""
    name = f"own model {own}, beta {beta:g}"
    if places:
        name += f", newcomers {places}/{BUDGET}"
    if delta_q:
        name += f", delta_q {delta_q:g}"
    return name


def border_runs(runs: pd.DataFrame, attack: str, own: str, beta: float) -> pd.DataFrame:
    """Return the runs of one line of the border, with the places for newcomers as a column."""
    places = runs.defence.str.extract(r", newcomers (\d)/", expand=False)
    names = [border_name(own, beta)]
    if attack == "sybils":
        names += [border_name(own, beta, k) for k in range(1, BUDGET + 1)]
    selected = (runs.attack == attack) & runs.defence.isin(names)
    return runs.assign(places=places.astype(float))[selected]


def mean_by_count(rows: pd.DataFrame, column: str) -> dict[int, "Series[float]"]:
    """Return the mean of a statistic in percent, per seed, by number of received attackers."""
    means = {}
    for f in range(BUDGET + 1):
        cases = rows[["seed", f"n{f}", f"{column}{f}"]].dropna()
        if cases[f"n{f}"].sum() >= MIN_CASES:
            sums = (cases[f"n{f}"] * cases[f"{column}{f}"]).groupby(cases.seed).sum()
            means[f] = 100 * sums / cases.groupby("seed")[f"n{f}"].sum()
    return means


def mean_weight(rows: pd.DataFrame) -> "Series[float]":
    """Return the attackers' mean weight in a round of each run, in percent."""
    counts = range(BUDGET + 1)
    n = rows[[f"n{f}" for f in counts]].fillna(0).to_numpy()
    sums = (n * rows[[f"weight{f}" for f in counts]].fillna(0).to_numpy()).sum(1)
    return pd.Series(100 * sums / n.sum(1), rows.index)


# Figure


def draw_border(runs: pd.DataFrame) -> Figure:
    """Draw the border of capture: in one round (top) and after all rounds (bottom)."""
    with rc_context(STYLE):
        figure = Figure(figsize=(11, 7), layout="constrained")
        top, bottom = figure.subplots(2, 3)
        for ax, attack, title in zip(top, BORDER_ATTACKS, BORDER_TITLES, strict=True):
            draw_round(ax, runs, attack)
            ax.set_title(title, pad=14)
        for ax, attack in zip(bottom, BORDER_ATTACKS, strict=True):
            draw_end(ax, runs, attack)
        for ax in figure.axes:
            ax.set_ylim(0, 100)

        handles = [
            Line2D([], [], label=f"beta = {beta:g}", markersize=5, **line_style(i))
            for i, beta in enumerate(BETAS)
        ]
        dotted = "(a) above: by chance; below: own model excluded"
        handles.append(Line2D([], [], color="0.3", linestyle=":", label=dotted))
        figure.legend(handles=handles, loc="outside lower center", ncols=5)
        return figure


def draw_round(ax: Axes, runs: pd.DataFrame, attack: str) -> None:
    """Draw the attackers' weight in a round by their number, with the agent's model excluded.

    Triangles mark where the window of each beta starts to close. For flips dotted lines show how
    often chance leaves no benign model of the agent's cluster in Q_beta.
    """
    for i, beta in enumerate(BETAS):
        style = line_style(i)
        rows = border_runs(runs, attack, "excluded", beta)
        if attack == "sybils":
            weights = {places: mean_weight(part) for places, part in rows.groupby("places")}
            draw_points(ax, weights, **style)
            continue

        draw_points(ax, mean_by_count(rows, "weight"), **style)
        k = math.ceil(beta * BUDGET)
        window = k if attack == "flip" else BUDGET - k + 1
        ax.plot(window, 105, clip_on=False, **(style | {"marker": "v"}))
        if attack == "flip":
            chances = mean_by_count(rows, "chance")
            means = [chance.mean() for chance in chances.values()]
            ax.plot(list(chances), means, color=PALETTE[i], linestyle=":")
    ax.set_xlabel(f"{BORDER_ATTACKS[attack]} among the {BUDGET} received")
    ax.set_ylabel("their weight in m_j, percent")


def draw_end(ax: Axes, runs: pd.DataFrame, attack: str) -> None:
    """Draw results after all rounds by the share of attackers, or by places for newcomers.

    Solid lines have the agent's own model judged, dotted lines excluded. Triangles mark the ends of
    the window.
    """
    value = "accuracy" if attack == "trash" else "attack_success_rate"
    for own, line in (("judged", "-"), ("excluded", ":")):
        for i, beta in enumerate(BETAS):
            rows = border_runs(runs, attack, own, beta)
            points = {}
            for key, part in rows.groupby("places" if attack == "sybils" else "malicious"):
                x = key if attack == "sybils" else 100 * part.share.mean()
                points[x] = part[value]
            draw_points(ax, points, linestyle=line, **line_style(i))
    ax.set_ylabel(axis_label(value))
    if attack == "sybils":
        ax.set_xlabel(f"places for newcomers, of {BUDGET}")
        return

    ax.set_xlabel("attackers among the received, percent")
    ax.set_xlim(0, 70)
    for i in (0, 1) if attack == "flip" else (1, 2):  # the others are outside the axis
        window = BETAS[i] if attack == "flip" else 1 - BETAS[i]
        ax.plot(100 * window, 105, clip_on=False, **(line_style(i) | {"marker": "v"}))


def line_style(i: int) -> dict[str, Any]:
    """Return colour and marker of the i-th beta."""
    return {"color": PALETTE[i], "marker": MARKERS[i]}


def draw_points(ax: Axes, values: Mapping[Any, "Series[float]"], **style: Any) -> None:
    """Draw means with intervals over seeds, by position."""
    means = [seeds.mean() for seeds in values.values()]
    half = [float(interval_half_width(len(seeds), seeds.std(ddof=1))) for seeds in values.values()]
    ax.errorbar(list(values), means, yerr=half, **style, **BAR_STYLE)


def axis_label(value: str) -> str:
    """Return the axis label of a metric."""
    return f"{value.replace('_', ' ').removesuffix(' rate')}, percent"
