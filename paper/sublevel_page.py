"""The tables and figures of docs/sublevel.md, from the values that paper/sublevel.py keeps beside it."""

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
from fedcb2o.report.figures import MARKERS, PALETTE, STYLE
from fedcb2o.report.statistics import interval_half_width
from fedcb2o.report.tables import format_mean_interval

BETAS = (0.25, 0.5, 0.75, 1.0)
BUDGET = 6
BORDER = {"flip": "flips of the own cluster", "trash": "random models", "sybils": "sybils"}
EVEN = (2, 4, 6)  # attackers in a cluster of ten
FEW = 20  # cases below which a mean of rounds is not shown
COLUMNS = {
    "none": "Without attack",
    "trash": "Random models",
    "flip": "Label flip",
    "sybils": "Sybils",
}
TABLE = re.compile(r"(?P<mark>^<!-- sublevel: (?P<name>\S+) -->\n\n)(?:^\|.*\n)*\n?", re.MULTILINE)
BAR: dict[str, Any] = {"markersize": 5, "capsize": 2, "elinewidth": 1}


def named(own: str, beta: float, places: int = 0, delta_q: float = 0.0) -> str:
    """The defence of a line of the border."""
    more = (f", newcomers {places}/{BUDGET}" if places else "") + (
        f", delta_q {delta_q:g}" if delta_q else ""
    )
    return f"own model {own}, beta {beta:g}{more}"


def ablated(known: pd.DataFrame) -> pd.DataFrame:
    """The runs of Algorithm 2 with what it leaves out, not those of the border."""
    return known[~known.defence.str.startswith("own model")]


def omissions(known: pd.DataFrame) -> pd.DataFrame:
    """What Algorithm 2 reaches with each part put back, and all without each: accuracy, and attack success."""
    table: dict[str, dict[str, str]] = {}
    mine = ablated(known)
    first = (
        mine[(mine.attack == "none") & (mine.defence == "Algorithm 2")].set_index("seed").accuracy
    )
    for defence, rows in mine.groupby("defence", sort=False):
        by = {str(attack): some.set_index("seed") for attack, some in rows.groupby("attack")}
        cells = table.setdefault(str(defence), {})
        for attack, title in COLUMNS.items():
            cells[title] = told(by[attack].accuracy)
            if attack == "none":
                cells["less Algorithm 2"] = (
                    told(by["none"].accuracy - first) if len(table) > 1 else ""
                )
            elif attack != "trash":
                cells[title] += f" / {told(by[attack].attack_success_rate)}"
    return pd.DataFrame(table).T


def random_models(known: pd.DataFrame) -> pd.DataFrame:
    """Accuracy under random models, by the number of attackers in a cluster of ten, and behind it how much more that is
    than with the attackers removed."""
    table: dict[str, dict[str, str]] = {}
    lines = [named(own, beta) for own in ("excluded", "judged") for beta in BETAS]
    for name in [*lines, named("excluded", 0.25, delta_q=0.1), named("judged", 0.5, places=2)]:
        for malicious in EVEN:
            reached, without = (
                accuracy(known, attack, name, malicious) for attack in ("trash", "removed")
            )
            cell = told(reached) + (f" / {told(reached - without)}" if len(without) else "")
            table.setdefault(name, {})[f"{malicious} of 10"] = cell
    return pd.DataFrame(table).T


def removed(known: pd.DataFrame) -> pd.DataFrame:
    """Accuracy with the attackers removed, and behind it how much more that is than without a set."""
    table: dict[str, dict[str, str]] = {}
    for own in ("excluded", "judged"):
        for beta in BETAS:
            for malicious in EVEN:
                each, plain = (
                    accuracy(known, "removed", named(own, b), malicious) for b in (beta, 1.0)
                )
                cell = told(each) + (f" / {told(each - plain)}" if beta < 1 else "")
                table.setdefault(named(own, beta), {})[f"{10 - malicious} agents"] = cell
    return pd.DataFrame(table).T


def accuracy(known: pd.DataFrame, attack: str, defence: str, malicious: int) -> "pd.Series[float]":
    """What some runs reached, by their seeds."""
    mine = (known.attack == attack) & (known.defence == defence) & (known.malicious == malicious)
    found: pd.Series[float] = known[mine].set_index("seed").accuracy
    return found


