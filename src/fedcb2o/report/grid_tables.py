"""What a grid's report shows, as tables of text: a matrix for each measure, and what they come to for each defence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import pandas as pd

from fedcb2o.report import regret
from fedcb2o.report.grid_results import BASELINES, GridResults
from fedcb2o.report.page import flatten_to_text
from fedcb2o.report.statistics import (
    CONFIDENCE,
    add_attack_effects,
    attack_mean_statistics,
    format_interval,
    holm_correction,
    paired_differences,
    seed_statistics,
    worst_attack,
)

WORST_COLUMN = "Worst"
SIGNIFICANT_MARK = " *"
_EXCEEDED_MARK = " †"
COMPARED_METRICS = {"accuracy": "Accuracy", "attack_success_rate": "Attack success"}
"""What defences are compared in."""


@dataclass(frozen=True)
class GridMetric:
    """What a matrix is of: its heading, what it says of each cell, and which of its values is the worse."""

    title: str
    caption: str
    worse_direction: Literal["low", "high", "neither"] = "neither"
    is_percent: bool = True


_LATE_ROUNDS = "over the last fifth of the rounds"
GRID_METRICS = {
    "accuracy": GridMetric(
        "Overall accuracy", "The share of all test samples that benign agents get right.", "low"
    ),
    "attack_success_rate": GridMetric(
        "Attack success rate",
        "The share of the samples it is after that are taken for the target.",
        "high",
    ),
    "lost": GridMetric("Accuracy lost", "What the better of the two floors has beyond it.", "high"),
    "success": GridMetric(
        "Attack success, net", "The rate less that of the better of the two floors.", "high"
    ),
    "source_accuracy": GridMetric(
        "Source class accuracy",
        "The share of source-class samples that are taken for what they are.",
        "low",
    ),
    "malicious_weight": GridMetric(
        "Weight of malicious models",
        f"What benign agents give to malicious agents' models in their averages, {_LATE_ROUNDS}. Some rules give none.",
        "high",
    ),
    "accuracy_worst": GridMetric(
        "Overall accuracy, worst agent", "Of the benign agent with the lowest.", "low"
    ),
    "accuracy_worst_tenth": GridMetric(
        "Overall accuracy, worst tenth",
        "Mean of the tenth of the benign agents with the lowest.",
        "low",
    ),
    "attack_success_rate_worst": GridMetric(
        "Attack success rate, worst agent",
        "The rate itself, of the benign agent with the highest.",
        "high",
    ),
    "attack_success_rate_worst_tenth": GridMetric(
        "Attack success rate, worst tenth",
        "The rate itself, mean of the tenth of the agents with the highest.",
        "high",
    ),
    "malicious_received": GridMetric(
        "Malicious models among those received",
        f"Their share of what benign agents receive, {_LATE_ROUNDS}.",
        "high",
    ),
    "malicious_most": GridMetric(
        "Most malicious models in a round",
        "The largest number of them that a benign agent received in any round.",
        is_percent=False,
    ),
    "f_exceeded": GridMetric(
        "More malicious models than assumed",
        "How often a benign agent received more of them than its rule assumes, over all rounds. Rules that assume no "
        "number have none.",
        "high",
    ),
    "other_cluster_weight": GridMetric(
        "Weight of other clusters' models",
        f"What benign agents give to them in their averages, {_LATE_ROUNDS}.",
    ),
    "other_cluster_received": GridMetric(
        "Other clusters' models among those received",
        f"Their share of what benign agents receive, {_LATE_ROUNDS}.",
    ),
    "own_weight": GridMetric(
        "Weight of the own model", f"What benign agents give to their own models, {_LATE_ROUNDS}."
    ),
    "seconds": GridMetric(
        "Seconds a round",
        "Of one process, without evaluation and checkpoints, on the machine that ran it and as busy as it was.",
        is_percent=False,
    ),
    "megabytes": GridMetric(
        "Megabytes a round",
        "What a benign agent downloads: received models times 4 bytes for each parameter, in millions.",
        is_percent=False,
    ),
}


@dataclass(frozen=True)
class SettingResults:
    """The results of a grid in one setting."""

    results: GridResults
    setting: str

    @cached_property
    def rows(self) -> pd.DataFrame:
        """The rows of the setting, see `scored`."""
        return add_attack_effects(self.results, self.setting)

    @property
    def attacks(self) -> list[str]:
        """The attacks in the grid's order."""
        return self.results.attacks

    @cached_property
    def baselines(self) -> list[str]:
        """The columns without attack that there are, before those of the attacks."""
        return [
            name
            for name in BASELINES.values()
            if name not in self.attacks and (self.rows.attack == name).any()
        ]

    def attacks_with(self, value: str) -> list[str]:
        """The attacks under which a measure may have a value: without those that are done and have none."""
        done, have = (set(self.rows.dropna(subset=name).attack) for name in ("accuracy", value))
        return [name for name in self.attacks if name in have or name not in done]

    def columns(self, value: str) -> list[str]:
        """The columns of a measure: the floors where it has values there, then its attacks."""
        have = set(self.rows.dropna(subset=value).attack)
        return [*(name for name in self.baselines if name in have), *self.attacks_with(value)]

    def pivot(self, found: "pd.Series[Any]", columns: Sequence[str]) -> pd.DataFrame:
        """What is found by (defence, attack), as a table in the grid's order."""
        table = found.unstack("attack") if len(found) else pd.DataFrame()
        return table.reindex(index=self.results.defences, columns=list(columns)).rename_axis(
            "Defence"
        )

    def worst_attacks(self, found: pd.DataFrame, value: str) -> dict[str, str]:
        """The attack that each defence does worst against, of the statistics of a measure."""
        return worst_attack(
            found, self.attacks_with(value), highest=metric_info(value).worse_direction == "high"
        )

    def shortfalls(self, value: str) -> pd.DataFrame:
        """How far each run is behind the best defence of its column, see `regret.shortfalls`."""
        return regret.shortfalls(
            self.rows, value, highest=metric_info(value).worse_direction == "high"
        )

    @cached_property
    def has_worst_tenth(self) -> bool:
        """Whether the worst tenth of the agents is more than the worst one."""
        known = self.rows.dropna(subset="accuracy_worst_tenth")
        return not known.accuracy_worst_tenth.equals(known.accuracy_worst)

    def failed_cells(self, columns: Sequence[str]) -> pd.DataFrame:
        """Which cells failed, defences by columns."""
        rows = self.rows[(self.rows.error != "") & self.rows.accuracy.isna()]
        return self.pivot(rows.groupby(["defence", "attack"]).size(), columns).notna()

    def exceeded_cells(self, columns: Sequence[str]) -> pd.DataFrame:
        """Where benign agents received more malicious models than their rule assumes, defences by columns."""
        most = self.rows.groupby(["defence", "attack"]).f_exceeded.max()
        return self.pivot(most, columns).gt(0)

    @property
    def worst_column_exclusions(self) -> dict[str, list[str]]:
        """In which columns the worst is looked for: in all, and without those that the grid sets aside."""
        aside = [name for name in self.attacks if name in self.results.set_aside]
        told = aside[0] if len(aside) == 1 else f"{len(aside)} set aside"
        return {WORST_COLUMN: [], **({f"{WORST_COLUMN} but {told}": aside} if aside else {})}


