"""Tables of a grid: one matrix per metric, and summaries."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from fedcb2o.report import _regret
from fedcb2o.report._grid_metrics import COMPARED_METRICS
from fedcb2o.report._page import flatten_to_text
from fedcb2o.report._statistics import (
    CONFIDENCE,
    add_attack_effects,
    attack_mean_statistics,
    format_interval,
    holm_correction,
    paired_differences,
    seed_statistics,
    worst_attack,
)
from fedcb2o.report.grid_results import BASELINES, GridResults

WORST_COLUMN = "Worst"
SIGNIFICANT_MARK = " *"
_EXCEEDED_MARK = " †"
_MAX_TERMINAL_ATTACKS = 4


@dataclass(frozen=True)
class SettingResults:
    """The results of a grid in one setting."""

    results: GridResults
    setting: str

    @cached_property
    def rows(self) -> pd.DataFrame:
        """The rows of the setting; see `add_attack_effects`."""
        return add_attack_effects(self.results, self.setting)

    @property
    def main(self) -> str:
        """The metric that effects of attacks are measured by."""
        return self.results.main

    @cached_property
    def compared(self) -> dict[str, str]:
        """The metrics with values in which defences are compared, the main one first."""
        names = dict.fromkeys((self.main, *COMPARED_METRICS, *self.results.chosen))
        measured = [name for name in names if name in self.rows and self.rows[name].notna().any()]
        return {
            name: COMPARED_METRICS.get(name, self.results.info(name).title) for name in measured
        }

    def is_high_worse(self, value: str) -> bool:
        """Return whether a high value of a metric is worse."""
        return self.results.info(value).worse_direction == "high"

    @property
    def attacks(self) -> list[str]:
        """The attacks in the order of the grid, without the baselines."""
        return self.results.attacks

    @cached_property
    def baselines(self) -> list[str]:
        """The columns without attack that have rows; they come before those of the attacks."""
        names = [name for name in BASELINES.values() if name not in self.attacks]
        return [name for name in names if (self.rows.attack == name).any()]

    def attacks_with(self, value: str) -> list[str]:
        """Return the attacks except finished ones without a value of a metric."""
        # An attack that is still running keeps its column.
        finished = set(self.rows.dropna(subset=self.main).attack)
        measured = set(self.rows.dropna(subset=value).attack)
        return [name for name in self.attacks if name in measured or name not in finished]

    def columns(self, value: str) -> list[str]:
        """Return the columns of a metric: baselines with values, then attacks."""
        measured = set(self.rows.dropna(subset=value).attack)
        baselines = [name for name in self.baselines if name in measured]
        return [*baselines, *self.attacks_with(value)]

    def pivot(self, values: "pd.Series[Any]", columns: Sequence[str]) -> pd.DataFrame:
        """Arrange values by defence and attack, in the grid's order."""
        table = pd.DataFrame()
        if len(values):
            table = values.unstack("attack")
        table = table.reindex(index=self.results.defences, columns=list(columns))
        return table.rename_axis("Defence")

    def worst_attacks(self, statistics: pd.DataFrame, value: str) -> dict[str, str]:
        """Find the worst attack on each defence by a metric."""
        return worst_attack(statistics, self.attacks_with(value), highest=self.is_high_worse(value))

    def shortfalls(self, value: str) -> pd.DataFrame:
        """Compute the regret of each run; see `regret.shortfalls`."""
        return _regret.shortfalls(self.rows, value, highest=self.is_high_worse(value))

    @cached_property
    def has_worst_tenth(self) -> bool:
        """True unless the worst tenth equals the worst agent in every run."""
        worst, tenth = (f"{self.main}{suffix}" for suffix in ("_worst", "_worst_tenth"))
        measured = self.rows.reindex(columns=[worst, tenth]).dropna()
        return not measured[tenth].equals(measured[worst].rename(tenth))

    def failed_cells(self, columns: Sequence[str]) -> pd.DataFrame:
        """Return True for each failed cell, defences by columns."""
        rows = self.rows[(self.rows.error != "") & self.rows[self.main].isna()]
        return self.pivot(rows.groupby(["defence", "attack"]).size(), columns).notna()

    def exceeded_cells(self, columns: Sequence[str]) -> pd.DataFrame:
        """Return True for cells with more malicious models than a rule assumes."""
        exceeded = self.rows.groupby(["defence", "attack"]).f_exceeded.max()
        return self.pivot(exceeded, columns).gt(0)

    @property
    def worst_column_exclusions(self) -> dict[str, list[str]]:
        """The worst columns: over all attacks, and without those that the grid sets aside."""
        excluded = [name for name in self.attacks if name in self.results.set_aside]
        if not excluded:
            return {WORST_COLUMN: []}
        name = f"{len(excluded)} set aside"
        if len(excluded) == 1:
            name = excluded[0]
        return {WORST_COLUMN: [], f"{WORST_COLUMN} but {name}": excluded}


