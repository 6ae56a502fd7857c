"""The paper's empirical claims, each with its statistic, an interval over seeds and a verdict.

    .venv/bin/python paper/claims.py runs/claims --out docs/reproduction/digits    # the values, and figures
    .venv/bin/python paper/claims.py --page docs/claims.md    # the page's tables, from the values beside it

A folder holds runs named PREFIX-fedcbo, PREFIX-fedcb2o and so on, as presets are; where several are given, runs of one
name are one with all of their seeds, and seeds that have not run to their end are left out. Of runs of one name that
were computed on different devices Figure 6 shows the one with the most seeds. A claim is that a statistic lies in a
range: a difference is positive, or within what the paper calls alike. The statistic is the mean over seeds of what is
computed from the runs of one seed, with Student's interval at 95%. The claim *held* where the whole interval lies in
the range, it is the *opposite* where none of it does, and else *undecided*.

`--out` gets values.csv, which holds what each run reached with each seed, curves.csv, what it had reached in each round
with an evaluation, a picture of these, and Figure 6. With `--keep` what the two files have of other seeds stays, so
that seeds can be added where the runs of the others are gone; Figure 6, which needs runs, stays as it is then. Where
`--out` has no curves.csv, `--keep` makes none, and no picture of it. Without runs `--out` draws that picture anew.

Tables are made of these files alone; on a page they stand below a comment, `<!-- claims: FOLDER metrics -->` or `<!--
claims: FOLDER claims -->`, the folder seen from the page. A test holds pages to this. `later_metrics` and
`later_claims` are the same of the mean over all evaluations in the second half of the rounds, which moves less than the
last one; `rounds` has what curves.csv has, beside the paper; `glance` has the main claims in several folders, written
`A,B`, beside each other.
"""

import argparse
import functools
import itertools
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from fedcb2o.records import Run, last_fifth, settings_digest, summary
from fedcb2o.report import figures, statistics
from fedcb2o.report.tables import is_attacked, pair_statistics

ACCURACY, SOURCE, SUCCESS = METRICS = ("accuracy", "source_accuracy", "attack_success_rate")
NAMED = {ACCURACY: "overall accuracy", SOURCE: "source class accuracy", SUCCESS: "ASR"}
COLUMNS = {
    ACCURACY: "Overall accuracy",
    SOURCE: "Source class accuracy",
    SUCCESS: "Attack success rate",
    "malicious_weight": "Malicious weight",
}
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

# The largest difference that the paper calls similar, comparable or very close, rounded up to half a point: 0.17, 8.07
# and 7.65. The smallest that it calls a difference are 0.85, 15.50 and 16.50.
MARGIN = {ACCURACY: 0.5, SOURCE: 8.5, SUCCESS: 8.0}
EQUAL = (
    2 / 3,
    3 / 2,
)  # "comparable", "nearly equal", of a ratio that the paper shows in a figure alone
MINIMAL = (-math.inf, 0.1)  # "minimal", of such a ratio
VARIANTS = (
    "-trusted",
    "-released",
    "-paper",
    "-held-out",
    "",
)  # the last two are not the paper's Algorithm 2
CURVES = (
    "fedcbo",
    "fedcbo-alpha10",
    "oracle-min",
    "oracle-max",
    *(f"fedcb2o{variant}" for variant in VARIANTS),
)
MOST = len(figures.PALETTE)  # methods in one picture; of more, those of CURVES
JUDGED_ALIKE = "FedCBO, judging by samples of the same kind"
"""What stands for FedCBO where it holds validation data out as FedCB2O does, or neither does: only then are losses of
one kind."""
CLUSTERS = {" (cluster 1)": "_1", " (cluster 2)": "_2", " (both clusters)": ""}

Values = Mapping[str, pd.DataFrame]
"""For each run, or for what stands in the paper for it, a row a seed: what `values` computes."""


