"""Tables of runs: the paper's Tables 1 and 2, and Figure 6 data.

Results are over benign agents and at the last evaluated round, never the best one. Values are
fractions of 1; only `compare` returns text, in percent.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import pandas as pd

from fedcb2o.errors import RunError
from fedcb2o.records import (
    METRICS,
    NON_RESULT_SETTINGS,
    OPTIONAL_METRICS,
    STANDARD_METRICS,
    Run,
    last_fifth,
    last_round,
    left_out,
)
from fedcb2o.report._statistics import (
    MIN_SEEDS,
    TOO_FEW_SEEDS,
    format_interval,
    interval_half_width,
    rate_interval,
)

_ATTACK_METRIC = "attack_success_rate"
_MAX_SOURCE_SAMPLES = 3  # agents with more are in one group
LABELS = {
    **{name: METRICS[name].label for name in (*STANDARD_METRICS, *OPTIONAL_METRICS)},
    "best_round": "Accuracy, round of the lowest validation loss",
    "local": "Local baseline",
    "gain": "Gain over training alone",
    "gain_worst": "Gain over training alone, worst agent",
    "net": "Net attack success",
    "malicious_weight": METRICS["malicious_weight"].label,
}
"""Row labels of `compare`, in order."""
AgentSummary = Literal["mean", "worst", "worst_tenth"]
# Settings of the agents that a comparison needs to be equal.
_SHAPE_KEYS = ("num_clusters", "benign", "malicious", "benign_samples", "malicious_samples")


class ResultTable(pd.DataFrame):
    """A table of text that is printed whole, without hidden rows and columns."""

    @property
    def _constructor(self) -> type["ResultTable"]:
        return ResultTable

    def __repr__(self) -> str:
        """Return all rows and columns as text, without a limit of the width."""
        return self.to_string()


def compare(
    runs: Sequence[Run], *, over: AgentSummary = "mean", with_counterparts: bool = False
) -> pd.DataFrame:
    """Build Tables 1 and 2 (tab:baselines, tab:FedCB2O_T_G), metrics by runs.

    Net attack success is the attack success rate minus that of the clean counterpart with the same
    seed at the same round. The counterpart is searched among `runs`, then in the folder with the
    name of the run plus "-clean".

    Metrics that a configuration chose by its key `metrics` are plain numbers. Agents without a
    value are counted in a row of their own.

    Args:
        runs: Runs to compare.
        over: Summary over benign agents: mean, worst agent, or mean of the worst tenth.
        with_counterparts: Include a column for each clean counterpart.

    Returns:
        Text: mean over seeds with its 95% interval, which needs 5 seeds; in percent except
        for losses and for metrics of the key `metrics`. `print` shows the whole table.
    """
    shown = [*runs]
    if not with_counterparts:
        shown = without_counterparts(runs)
    columns = {}
    for run, label in zip(shown, run_labels(shown), strict=True):
        columns[label] = _compare_column(run, runs, over)
    # A row that no run has is left out.
    labels = {label for cells in columns.values() for label in cells}
    custom = [
        label for run in shown for name in run.custom_metrics for label in (name, _missing(name))
    ]
    # Rows are in the same order whatever runs are compared.
    index = [label for label in dict.fromkeys((*LABELS.values(), *custom)) if label in labels]
    table = ResultTable(columns, index=index).fillna("–")
    return table[(table != "–").any(axis="columns")]


def _compare_column(run: Run, runs: Sequence[Run], over: AgentSummary) -> dict[str, str]:
    """Format the results of one run, by label."""
    table = run.summary()
    suffix = f"_{over}".removesuffix("_mean")
    cells = {}
    for name in (*STANDARD_METRICS, *OPTIONAL_METRICS):
        if name in STANDARD_METRICS or name in table:
            values = table[name + suffix]
            cells[LABELS[name]] = format_mean_interval(values, percent=METRICS[name].is_percent)
    if over == "mean":
        if run.complete and run.config.get("keep_best"):
            cells[LABELS["best_round"]] = format_mean_interval(_accuracy_of_best(run))
        cells |= _gain_cells(run, runs)
        net = net_attack_success(run, runs)
        cells[LABELS["net"]] = format_mean_interval(net, is_difference=True)
        if is_attacked(run):
            cells[LABELS["malicious_weight"]] = format_mean_interval(table["malicious_weight"])
    for name in run.custom_metrics:
        cells[name] = format_mean_interval(table[name + suffix], percent=False)
        if (missing := int(table[f"{name}_missing"].sum())) and over == "mean":
            cells[_missing(name)] = f"{missing} of {len(last_round(run.records))}"
    return cells


def _missing(metric: str) -> str:
    return f"{metric}: agents without a value"


def _gain_cells(run: Run, runs: Sequence[Run]) -> dict[str, str]:
    """Format the accuracy of training alone, and the gain over it, where it was run."""
    both = local_gains(run, runs)
    if both.empty:
        return {}
    by_seed = both.assign(gain=both.accuracy - both.accuracy_local).groupby("seed")
    cells = {LABELS["local"]: format_mean_interval(by_seed.accuracy_local.mean())}
    for name, gain in (("gain", by_seed.gain.mean()), ("gain_worst", by_seed.gain.min())):
        cells[LABELS[name]] = format_mean_interval(gain, is_difference=True)
    return cells


def _accuracy_of_best(run: Run) -> pd.Series:
    """Return the mean accuracy of benign agents, each in its best round, by seed."""
    best = run.best_rounds().merge(run.records, on=["seed", "agent", "round"])
    return best[~best.malicious].groupby("seed").accuracy.mean()


def find_local_baseline(run: Run, among: Sequence[Run] = ()) -> Run | None:
    """Return the run of agents that train alone, among runs or in the folder next to it."""
    return _find_counterpart(run, among, "local", _is_local_baseline)


def local_gains(run: Run, among: Sequence[Run] = ()) -> pd.DataFrame:
    """Pair each benign agent's accuracy at the last round with `accuracy_local`, alone."""
    baseline = find_local_baseline(run, among)
    columns = ["seed", "agent", "accuracy"]
    if baseline is None:
        return pd.DataFrame(columns=[*columns, "accuracy_local"])
    keys = ["seed", "round", "agent"]
    records = last_round(run.records)
    # The baseline may have more rounds: the merge takes its values at the run's last round.
    alone = baseline.records[[*keys, "accuracy"]]
    both = records[[*keys, "accuracy"]].merge(alone, on=keys, suffixes=("", "_local"))
    return both[[*columns, "accuracy_local"]].dropna()


