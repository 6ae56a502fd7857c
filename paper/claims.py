"""The paper's empirical claims: statistics, intervals over seeds and verdicts.

    .venv/bin/python -m paper.claims runs/claims --out docs/reproduction/digits  # values, figures
    .venv/bin/python -m paper.claims                    # rewrite the matrix of docs/claims.md

A folder of runs has the runs PREFIX-fedcbo, PREFIX-fedcb2o-released and so on, named like presets.
Runs with the same name in several folders are merged into one run with all of their finished seeds.
Figure 6 uses the run with the most seeds if devices differ.

A claim says that a statistic is in a range: a difference is positive, or within what the paper
calls similar. The statistic is a mean over seeds with Student's 95% interval. The claim is *held*
if the whole interval is in the range, *opposite* if the interval is outside, and otherwise
*undecided*. Fewer than five seeds have no verdict; the cell says whether their mean is in the
range.

`--out` receives values.csv (results of each run and seed), curves.csv (results of each evaluated
round), a figure of the curves, and Figure 6. Without runs `--out` draws the figure of the curves
again.
"""

import argparse
import functools
import math
import operator
import re
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, FileSystemLoader

from fedcb2o.records import Run, last_fifth, settings_digest, summary
from fedcb2o.report import _figures, _statistics
from fedcb2o.report.tables import is_attacked, pair_statistics

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "claims.md"
ACCURACY, SOURCE, SUCCESS = METRICS = ("accuracy", "source_accuracy", "attack_success_rate")
METRIC_NAMES = {ACCURACY: "overall accuracy", SOURCE: "source class accuracy", SUCCESS: "ASR"}
PAPER = pd.DataFrame(  # tab:baselines, and tab:FedCB2O_T_G with T_G = 30, 20 and 40 of T = 150
    {
        "FedCBO": [84.26, 40.23, 55.23],
        "Oracle Min": [82.75, 63.53, 31.08],
        "Oracle Max": [84.43, 63.80, 32.19],
        "FedCB2O": [82.79, 55.73, 38.73],
        "FedCB2O with T_G": [83.64, 57.64, 37.31],
        "with an earlier T_G": [83.68, 55.98, 38.83],
        "with a later T_G": [83.76, 56.87, 38.07],
    },
    index=METRICS,
)

# The largest difference that the paper calls similar, comparable or very close, rounded up to half
# a point: 0.17, 8.07 and 7.65. The smallest that it calls a difference are 0.85, 15.50 and 16.50.
MARGIN = {ACCURACY: 0.5, SOURCE: 8.5, SUCCESS: 8.0}
EQUAL_RATIO = (2 / 3, 3 / 2)  # "comparable", "nearly equal": ratios that only a figure shows
MINIMAL_RATIO = (-math.inf, 0.1)  # "minimal"
FEDCB2O = ("fedcb2o-released", "fedcb2o-paper")
"""Runs for the role of FedCB2O: as the authors' code computes it, and as the text states it."""
MAIN_METHODS = ("fedcbo", "fedcbo-alpha10", "oracle-min", "oracle-max", *FEDCB2O)
MAX_CURVES = 8  # of more methods, the figure shows MAIN_METHODS
CLUSTER_SUFFIXES = {" (cluster 1)": "_1", " (cluster 2)": "_2", " (both clusters)": ""}

Series = pd.Series  # of floats; pandas has no type for it at run time
Values = Mapping[str, pd.DataFrame]
"""A table with one row per seed for each run, or for each role in the paper: see `seed_values`."""


@dataclass(frozen=True)
class Claim:
    """A range for a statistic, which has one value per seed and requires the runs `needs`."""

    section: str
    text: str
    statistic: str
    needs: tuple[str, ...]
    compute: Callable[[Values], "Series[float]"]
    low: float
    high: float
    paper: float = math.nan


# Values of runs