def rounds(known: pd.DataFrame) -> pd.DataFrame:
    """The weight of flips in a round by how many of the models received they are, own model excluded, with its
    interval, in round ones how often Q_beta would hold no benign model of the own cluster by chance."""
    table = {}
    for beta in BETAS:
        rows = of_border(known, "flip", "excluded", beta)
        weight = by_count(rows, "weight")
        chance = by_count(rows, "chance")
        table[f"beta {beta:g}"] = {
            f"{f} of {BUDGET}": f"{told(weight[f])} ({chance[f].mean():.0f})" for f in weight if f
        }
    return pd.DataFrame(table).T.fillna("")


def newcomers(known: pd.DataFrame) -> pd.DataFrame:
    """What sybils reach by the places that newcomers have: their weight in a round, and in the end their success."""
    table: dict[str, dict[str, str]] = {}
    for own in ("excluded", "judged"):
        for beta in BETAS:
            for places, rows in of_border(known, "sybils", own, beta).groupby("places"):
                cell = f"{told(weight(rows))} / {told(rows.attack_success_rate)}"
                table.setdefault(named(own, beta), {})[f"{places:.0f} of {BUDGET}"] = cell
    return pd.DataFrame(table).T.fillna("")


def told(percent: "pd.Series[float]") -> str:
    """The mean and its interval over seeds."""
    return format_mean_interval(percent / 100)


TABLES: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "omissions": omissions,
    "rounds": rounds,
    "newcomers": newcomers,
    "random-models": random_models,
    "removed": removed,
}


def rewritten(page: Path, known: pd.DataFrame) -> str:
    """The page with its tables as the values have them."""

    def table(found: re.Match[str]) -> str:
        return found["mark"] + to_markdown(TABLES[found["name"]](known)) + "\n"

    return TABLE.sub(table, page.read_text(encoding="utf-8"))


def of_border(known: pd.DataFrame, attack: str, own: str, beta: float) -> pd.DataFrame:
    """The runs of one line, those with more than the plain set left out; of sybils `places` are those of newcomers."""
    places = known.defence.str.extract(r", newcomers (\d)/", expand=False)
    names = (
        [named(own, beta, k) for k in range(BUDGET + 1)]
        if attack == "sybils"
        else [named(own, beta)]
    )
    return known.assign(places=places.astype(float))[
        (known.attack == attack) & known.defence.isin(names)
    ]


def by_count(rows: pd.DataFrame, what: str) -> dict[int, "pd.Series[float]"]:
    """The mean of what is kept, in percent, by the number of attackers received: a value for each seed."""
    found = {}
    for f in range(BUDGET + 1):
        some = rows[["seed", f"n{f}", f"{what}{f}"]].dropna()
        if some[f"n{f}"].sum() >= FEW:
            sums = (some[f"n{f}"] * some[f"{what}{f}"]).groupby(some.seed).sum()
            found[f] = 100 * sums / some.groupby("seed")[f"n{f}"].sum()
    return found


def weight(rows: pd.DataFrame) -> "pd.Series[float]":
    """The attackers' mean weight in a round of each run, in percent."""
    columns = range(BUDGET + 1)
    n = rows[[f"n{f}" for f in columns]].fillna(0).to_numpy()
    sums = (n * rows[[f"weight{f}" for f in columns]].fillna(0).to_numpy()).sum(1)
    return pd.Series(100 * sums / n.sum(1), rows.index)


def draw_omissions(known: pd.DataFrame) -> Figure:
    """What Algorithm 2 reaches with each part put back, and all without each: dots with intervals over seeds."""
    mine = ablated(known)
    names = list(dict.fromkeys(mine.defence))
    with rc_context(STYLE | {"axes.grid.axis": "x"}):
        figure = Figure(figsize=(11, 4), layout="constrained")
        for ax, (attack, title) in zip(
            figure.subplots(1, 4, sharey=True), COLUMNS.items(), strict=True
        ):
            value = "accuracy" if attack in ("none", "trash") else "attack_success_rate"
            for i, name in enumerate(names):
                some = mine[(mine.attack == attack) & (mine.defence == name)][value]
                colour = (
                    7
                    if name == "with all four"
                    else {"with": 0, "without": 1}.get(name.split()[0], 7)
                )
                points(ax, {i: some}, across=True, color=PALETTE[colour], marker="o")
            ax.set_title(title)
            ax.set_xlabel(called(value))
            ax.set_xlim((90, 100) if attack == "none" else (0, 100))
        figure.axes[0].set_yticks(range(len(names)), names)
        figure.axes[0].invert_yaxis()
        return figure