def net_attack_success(run: Run, among: Sequence[Run] = ()) -> "pd.Series[float]":
    """Compute the attack success rate minus that of the clean counterpart.

    Args:
        run: Run under attack.
        among: Runs to search for the counterpart, before the folder next to the run.

    Returns:
        One value for each seed (the index) that both have at the same round; empty without a
        counterpart.
    """
    counterpart = find_clean_counterpart(run, among)
    records = last_round(run.records)
    if counterpart is None or records.empty:
        return pd.Series(dtype=float)
    keys = ["seed", "round", "agent"]
    both = records.merge(counterpart.records, on=keys, suffixes=("", "_clean"))
    difference = both[_ATTACK_METRIC] - both[f"{_ATTACK_METRIC}_clean"]
    return difference.groupby(both["seed"]).mean().dropna()


def by_source_count(run: Run) -> pd.DataFrame:
    """Group results by the number of source-class samples in validation data.

    An agent without such samples has a criterion G that cannot see the attack.

    Args:
        run: Run to summarise.

    Returns:
        One row for each number of samples: 0, 1, 2, 3 or more. Columns: samples, agents (their
        number), the evaluated metrics, and malicious_weight over the last fifth of the rounds (NaN
        without an attack); means over all benign agents of all seeds.
    """
    last = last_round(run.records).dropna(subset="source_in_validation")
    # An agent meets few peers in a round, so the weight of a single round is noise.
    late = last_fifth(run.records).groupby(["seed", "agent"]).malicious_weight.mean()
    last = last.merge(late.rename("late"), on=["seed", "agent"])
    counts = last.source_in_validation.clip(upper=_MAX_SOURCE_SAMPLES)
    samples = counts.map(
        lambda count: "3 or more" if count == _MAX_SOURCE_SAMPLES else f"{count:.0f}"
    )

    columns = [*STANDARD_METRICS, "malicious_weight"]
    means = last.assign(malicious_weight=last.late).groupby(samples)[columns].mean()
    if not is_attacked(run):
        means["malicious_weight"] = math.nan
    means.insert(0, "agents", samples.value_counts())
    return means.rename_axis("samples").reset_index()