def metric_info(value: str) -> GridMetric:
    """What a column of the results is, one of a single cluster among them."""
    name, _, cluster = value.partition("_cluster_")
    if not cluster.isdecimal():
        return GRID_METRICS[value]
    whole = GRID_METRICS[name]
    return GridMetric(
        f"{whole.title}, cluster {cluster}",
        f"The same of cluster {cluster}.",
        whole.worse_direction,
    )


def metric_matrix(view: SettingResults, value: str) -> pd.DataFrame:
    """One measure: a row a defence, a column an attack, last its worst case; mean and 95% interval over seeds."""
    found = seed_statistics(view.rows, value)
    columns = view.columns(value)
    texts = _format_rows(found, value, format_interval)
    table = _mark_exceeded(view, _text_table(view, texts, columns), columns)
    if metric_info(value).worse_direction != "neither":
        at = view.worst_attacks(found, value)
        table[WORST_COLUMN] = [
            str(table.at[name, at[name]]) if name in at else "–" for name in table.index
        ]
    return table.rename_axis(columns=None)


def regret_matrix(view: SettingResults, value: str) -> pd.DataFrame:
    """By how much each defence falls short of the best in each column, and in its worst ones; "best" where it is it."""
    short = view.shortfalls(value)
    columns = view.columns(value)
    texts = _format_rows(regret.regrets(short), value, format_interval)
    texts.update(
        pd.Series(
            "best", index=pd.MultiIndex.from_frame(short[["best", "attack"]].drop_duplicates())
        )
    )
    table = _mark_exceeded(view, _text_table(view, texts, columns), columns)
    for title, aside in view.worst_column_exclusions.items():
        found = regret.worst_regret(short, [name for name in columns if name not in aside])
        table[title] = _format_with_column(view, found).reindex(table.index).fillna("–")
    return table.rename_axis(columns=None)