def metric_matrix(view: SettingResults, value: str) -> pd.DataFrame:
    """Build the matrix of one metric, mean and interval, with the worst attack last."""
    statistics = seed_statistics(view.rows, value)
    columns = view.columns(value)
    table = _text_table(view, _format_rows(view, statistics, value), columns)
    table = _mark_exceeded(view, table, columns)
    if view.results.info(value).worse_direction != "neither":
        worst = view.worst_attacks(statistics, value)
        table[WORST_COLUMN] = [
            str(table.at[name, worst[name]]) if name in worst else "–" for name in table.index
        ]
    return table.rename_axis(columns=None)


def regret_matrix(view: SettingResults, value: str) -> pd.DataFrame:
    """Build the matrix of regrets in one metric ("best" for 0), with the worst columns."""
    short = view.shortfalls(value)
    columns = view.columns(value)
    texts = _format_rows(view, _regret.regrets(short), value)
    best = pd.MultiIndex.from_frame(short[["best", "attack"]].drop_duplicates())
    # The regret of the best is 0 by definition, which is no measurement.
    texts.update(pd.Series("best", index=best))
    table = _mark_exceeded(view, _text_table(view, texts, columns), columns)
    for title, excluded in view.worst_column_exclusions.items():
        worst = _regret.worst_regret(short, [name for name in columns if name not in excluded])
        table[title] = _format_with_column(view, worst, value).reindex(table.index).fillna("–")
    return table.rename_axis(columns=None)


def worst_regrets(view: SettingResults) -> pd.DataFrame:
    """Build the table of worst regrets in accuracy and attack success.

    A dagger marks a rule that received more malicious models than it assumes in that column.
    Intervals are paired.
    """
    columns = {}
    for title, (short, names, value) in regret_contests(view).items():
        columns[title] = _format_with_column(view, _regret.worst_regret(short, names), value)
    return _defence_table(view, columns)


def losses_against_baselines(view: SettingResults) -> pd.DataFrame:
    """Build the table of the largest loss of accuracy and net success of attacks."""
    columns = {}
    for value in ("lost", "success"):
        for title, excluded in view.worst_column_exclusions.items():
            attacks = [name for name in view.attacks_with(value) if name not in excluded]
            if attacks:
                name = f"{view.results.info(value).title}, {_lower_first(title)}"
                columns[name] = _worst_case(view, value, attacks)
    return _defence_table(view, columns)


def worst_regret_differences(view: SettingResults) -> pd.DataFrame:
    """Build the table of worst regrets minus the reference's, with Holm's correction."""
    reference = view.results.reference
    columns: dict[str, pd.Series[Any]] = {}
    for title, (short, names, value) in regret_contests(view).items():
        differences = _regret.worst_regret_differences(short, names, reference)
        columns[title] = _format_differences(view, differences, value)
    return _defence_table(view, columns).drop(index=reference, errors="ignore")


def regret_contests(view: SettingResults) -> dict[str, tuple[pd.DataFrame, list[str], str]]:
    """Collect the regrets, columns and metric behind each column of `worst_regrets`."""
    contests: dict[str, tuple[pd.DataFrame, list[str], str]] = {}
    metrics = {value: title for value, title in view.compared.items() if view.columns(value)}
    for title, excluded in view.worst_column_exclusions.items():
        worst = _lower_first(title)
        tables = []
        all_columns = []
        for value, metric in metrics.items():
            short = view.shortfalls(value)
            columns = [name for name in view.columns(value) if name not in excluded]
            words = metric.lower() if value in COMPARED_METRICS else metric
            contests[f"Regret in {words}, {worst}"] = short, columns, value
            # Metrics of other scales have no common regret.
            if value not in COMPARED_METRICS:
                continue
            suffix = f", {words}"
            tables.append(short.assign(attack=short.attack + suffix))
            all_columns += [f"{name}{suffix}" for name in columns]
        if len(tables) > 1:
            title = f"Regret in either, {worst}"
            contests[title] = pd.concat(tables), all_columns, "accuracy"
    return contests


