"""The tables and the figure of docs/sublevel.md, from the values that benchmarks/sublevel.py keeps beside it."""

import math
import re
from collections.abc import Callable, Iterator
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
FEW = 20  # cases below which a point of the upper row is not drawn
TABLE = re.compile(r"(?P<mark>^<!-- sublevel: (?P<name>\S+) -->\n\n)(?:^\|.*\n)*\n?", re.MULTILINE)
TITLES = {"flip": "(a) Label flip 3 to 8", "trash": "(b) Random models", "sybils": "(c) Sybils that flip"}
BAR: dict[str, Any] = {"markersize": 5, "capsize": 2, "elinewidth": 1}
ATTACKS = {"flip": "flip 3 to 8, 3 of 10", "trash": "random models, 3 of 10", "sybils": "sybils from round 13"}


def named(own: str, beta: float, places: int = 0, delta_q: float = 0.0) -> str:
    """The defence of a line of the border."""
    more = (f", newcomers {places}/6" if places else "") + (f", delta_q {delta_q:g}" if delta_q else "")
    return f"own model {own}, beta {beta:g}{more}"


def ablation(known: pd.DataFrame) -> pd.DataFrame:
    """What Algorithm 2 reaches with each part put back, and all without each."""
    mine = known[(known.malicious == 3) & ~known.defence.str.startswith("own model")]
    table = {}
    for defence, rows in mine.groupby("defence", sort=False):
        by = dict(list(rows.groupby("attack")))
        cells = {"without attack": told(by["none"].accuracy)}
        for attack, title in ATTACKS.items():
            cells[title] = told(by[attack].accuracy)
            if attack != "trash":
                cells[title] += f" / {told(by[attack].attack_success_rate)}"
        table[str(defence)] = cells
    return pd.DataFrame(table).T


def border(known: pd.DataFrame, attack: str, value: str) -> pd.DataFrame:
    """What is reached by the number of attackers in a cluster of ten, and their share among the models received."""
    mine = known[(known.attack == attack) & known.defence.str.startswith("own model")]
    table: dict[str, dict[str, str]] = {}
    for (defence, malicious), rows in mine.groupby(["defence", "malicious"], sort=False):
        table.setdefault(str(defence), {})[str(malicious)] = told(rows[value])
    return pd.DataFrame(table).T.fillna("")


def newcomers(known: pd.DataFrame) -> pd.DataFrame:
    """Attack success of the sybils, by the places that newcomers may have."""
    mine = known[(known.attack == "sybils") & known.defence.str.contains("newcomers ./6")]
    table: dict[str, dict[str, str]] = {}
    for defence, rows in mine.groupby("defence", sort=False):
        name, places = str(defence).split(", newcomers ")
        table.setdefault(name, {})[places] = told(rows.attack_success_rate)
    return pd.DataFrame(table).T.fillna("")


def told(percent: "pd.Series[float]") -> str:
    """The mean and its interval over seeds."""
    return spread(percent / 100)


TABLES: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "ablation": ablation,
    "flip": lambda known: border(known, "flip", "attack_success_rate"),
    "trash": lambda known: border(known, "trash", "accuracy"),
    "newcomers": newcomers,
}


def rewritten(page: Path, known: pd.DataFrame) -> str:
    """The page with its tables as the values have them."""

    def table(found: re.Match[str]) -> str:
        return found["mark"] + to_markdown(TABLES[found["name"]](known)) + "\n"

    return TABLE.sub(table, page.read_text(encoding="utf-8"))


def by_count(rows: pd.DataFrame, what: str) -> pd.DataFrame:
    """The mean of what is kept by the number of attackers received, over seeds: a row for each number, with the half of
    its interval, and how many cases there are."""
    counts = rows[[f"n{f}" for f in range(BUDGET + 1)]].fillna(0).to_numpy()
    values = rows[[f"{what}{f}" for f in range(BUDGET + 1)]].fillna(0).to_numpy()
    sums = pd.DataFrame(counts * values).groupby(rows.seed.to_numpy()).sum()
    cases = pd.DataFrame(counts).groupby(rows.seed.to_numpy()).sum()
    each = sums / cases.where(cases > 0)
    found = pd.DataFrame({"mean": each.mean(), "half": half_width(each.count(), each.std(ddof=1)), "n": cases.sum()})
    return found[found.n >= FEW]