def worst_regrets(view: SettingResults) -> pd.DataFrame:
    """A row a defence: its worst regret in accuracy, in attack success rate and in whichever of both is worse, and the
    same without what the grid sets aside; with paired intervals, and a mark where a rule received more malicious models
    than it assumes in that column."""
    found = {
        title: regret.worst_regret(short, among)
        for title, (short, among) in regret_contests(view).items()
    }
    return _defence_table(
        view, {title: _format_with_column(view, each) for title, each in found.items()}
    )


def losses_against_baselines(view: SettingResults) -> pd.DataFrame:
    """A row a defence: the most that an attack takes from it, and the most that one achieves, against the better of its
    own two floors; and the same without what the grid sets aside."""
    columns = {}
    for value in ("lost", "success"):
        for each, aside in view.worst_column_exclusions.items():
            among = [name for name in view.attacks_with(value) if name not in aside]
            if among:
                columns[f"{metric_info(value).title}, {each[0].lower()}{each[1:]}"] = _worst_case(
                    view, value, among
                )
    return _defence_table(view, columns)


def worst_regret_differences(view: SettingResults) -> pd.DataFrame:
    """The same less those of the reference, paired by seeds, and an asterisk where they are not 0 after Holm's
    correction over a column."""
    reference = view.results.reference
    columns = dict[str, "pd.Series[Any]"]()
    for title, (short, among) in regret_contests(view).items():
        columns[title] = _format_differences(
            regret.worst_regret_differences(short, among, reference), "accuracy"
        )
    return _defence_table(view, columns).drop(index=reference, errors="ignore")


def regret_contests(view: SettingResults) -> dict[str, tuple[pd.DataFrame, list[str]]]:
    """How far each run is behind the best of its column, and in which columns the worst is looked for."""
    found: dict[str, tuple[pd.DataFrame, list[str]]] = {}
    rivals = {value: title for value, title in COMPARED_METRICS.items() if view.columns(value)}
    for each, aside in view.worst_column_exclusions.items():
        worst_of = each[0].lower() + each[1:]
        shorts = {}
        columns = {}
        for value, title in rivals.items():
            among = [name for name in view.columns(value) if name not in aside]
            shorts[value], columns[value] = view.shortfalls(value), among
            found[f"{title}, {worst_of}"] = shorts[value], among
        both = [
            short.assign(attack=short.attack + f", {COMPARED_METRICS[value].lower()}")
            for value, short in shorts.items()
        ]
        among = [
            f"{name}, {COMPARED_METRICS[value].lower()}"
            for value, names in columns.items()
            for name in names
        ]
        if len(rivals) > 1:
            found[f"Either, {worst_of}"] = pd.concat(both), among
    return found


