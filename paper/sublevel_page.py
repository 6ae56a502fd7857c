"""Tables and figures of docs/sublevel.md, from the values that paper/sublevel.py stores."""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedcb2o.report import to_markdown
from fedcb2o.report._figures import MARKERS, PALETTE, STYLE
from fedcb2o.report._statistics import interval_half_width
from fedcb2o.report.tables import format_mean_interval

BETAS = (0.25, 0.5, 0.75, 1.0)
BUDGET = 6
BORDER_ATTACKS = {"flip": "flips of the own cluster", "trash": "random models", "sybils": "sybils"}
BORDER_TITLES = ("(a) Label flip", "(b) Random models", "(c) Sybils that flip")
MALICIOUS_COUNTS = (2, 4, 6)  # attackers in a cluster of ten
MIN_CASES = 20  # a mean of fewer cases is not shown
COLUMNS = {
    "none": "Without attack",
    "trash": "Random models",
    "flip": "Label flip",
    "sybils": "Sybils",
}
TABLE = re.compile(r"(?P<mark>^<!-- sublevel: (?P<name>\S+) -->\n\n)(?:^\|.*\n)*\n?", re.MULTILINE)
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


def ablation_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs of Algorithm 2 with omitted parts, without those of the border."""
    return runs[~runs.defence.str.startswith("own model")]


def format_percent(values: "Series[float]") -> str:
    """Format mean and interval of values that are in percent already."""
    return format_mean_interval(values / 100)


# Tables


def omissions(runs: pd.DataFrame) -> pd.DataFrame:
    """Return accuracy and attack success with each part restored, and with all but each."""
    table: dict[str, dict[str, str]] = {}
    ablation = ablation_runs(runs)
    is_reference = (ablation.attack == "none") & (ablation.defence == "Algorithm 2")
    reference = ablation[is_reference].set_index("seed").accuracy
    for defence, rows in ablation.groupby("defence", sort=False):
        by_attack = {str(attack): part.set_index("seed") for attack, part in rows.groupby("attack")}
        cells = table.setdefault(str(defence), {})
        for attack, title in COLUMNS.items():
            cells[title] = format_percent(by_attack[attack].accuracy)
            if attack == "none":
                difference = format_percent(by_attack["none"].accuracy - reference)
                cells["less Algorithm 2"] = difference if len(table) > 1 else ""
            elif attack != "trash":
                cells[title] += f" / {format_percent(by_attack[attack].attack_success_rate)}"
    return pd.DataFrame(table).T


def random_models(runs: pd.DataFrame) -> pd.DataFrame:
    """Return accuracy under random models, and its difference to that without attackers."""
    table: dict[str, dict[str, str]] = {}
    names = [border_name(own, beta) for own in ("excluded", "judged") for beta in BETAS]
    names += [border_name("excluded", 0.25, delta_q=0.1), border_name("judged", 0.5, places=2)]
    for name in names:
        for malicious in MALICIOUS_COUNTS:
            attacked = accuracy(runs, "trash", name, malicious)
            clean = accuracy(runs, "removed", name, malicious)
            cell = format_percent(attacked)
            if len(clean):
                cell += f" / {format_percent(attacked - clean)}"
            table.setdefault(name, {})[f"{malicious} of 10"] = cell
    return pd.DataFrame(table).T


def removed(runs: pd.DataFrame) -> pd.DataFrame:
    """Return accuracy without attackers, and its difference to that without a sub-level set."""
    table: dict[str, dict[str, str]] = {}
    for own in ("excluded", "judged"):
        for beta in BETAS:
            for malicious in MALICIOUS_COUNTS:
                with_set = accuracy(runs, "removed", border_name(own, beta), malicious)
                without = accuracy(runs, "removed", border_name(own, 1.0), malicious)
                cell = format_percent(with_set)
                if beta < 1:
                    cell += f" / {format_percent(with_set - without)}"
                table.setdefault(border_name(own, beta), {})[f"{10 - malicious} agents"] = cell
    return pd.DataFrame(table).T


def accuracy(runs: pd.DataFrame, attack: str, defence: str, malicious: int) -> "Series[float]":
    """Return the accuracy of the selected runs by seed."""
    selected = (runs.attack == attack) & (runs.defence == defence) & (runs.malicious == malicious)
    values: Series[float] = runs[selected].set_index("seed").accuracy
    return values


def rounds(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the weight of flips in a round by their number, and the chance of a full capture."""
    table = {}
    for beta in BETAS:
        rows = border_runs(runs, "flip", "excluded", beta)
        weights = mean_by_count(rows, "weight")
        chances = mean_by_count(rows, "chance")
        cells = {}
        for f, weight in weights.items():
            if f:
                cells[f"{f} of {BUDGET}"] = f"{format_percent(weight)} ({chances[f].mean():.0f})"
        table[f"beta {beta:g}"] = cells
    return pd.DataFrame(table).T.fillna("")


