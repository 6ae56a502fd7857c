"""The tables and figures of docs/sublevel.md, from the values that benchmarks/sublevel.py keeps beside it."""

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedcb2o.report import to_markdown
from fedcb2o.report.figures import COLOURS, MARKERS, STYLE
from fedcb2o.report.matrix import half_width
from fedcb2o.report.tables import spread

BETAS = (0.25, 0.5, 0.75, 1.0)
BUDGET = 6
FEW = 20  # cases below which a mean of rounds is not shown
COLUMNS = {"none": "Without attack", "trash": "Random models", "flip": "Label flip", "sybils": "Sybils"}
TABLE = re.compile(r"(?P<mark>^<!-- sublevel: (?P<name>\S+) -->\n\n)(?:^\|.*\n)*\n?", re.MULTILINE)
BAR: dict[str, Any] = {"markersize": 5, "capsize": 2, "elinewidth": 1}

Series = "pd.Series[float]"


def named(own: str, beta: float, places: int = 0, delta_q: float = 0.0) -> str:
    """The defence of a line of the border."""
    more = (f", newcomers {places}/{BUDGET}" if places else "") + (f", delta_q {delta_q:g}" if delta_q else "")
    return f"own model {own}, beta {beta:g}{more}"


def ablated(known: pd.DataFrame) -> pd.DataFrame:
    """The runs of Algorithm 2 with what it leaves out, not those of the border."""
    return known[~known.defence.str.startswith("own model")]


def omissions(known: pd.DataFrame) -> pd.DataFrame:
    """What Algorithm 2 reaches with each part put back, and all without each: accuracy, and attack success."""
    table: dict[str, dict[str, str]] = {}
    for defence, rows in ablated(known).groupby("defence", sort=False):
        by = {str(attack): mine.set_index("seed") for attack, mine in rows.groupby("attack")}
        first = by["none"].accuracy if not table else first
        cells = table.setdefault(str(defence), {})
        for attack, title in COLUMNS.items():
            cells[title] = told(by[attack].accuracy)
            if attack == "none":
                cells["less Algorithm 2"] = told(by["none"].accuracy - first) if len(table) > 1 else ""
            elif attack != "trash":
                cells[title] += f" / {told(by[attack].attack_success_rate)}"
    return pd.DataFrame(table).T


def border(known: pd.DataFrame, attack: str, value: str) -> pd.DataFrame:
    """What is reached, by the number of attackers in a cluster of ten."""
    table: dict[str, dict[str, str]] = {}
    mine = known[(known.attack == attack) & known.defence.str.startswith("own model")]
    for (defence, malicious), rows in mine.groupby(["defence", "malicious"]):
        table.setdefault(str(defence), {})[str(malicious)] = told(rows[value])
    if attack == "trash":
        for (defence, malicious), rows in known[known.attack == "removed"].groupby(["defence", "malicious"]):
            table.setdefault(f"{defence}, attackers removed", {})[str(malicious)] = told(rows[value])
    return pd.DataFrame(table).T.fillna("")[["2", "4", "6"]].rename(columns="{} of 10".format)


def rounds(known: pd.DataFrame) -> pd.DataFrame:
    """The weight of flips in a round by how many of the models received they are, own model excluded, with its
    interval, in round ones how often Q_beta would hold no benign model of the own cluster by chance."""
    table = {}
    for beta in BETAS:
        rows = of_border(known, "flip", "excluded", beta)
        weight, chance = by_count(rows, "weight"), by_count(rows, "chance")
        table[f"beta {beta:g}"] = {
            f"{f} of {BUDGET}": f"{told(weight[f])} ({chance[f].mean():.0f})" for f in weight if f
        }
    return pd.DataFrame(table).T.fillna("")


def newcomers(known: pd.DataFrame) -> pd.DataFrame:
    """What sybils reach by the places that newcomers have: their mean weight in a round, and in the end their success."""
    table: dict[str, dict[str, str]] = {}
    for own in ("excluded", "judged"):
        for beta in BETAS:
            for places, rows in of_border(known, "sybils", own, beta).groupby("places"):
                cell = f"{told(weight(rows))} / {told(rows.attack_success_rate)}"
                table.setdefault(named(own, beta), {})[f"{places:.0f} of {BUDGET}"] = cell
    return pd.DataFrame(table).T.fillna("")


def told(percent: "pd.Series[float]") -> str:
    """The mean and its interval over seeds."""
    return spread(percent / 100)


TABLES: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "omissions": omissions,
    "rounds": rounds,
    "newcomers": newcomers,
    "flip": lambda known: border(known, "flip", "attack_success_rate"),
    "trash": lambda known: border(known, "trash", "accuracy"),
}


def rewritten(page: Path, known: pd.DataFrame) -> str:
    """The page with its tables as the values have them."""

    def table(found: re.Match[str]) -> str:
        return found["mark"] + to_markdown(TABLES[found["name"]](known)) + "\n"

    return TABLE.sub(table, page.read_text(encoding="utf-8"))