def difference_matrix(view: SettingResults, value: str) -> pd.DataFrame:
    """The differences to the reference, paired by seeds, with their 95% intervals, and an asterisk where they are not 0
    after Holm's correction over the table."""
    texts = _format_differences(paired_differences(view.rows, value, view.results.reference), value)
    table = (
        view.pivot(texts, view.columns(value)).astype(object).fillna("–").rename_axis(columns=None)
    )
    return table.drop(index=view.results.reference, errors="ignore")


def compare_settings(results: GridResults, value: str, column: str) -> pd.DataFrame:
    """One column of a measure in all settings: a row a defence, a column a setting."""
    columns = {}
    for setting in results.settings:
        view = SettingResults(results, setting)
        found = seed_statistics(view.rows[view.rows.attack == column], value)
        texts = _format_rows(found, value, format_interval)
        columns[setting] = _mark_exceeded(view, _text_table(view, texts, [column]), [column])[
            column
        ]
    return pd.DataFrame(columns, index=pd.Index(results.defences, name="Defence"))


def terminal_tables(results: GridResults) -> dict[str, pd.DataFrame]:
    """For each setting what fits on a terminal: accuracies without attack, and the worst regrets, without intervals."""
    found = {}
    for setting in results.settings:
        view = SettingResults(results, setting)
        told = worst_regrets(view)
        told = told[[name for name in told if not str(name).startswith("Either")]]
        found[setting] = (
            defence_overview(view)[view.baselines].join(told).replace(r" [\[(].*", "", regex=True)
        )
    return found


def defence_overview(view: SettingResults) -> pd.DataFrame:
    """A row a defence: accuracy without attack, in the mean over attacks, at the worst and of the worst tenth of the
    agents; success rates in the same way; what malicious models weigh, and what a round takes."""
    found = seed_statistics(view.rows, "accuracy")
    texts = _format_rows(found, "accuracy", format_interval)
    columns = {name: texts.xs(name, level="attack") for name in view.baselines}
    for value, title in COMPARED_METRICS.items():
        columns[f"{title}, mean over attacks"] = _mean_over_attacks(view, value)
        columns[f"{title}, worst attack"] = _worst_case(view, value, view.attacks_with(value))
        if view.has_worst_tenth:
            columns[f"{title}, worst attack, worst tenth of the agents"] = _worst_case(
                view, f"{value}_worst_tenth", view.attacks_with(value)
            )
    columns["Weight of malicious models"] = _mean_over_attacks(view, "malicious_weight")
    columns["Seconds a round"] = _mean_over_attacks(view, "seconds")
    columns["Megabytes a round"] = _mean_over_attacks(view, "megabytes")
    return _defence_table(view, columns)


def tuning_table(results: GridResults) -> pd.DataFrame:
    """A row a candidate: what it changes, its score, and whether it was chosen, and at an end of what was tried."""
    rows = [
        (
            defence,
            describe_changes(changes),
            "failed" if score is None else f"{100 * score:.2f}",
            ("yes" + ", at an end" * found["at_end"]) * (i == found["best"]),
        )
        for defence, found in results.tuning.items()
        for i, (changes, score) in enumerate(
            zip(found["asked"]["candidates"], found["scores"], strict=True)
        )
    ]
    return pd.DataFrame(rows, columns=["Defence", "Candidate", "Score", "Chosen"]).set_index(
        "Defence"
    )


