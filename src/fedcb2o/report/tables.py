"""The paper's numbers from records: Tables 1 and 2 (tab:baselines, tab:FedCB2O_T_G) and those behind Figure 6.

Everything is over benign agents and at the last round that was evaluated, never the best one. Values are fractions
of 1; only `compare` returns text, in percent.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from fedcb2o.errors import RunError
from fedcb2o.records import (
    EVALUATED_METRICS,
    NON_RESULT_SETTINGS,
    OPTIONAL_METRICS,
    Run,
    last_fifth,
    last_round,
    summary,
)
from fedcb2o.report.statistics import format_interval, interval_half_width

METRICS = EVALUATED_METRICS
_ATTACK_METRIC = "attack_success_rate"
LABELS = {
    "accuracy": "Overall accuracy",
    "source_accuracy": "Source class accuracy",
    "attack_success_rate": "Attack success rate",
    "test_loss": "Test loss",
    "global_accuracy": "Accuracy, global test set",
    "global_loss": "Loss, global test set",
    "net": "Net attack success",
    "malicious_weight": "Malicious weight",
}
AgentSummary = Literal["mean", "worst", "worst_tenth"]


def compare(
    runs: Sequence[Run], *, over: AgentSummary = "mean", with_counterparts: bool = False
) -> pd.DataFrame:
    """The paper's Tables 1 and 2 (tab:baselines, tab:FedCB2O_T_G): a row a metric, a column a run, in percent but for
    losses.

    Each is the mean over seeds with Student's 95% interval. The net attack success is the rate minus that of the clean
    twin with the same seed at the same round; the twin is sought among `runs`, then beside the run in the folder of its
    name + "-clean". Twins get no column of their own unless `twins`. `over` says how agents are summed up: their mean,
    the worst one, or the worst tenth.
    """
    shown = [*runs] if with_counterparts else without_counterparts(runs)
    end = "" if over == "mean" else f"_{over}"
    columns = {}
    for run, label in zip(shown, run_labels(shown), strict=True):
        table = summary(run.records)
        cells = {LABELS[metric]: format_mean_interval(table[metric + end]) for metric in METRICS}
        for metric in filter(table.__contains__, OPTIONAL_METRICS):
            cells[LABELS[metric]] = format_mean_interval(
                table[metric + end], percent=not metric.endswith("loss")
            )
        if over == "mean":
            cells[LABELS["net"]] = format_mean_interval(net_attack_success(run, runs))
        taken = table["malicious_weight"] if is_attacked(run) else pd.Series(dtype=float)
        cells[LABELS["malicious_weight"]] = format_mean_interval(taken)
        columns[label] = cells
    rows = {label for cells in columns.values() for label in cells}
    table = pd.DataFrame(
        columns, index=[label for label in LABELS.values() if label in rows]
    ).fillna("–")
    if over != "mean":
        table = table.drop(index=LABELS["malicious_weight"], errors="ignore")
    return table[(table != "–").any(axis="columns")]


def net_attack_success(run: Run, among: Sequence[Run] = ()) -> "pd.Series[float]":
    """Attack success rate minus that of the clean twin, for each seed (the index) that both have at the same round.

    Empty where no twin is found among `among` or beside the run's folder.
    """
    twin = find_clean_counterpart(run, among)
    mine = last_round(run.records)
    if twin is None or mine.empty:
        return pd.Series(dtype=float)
    both = mine.merge(twin.records, on=["seed", "round", "agent"], suffixes=("", "_twin"))
    return (
        (both[_ATTACK_METRIC] - both[f"{_ATTACK_METRIC}_twin"])
        .groupby(both["seed"])
        .mean()
        .dropna()
    )


def by_source_count(run: Run) -> pd.DataFrame:
    """Results by how many source-class samples an agent validates on: 0, 1, 2, 3 or more.

    The criterion G is blind to the attack with none. Mean over all benign agents of all seeds; columns: samples,
    agents (how many), the three metrics, and malicious_weight over the last fifth of the rounds, NaN where the
    malicious agents do not attack.
    """
    last = last_round(run.records).dropna(subset="source_in_validation")
    late = last_fifth(run.records).groupby(["seed", "agent"]).malicious_weight.mean().rename("late")
    last = last.merge(late, on=["seed", "agent"])
    samples = last.source_in_validation.clip(upper=3).map(
        lambda count: "3 or more" if count == 3 else f"{count:.0f}"
    )
    means = (
        last.assign(malicious_weight=last.late)
        .groupby(samples)[[*METRICS, "malicious_weight"]]
        .mean()
    )
    if not is_attacked(run):
        means["malicious_weight"] = math.nan
    means.insert(0, "agents", samples.value_counts())
    return means.rename_axis("samples").reset_index()


def pair_statistics(run: Run) -> pd.DataFrame:
    """How often benign agents received each kind of peer, and with what weight, over all rounds.

    The numbers of Figure 6 (fig:avg_select_time_mul_weights). A row for each seed, cluster of the selecting benign
    agents, kind of peer (`peer`: benign or malicious) and `relation` (same or other cluster) of which there are peers:
    available   peers of that kind that one agent has, itself left out
    frequency   models received per agent, round and available peer
    mean_weight mean weight in m_j of a received model
    share       frequency * mean_weight, scaled so that a cluster's rows of a seed sum to 1
    """
    rows: list[dict[str, Any]] = []
    for seed, agents in run.agents.groupby("seed"):
        cluster = agents.cluster.to_numpy()
        malicious = agents.malicious.to_numpy(bool)
        pairs = run.pairs[(run.pairs.seed == seed) & (run.pairs.agent != run.pairs.peer)]
        rounds = pairs["round"].nunique()
        me = pairs.agent.to_numpy()
        peer = pairs.peer.to_numpy()
        weight = pairs.weight.to_numpy()
        for c in np.unique(cluster):
            begin = len(rows)
            selecting = np.sum((cluster == c) & ~malicious)
            for relation, kind in (
                (r, k) for r in ("same", "other") for k in ("benign", "malicious")
            ):
                wanted = ((cluster == c) == (relation == "same")) & (
                    malicious == (kind == "malicious")
                )
                available = wanted.sum() - ((relation, kind) == ("same", "benign"))
                received = weight[~malicious[me] & (cluster[me] == c) & wanted[peer]]
                if available > 0 and selecting > 0 and rounds > 0:
                    row = {
                        "seed": seed,
                        "cluster": c,
                        "peer": kind,
                        "relation": relation,
                        "available": available,
                    }
                    row["frequency"] = len(received) / (selecting * rounds * available)
                    row["mean_weight"] = received.mean() if len(received) else math.nan
                    row["share"] = received.sum() / available
                    rows.append(row)
            total = sum(row["share"] for row in rows[begin:])
            for row in rows[begin:]:
                row["share"] = row["share"] / total if total > 0 else math.nan
    names = [
        "seed",
        "cluster",
        "peer",
        "relation",
        "available",
        "frequency",
        "mean_weight",
        "share",
    ]
    return pd.DataFrame(rows, columns=names)


def is_attacked(run: Run) -> bool:
    """Whether malicious agents attack in a run."""
    return run.config.get("agents", {}).get("malicious_role") == "attack" and bool(
        run.agents.malicious.any()
    )


def find_clean_counterpart(run: Run, among: Sequence[Run] = ()) -> Run | None:
    """The clean twin of an attacked run: the same settings, but malicious agents train on true labels."""
    if not is_attacked(run):
        return None
    beside = run.folder.with_name(run.folder.name + "-clean")
    try:
        candidates = [*among, *([Run(beside)] if beside.is_dir() else [])]
    except RunError:
        candidates = [*among]
    return next((other for other in candidates if _is_counterpart(run, other)), None)


def without_counterparts(runs: Sequence[Run]) -> list[Run]:
    """The runs, less those that are the clean twin of another one of them."""
    return [run for run in runs if not any(_is_counterpart(other, run) for other in runs)]


def run_labels(runs: Sequence[Run]) -> list[str]:
    """A title for each run; where two share one, their folders' names tell them apart."""
    titles = [run.title for run in runs]
    named = [
        t if titles.count(t) == 1 else f"{t} ({run.folder.name})"
        for t, run in zip(titles, runs, strict=True)
    ]
    return [
        t if named.count(t) == 1 else f"{t} #{named[: i + 1].count(t)}" for i, t in enumerate(named)
    ]