def of_border(known: pd.DataFrame, attack: str, own: str, beta: float) -> pd.DataFrame:
    """The runs of one line, those with more than the plain set left out; of sybils `places` are those of newcomers."""
    places = known.defence.str.extract(r", newcomers (\d)/", expand=False)
    names = [named(own, beta, k) for k in range(BUDGET + 1)] if attack == "sybils" else [named(own, beta)]
    return known.assign(places=places.astype(float))[(known.attack == attack) & known.defence.isin(names)]


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
    n, each = ([rows[f"{what}{f}"].fillna(0) for f in range(BUDGET + 1)] for what in ("n", "weight"))
    return 100 * sum(a * b for a, b in zip(n, each, strict=True)) / sum(n)


def draw_omissions(known: pd.DataFrame) -> Figure:
    """What Algorithm 2 reaches with each part put back, and all without each: dots with intervals over seeds."""
    mine = ablated(known)
    names = list(dict.fromkeys(mine.defence))
    with rc_context(STYLE | {"svg.hashsalt": "omissions", "axes.grid.axis": "x"}):
        figure = Figure(figsize=(11, 4), layout="constrained")
        for ax, (attack, title) in zip(figure.subplots(1, 4, sharey=True), COLUMNS.items(), strict=True):
            value = "accuracy" if attack in ("none", "trash") else "attack_success_rate"
            for i, name in enumerate(names):
                some = mine[(mine.attack == attack) & (mine.defence == name)][value]
                colour = {"with": 0, "without": 1}.get(name.removesuffix(" all four").split()[0], 7)
                points(ax, [i], [some], color=COLOURS[7 if name == "with all four" else colour], marker="o", across=True)
            ax.set_title(title)
            ax.set_xlabel(called(value))
            ax.set_xlim((90, 100) if attack == "none" else (0, 100))
        figure.axes[0].set_yticks(range(len(names)), names)
        figure.axes[0].invert_yaxis()
        return figure


def draw_border(known: pd.DataFrame) -> Figure:
    """The border of capture: above in a round, below after all of them."""
    with rc_context(STYLE | {"svg.hashsalt": "border"}):
        figure = Figure(figsize=(11, 7), layout="constrained")
        above, below = figure.subplots(2, 3)
        for i, beta in enumerate(BETAS):
            look = {"color": COLOURS[i], "marker": MARKERS[i]}
            k = math.ceil(beta * BUDGET)
            for ax, attack, at in zip(above, ("flip", "trash"), (k, BUDGET - k + 1), strict=False):
                found = by_count(of_border(known, attack, "excluded", beta), "weight")
                points(ax, found, found.values(), **look)
                ax.plot(at, 105, marker="v", color=COLOURS[i], clip_on=False)
            chance = by_count(of_border(known, "flip", "excluded", beta), "chance")
            above[0].plot(list(chance), [each.mean() for each in chance.values()], color=COLOURS[i], linestyle=":")
            sybils = of_border(known, "sybils", "excluded", beta)
            some = [(places, weight(rows)) for places, rows in sybils.groupby("places")]
            points(above[2], *unzipped(some), **look)
            for ax, attack in zip(below, ("flip", "trash", "sybils"), strict=True):
                for own, line in (("judged", "-"), ("excluded", ":")):
                    rows = of_border(known, attack, own, beta)
                    key = "places" if attack == "sybils" else "malicious"
                    value = "accuracy" if attack == "trash" else "attack_success_rate"
                    some = [
                        (places if attack == "sybils" else 100 * each.share.mean(), each[value])
                        for places, each in rows.groupby(key)
                    ]
                    points(ax, *unzipped(some), **look, linestyle=line)
                    ax.set_ylabel(called(value))
        titles = ("(a) Label flip", "(b) Random models", "(c) Sybils that flip")
        for ax, title, who in zip(above, titles, ("flips of the own cluster", "random models", "sybils"), strict=True):
            ax.set_title(title, pad=14)
            ax.set_xlabel(f"{who} among the {BUDGET} received")
            ax.set_ylabel("their weight in m_j, percent")
        for ax in below[:2]:
            ax.set_xlabel("attackers among the received, percent")
        below[2].set_xlabel(f"places for newcomers, of {BUDGET}")
        for ax in figure.axes:
            ax.set_ylim(0, 100)
        handles = [
            Line2D([], [], color=COLOURS[i], marker=MARKERS[i], markersize=5, label=f"beta = {beta:g}")
            for i, beta in enumerate(BETAS)
        ]
        handles.append(Line2D([], [], color="0.3", linestyle=":", label="(a) above: by chance; below: own model excluded"))
        figure.legend(handles=handles, loc="outside lower center", ncols=5)
        return figure


def unzipped(pairs: list[tuple[float, Any]]) -> tuple[list[float], list[Any]]:
    """The places and the values of points."""
    return [at for at, _ in pairs], [values for _, values in pairs]


def points(ax: Axes, at: Iterable[float], values: Iterable["pd.Series[float]"], *, across: bool = False, **look: Any) -> None:
    """Means with intervals over seeds, one above the other or, `across`, from left to right."""
    values = list(values)
    middle = [each.mean() for each in values]
    half = [float(half_width(len(each), each.std(ddof=1))) for each in values]
    if across:
        ax.errorbar(middle, list(at), xerr=half, **look, **BAR)
    else:
        ax.errorbar(list(at), middle, yerr=half, **look, **BAR)


def called(value: str) -> str:
    """What an axis says of a value."""
    return f"{value.replace('_', ' ').removesuffix(' rate')}, percent"