def _lower_first(text: str) -> str:
    return text[0].lower() + text[1:]


def difference_matrix(view: SettingResults, value: str) -> pd.DataFrame:
    """Build the matrix of differences to the reference, paired by seeds, with Holm's correction."""
    reference = view.results.reference
    texts = _format_differences(view, paired_differences(view.rows, value, reference), value)
    table = view.pivot(texts, view.columns(value)).astype(object).fillna("–")
    return table.rename_axis(columns=None).drop(index=reference, errors="ignore")


def compare_settings(results: GridResults, value: str, column: str) -> pd.DataFrame:
    """Build the table of an attack or a baseline, by one metric: defences by settings."""
    columns = {}
    for setting in results.settings:
        view = SettingResults(results, setting)
        statistics = seed_statistics(view.rows[view.rows.attack == column], value)
        table = _text_table(view, _format_rows(view, statistics, value), [column])
        columns[setting] = _mark_exceeded(view, table, [column])[column]
    return pd.DataFrame(columns, index=pd.Index(results.defences, name="Defence"))


def terminal_tables(results: GridResults) -> dict[str, pd.DataFrame]:
    """Build a table for the terminal for each setting.

    Args:
        results: A grid, such as from `read_grid`.

    Returns:
        Text, one row per defence: accuracies without attack, under up to four attacks, and worst
        regrets, without intervals.
    """
    tables = {}
    for setting in results.settings:
        view = SettingResults(results, setting)
        regrets = worst_regrets(view)
        regrets = regrets[[name for name in regrets if "in either" not in str(name)]]
        regrets = regrets.rename(columns=_shorten_contest)
        columns = view.columns(view.main)
        if len(columns) > len(view.baselines) + _MAX_TERMINAL_ATTACKS:
            columns = view.baselines
        table = metric_matrix(view, view.main)[columns].join(regrets)
        tables[setting] = table.replace(r" [\[(][^\])]*[\])]", "", regex=True)
    return tables


def _shorten_contest(title: str) -> str:
    """Shorten the title of a worst regret for a terminal."""
    title = title.replace("Regret in ", "Regret: ").replace("attack success", "success")
    return title.replace(", worst", "").replace(" but ", ", but ")


def defence_overview(view: SettingResults) -> pd.DataFrame:
    """Build the overview of defences: scores without attack and under the worst; costs."""
    texts = _format_rows(view, seed_statistics(view.rows, view.main), view.main)
    columns = {name: texts.xs(name, level="attack") for name in view.baselines}
    for value, title in view.compared.items():
        attacks = view.attacks_with(value)
        columns[f"{title}, mean over attacks"] = _mean_over_attacks(view, value)
        columns[f"{title}, worst attack"] = _worst_case(view, value, attacks)
        if view.has_worst_tenth:
            name = f"{title}, worst attack, worst tenth of the agents"
            columns[name] = _worst_case(view, f"{value}_worst_tenth", attacks)
    columns["Weight of malicious models"] = _mean_over_attacks(view, "malicious_weight")
    columns["Seconds a round"] = _mean_over_attacks(view, "seconds")
    columns["Megabytes a round"] = _mean_over_attacks(view, "megabytes")
    return _defence_table(view, columns)


def tuning_table(results: GridResults) -> pd.DataFrame:
    """Build the table of tuning candidates: changes, score, and the choice."""
    rows = []
    for defence, choice in results.tuning.items():
        candidates = zip(choice["asked"]["candidates"], choice["scores"], strict=True)
        for i, (changes, score) in enumerate(candidates):
            chosen = "yes" + ", at an end" * choice["at_end"] if i == choice["best"] else ""
            text = f"{100 * score:.2f}" if score is not None else "failed"
            rows.append((defence, describe_changes(changes), text, chosen))
    columns = ["Defence", "Candidate", "Score", "Chosen"]
    return pd.DataFrame(rows, columns=columns).set_index("Defence")