def by_agent(run: Run) -> pd.DataFrame:
    """Summarise each benign agent at the last evaluated round, over the seeds.

    Args:
        run: Run to summarise.

    Returns:
        Text, one row per agent, by the name of its owner where the data have some: training
        samples, and the mean of each metric over the seeds in which it has a value. The number of
        these seeds follows where it is smaller; "no value" stands for 0.
    """
    last = last_round(run.records)
    labels: list[str] = []
    for seed, rows in last.groupby("seed", sort=False):
        names = run.about(int(str(seed))).get("names")
        labels += [names[j] if names else f"agent {j}" for j in rows.agent]
    agents = last.groupby(pd.Index(labels, name="Agent"), sort=False)
    counts = agents.size()
    samples = agents.num_samples.mean()
    columns = {"Training samples": samples.map("{:.0f}".format)}
    for name in (*STANDARD_METRICS, *OPTIONAL_METRICS, *run.custom_metrics):
        if name not in last or (name not in run.custom_metrics and last[name].isna().all()):
            continue
        scale, digits = (100, 1) if name in METRICS and METRICS[name].is_percent else (1, 3)
        texts = []
        for mean, known, count in zip(
            agents[name].mean(), agents[name].count(), counts, strict=True
        ):
            part = f" ({known} of {count} seeds)" if known < count else ""
            texts.append(f"{scale * mean:.{digits}f}{part}" if known else "no value")
        columns[LABELS.get(name, name)] = pd.Series(texts, counts.index)
    return pd.DataFrame(columns)


def pair_statistics(run: Run) -> pd.DataFrame:
    """Compute frequency and weight of each kind of peer, over all rounds.

    These are the numbers of Figure 6 (fig:avg_select_time_mul_weights).

    Args:
        run: Run to summarise.

    Returns:
        One row for each seed, cluster of the selecting benign agents, kind of peer (`peer`: benign
        or malicious) and `relation` (same or other cluster) with such peers. Further columns:
        available (number of such peers of one agent, itself excluded), frequency (models received
        per agent, round and available peer), mean_weight (mean weight in m_j of a received model),
        share (frequency * mean_weight, scaled so that the rows of a cluster and seed sum to 1).
    """
    rows: list[dict[str, Any]] = []
    for seed, agents in run.agents.groupby("seed"):
        # An agent always has its own model, which is no choice of a peer.
        pairs = run.pairs[run.pairs.seed == seed]
        recorded = np.isin(agents.agent, pairs.agent)  # a sample of many agents
        pairs = pairs[pairs.agent != pairs.peer]
        for cluster in np.unique(agents.cluster.to_numpy()):
            rows += [
                {"seed": seed, **row} for row in _cluster_pairs(agents, pairs, cluster, recorded)
            ]
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