@dataclass(frozen=True)
class Claim:
    """That a statistic of `needs`, a value for each seed, lies between `low` and `high`."""

    where: str
    says: str
    statistic: str
    needs: tuple[str, ...]
    of: Callable[[Values], "pd.Series[float]"]
    low: float
    high: float
    paper: float = math.nan


def values(run: Run) -> pd.DataFrame:
    """A row for each seed of a run: its metrics in percent, and the numbers of its pairs, those of Figure 6 by cluster.

    `malicious_weight`, in percent, is what benign agents give to malicious peers, and `elsewhere` the share of the
    weight given to peers that went to the other cluster, both over the last fifth of the rounds; `loss` is the mean
    validation loss of benign agents over all rounds. Of Figure 6, for benign agents of cluster c: `benign_picked_c` is
    how often they receive a benign peer of their cluster, `malicious_picked_c` and `malicious_share_c` the bars of
    malicious peers of their cluster over those of benign ones, of the frequency and of the weight given. Of FedCBO
    `malicious_loss` is by how much more loss malicious peers have than benign ones of the same cluster that the same
    benign agent judged in the same round, mean over agents and rounds.
    """
    table = 100 * summary(run.records).set_index("seed")[[*METRICS, "malicious_weight"]]
    if not is_attacked(run):
        return table[[*METRICS]]
    columns = {"loss": run.records[~run.records.malicious].groupby("seed").validation_loss.mean()}
    columns["elsewhere"] = _elsewhere(run)
    if run.config["algorithm"]["name"] == "fedcbo":
        columns["malicious_loss"] = _malicious_loss(run)
    same = (
        pair_statistics(run)
        .query("relation == 'same'")
        .set_index(["peer", "cluster", "seed"])
        .sort_index()
    )
    for cluster in sorted(same.index.unique("cluster")):
        benign, malicious = (same.loc[(peer, cluster)] for peer in ("benign", "malicious"))
        columns[f"benign_picked_{cluster + 1}"] = benign.frequency
        columns[f"malicious_picked_{cluster + 1}"] = malicious.frequency / benign.frequency
        columns[f"malicious_share_{cluster + 1}"] = malicious.share / benign.share
    return table.assign(**columns)


def curve(run: Run) -> pd.DataFrame:
    """What benign agents of a run reached in each round with an evaluation, in percent, a row for each seed."""
    found = run.records[~run.records.malicious].groupby(["seed", "round"])[list(METRICS)].mean()
    return (100 * found.dropna()).round(2)


def pictured(found: Values) -> list[figures.Curve]:
    """The lines of a picture of `curve`s, a method each, with T_G where its name tells it."""
    names = [name for name in found if name in CURVES or len(found) <= MOST]
    switches = {name: re.search(r"-tg(\d+)$", name) for name in names}
    return [
        figures.Curve(
            name,
            (found[name] / 100).reset_index(),
            int(match[1]) if (match := switches[name]) else 0,
        )
        for name in names
    ]


def _given(run: Run) -> pd.DataFrame:
    """The pairs of benign agents and others, with the cluster of each (`cluster`, `there`) and the peer's role."""
    pairs = run.pairs[run.pairs.agent != run.pairs.peer]
    who = run.agents.set_index(["seed", "agent"])[["cluster", "malicious"]]
    peers = who.rename(columns={"cluster": "there", "malicious": "hostile"})
    pairs = pairs.join(who, on=["seed", "agent"]).join(peers, on=["seed", "peer"])
    return pairs[~pairs.malicious.astype(bool)]


def _elsewhere(run: Run) -> "pd.Series[float]":
    """For each seed, the share of the weight that benign agents late in the run gave to peers of the other cluster."""
    pairs = last_fifth(_given(run))
    given = pairs.groupby("seed").weight.sum()
    return (
        pairs[pairs.cluster != pairs.there]
        .groupby("seed")
        .weight.sum()
        .reindex(given.index, fill_value=0.0)
        / given
    )