def by(rows: pd.DataFrame, group: str, value: str) -> Iterator[tuple[float, float, float]]:
    """For each group the attackers' mean share among the models received, and the mean of a value and the half of its
    interval over seeds."""
    for _, some in rows.groupby(group):
        yield some.share.mean(), some[value].mean(), float(half_width(len(some), some[value].std(ddof=1)))


def draw(known: pd.DataFrame) -> Figure:
    """The border of capture: above, in a round, by the attackers received; below, after all rounds."""
    with rc_context(STYLE | {"svg.hashsalt": "sublevel"}):
        figure = Figure(figsize=(11, 6.8), layout="constrained")
        above, below = figure.subplots(2, 3)
        for ax, (attack, title) in zip(above, TITLES.items(), strict=True):
            ax.set_title(title)
            in_a_round(ax, known[known.attack == attack], borders=attack != "trash")
            ax.set_xlabel(f"attackers among the {BUDGET} received" + ", own cluster" * (attack != "trash"))
        above[0].set_ylabel("their weight in m_j, percent")
        for ax, attack in zip(below, TITLES, strict=True):
            value = "accuracy" if attack == "trash" else "attack_success_rate"
            in_the_end(ax, known[known.attack == attack], value)
            ax.set_ylabel(f"{value.replace('_rate', '').replace('_', ' ')}, percent")
            ax.set_xlabel("share that newcomers may have" if attack == "sybils" else "share of attackers among the received")
            ax.set_ylim(0, 100)
        handles = [
            Line2D([], [], color=COLOURS[i], marker=MARKERS[i], markersize=5, label=f"beta = {beta:g}" + " (no set)" * (beta == 1))
            for i, beta in enumerate(BETAS)
        ]
        handles.append(Line2D([], [], color="0.3", linestyle=":", label="above: by chance; below: own model excluded"))
        figure.legend(handles=handles, loc="outside lower center", ncols=5)
        return figure


def in_a_round(ax: Axes, known: pd.DataFrame, *, borders: bool) -> None:
    """The attackers' weight by their number, own model excluded; dotted how often they would be alone in Q_beta if all
    orders of losses were as likely, and a tick on top where there are enough of them for that."""
    for i, beta in enumerate(BETAS):
        rows = known[known.defence.str.startswith(named("excluded", beta)) & ~known.defence.str.contains("delta")]
        if rows.empty:
            continue
        found = by_count(rows, "weight")
        ax.errorbar(found.index, found["mean"] * 100, found.half * 100, color=COLOURS[i], marker=MARKERS[i], **BAR)
        if borders:
            chance = by_count(rows, "chance")
            ax.plot(chance.index, chance["mean"] * 100, color=COLOURS[i], linestyle=":")
            ax.plot(math.ceil(beta * BUDGET), 103, marker="v", color=COLOURS[i], clip_on=False)
    ax.set_xticks(range(BUDGET + 1))
    ax.set_ylim(0, 100)


def in_the_end(ax: Axes, known: pd.DataFrame, value: str) -> None:
    """What is reached by the share of attackers: own model judged, and dotted excluded."""
    for own, line in (("judged", "-"), ("excluded", ":")):
        for i, beta in enumerate(BETAS):
            rows = known[known.defence.str.startswith(named(own, beta))]
            if known.attack.iloc[0] == "sybils":
                rows = rows.assign(share=rows.defence.str.extract(r"newcomers (\d)/6", expand=False).astype(float) / BUDGET)
                points = list(by(rows, "share", value))
            else:
                points = list(by(rows[rows.defence == named(own, beta)], "malicious", value))
            if points:
                x, y, half = zip(*points, strict=True)
                ax.errorbar(x, y, half, color=COLOURS[i], marker=MARKERS[i], linestyle=line, **BAR)