def _cluster_pairs(
    agents: pd.DataFrame, pairs: pd.DataFrame, cluster: np.integer[Any], recorded: np.ndarray
) -> list[dict[str, Any]]:
    """Compute the rows of `pair_statistics` for one seed and cluster, of `recorded` agents."""
    in_cluster = agents.cluster.to_numpy() == cluster
    malicious = agents.malicious.to_numpy(bool)
    agent = pairs.agent.to_numpy()
    peer = pairs.peer.to_numpy()
    weight = pairs.weight.to_numpy()
    rounds = pairs["round"].nunique()
    selecting = np.sum(in_cluster & ~malicious & recorded)

    rows: list[dict[str, Any]] = []
    for relation in ("same", "other"):
        for kind in ("benign", "malicious"):
            wanted = (in_cluster == (relation == "same")) & (malicious == (kind == "malicious"))
            available = wanted.sum() - ((relation, kind) == ("same", "benign"))
            if not (available > 0 and selecting > 0 and rounds > 0):
                continue
            received = weight[~malicious[agent] & in_cluster[agent] & wanted[peer]]
            rows.append(
                {
                    "cluster": cluster,
                    "peer": kind,
                    "relation": relation,
                    "available": available,
                    "frequency": len(received) / (selecting * rounds * available),
                    "mean_weight": received.mean() if len(received) else math.nan,
                    "share": received.sum() / available,
                }
            )

    total = sum(row["share"] for row in rows) or math.nan
    for row in rows:
        row["share"] = row["share"] / total
    return rows


def is_attacked(run: Run) -> bool:
    """Return True if malicious agents attack in a run."""
    role = run.config.get("agents", {}).get("malicious_role")
    return role == "attack" and bool(run.agents.malicious.any())


def find_clean_counterpart(run: Run, among: Sequence[Run] = ()) -> Run | None:
    """Find the run of agents that train cleanly, among runs or in the folder next to it."""
    return _find_counterpart(run, among, "clean", _is_counterpart) if is_attacked(run) else None


def _find_counterpart(
    run: Run, among: Sequence[Run], suffix: str, matches: Callable[[Run, Run], bool]
) -> Run | None:
    """Return the first run that matches, among runs or in the folder NAME-SUFFIX."""
    candidates = [*among]
    folder = run.folder.with_name(f"{run.folder.name}-{suffix}")
    if folder.is_dir():
        # A folder of this name that is no run is somebody else's.
        with suppress(RunError):
            candidates.append(Run(folder))
    return next((other for other in candidates if matches(run, other)), None)


def without_counterparts(runs: Sequence[Run]) -> list[Run]:
    """Return the runs except the clean counterparts of others."""
    return [run for run in runs if not any(_is_counterpart(other, run) for other in runs)]


def run_labels(runs: Sequence[Run]) -> list[str]:
    """Return a unique title for each run."""
    titles = [run.title for run in runs]
    labels = [
        f"{run.title} ({run.folder.name})" if titles.count(run.title) > 1 else run.title
        for run in runs
    ]
    # Folders of different places may have one name.
    return [
        f"{label} #{labels[: i + 1].count(label)}" if labels.count(label) > 1 else label
        for i, label in enumerate(labels)
    ]


def format_mean_interval(
    values: "pd.Series[float]", *, percent: bool = True, is_difference: bool = False
) -> str:
    """Format the mean of values over seeds with its 95% interval; "–" without values.

    The interval of a rate is computed on the logit scale; that of a difference is Student's.
    Without `percent` a number has three decimals. There is no interval for fewer than 5 values.
    """
    known = values.dropna()
    if known.empty:
        return "–"
    mean = known.mean()
    deviation = known.std(ddof=1)
    if percent and not is_difference:
        low, high = rate_interval(len(known), mean, deviation)
    else:
        half = interval_half_width(len(known), deviation)
        low = mean - half
        high = mean + half
    if not percent:
        return format_interval(mean, low, high, digits=3)
    return format_interval(100 * mean, 100 * low, 100 * high)