def draw_border(known: pd.DataFrame) -> Figure:
    """The border of capture: above in a round, below after all of them."""
    with rc_context(STYLE):
        figure = Figure(figsize=(11, 7), layout="constrained")
        above, below = figure.subplots(2, 3)
        titles = ("(a) Label flip", "(b) Random models", "(c) Sybils that flip")
        for ax, attack, title in zip(above, BORDER, titles, strict=True):
            draw_round(ax, known, attack)
            ax.set_title(title, pad=14)
        for ax, attack in zip(below, BORDER, strict=True):
            draw_end(ax, known, attack)
        for ax in figure.axes:
            ax.set_ylim(0, 100)
        handles = [
            Line2D([], [], label=f"beta = {beta:g}", markersize=5, **look(i))
            for i, beta in enumerate(BETAS)
        ]
        dotted = "(a) above: by chance; below: own model excluded"
        handles.append(Line2D([], [], color="0.3", linestyle=":", label=dotted))
        figure.legend(handles=handles, loc="outside lower center", ncols=5)
        return figure


def draw_round(ax: Axes, known: pd.DataFrame, attack: str) -> None:
    """The attackers' weight in a round by how many are received, own model excluded, and where the window for each beta
    begins to close; of flips also how often there would be no benign model of the own cluster in Q_beta by chance."""
    for i, beta in enumerate(BETAS):
        rows = of_border(known, attack, "excluded", beta)
        if attack == "sybils":
            points(ax, {places: weight(each) for places, each in rows.groupby("places")}, **look(i))
            continue
        points(ax, by_count(rows, "weight"), **look(i))
        k = math.ceil(beta * BUDGET)
        ax.plot(
            k if attack == "flip" else BUDGET - k + 1,
            105,
            clip_on=False,
            **(look(i) | {"marker": "v"}),
        )
        if attack == "flip":
            chance = by_count(rows, "chance")
            ax.plot(
                list(chance),
                [each.mean() for each in chance.values()],
                color=PALETTE[i],
                linestyle=":",
            )
    ax.set_xlabel(f"{BORDER[attack]} among the {BUDGET} received")
    ax.set_ylabel("their weight in m_j, percent")


def draw_end(ax: Axes, known: pd.DataFrame, attack: str) -> None:
    """What is reached after all rounds by the attackers' share among the models received, with the window's ends, or by
    the sybils' places: own model judged, and dotted excluded."""
    value = "accuracy" if attack == "trash" else "attack_success_rate"
    for own, line in (("judged", "-"), ("excluded", ":")):
        for i, beta in enumerate(BETAS):
            rows = of_border(known, attack, own, beta)
            if attack == "sybils":
                found = {places: each[value] for places, each in rows.groupby("places")}
            else:
                found = {
                    100 * each.share.mean(): each[value] for _, each in rows.groupby("malicious")
                }
            points(ax, found, linestyle=line, **look(i))
    ax.set_ylabel(called(value))
    if attack == "sybils":
        ax.set_xlabel(f"places for newcomers, of {BUDGET}")
        return
    ax.set_xlabel("attackers among the received, percent")
    ax.set_xlim(0, 70)
    for i in (0, 1) if attack == "flip" else (1, 2):  # the others lie beyond
        at = BETAS[i] if attack == "flip" else 1 - BETAS[i]
        ax.plot(100 * at, 105, clip_on=False, **(look(i) | {"marker": "v"}))


def look(i: int) -> dict[str, Any]:
    """Colour and marker of the i-th beta."""
    return {"color": PALETTE[i], "marker": MARKERS[i]}


def points(
    ax: Axes, values: Mapping[Any, "pd.Series[float]"], *, across: bool = False, **look: Any
) -> None:
    """Means with intervals over seeds, by where they stand from left to right or, `across`, from top to bottom."""
    middle = [each.mean() for each in values.values()]
    half = [float(interval_half_width(len(each), each.std(ddof=1))) for each in values.values()]
    if across:
        ax.errorbar(middle, list(values), xerr=half, **look, **BAR)
    else:
        ax.errorbar(list(values), middle, yerr=half, **look, **BAR)


def called(value: str) -> str:
    """What an axis says of a value."""
    return f"{value.replace('_', ' ').removesuffix(' rate')}, percent"