def tuning_rows(results: GridResults) -> pd.DataFrame:
    """Build the table of all tuning scores, by defence, candidate, attack and seed."""
    rows = []
    for defence, choice in results.tuning.items():
        asked = choice["asked"]
        for changes, scores in zip(asked["candidates"], choice["by_attack"], strict=True):
            for attack, values in (scores or {}).items():
                for seed, score in zip(asked["seeds"], values, strict=True):
                    rows.append((defence, describe_changes(changes), attack, seed, score))
    return pd.DataFrame(rows, columns=["defence", "candidate", "attack", "seed", "score"])


def describe_changes(changes: object) -> str:
    """Describe changes of an experiment on one line: 'agents.budget = 4'."""
    assert isinstance(changes, dict)
    texts = [f"{key} = {value}" for key, value in flatten_to_text(changes).items()]
    return ", ".join(texts) or "unchanged"


def _text_table(
    view: SettingResults, texts: "pd.Series[Any]", columns: Sequence[str]
) -> pd.DataFrame:
    """Arrange texts as a table, with "failed" in failed cells."""
    table = view.pivot(texts, columns).astype(object)
    return table.where(table.notna() | ~view.failed_cells(columns), "failed").fillna("–")


def _mark_exceeded(
    view: SettingResults, table: pd.DataFrame, columns: Sequence[str]
) -> pd.DataFrame:
    """Mark cells with more malicious models than a rule assumes."""
    return table.where(~view.exceeded_cells(columns), table + _EXCEEDED_MARK)


def _format_rows(
    view: SettingResults, statistics: pd.DataFrame, value: str, sign: str = ""
) -> "pd.Series[Any]":
    """Format the mean and interval of each row."""
    scale = 1
    digits = 3
    if view.results.info(value).is_percent:
        scale = 100
        digits = 1
    numbers = (scale * statistics[["mean", "low", "high"]]).to_numpy(float)
    texts = [format_interval(mean, low, high, digits, sign) for mean, low, high in numbers]
    return pd.Series(texts, index=statistics.index, dtype=object)


def _format_differences(
    view: SettingResults, statistics: pd.DataFrame, value: str
) -> "pd.Series[Any]":
    """Format differences; mark those that are significant after Holm's correction."""
    is_significant = holm_correction(statistics.p) < 1 - CONFIDENCE
    marks = is_significant.map({True: SIGNIFICANT_MARK, False: ""})
    return _format_rows(view, statistics, value, sign="+") + marks


def _format_with_column(
    view: SettingResults, statistics: pd.DataFrame, value: str
) -> "pd.Series[Any]":
    """Format statistics with the name of their column, and mark them."""
    exceeded = view.exceeded_cells([*view.baselines, *view.attacks])
    numbers = _format_rows(view, statistics, value)
    texts: pd.Series[Any] = numbers + " (" + statistics.attack + ")"
    marks = []
    for defence, attack in zip(statistics.index, statistics.attack, strict=True):
        # A column of both metrics has a name such as "Label flip, accuracy".
        column = attack.rpartition(", ")[0] if attack not in exceeded else attack
        marks.append(_EXCEEDED_MARK * bool(exceeded.at[defence, column]))
    return texts + pd.Series(marks, statistics.index, dtype=object)


def _worst_case(view: SettingResults, value: str, attacks: Sequence[str]) -> "pd.Series[Any]":
    """Format a metric under its worst attack for each defence."""
    statistics = seed_statistics(view.rows, value)
    worst = worst_attack(statistics, attacks, highest=view.is_high_worse(value))
    rows = statistics.loc[list(worst.items())].reset_index("attack")
    return pd.Series(dtype=object) if rows.empty else _format_with_column(view, rows, value)


def _mean_over_attacks(view: SettingResults, value: str) -> "pd.Series[Any]":
    means = attack_mean_statistics(view.rows, value, view.attacks_with(value))
    return _format_rows(view, means, value)


def _defence_table(view: SettingResults, columns: dict[str, "pd.Series[Any]"]) -> pd.DataFrame:
    defences = view.results.defences
    table = pd.DataFrame({name: texts.reindex(defences) for name, texts in columns.items()})
    return table.fillna("–").rename_axis("Defence")