def seed_values(run: Run) -> pd.DataFrame:
    """Compute the statistics of each seed of a run: metrics in percent, and numbers of pairs.

    Args:
        run: A run with all of its seeds.

    Returns:
        One row per seed with the metrics and, for attacked runs:

        - malicious_weight: weight that benign agents give to malicious peers, in percent;
        - elsewhere: share of their weight for peers of the other cluster; both over the last fifth
          of the rounds;
        - loss: mean validation loss of benign agents over all rounds;
        - benign_picked_c, malicious_picked_c, malicious_share_c: bars of Figure 6 for benign agents
          of cluster c: how often they receive benign peers of their cluster, and ratios of
          malicious to benign peers;
        - malicious_loss (FedCBO only): mean excess loss of malicious peers over benign peers of the
          same cluster that the same benign agent evaluated in the same round.
    """
    table = 100 * summary(run.records).set_index("seed")[[*METRICS, "malicious_weight"]]
    if not is_attacked(run):
        return table[[*METRICS]]

    columns = {"loss": run.records[~run.records.malicious].groupby("seed").validation_loss.mean()}
    columns["elsewhere"] = _other_cluster_share(run)
    if run.config["algorithm"]["name"] == "fedcbo":
        columns["malicious_loss"] = _malicious_loss(run)

    same = pair_statistics(run).query("relation == 'same'")
    same = same.set_index(["peer", "cluster", "seed"]).sort_index()
    for cluster in sorted(same.index.unique("cluster")):
        benign = same.loc[("benign", cluster)]
        malicious = same.loc[("malicious", cluster)]
        columns[f"benign_picked_{cluster + 1}"] = benign.frequency
        columns[f"malicious_picked_{cluster + 1}"] = malicious.frequency / benign.frequency
        columns[f"malicious_share_{cluster + 1}"] = malicious.share / benign.share
    return table.assign(**columns)


def seed_curves(run: Run) -> pd.DataFrame:
    """Return the mean metrics of benign agents in percent, by seed and evaluated round."""
    benign = run.records[~run.records.malicious]
    means = benign.groupby(["seed", "round"])[list(METRICS)].mean()
    return (100 * means.dropna()).round(2)


def select_curves(curves: Values) -> list[_figures.Curve]:
    """Return the curves of a figure, with T_G where the method's name contains it."""
    selected = []
    for name, table in curves.items():
        if name in MAIN_METHODS or len(curves) <= MAX_CURVES:
            match = re.search(r"-tg(\d+)$", name)
            switch = int(match[1]) if match else 0
            selected.append(_figures.Curve(name, (table / 100).reset_index(), switch))
    return selected


def _benign_pairs(run: Run) -> pd.DataFrame:
    """Return pairs of benign agents and peers with both clusters and the peer's role."""
    pairs = run.pairs[run.pairs.agent != run.pairs.peer]
    agents = run.agents.set_index(["seed", "agent"])[["cluster", "malicious"]]
    peers = agents.rename(columns={"cluster": "peer_cluster", "malicious": "hostile"})
    pairs = pairs.join(agents, on=["seed", "agent"]).join(peers, on=["seed", "peer"])
    return pairs[~pairs.malicious.astype(bool)]


def _other_cluster_share(run: Run) -> "Series[float]":
    """Return the share of benign agents' late weight for peers of the other cluster, by seed."""
    pairs = last_fifth(_benign_pairs(run))
    total = pairs.groupby("seed").weight.sum()
    other = pairs[pairs.cluster != pairs.peer_cluster].groupby("seed").weight.sum()
    return other.reindex(total.index, fill_value=0.0) / total


def _malicious_loss(run: Run) -> "Series[float]":
    """Return the excess loss of malicious peers by seed.

    FedCBO's weights are exp(-alpha L) up to a factor. Losses are therefore -log(weight) / alpha up
    to a term that cancels in their differences.
    """
    pairs = _benign_pairs(run).query("cluster == peer_cluster and weight > 0")
    pairs = pairs.assign(loss=-np.log(pairs.weight) / run.config["algorithm"]["alpha"])
    loss = pairs.groupby(["seed", "round", "agent", "hostile"]).loss.mean()
    loss = loss.unstack("hostile").reindex(columns=[False, True])
    return (loss[True] - loss[False]).groupby("seed").mean()


# Roles of runs