def tuning_rows(results: GridResults) -> pd.DataFrame:
    """A row for each defence, candidate, attack and seed that it was tuned with: the score."""
    rows = [
        (defence, describe_changes(changes), attack, seed, score)
        for defence, found in results.tuning.items()
        for changes, scores in zip(found["asked"]["candidates"], found["by_attack"], strict=True)
        for attack, values in (scores or {}).items()
        for seed, score in zip(found["asked"]["seeds"], values, strict=True)
    ]
    return pd.DataFrame(rows, columns=["defence", "candidate", "attack", "seed", "score"])


def describe_changes(changes: object) -> str:
    """Changes over an experiment on one line: "algorithm.alpha = 2, agents.budget = 4"."""
    assert isinstance(changes, dict)
    return (
        ", ".join(f"{key} = {value}" for key, value in flatten_to_text(changes).items())
        or "unchanged"
    )


def _text_table(
    view: SettingResults, texts: "pd.Series[Any]", columns: Sequence[str]
) -> pd.DataFrame:
    """Texts by (defence, attack) as a table; what failed says so."""
    table = view.pivot(texts, columns).astype(object)
    return table.where(table.notna() | ~view.failed_cells(columns), "failed").fillna("–")


def _mark_exceeded(
    view: SettingResults, table: pd.DataFrame, columns: Sequence[str]
) -> pd.DataFrame:
    """The table with a mark where rules received more malicious models than they assume."""
    return table.where(~view.exceeded_cells(columns), table + _EXCEEDED_MARK)


def _format_rows(found: pd.DataFrame, value: str, told: Callable[..., str]) -> "pd.Series[Any]":
    """Statistics as text, a row each."""
    scale, digits = (100, 1) if metric_info(value).is_percent else (1, 3)
    rows = (scale * found[["mean", "low", "high"]]).to_numpy(float)
    return pd.Series([told(*row, digits) for row in rows], index=found.index, dtype=object)


def _format_differences(found: pd.DataFrame, value: str) -> "pd.Series[Any]":
    """Differences as text, with a mark at those that are not 0 after a correction for how many they are."""
    sure = holm_correction(found.p) < 1 - CONFIDENCE
    return _format_rows(found, value, partial(format_interval, sign="+")) + sure.map(
        {True: SIGNIFICANT_MARK, False: ""}
    )


def _format_with_column(view: SettingResults, found: pd.DataFrame) -> "pd.Series[Any]":
    """Statistics of defences as text, each with the column that it is of, and a mark where a rule received more
    malicious models there than it assumes."""
    exceeded = view.exceeded_cells([*view.baselines, *view.attacks])
    texts: pd.Series[Any] = (
        _format_rows(found, "accuracy", format_interval) + " (" + found.attack + ")"
    )
    columns = [
        at if at in exceeded else at.rpartition(", ")[0] for at in found.attack
    ]  # "Label flip, accuracy"
    noted = [
        bool(exceeded.at[name, column]) for name, column in zip(found.index, columns, strict=True)
    ]
    return texts + pd.Series(noted, found.index).map({True: _EXCEEDED_MARK, False: ""})


def _worst_case(view: SettingResults, value: str, attacks: Sequence[str]) -> "pd.Series[Any]":
    """A measure under that of some attacks which is worst in it, and which this is."""
    found = seed_statistics(view.rows, value)
    at = worst_attack(found, attacks, highest=metric_info(value).worse_direction == "high")
    rows = found.loc[list(at.items())].reset_index("attack")
    return _format_with_column(view, rows) if len(rows) else pd.Series(dtype=object)


def _mean_over_attacks(view: SettingResults, value: str) -> "pd.Series[Any]":
    return _format_rows(
        attack_mean_statistics(view.rows, value, view.attacks_with(value)), value, format_interval
    )


def _defence_table(view: SettingResults, columns: dict[str, "pd.Series[Any]"]) -> pd.DataFrame:
    table = pd.DataFrame(
        {name: texts.reindex(view.results.defences) for name, texts in columns.items()}
    )
    return table.fillna("–").rename_axis("Defence")