def _malicious_loss(run: Run) -> "pd.Series[float]":
    """`malicious_loss` for each seed. FedCBO weighs the models that an agent received by exp(-alpha L), up to a factor,
    so the losses in its judgement are -log(weight) / alpha, up to a term that falls out of their differences."""
    pairs = _given(run).query("cluster == there and weight > 0")
    pairs = pairs.assign(loss=-np.log(pairs.weight) / run.config["algorithm"]["alpha"])
    loss = (
        pairs.groupby(["seed", "round", "agent", "hostile"])
        .loss.mean()
        .unstack("hostile")
        .reindex(columns=[False, True])
    )
    return (loss[True] - loss[False]).groupby("seed").mean()


def columns(known: Values) -> dict[str, dict[str, str]]:
    """Under a heading each, which runs stand for those of the paper: each variant of FedCB2O beside its FedCBO if it
    has one, and the others, and those whose FedCBO has fewer seeds than they, beside the FedCBO of each alpha.

    The default holds nothing out, so first it stands beside a FedCBO and oracles that do not either, if there are any:
    their names end in how many samples an agent has. Beside others its validation loss is of samples that it trains on,
    theirs is not, so these are not compared. Of the runs with T_G > 0 the middle one is for T_G = 30, and in Figure 6,
    which is without where there is none.
    """
    found = {}
    for variant in VARIANTS:
        fedcb2o = f"fedcb2o{variant}"
        whole = {
            match[0]: match[1]
            for name in known
            if not variant and (match := re.fullmatch(r"fedcbo(-\d+)", name))
        }
        own = [f"fedcbo{variant}"] if variant and f"fedcbo{variant}" in known else []
        if not own or len(known[own[0]]) < len(known.get(fedcb2o, ())):
            own += ["fedcbo-alpha10", "fedcbo"]
        later = {
            int(match[1]): name
            for name in known
            if (match := re.fullmatch(rf"{fedcb2o}-tg(\d+)", name))
        }
        switched = [later[start] for start in sorted(later)]
        for fedcbo in [*whole, *own] if fedcb2o in known else []:
            end = whole.get(fedcbo, "")
            stands = {
                "FedCBO": fedcbo,
                "FedCB2O": fedcb2o,
                "FedCBO without attack": f"{fedcbo}-clean",
            }
            stands |= {"Oracle Min": f"oracle-min{end}", "Oracle Max": f"oracle-max{end}"}
            if variant or fedcbo in whole:
                stands[JUDGED_ALIKE] = fedcbo
            if fedcbo == "fedcbo-alpha10":
                stands["FedCBO with alpha = 2"] = "fedcbo"
            if switched:
                stands["FedCB2O with T_G"] = switched[len(switched) // 2]
            if len(switched) > 2:
                stands |= {"with an earlier T_G": switched[0], "with a later T_G": switched[-1]}
            stands["FedCB2O of Fig. 6"] = stands.get("FedCB2O with T_G", fedcb2o)
            if fedcbo in known:
                found[f"`{fedcbo}`, `{fedcb2o}`"] = {
                    role: name for role, name in stands.items() if name in known
                }
    return found


def claims() -> Iterator[Claim]:
    """All claims of sec:experiments, in its order."""
    flat = "FedCBO with alpha = 2"
    yield _more(
        "Settings",
        "alpha = 10 yields better performance of FedCBO, overall",
        ACCURACY,
        "FedCBO",
        flat,
    )
    yield _more("Settings", "and on the source class", SOURCE, "FedCBO", flat)
    yield _less("Settings", "and in ASR", SUCCESS, "FedCBO", flat)
    yield _second("Oracle Max is the best or second-best overall", ACCURACY)
    yield _second("and on the source class", SOURCE)
    yield _second("and in ASR", SUCCESS)
    yield _alike(
        "(i)",
        "Oracle Min is similar to Oracle Max on the source class",
        SOURCE,
        "Oracle Min",
        "Oracle Max",
    )
    yield _alike("(i)", "and in ASR", SUCCESS, "Oracle Min", "Oracle Max")
    yield _less("(i)", "but lower overall", ACCURACY, "Oracle Min", "Oracle Max")
    yield _alike(
        "(ii)", "FedCBO is comparable to Oracle Max overall", ACCURACY, "FedCBO", "Oracle Max"
    )
    attack = "since the attack has minimal impact on overall accuracy"
    yield _no_worse("(ii)", attack, ACCURACY, "FedCBO", "FedCBO without attack")
    yield _of(
        "(ii)",
        "FedCBO finds the clusters",
        "weight on the other cluster",
        "elsewhere",
        "FedCBO",
        MINIMAL,
    )
    yield _less(
        "(ii)", "but degrades significantly on the source class", SOURCE, "FedCBO", "Oracle Max"
    )
    yield _more("(ii)", "with a notably high ASR", SUCCESS, "FedCBO", "Oracle Max")
    yield from _bars(
        "Fig. 6 (a)",
        "It selects malicious peers at a comparable frequency",
        "picked",
        "FedCBO",
        EQUAL,
    )
    yield from _bars("Fig. 6 (b)", "and gives them nearly equal weight", "share", "FedCBO", EQUAL)
    yield _more(
        "(iii)", "FedCB2O is significantly higher on the source class", SOURCE, "FedCB2O", "FedCBO"
    )
    yield _less("(iii)", "and much lower in ASR", SUCCESS, "FedCB2O", "FedCBO")
    for oracle in ("Oracle Min", "Oracle Max"):
        yield _alike(
            "(iii)", f"comparable to {oracle} on the source class", SOURCE, "FedCB2O", oracle
        )
        yield _alike("(iii)", "and in ASR", SUCCESS, "FedCB2O", oracle)
    yield _alike("(iii)", "and very close to Oracle Min overall", ACCURACY, "FedCB2O", "Oracle Min")
    yield _of(
        "(iii)",
        "FedCB2O finds the clusters",
        "weight on the other cluster",
        "elsewhere",
        "FedCB2O",
        MINIMAL,
    )
    yield _more(
        "Table 2", "T_G > 0 improves overall accuracy", ACCURACY, "FedCB2O with T_G", "FedCB2O"
    )
    yield _no_worse(
        "Table 2", "the source class does not degrade", SOURCE, "FedCB2O with T_G", "FedCB2O"
    )
    yield _no_worse("Table 2", "nor does ASR", SUCCESS, "FedCB2O with T_G", "FedCB2O")
    for other in ("with an earlier T_G", "with a later T_G"):
        says = f"T_G = 30 strikes the best balance: better than {other.removeprefix('with ')} on the source class"
        yield _more("Table 2", says, SOURCE, "FedCB2O with T_G", other)
        yield _less("Table 2", "and in ASR", SUCCESS, "FedCB2O with T_G", other)
    pictured = "FedCB2O of Fig. 6"
    says = "FedCB2O does not exclude malicious peers"
    yield from _bars("Fig. 6 (c)", says, "picked", pictured, (EQUAL[0], math.inf))
    says = "since malicious agents train models with smaller average losses than benign ones"
    what = "average loss, malicious less benign peers of the cluster"
    yield _of("Fig. 6 (c)", says, what, "malicious_loss", "FedCBO", (-math.inf, 0.0))
    yield from _bars(
        "Fig. 6 (c)",
        "it selects benign peers less than malicious ones",
        "picked",
        pictured,
        (1, math.inf),
    )
    yield from _bars(
        "Fig. 6 (d)", "but gives malicious ones minimal weight", "share", pictured, MINIMAL
    )
    what = "frequency, benign peers of the cluster"
    for cluster, end in CLUSTERS.items():
        says = f"Benign peers are selected less than in FedCBO{cluster}"
        yield _grown(says, what, f"benign_picked{end}", -math.inf, 0.0)
    says = "since their own average loss is larger"
    what = "validation loss of benign agents, all rounds"
    yield _grown(says, what, "loss", 0.0, math.inf, JUDGED_ALIKE)


def _difference(
    where: str, says: str, metric: str, a: str, b: str, *, low: float, high: float
) -> Claim:
    """That the difference of two methods lies in a range."""
    paper = float(PAPER[a][metric] - PAPER[b][metric]) if {a, b} <= {*PAPER} else math.nan
    statistic = f"{NAMED[metric]}, {a} less {b}"
    return Claim(
        where, says, statistic, (a, b), lambda v: v[a][metric] - v[b][metric], low, high, paper
    )


_more = functools.partial(_difference, low=0.0, high=math.inf)
_less = functools.partial(_difference, low=-math.inf, high=0.0)


def _alike(where: str, says: str, metric: str, a: str, b: str) -> Claim:
    """That two methods differ by no more than what the paper calls alike."""
    return _difference(where, says, metric, a, b, low=-MARGIN[metric], high=MARGIN[metric])


def _no_worse(where: str, says: str, metric: str, a: str, b: str) -> Claim:
    """That a method is not worse than another by more than what the paper calls alike; better it may be."""
    worse, better = ("high", "low") if metric == SUCCESS else ("low", "high")
    sign = 1 if metric == SUCCESS else -1
    return _difference(
        where, says, metric, a, b, **{worse: sign * MARGIN[metric], better: -sign * math.inf}
    )


def _second(says: str, metric: str) -> Claim:
    """That at most one of the others is better than Oracle Max."""
    others = ["FedCBO", "Oracle Min", "FedCB2O"]
    sign = -1 if metric == SUCCESS else 1

    def ahead(v: pd.DataFrame) -> "pd.Series[float]":
        v = sign * v.dropna()
        best: pd.Series[float] = v["Oracle Max"] - v[others].apply(
            lambda row: row.nlargest(2).iloc[-1], axis="columns"
        )
        return best

    return Claim(
        "(i)",
        says,
        f"{NAMED[metric]}, Oracle Max better than the second best of the others by",
        ("Oracle Max", *others),
        lambda v: ahead(pd.DataFrame({name: v[name][metric] for name in ("Oracle Max", *others)})),
        0.0,
        math.inf,
        float(ahead(PAPER.loc[[metric]]).iloc[0]),
    )


def _of(
    where: str, says: str, what: str, column: str, role: str, limits: tuple[float, float]
) -> Claim:
    """That what stands in a column lies in a range."""
    return Claim(
        where, says, f"{what}, {role}", (role,), lambda v: _column(v[role], column), *limits
    )


def _bars(
    where: str, says: str, bar: str, role: str, limits: tuple[float, float]
) -> Iterator[Claim]:
    """The same of two bars of Figure 6 for each cluster: that of malicious over that of benign peers."""
    what = f"{'frequency' if bar == 'picked' else 'weight given'}, malicious over benign peers of the cluster"
    for cluster, end in CLUSTERS.items():
        yield _of(where, says + cluster, what, f"malicious_{bar}{end}", role, limits)


def _grown(says: str, what: str, column: str, low: float, high: float, *also: str) -> Claim:
    """That a column of FedCB2O less that of FedCBO lies in a range, where runs stand for `also`, too."""
    a = "FedCB2O of Fig. 6"
    b = "FedCBO"
    return Claim(
        "Fig. 6 (a, c)",
        says,
        f"{what}, {a} less {b}",
        (a, b, *also),
        lambda v: _column(v[a], column) - _column(v[b], column),
        low,
        high,
    )


def _column(table: pd.DataFrame, name: str) -> "pd.Series[float]":
    """A column, of NaN where the table has none."""
    return table[name] if name in table else pd.Series(math.nan, table.index)


def interval(each: "pd.Series[float]") -> tuple[float, float, float]:
    """The mean of a statistic over seeds, and the ends of Student's interval for it at 95%."""
    known = each.dropna()
    mean = float(known.mean())
    if len(known) < 2:
        return mean, -math.inf, math.inf
    half = float(statistics.interval_half_width(len(known), known.std(ddof=1)))
    return mean, mean - half, mean + half


def verdict(claim: Claim, low: float, high: float) -> str:
    """What an interval for the statistic says about the claim."""
    if claim.low <= low and high <= claim.high:
        return "held"
    return "opposite" if high < claim.low or low > claim.high else "undecided"


def claims_table(known: Values) -> str:
    """The claims in Markdown, a column for each choice of runs; what only repeats the cell before it is ″."""
    seeds = max(map(len, known.values()))
    shown = columns(known)

    def cells(claim: Claim) -> Iterator[str]:
        before: tuple[str, ...] = ()
        for stands in shown.values():
            names = tuple(stands.get(role, "") for role in claim.needs)
            cell = _cell(claim, {role: known[name] for role, name in stands.items()}, seeds)
            yield "″" if cell and names == before else cell
            before = names

    return _rows(claims(), shown, cells)


def glance_table(*folders: Path) -> str:
    """The claims of the text and of Table 2 in Markdown, in several folders beside each other: for FedCB2O as the
    authors released it and as it is by default, each beside the first FedCBO that `columns` has for it."""
    known = {folder.name: read_values(folder) for folder in folders}
    shown: dict[str, tuple[Values, int]] = {}
    for fedcb2o, (size, here) in itertools.product(("fedcb2o-released", "fedcb2o"), known.items()):
        stands = next(each for each in columns(here).values() if each["FedCB2O"] == fedcb2o)
        by_role = {role: here[name] for role, name in stands.items()}
        shown[f"`{size}`: `{stands['FedCBO']}`, `{fedcb2o}`"] = (
            by_role,
            max(map(len, here.values())),
        )
    main = (claim for claim in claims() if not claim.where.startswith(("Settings", "Fig.")))
    return _rows(
        main, shown, lambda claim: (_cell(claim, here, seeds) for here, seeds in shown.values())
    )


def _rows(
    told: Iterable[Claim], shown: Iterable[str], cells: Callable[[Claim], Iterable[str]]
) -> str:
    """Claims in Markdown, with a column for each heading of `shown`; of those that have anything in a cell."""
    headings = [*shown]
    lines = [" | ".join(["| | The paper says | Statistic | In the paper", *headings]) + " |"]
    lines.append("| --- | --- | --- | ---: |" + " ---: |" * len(headings))
    for claim in told:
        found = [*cells(claim)]
        if any(found):
            paper = "" if math.isnan(claim.paper) else f"{claim.paper:+.2f}"
            lines.append(
                "| " + " | ".join([claim.where, claim.says, claim.statistic, paper, *found]) + " |"
            )
    return "\n".join(lines) + "\n"


def _cell(claim: Claim, runs: Values, seeds: int) -> str:
    """The mean of a statistic, its interval and the verdict, and how many seeds it is of where others have more;
    nothing where the runs do not tell."""
    if not runs.keys() >= {*claim.needs} or (each := claim.of(runs).dropna()).empty:
        return ""
    mean, low, high = interval(each)
    sign = "+" if " less " in claim.statistic or " by" in claim.statistic else ""
    places = 2 if claim.statistic.startswith(tuple(NAMED.values())) else 3
    count = (
        "" if len(each) == seeds and seeds > 1 else f" ({len(each)} seed{'s' * (len(each) > 1)})"
    )
    return (
        statistics.format_interval(mean, low, high, places, sign)
        + count
        + f" **{verdict(claim, low, high)}**"
    )


def metrics_table(known: Values) -> str:
    """What each run reached, in percent: mean and interval over its seeds."""
    shown = [column for column in COLUMNS if any(column in table for table in known.values())]
    lines = [" | ".join(["| ", *(COLUMNS[column] for column in shown), "Seeds |"])]
    lines.append("| --- |" + " ---: |" * (len(shown) + 1))
    for name, table in known.items():
        cells = []
        for column in shown if not name.endswith("-clean") else ():
            mean, low, high = interval(_column(table, column))
            cells.append(
                "–" if math.isnan(mean) else statistics.format_interval(mean, low, high, digits=2)
            )
        if cells:
            lines.append("| " + " | ".join([f"`{name}`", *cells, str(len(table))]) + " |")
    return "\n".join(lines) + "\n"


def rounds_table(folder: Path) -> str:
    """What FedCBO and FedCB2O had reached in each round with an evaluation, in percent, the mean over seeds; and last
    the paper's."""
    found = {
        name: table.groupby("round").mean()
        for name, table in _by_round(folder).items()
        if name.startswith(("fedcbo", "fedcb2o"))
    }
    heads = [f"`{name}`, {NAMED[metric]}" for name in found for metric in METRICS]
    lines = [" | ".join(["| Round", *heads]) + " |", "| ---: |" + " ---: |" * len(heads)]
    for each in sorted(set().union(*(table.index for table in found.values()))):
        cells = [
            float(table[metric].get(each, math.nan))
            for table in found.values()
            for metric in METRICS
        ]
        lines.append(
            " | ".join(
                [f"| {each}", *("" if math.isnan(cell) else f"{cell:.2f}" for cell in cells)]
            )
            + " |"
        )
    paper = [
        PAPER["FedCBO" if name.startswith("fedcbo") else "FedCB2O"][metric]
        for name in found
        for metric in METRICS
    ]
    lines.append(" | ".join(["| 150, the paper", *(f"{cell:.2f}" for cell in paper)]) + " |")
    return "\n".join(lines) + "\n"


TABLE = re.compile(
    r"(?P<mark>^<!-- claims: (?P<folder>\S+) (?P<name>\w+) -->\n\n)(?:^\|.*\n)*\n?", re.MULTILINE
)


def gathered(folders: Sequence[Path], into: Path) -> dict[str, list[Run]]:
    """The runs in some folders by what follows the prefix of their names, those of one name and of the same settings as
    one run, by links, the one with the most seeds first."""
    for config in (path for folder in folders for path in sorted(folder.glob("*/config.toml"))):
        run = Run(config.parent)
        there = into / settings_digest(run.config) / config.parent.name
        done = [
            s
            for s in run.seeds
            if (run.summary_of(s) or {"rounds": -1})["rounds"] >= run.config["rounds"]
        ]
        if not done:
            continue
        there.mkdir(parents=True, exist_ok=True)
        if not (there / "config.toml").exists():
            (there / "config.toml").symlink_to(config.resolve())
        for seed in done:
            (there / f"seed-{seed}").symlink_to(config.parent.resolve() / f"seed-{seed}")
    runs: dict[str, list[Run]] = {}
    for path in sorted(into.glob("*/*")):
        if match := re.search("fedcbo|fedcb2o|oracle", path.name):
            runs.setdefault(path.name[match.start() :], []).append(Run(path))
    ordered = {name: sorted(each, key=lambda run: -len(run.seeds)) for name, each in runs.items()}
    return {name: ordered[name] for name in sorted(ordered, key=_place)}


def read_values(folder: Path) -> dict[str, pd.DataFrame]:
    """What values.csv of a folder holds, by method."""
    return _by_method(folder / "values.csv", ["seed"])


def read_mean(folder: Path, after: float = 0.5) -> dict[str, pd.DataFrame]:
    """The mean, for each seed, of what curves.csv of a folder holds beyond a share of the rounds, by method."""
    found = _by_round(folder)
    start = after * max(
        int(table.index.get_level_values("round").max()) for table in found.values()
    )
    return {
        name: table.query(f"round > {start}").groupby("seed").mean()
        for name, table in found.items()
    }


def _by_round(folder: Path) -> dict[str, pd.DataFrame]:
    return _by_method(folder / "curves.csv", ["seed", "round"])


def _by_method(path: Path, keys: list[str]) -> dict[str, pd.DataFrame]:
    table = pd.read_csv(path).set_index(keys)
    return {
        str(name): mine.drop(columns="method") for name, mine in table.groupby("method", sort=False)
    }


def added(path: Path, new: Values) -> dict[str, pd.DataFrame]:
    """The values of a file, and new ones, which replace those of the same method and seed; in the order of methods."""
    keys = [str(key) for key in next(iter(new.values())).index.names]
    found = (
        _by_method(path, keys) if path.exists() else {}
    )  # curves.csv may not be there, and is not made then
    for name, mine in new.items():
        old = found.get(name, mine.iloc[:0])
        old = old[~old.index.get_level_values("seed").isin(mine.index.get_level_values("seed"))]
        found[name] = pd.concat([old, mine]).sort_index()
    return dict(sorted(found.items(), key=lambda each: _place(each[0])))


def _place(name: str) -> tuple[bool, str]:
    return name.startswith("fedcb2o"), name


TABLES: dict[str, Callable[..., str]] = {
    "metrics": lambda folder: metrics_table(read_values(folder)),
    "claims": lambda folder: claims_table(read_values(folder)),
    "later_metrics": lambda folder: metrics_table(read_mean(folder)),
    "later_claims": lambda folder: claims_table(read_mean(folder)),
    "rounds": rounds_table,
    "glance": glance_table,
}


def rewritten(page: Path) -> str:
    """The page with its tables as the values have them."""

    def table(found: re.Match[str]) -> str:
        folders = (page.parent / folder for folder in found["folder"].split(","))
        return found["mark"] + TABLES[found["name"]](*folders) + "\n"

    return TABLE.sub(table, page.read_text(encoding="utf-8"))


def draw(folder: Path) -> None:
    """The picture of a folder's curves.csv, beside it."""
    figures.draw_panels(figures.curve_panels(pictured(_by_round(folder)))).savefig(
        folder / "curves.png", dpi=130
    )


def main() -> None:
    """Read the runs, print the tables, and write what there is to keep; or write the tables of pages anew."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="*", help="folders that hold runs")
    parser.add_argument("--out", type=Path, help="where values and figures go")
    parser.add_argument(
        "--keep", action="store_true", help="with --out: keep what it has of other seeds"
    )
    parser.add_argument(
        "--page", type=Path, action="append", default=[], help="a page whose tables to write anew"
    )
    arguments = parser.parse_args()
    if arguments.keep and (arguments.out is None or not (arguments.out / "values.csv").exists()):
        parser.error("--keep adds to the values.csv of --out, and there is none")
    if arguments.keep and not arguments.folders:
        parser.error("--keep adds runs, and no folder of any is given")
    with tempfile.TemporaryDirectory() as into:
        runs = gathered(arguments.folders, Path(into))
        known = {
            name: pd.concat(map(values, each)).sort_index().round(4) for name, each in runs.items()
        }
        curves = {name: pd.concat(map(curve, each)).sort_index() for name, each in runs.items()}
        if runs and arguments.keep:
            known = added(arguments.out / "values.csv", known)
            curves = added(arguments.out / "curves.csv", curves)
        if arguments.folders and not columns(known):
            parser.error(
                f"no finished runs PREFIX-fedcbo and PREFIX-fedcb2o, only {', '.join(runs) or 'none'}"
            )
        if known:
            print(metrics_table(known), claims_table(known), sep="\n")
        if known and arguments.out is not None:
            arguments.out.mkdir(parents=True, exist_ok=True)
            pd.concat(known, names=["method"]).to_csv(arguments.out / "values.csv")
            if (arguments.out / "curves.csv").exists() or not arguments.keep:
                pd.concat(curves, names=["method"]).to_csv(arguments.out / "curves.csv")
                draw(arguments.out)
        if known and arguments.out is not None and not arguments.keep:
            stands = next(iter(columns(known).values()))
            bars = figures.figure6(
                *(runs[stands[role]][0] for role in ("FedCBO", "FedCB2O of Fig. 6"))
            )
            bars.savefig(arguments.out / "figure6.png", dpi=130)
    if arguments.out is not None and not arguments.folders:
        if not (arguments.out / "curves.csv").exists():
            parser.error("--out without runs draws what is in its curves.csv, and there is none")
        draw(arguments.out)
    for page in arguments.page:
        page.write_text(rewritten(page), encoding="utf-8")


if __name__ == "__main__":
    main()