def newcomers(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the weight of sybils in a round, and their success, by places for newcomers."""
    table: dict[str, dict[str, str]] = {}
    for own in ("excluded", "judged"):
        for beta in BETAS:
            for places, rows in border_runs(runs, "sybils", own, beta).groupby("places"):
                weight = format_percent(mean_weight(rows))
                cell = f"{weight} / {format_percent(rows.attack_success_rate)}"
                column = f"{places:.0f} of {BUDGET}"
                table.setdefault(border_name(own, beta), {})[column] = cell
    return pd.DataFrame(table).T.fillna("")


TABLES: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "omissions": omissions,
    "rounds": rounds,
    "newcomers": newcomers,
    "random-models": random_models,
    "removed": removed,
}


def rewrite_page(page: Path, runs: pd.DataFrame) -> str:
    """Return the text of a page with tables made from the runs."""

    def table(match: re.Match[str]) -> str:
        return match["mark"] + to_markdown(TABLES[match["name"]](runs)) + "\n"

    return TABLE.sub(table, page.read_text(encoding="utf-8"))


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


# Figures


def draw_omissions(runs: pd.DataFrame) -> Figure:
    """Draw the table of omissions: means with intervals over seeds."""
    ablation = ablation_runs(runs)
    names = list(dict.fromkeys(ablation.defence))
    with rc_context(STYLE | {"axes.grid.axis": "x"}):
        figure = Figure(figsize=(11, 4), layout="constrained")
        axes = figure.subplots(1, 4, sharey=True)
        for ax, (attack, title) in zip(axes, COLUMNS.items(), strict=True):
            value = "accuracy" if attack in ("none", "trash") else "attack_success_rate"
            for i, name in enumerate(names):
                selected = (ablation.attack == attack) & (ablation.defence == name)
                color = {"with": 0, "without": 1}.get(name.split()[0], 7)
                if name == "with all four":
                    color = 7
                style = {"color": PALETTE[color], "marker": "o"}
                draw_points(ax, {i: ablation[selected][value]}, horizontal=True, **style)
            ax.set_title(title)
            ax.set_xlabel(axis_label(value))
            ax.set_xlim((90, 100) if attack == "none" else (0, 100))
        figure.axes[0].set_yticks(range(len(names)), names)
        figure.axes[0].invert_yaxis()
        return figure


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


FIGURES = {"omissions": draw_omissions, "border": draw_border}


def line_style(i: int) -> dict[str, Any]:
    """Return colour and marker of the i-th beta."""
    return {"color": PALETTE[i], "marker": MARKERS[i]}


def draw_points(
    ax: Axes, values: Mapping[Any, "Series[float]"], *, horizontal: bool = False, **style: Any
) -> None:
    """Draw means with intervals over seeds, by position."""
    means = [seeds.mean() for seeds in values.values()]
    half = [float(interval_half_width(len(seeds), seeds.std(ddof=1))) for seeds in values.values()]
    if horizontal:
        ax.errorbar(means, list(values), xerr=half, **style, **BAR_STYLE)
    else:
        ax.errorbar(list(values), means, yerr=half, **style, **BAR_STYLE)


def axis_label(value: str) -> str:
    """Return the axis label of a metric."""
    return f"{value.replace('_', ' ').removesuffix(' rate')}, percent"