def format_mean_interval(values: "pd.Series[float]", *, percent: bool = True) -> str:
    """Mean and interval, in percent: "84.3 [83.9, 84.6]"; "84.3" for one value, "–" for none. Or plain, with more
    places."""
    known = values.dropna() * (100 if percent else 1)
    if known.empty:
        return "–"
    mean = known.mean()
    half = interval_half_width(len(known), known.std(ddof=1))
    return format_interval(mean, mean - half, mean + half, digits=1 if percent else 3)


def seed_caption(runs: Sequence[Run]) -> str:
    """What the numbers of `compare` are over, as a sentence: which seeds, or how many of them where runs differ."""
    shown = without_counterparts(runs)
    seeds = [last_round(run.records).seed.unique().tolist() for run in shown]
    over = "Percent, at the last round; mean and 95% interval over seeds"
    if any(mine != seeds[0] for mine in seeds):
        counts = [
            f"{label} {len(mine)}" for label, mine in zip(run_labels(shown), seeds, strict=True)
        ]
        return f"{over}, as many as each has: {', '.join(counts)}."
    if len(seeds[0]) == 1:
        return f"Percent, at the last round of seed {seeds[0][0]}."
    return f"{over} ({', '.join(str(seed) for seed in seeds[0])})."


def incomplete_note(run: Run) -> str | None:
    """What a run still lacks, as a sentence; None if it is complete."""
    if run.complete:
        return None
    table = summary(run.records)
    rounds = run.config.get("rounds", "?")
    seen = ", ".join(
        f"seed {row.seed} at round {row.round} of {rounds}" for row in table.itertuples()
    )
    wanted = len(run.config.get("seeds", run.seeds))
    have = f"read from {seen}" if seen else "no round was evaluated yet"
    return f"{run.title} ({Path(run.folder).name}) is incomplete: {len(run.seeds)} of {wanted} seeds begun, {have}"


def unverified_note(run: Run) -> str | None:
    """Which seeds of a run have no sums to hold their files against, as a sentence; None if all have."""
    if not run.unchecked:
        return None
    seeds = ", ".join(map(str, run.unchecked))
    return (
        f"{run.title} ({Path(run.folder).name}): there is no sums.json to hold the files of seed {seeds} against; "
        "`fedcb2o run` with --resume looks at them and writes it"
    )


def _is_counterpart(run: Run, other: Run) -> bool:
    """Whether `other` is the clean twin of `run`."""

    def settings(config: dict[str, Any]) -> dict[str, Any]:
        agents = {
            key: value for key, value in config.get("agents", {}).items() if key != "malicious_role"
        }
        return {
            **{key: value for key, value in config.items() if key not in NON_RESULT_SETTINGS},
            "agents": agents,
        }

    roles = [each.config.get("agents", {}).get("malicious_role") for each in (run, other)]
    return roles == ["attack", "clean"] and settings(run.config) == settings(other.config)