def seed_caption(runs: Sequence[Run], *, over: AgentSummary = "mean") -> str:
    """Describe the unit and the seeds behind the numbers of `compare`."""
    shown = without_counterparts(runs)
    seeds = [last_round(run.records).seed.unique().tolist() for run in shown]
    unit = _unit_caption(shown, over)
    if all(run_seeds == seeds[0] for run_seeds in seeds):
        if len(seeds[0]) == 1:
            return f"{unit}, at the last round of seed {seeds[0][0]}."
        seeds_text = f" ({', '.join(map(str, seeds[0]))})"
    elif len({len(run_seeds) for run_seeds in seeds}) == 1:
        seeds_text = f", {len(seeds[0])} per run, which are not the same"
    else:
        labels = run_labels(shown)
        counts = [f"{label} {len(own)}" for label, own in zip(labels, seeds, strict=True)]
        seeds_text = f", with a different number of seeds per run: {', '.join(counts)}"
    numbers = [len(run_seeds) for run_seeds in seeds]
    if max(numbers) < MIN_SEEDS:
        return (
            f"{unit}, at the last round; mean over seeds{seeds_text}: {TOO_FEW_SEEDS}, which needs"
            f" {MIN_SEEDS}."
        )
    limit = ""
    if min(numbers) < MIN_SEEDS:
        limit = f"; {TOO_FEW_SEEDS} where there are fewer than {MIN_SEEDS}"
    return f"{unit}, at the last round; mean and 95% interval over seeds{seeds_text}{limit}."


def _unit_caption(runs: Sequence[Run], over: AgentSummary) -> str:
    """Describe the unit of the rows of `compare`; name those that are not in percent."""
    plain: dict[str, None] = {}
    for run in runs:
        losses = [name for name in OPTIONAL_METRICS if name in run.records]
        plain |= {LABELS[name]: None for name in losses if not METRICS[name].is_percent}
        plain |= dict.fromkeys(run.custom_metrics)
    return f"Percent, except {', '.join(plain)}" if plain else "Percent"


def comparability_notes(runs: Sequence[Run]) -> list[str]:
    """Describe the conditions in which runs differ, so that their numbers do not compare.

    Args:
        runs: Runs of a table or a figure.

    Returns:
        One sentence without a full stop for each of data, test set, rounds, agents, training
        samples and seeds in which the runs differ; empty for comparable runs. Data of one name are
        compared by their checksums.
    """
    shown = without_counterparts(runs)
    labels = run_labels(shown)
    notes = _data_notes(shown, labels)
    for aspect, describe in _CONDITIONS.items():
        groups: dict[str, list[str]] = {}
        for label, run in zip(labels, shown, strict=True):
            groups.setdefault(describe(run), []).append(label)
        if len(groups) > 1:
            parts = [f"{value} ({', '.join(names)})" for value, names in groups.items()]
            notes.append(f"These runs differ in {aspect}: {'; '.join(parts)}")
    return notes


def _data_notes(runs: Sequence[Run], labels: Sequence[str]) -> list[str]:
    """Describe the runs, and the seeds of a run, whose data have one name and differ."""
    notes = []
    groups: dict[str, dict[str, list[str]]] = {}
    for label, run in zip(labels, runs, strict=True):
        seeds: dict[str, list[str]] = {}
        for seed, checksum in run.data_checksums.items():
            seeds.setdefault(checksum, []).append(str(seed))
        if len(seeds) > 1:
            parts = [f"{data} (seed {', '.join(own)})" for data, own in seeds.items()]
            notes.append(
                f"The seeds of {label} have different data of one name, by their checksums:"
                f" {'; '.join(parts)}"
            )
        for checksum in seeds:
            name = _CONDITIONS["data"](run)
            groups.setdefault(name, {}).setdefault(checksum, []).append(label)
    for name, by_checksum in groups.items():
        parts = [f"{data} ({', '.join(own)})" for data, own in by_checksum.items()]
        if len({tuple(own) for own in by_checksum.values()}) > 1:
            notes.append(
                f"These runs differ in their data, though all are named {name}, by their"
                f" checksums: {'; '.join(parts)}"
            )
    return notes