def runs_by_role(values: Values, fedcb2o: str = FEDCB2O[0]) -> dict[str, str]:
    """Choose the runs for the paper's roles.

    A variant of FedCB2O is compared with its own FedCBO if that has as many seeds, otherwise with
    the FedCBO of alpha = 10 or of the default. Of several runs with T_G > 0 the middle one has the
    role of T_G = 30.

    Args:
        values: Tables by the names of the runs.
        fedcb2o: Name of the runs in the role of FedCB2O.

    Returns:
        The name of the run for each role that has one.
    """
    own = fedcb2o.replace("fedcb2o", "fedcbo")
    partners = ["fedcbo-alpha10", "fedcbo", own]
    if own in values and len(values[own]) >= len(values[fedcb2o]):
        partners.insert(0, own)
    fedcbo = next((name for name in partners if name in values), own)
    roles = {
        "FedCBO": fedcbo,
        "FedCB2O": fedcb2o,
        "FedCBO without attack": f"{fedcbo}-clean",
        "Oracle Min": "oracle-min",
        "Oracle Max": "oracle-max",
    }
    matches = (re.fullmatch(rf"{fedcb2o}-tg(\d+)", name) for name in values)
    by_start = {int(match[1]): match[0] for match in matches if match}
    switched = [by_start[start] for start in sorted(by_start)]
    if switched:
        roles["FedCB2O with T_G"] = switched[len(switched) // 2]
    if len(switched) > 2:
        roles["with an earlier T_G"] = switched[0]
        roles["with a later T_G"] = switched[-1]
    roles["FedCB2O of Fig. 6"] = roles.get("FedCB2O with T_G", fedcb2o)
    return {role: name for role, name in roles.items() if name in values}


# Claims


def all_claims() -> Iterator[Claim]:
    """Yield all claims of sec:experiments, in its order."""
    cbo, b2o, tg = ("FedCBO", "FedCB2O", "FedCB2O with T_G")
    low, high = ("Oracle Min", "Oracle Max")
    yield _second_best("Oracle Max is the best or second-best overall", ACCURACY)
    yield _second_best("and on the source class", SOURCE)
    yield _second_best("and in ASR", SUCCESS)
    text = "Oracle Min is similar to Oracle Max on the source class"
    yield _alike("(i)", text, SOURCE, low, high)
    yield _alike("(i)", "and in ASR", SUCCESS, low, high)
    yield _less("(i)", "but lower overall", ACCURACY, low, high)
    yield _alike("(ii)", "FedCBO is comparable to Oracle Max overall", ACCURACY, cbo, high)
    text = "since the attack has minimal impact on overall accuracy"
    yield _no_worse("(ii)", text, ACCURACY, cbo, "FedCBO without attack")
    other = ("weight on the other cluster", "elsewhere")
    yield _in_range("(ii)", "FedCBO finds the clusters", *other, cbo, MINIMAL_RATIO)
    yield _less("(ii)", "but degrades significantly on the source class", SOURCE, cbo, high)
    yield _more("(ii)", "with a notably high ASR", SUCCESS, cbo, high)
    text = "It selects malicious peers at a comparable frequency"
    yield from _bar_ratios("Fig. 6 (a)", text, "picked", cbo, EQUAL_RATIO)
    text = "and gives them nearly equal weight"
    yield from _bar_ratios("Fig. 6 (b)", text, "share", cbo, EQUAL_RATIO)
    yield _more("(iii)", "FedCB2O is significantly higher on the source class", SOURCE, b2o, cbo)
    yield _less("(iii)", "and much lower in ASR", SUCCESS, b2o, cbo)
    for oracle in (low, high):
        yield _alike("(iii)", f"comparable to {oracle} on the source class", SOURCE, b2o, oracle)
        yield _alike("(iii)", "and in ASR", SUCCESS, b2o, oracle)
    yield _alike("(iii)", "and very close to Oracle Min overall", ACCURACY, b2o, low)
    yield _in_range("(iii)", "FedCB2O finds the clusters", *other, b2o, MINIMAL_RATIO)
    yield _more("Table 2", "T_G > 0 improves overall accuracy", ACCURACY, tg, b2o)
    yield _no_worse("Table 2", "the source class does not degrade", SOURCE, tg, b2o)
    yield _no_worse("Table 2", "nor does ASR", SUCCESS, tg, b2o)
    for start in ("an earlier T_G", "a later T_G"):
        text = f"T_G = 30 strikes the best balance: better than {start} on the source class"
        yield _more("Table 2", text, SOURCE, tg, f"with {start}")
        yield _less("Table 2", "and in ASR", SUCCESS, tg, f"with {start}")

    drawn = "FedCB2O of Fig. 6"
    text = "FedCB2O does not exclude malicious peers"
    yield from _bar_ratios("Fig. 6 (c)", text, "picked", drawn, (EQUAL_RATIO[0], math.inf))
    text = "since malicious agents train models with smaller average losses than benign ones"
    quantity = "average loss, malicious less benign peers of the cluster"
    yield _in_range("Fig. 6 (c)", text, quantity, "malicious_loss", cbo, (-math.inf, 0.0))
    text = "it selects benign peers less than malicious ones"
    yield from _bar_ratios("Fig. 6 (c)", text, "picked", drawn, (1, math.inf))
    text = "but gives malicious ones minimal weight"
    yield from _bar_ratios("Fig. 6 (d)", text, "share", drawn, MINIMAL_RATIO)
    quantity = "frequency, benign peers of the cluster"
    for cluster, suffix in CLUSTER_SUFFIXES.items():
        text = f"Benign peers are selected less than in FedCBO{cluster}"
        yield _change(text, quantity, f"benign_picked{suffix}", -math.inf, 0.0)
    text = "since their own average loss is larger"
    quantity = "validation loss of benign agents, all rounds"
    yield _change(text, quantity, "loss", 0.0, math.inf)


def _difference(
    section: str, text: str, metric: str, a: str, b: str, *, low: float, high: float
) -> Claim:
    """Claim that the difference of two methods is in a range."""
    paper = math.nan
    if {a, b} <= {*PAPER}:
        paper = float(PAPER[a][metric] - PAPER[b][metric])
    statistic = f"{METRIC_NAMES[metric]}, {a} less {b}"
    return Claim(
        section, text, statistic, (a, b), lambda v: v[a][metric] - v[b][metric], low, high, paper
    )


_more = functools.partial(_difference, low=0.0, high=math.inf)
_less = functools.partial(_difference, low=-math.inf, high=0.0)


def _alike(section: str, text: str, metric: str, a: str, b: str) -> Claim:
    """Claim that two methods differ by at most the paper's margin."""
    return _difference(section, text, metric, a, b, low=-MARGIN[metric], high=MARGIN[metric])


def _no_worse(section: str, text: str, metric: str, a: str, b: str) -> Claim:
    """Claim that a method is at most the margin worse than another."""
    if metric == SUCCESS:
        return _difference(section, text, metric, a, b, low=-math.inf, high=MARGIN[metric])
    return _difference(section, text, metric, a, b, low=-MARGIN[metric], high=math.inf)


def _second_best(text: str, metric: str) -> Claim:
    """Claim that at most one other method is better than Oracle Max."""
    others = ["FedCBO", "Oracle Min", "FedCB2O"]
    sign = -1 if metric == SUCCESS else 1

    def advantage(values: pd.DataFrame) -> "Series[float]":
        values = sign * values.dropna()
        second = values[others].apply(lambda row: row.nlargest(2).iloc[-1], axis="columns")
        difference: Series[float] = values["Oracle Max"] - second
        return difference

    def compute(v: Values) -> "Series[float]":
        return advantage(pd.DataFrame({name: v[name][metric] for name in ("Oracle Max", *others)}))

    statistic = f"{METRIC_NAMES[metric]}, Oracle Max better than the second best of the others by"
    paper = float(advantage(PAPER.loc[[metric]]).iloc[0])
    return Claim("(i)", text, statistic, ("Oracle Max", *others), compute, 0.0, math.inf, paper)


def _in_range(
    section: str, text: str, quantity: str, column: str, role: str, limits: tuple[float, float]
) -> Claim:
    """Claim that a column of a run is in a range."""
    return Claim(
        section, text, f"{quantity}, {role}", (role,), lambda v: _column(v[role], column), *limits
    )


def _bar_ratios(
    section: str, text: str, bar: str, role: str, limits: tuple[float, float]
) -> Iterator[Claim]:
    """Yield claims on ratios of bars of Figure 6, malicious over benign peers, per cluster."""
    name = "frequency" if bar == "picked" else "weight given"
    quantity = f"{name}, malicious over benign peers of the cluster"
    for cluster, suffix in CLUSTER_SUFFIXES.items():
        yield _in_range(section, text + cluster, quantity, f"malicious_{bar}{suffix}", role, limits)


def _change(text: str, quantity: str, column: str, low: float, high: float) -> Claim:
    """Claim that FedCB2O's column minus FedCBO's is in a range."""
    a = "FedCB2O of Fig. 6"
    b = "FedCBO"

    def compute(v: Values) -> "Series[float]":
        return _column(v[a], column) - _column(v[b], column)

    return Claim("Fig. 6 (a, c)", text, f"{quantity}, {a} less {b}", (a, b), compute, low, high)


def _column(table: pd.DataFrame, name: str) -> "Series[float]":
    """Return a column, or NaN if the table does not have it."""
    return table[name] if name in table else pd.Series(math.nan, table.index)


def mean_interval(values: "Series[float]") -> tuple[float, float, float]:
    """Return the mean over seeds and the ends of Student's 95% interval.

    Args:
        values: One value per seed; NaN is ignored.

    Returns:
        Mean, lower and upper end; infinite ends for fewer than five seeds.
    """
    values = values.dropna()
    mean = float(values.mean())
    if len(values) < _statistics.MIN_SEEDS:
        return mean, -math.inf, math.inf
    half = float(_statistics.interval_half_width(len(values), values.std(ddof=1)))
    return mean, mean - half, mean + half


def verdict(claim: Claim, low: float, high: float) -> str:
    """Return the verdict on a claim from an interval of its statistic."""
    if claim.low <= low and high <= claim.high:
        return "held"
    if high < claim.low or low > claim.high:
        return "opposite"
    return "undecided"


# The matrix of the page


COLUMNS = {
    "Paper's size": "full-size",
    "Reduced EMNIST": "emnist-small-50",
    "Other classes": "emnist-small-x",
    "Digits": "digits",
}
"""Folders in docs/reproduction, by the title of their columns."""
EARLIER = {"full-size": "emnist-150"}
"""Folders with values of methods that a folder lacks."""
MARKER = re.compile(r"(?<=<!-- generated: claims -->\n\n).*?(?=\n\n|\Z)", re.DOTALL)


def matrix_rows() -> list[dict[str, Any]]:
    """Compute the matrix: one row per claim, one cell per column.

    Returns:
        Rows with section, text, the paper's number and cells; a cell has a verdict, statistic and
        seeds for each cluster that the row names, and is empty without the runs of the claim.
    """
    columns = [_column_values(folder) for folder in COLUMNS.values()]
    rows: list[dict[str, Any]] = []
    for claim in all_claims():
        found = (_cell(claim, values) for values in columns)
        cells = [[cell] if cell else [] for cell in found]
        text = claim.text.replace(" (cluster 1)", " (clusters 1, 2)")
        if text.endswith(" (cluster 2)"):
            rows[-1]["cells"] = list(map(operator.add, rows[-1]["cells"], cells))
        elif any(cells):
            paper = "" if math.isnan(claim.paper) else f"{claim.paper:+.2f}"
            row = {"section": claim.section, "text": text, "paper": paper}
            rows.append({**row, "cells": cells})
    return rows


def _column_values(folder: str) -> Values:
    """Return the values of a folder by role."""
    values = {}
    for name in (EARLIER.get(folder, folder), folder):
        path = DOCS / "reproduction" / name
        if path.is_dir():
            values.update(read_values(path))
    values = {re.sub("^(oracle-m..)-released$", r"\1", name): values[name] for name in values}
    return {role: values[name] for role, name in runs_by_role(values).items()}


def _cell(claim: Claim, runs: Values) -> dict[str, str | int] | None:
    """Return the verdict of a claim, its statistic as text and the number of seeds."""
    if not runs.keys() >= {*claim.needs}:
        return None
    values = claim.compute(runs).dropna()
    if values.empty:
        return None
    mean, low, high = mean_interval(values)
    is_signed = " less " in claim.statistic or " by" in claim.statistic
    decimals = 2 if claim.statistic.startswith(tuple(METRIC_NAMES.values())) else 3
    statistic = _statistics.format_interval(mean, low, high, decimals, "+" if is_signed else "")
    cell: dict[str, str | int] = {"statistic": statistic.replace(", ", ","), "seeds": len(values)}
    if len(values) < _statistics.MIN_SEEDS:
        is_inside = claim.low <= mean <= claim.high
        found = "agrees" if is_inside else "disagrees"
        return {"verdict": found, **cell}
    return {"verdict": verdict(claim, low, high), **cell}


def matrix_markdown() -> str:
    """Render the matrix as a Markdown table with verdicts that have their statistic as title."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        keep_trailing_newline=False,
    )
    template = environment.get_template("claims.md.jinja")
    rows = matrix_rows()
    columns = []
    for position, title in enumerate(COLUMNS):
        cells = [cell for row in rows for cell in row["cells"][position]]
        usual_seeds = statistics.mode(cell["seeds"] for cell in cells)
        columns.append({"title": title, "seeds": usual_seeds})
    return template.render(columns=columns, rows=rows).strip()


def rewrite_page(page: Path) -> str:
    """Return the text of a page with the matrix made anew.

    Args:
        page: Page with the comment `<!-- generated: claims -->`.
    """
    matrix = matrix_markdown()
    return MARKER.sub(lambda match: matrix, page.read_text(encoding="utf-8"))


# Files


def gather_runs(folders: Sequence[Path], target: Path) -> dict[str, list[Run]]:
    """Merge runs with the same name and settings, by copies of the records of finished seeds.

    Args:
        folders: Folders of runs.
        target: Empty folder for the copies.

    Returns:
        Runs by the part of their names after the prefix, those with the most seeds first.
    """
    for config in (path for folder in folders for path in sorted(folder.glob("*/config.toml"))):
        run = Run(config.parent)
        seeds = [
            s
            for s in run.seeds
            if (run.summary_of(s) or {"rounds": -1})["rounds"] >= run.config["rounds"]
        ]
        if not seeds:
            continue

        merged = target / settings_digest(run.config) / config.parent.name
        merged.mkdir(parents=True, exist_ok=True)
        if not (merged / "config.toml").exists():
            shutil.copyfile(config, merged / "config.toml")
        for seed in seeds:
            name = f"seed-{seed}"
            without_models = shutil.ignore_patterns("*.safetensors")
            shutil.copytree(config.parent / name, merged / name, ignore=without_models)

    runs: dict[str, list[Run]] = {}
    for path in sorted(target.glob("*/*")):
        if match := re.search("fedcbo|fedcb2o|oracle", path.name):
            runs.setdefault(path.name[match.start() :], []).append(Run(path))
    names = sorted(runs, key=lambda name: (name.startswith("fedcb2o"), name))
    return {name: sorted(runs[name], key=lambda run: -len(run.seeds)) for name in names}


def read_values(folder: Path) -> dict[str, pd.DataFrame]:
    """Read values.csv of a folder: by method, one row per seed."""
    return _read_by_method(folder / "values.csv", ["seed"])


def _read_curves(folder: Path) -> dict[str, pd.DataFrame]:
    return _read_by_method(folder / "curves.csv", ["seed", "round"])


def _read_by_method(path: Path, keys: list[str]) -> dict[str, pd.DataFrame]:
    table = pd.read_csv(path).set_index(keys)
    return {
        str(name): rows.drop(columns="method") for name, rows in table.groupby("method", sort=False)
    }


def draw_curves(folder: Path) -> None:
    """Draw the figure of a folder's curves.csv."""
    panels = _figures.curve_panels(select_curves(_read_curves(folder)))
    _figures.draw_panels(panels).savefig(folder / "curves.png", dpi=130)


def main() -> None:
    """Read runs and write values and figures; or rewrite the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="*", help="folders of runs")
    parser.add_argument("--out", type=Path, help="folder for values and figures")
    arguments = parser.parse_args()
    out: Path | None = arguments.out
    if bool(arguments.folders) and out is None:
        parser.error("runs need --out, a folder for their values")
    if out is None:
        PAGE.write_text(rewrite_page(PAGE), encoding="utf-8")
    elif arguments.folders:
        _write_values(arguments.folders, out, parser)
    elif (out / "curves.csv").exists():
        draw_curves(out)
    else:
        parser.error("--out without runs draws its curves.csv, and the folder has none")


def _write_values(folders: list[Path], out: Path, parser: argparse.ArgumentParser) -> None:
    with tempfile.TemporaryDirectory() as target:
        runs = gather_runs(folders, Path(target))
        values = {
            name: pd.concat(map(seed_values, same)).sort_index().round(4)
            for name, same in runs.items()
        }
        method = next((name for name in FEDCB2O if name in values), "")
        roles = runs_by_role(values, method) if method else {}
        if "FedCBO" not in roles:
            names = ", ".join(runs) or "none"
            parser.error(
                f"no finished runs PREFIX-fedcbo and PREFIX-fedcb2o-released, only {names}"
            )
        out.mkdir(parents=True, exist_ok=True)
        pd.concat(values, names=["method"]).to_csv(out / "values.csv")
        curves = {
            name: pd.concat(map(seed_curves, same)).sort_index() for name, same in runs.items()
        }
        pd.concat(curves, names=["method"]).to_csv(out / "curves.csv")
        draw_curves(out)
        bars = _figures.figure6(*(runs[roles[role]][0] for role in ("FedCBO", "FedCB2O of Fig. 6")))
        bars.savefig(out / "figure6.png", dpi=130)


if __name__ == "__main__":
    main()