def _has_same_data(run: Run, other: Run) -> bool:
    """Return whether no seed of two runs is known to have other data."""
    own = set(run.data_checksums.values())
    others = set(other.data_checksums.values())
    return not own or not others or own == others


def _describe_agents(run: Run) -> str:
    agents = run.config.get("agents", {})
    return ", ".join(f"{key} {agents[key]}" for key in _SHAPE_KEYS if key in agents)


def _describe_training_samples(run: Run) -> str:
    agents = run.config.get("agents", {})
    held_out = 0.0
    if agents.get("hold_out", True):
        held_out = agents.get("validation", 0.0)
    if held_out:
        return f"{1 - held_out:.0%} of an agent's samples, the rest only validates"
    return "all samples of an agent"


# Conditions of a comparison, and their description for a run.
_CONDITIONS: dict[str, Callable[[Run], str]] = {
    "data": lambda run: ", ".join(map(str, run.config.get("data", {}).values())),
    "test set": lambda run: str(run.config.get("evaluate_on", "test")),
    "rounds": lambda run: str(run.config.get("rounds")),
    "agents": _describe_agents,
    "training samples": _describe_training_samples,
    "seeds": lambda run: ", ".join(map(str, last_round(run.records).seed.unique())) or "none",
}


def incomplete_note(run: Run) -> str | None:
    """Describe the missing seeds and rounds of a run, without a full stop."""
    if run.complete:
        return None
    rounds = run.config.get("rounds", "?")
    states = [
        f"seed {row.seed} at round {row.round} of {rounds}" for row in run.summary().itertuples()
    ]
    state = f"read from {', '.join(states)}" if states else "no round was evaluated yet"
    wanted = len(run.config.get("seeds", run.seeds))
    return (
        f"{run.title} ({run.folder.name}) is incomplete: {len(run.seeds)} of {wanted} seeds begun, "
        f"{state}"
    )


def left_out_note(run: Run) -> str | None:
    """Count the agents that the means of a run leave out, if any, without a full stop."""
    notes = left_out(run.records, run.custom_metrics)
    return f"{run.title} ({run.folder.name}), {'; '.join(notes)}" if notes else None


def unverified_note(run: Run) -> str | None:
    """Name the seeds of a run without checksums, if any, without a full stop."""
    if not run.unchecked:
        return None
    seeds = ", ".join(map(str, run.unchecked))
    return (
        f"{run.title} ({run.folder.name}): the files of seed {seeds} are not verified, because "
        "there is no sums.json, which older versions did not write"
    )


def _is_counterpart(run: Run, other: Run) -> bool:
    """Return True if `other` is the clean counterpart of `run`."""
    roles = [each.config.get("agents", {}).get("malicious_role") for each in (run, other)]
    if roles != ["attack", "clean"] or _shared_settings(run) != _shared_settings(other):
        return False
    return _has_same_data(run, other)


def _is_local_baseline(run: Run, other: Run) -> bool:
    """Return True if `other` is the local baseline of `run`."""
    algorithms = [each.config.get("algorithm", {}).get("name") for each in (run, other)]
    if algorithms[0] == "local_training" or algorithms[1] != "local_training":
        return False
    return _trained_settings(run) == _trained_settings(other) and _has_same_data(run, other)


def _trained_settings(run: Run) -> dict[str, Any]:
    """Return the settings that a run shares with its local baseline."""
    excluded = (*NON_RESULT_SETTINGS, "algorithm")
    settings = {key: value for key, value in run.config.items() if key not in excluded}
    # The baseline trains without privacy, as it shares no model.
    training = run.config.get("training", {})
    settings["training"] = {key: value for key, value in training.items() if key != "privacy"}
    return settings


def _shared_settings(run: Run) -> dict[str, Any]:
    """Return the settings that a run shares with its clean counterpart."""
    settings = {key: value for key, value in run.config.items() if key not in NON_RESULT_SETTINGS}
    settings["agents"] = {
        key: value for key, value in run.config.get("agents", {}).items() if key != "malicious_role"
    }
    return settings
