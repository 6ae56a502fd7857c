"""Report of a grid: its matrices as files and one page."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import tomli_w
from matplotlib.figure import Figure

from fedcb2o.errors import RunError
from fedcb2o.records import STANDARD_METRICS, slug
from fedcb2o.report._attack_strengths import write_strengths
from fedcb2o.report._heat_map import draw_heat_map, shade_intensity
from fedcb2o.report._html import to_png
from fedcb2o.report._ineffective_attacks import ineffective_attack_notes
from fedcb2o.report._page import Page, create_page, flatten_to_text
from fedcb2o.report._regret import regrets
from fedcb2o.report._statistics import (
    CONFIDENCE,
    holm_correction,
    paired_differences,
    seed_statistics,
    worst_attack,
)
from fedcb2o.report.grid_results import BASELINES, KEY_COLUMNS, GridResults, metric_names
from fedcb2o.report.grid_tables import (
    COMPARED_METRICS,
    GRID_METRICS,
    WORST_COLUMN,
    SettingResults,
    compare_settings,
    defence_overview,
    describe_changes,
    difference_matrix,
    losses_against_baselines,
    metric_info,
    metric_matrix,
    regret_matrix,
    tuning_rows,
    tuning_table,
    worst_regret_differences,
    worst_regrets,
)

_DEFINITIONS = (
    "Rows are defences, columns are attacks. Numbers are in percent, over benign agents, after the "
    "last round: the mean over seeds with its interval. A defence has the same hyperparameters "
    "against all attacks.",
    "Every attacked run has two baselines, the same run without attack: in one its malicious "
    "agents train on true labels, in the other they are removed. The success rate of an attack is "
    "the share of source samples, or of samples of all other classes, that are classified as the "
    "target; for a backdoor, with its trigger. An attack without a target has no rate.",
    "The regret of a defence in a column is its distance to the best defence of the column among "
    "those with the most seeds. Its worst regret is the largest possible cost of this choice.",
    "The worst attack on a defence has the worst mean over seeds. Differences between defences are "
    "paired: with equal seeds agents hold equal samples. Intervals are Student's, of 95%, over "
    "seeds, where there are at least 3; the rotated images of one picture in several clusters are "
    "one value of a seed. Decimals are added if 0 is in an interval and rounding would hide that. "
    "An interval in a worst column takes that column as given.",
    "A dagger (†) marks cells in which a benign agent received more malicious models in a round "
    "than its rule assumes.",
)
_DRAWN_METRICS = (
    "accuracy",
    "attack_success_rate",
    "lost",
    "success",
    "source_accuracy",
    "malicious_weight",
)
_NON_SETTING_KEYS = ("tune", "seeds", "strengths")
_OVERVIEW_CAPTION = (
    "A defence with a missing or failed attack has neither a mean over attacks nor a worst attack."
)
_HEADLINE_CAPTION = (
    "The largest possible cost of each defence: its regret in its worst column, in percentage "
    "points; in accuracy, in the success of attacks, and in either."
)
_BASELINE_CAPTION = (
    "The largest loss of accuracy of a defence under an attack, and the largest success of an "
    "attack, against the better of its own two baselines. In a column in which even the best "
    "defence loses much, its regret is 0, and this loss is not."
)
_CORRECTION_CAPTION = (
    "Percentage points; an asterisk marks significant differences after Holm's correction over"
)
_REGRET_CAPTION = (
    "Percentage points behind the best defence of each column, paired by seeds. Deeper orange is "
    "worse."
)


def report_grid(results: GridResults, out: Path | str) -> list[Path]:
    """Write the matrices, the data and the page of a grid.

    `grid.toml` and `summary.csv` are among the files; from them the report can be made again.

    Args:
        results: Results of the grid.
        out: Folder for matrices (CSV, Markdown, LaTeX, PNG) and `report.html`.

    Returns:
        Paths of the files.

    Raises:
        RunError: No run has finished, or a file cannot be written.
    """
    if results.rows.accuracy.isna().all():
        raise RunError(
            f"no run in {results.folder} is done yet, so there is nothing to report: let it go on "
            "first"
        )
    page = create_page(Path(out))
    views = [SettingResults(results, setting) for setting in results.settings]
    for sentence in grid_notes(results):
        page.add_warning(f"{sentence}.")
    for text in _DEFINITIONS:
        page.add_text(text)

    for view in views:
        if view.setting:
            page.add_heading(view.setting, is_section=True)
        if view.rows.accuracy.notna().any():
            _write_setting(page, view)
    if len(views) > 1:
        _write_across(page, results, views)

    page.add_heading("How it was done", is_section=True)
    if "tuning" in results.table:
        _write_tuning(page, results)
    write_strengths(page, results)
    _write_definitions(page, results)
    _write_data(page, results, views)
    page.write_page("report.html", f"fedcb2o: {results.title}")
    return page.paths


def _write_data(page: Page, results: GridResults, views: Sequence[SettingResults]) -> None:
    """Write the data behind the matrices."""
    page.write_file("cells.csv", pd.concat(map(_long_table, views)).to_csv(index=False))
    page.write_file("statistics.csv", pd.concat(map(_statistics_table, views)).to_csv(index=False))
    page.write_file("summary.csv", results.summary_csv())
    page.write_file("grid.toml", tomli_w.dumps(results.table))
    if results.tuning:
        page.write_file("tuning.json", json.dumps(results.tuning, indent=1) + "\n")


def grid_notes(results: GridResults) -> Iterator[str]:
    """Describe missing runs, failed runs, and measurements on tuning data.

    Args:
        results: Results of the grid.

    Yields:
        Sentences without a full stop.
    """
    views = [SettingResults(results, setting).rows for setting in results.settings]
    attacked = pd.concat([rows[rows.role == "attack"] for rows in views])
    yield from _progress_notes(results, attacked)

    has_unknown_effect = attacked.accuracy.notna() & attacked.lost.isna() & (attacked.floor != "")
    count = int(has_unknown_effect.sum())
    if count:
        yield (
            f"The effect of the attack is unknown for {count} attacked runs, because the better "
            "baseline is missing"
        )
    failed = results.rows[results.rows.error != ""]
    for _, row in failed.drop_duplicates([*KEY_COLUMNS[:-1], "error"]).iterrows():
        attack = row.attack or BASELINES[row.role].lower()
        cell = ", ".join(filter(None, [row.setting, row.defence, attack]))
        yield f"{cell} failed: {row.error}"
    if results.table.get("evaluate_on") == "tuning":
        yield "All of this was measured on tuning data, not on the test set"


def _progress_notes(results: GridResults, attacked: pd.DataFrame) -> Iterator[str]:
    """Describe missing runs under attack, and defences with fewer seeds."""
    seeds = sum(len(results.defence_seeds(defence)) for defence in results.defences)
    wanted = len(results.settings) * len(results.attacks) * seeds
    finished = int(attacked.accuracy.notna().sum())
    if finished < wanted:
        rows = results.rows[results.rows.role == "attack"]
        failed = int((rows.error != "").sum())
        note = f"This report is partial: {finished} of {wanted} runs under attack are done"
        if failed:
            note += f", {failed} of the others failed"
        yield note

    fewer = []
    for name in results.defences:
        defence_seeds = results.defence_seeds(name)
        if defence_seeds != results.seeds:
            fewer.append(f"{name} {len(defence_seeds)}")
    if fewer:
        yield (
            f"Fewer than {len(results.seeds)} seeds were run with some defences: {', '.join(fewer)}"
        )


def _write_setting(page: Page, view: SettingResults) -> None:
    """Write all tables and figures of one setting."""
    start = "matrices/"
    if view.setting:
        start += f"{slug(view.setting)}/"
    compared = [value for value in COMPARED_METRICS if _has_values(view, value)]
    _write_headline(page, view, start)
    for value in compared:
        title = f"Regret: {metric_info(value).title.lower()}"
        name = f"{start}{_file_stem(value)}-regret"
        table = regret_matrix(view, value)
        _write_matrix(page, title, name, view, table, _regret_data(view, value), _REGRET_CAPTION)
    page.add_table("Overview", f"{start}overview", defence_overview(view), _OVERVIEW_CAPTION)
    for sentence in ineffective_attack_notes(view.rows, view.attacks):
        page.add_warning(f"{sentence}.")

    for value in _DRAWN_METRICS:
        if _has_values(view, value):
            metric = metric_info(value)
            name = f"{start}{_file_stem(value)}"
            caption = f"{metric.caption} Deeper orange is worse."
            table = metric_matrix(view, value)
            _write_matrix(page, metric.title, name, view, table, _metric_data(view, value), caption)
    for value in compared:
        name = f"{start}{_file_stem(value)}-difference"
        _write_difference(page, name, view, value)

    page.add_heading("More")
    for value in _remaining_metrics(view):
        page.add_table(
            metric_info(value).title,
            f"{start}{_file_stem(value)}",
            metric_matrix(view, value),
            _metric_caption(value),
            collapsed=True,
        )


def _write_headline(page: Page, view: SettingResults, start: str) -> None:
    """Write the worst regrets, and the tables folded below them."""
    reference = view.results.reference
    page.add_table("Worst regret", f"{start}regret", worst_regrets(view), _HEADLINE_CAPTION)
    losses = losses_against_baselines(view)
    if len(losses):
        title = "Worst effects against the baselines"
        page.add_table(title, f"{start}floors", losses, _BASELINE_CAPTION, collapsed=True)
    differences = worst_regret_differences(view)
    if len(differences):
        title = f"Worst regret: difference to {reference}"
        caption = f"Minus that of {reference}. {_CORRECTION_CAPTION} a column."
        page.add_table(title, f"{start}regret-difference", differences, caption, collapsed=True)


def _write_across(page: Page, results: GridResults, views: Sequence[SettingResults]) -> None:
    """Write the columns of the compared metrics in all settings."""
    page.add_heading("Across settings", is_section=True)
    for value in COMPARED_METRICS:
        columns: dict[str, None] = {}
        for view in views:
            if _has_values(view, value):
                columns |= dict.fromkeys(view.columns(value))
        metric = metric_info(value)
        for column in columns:
            page.add_table(
                f"{metric.title}: {column}",
                f"matrices/across/{_file_stem(value)}/{slug(column)}",
                compare_settings(results, value, column),
                metric.caption,
                collapsed=True,
            )


def _remaining_metrics(view: SettingResults) -> list[str]:
    """Return the metrics without a heat map."""
    cluster_metrics = [
        name for name in metric_names(view.rows) if "_cluster_" in name and name not in GRID_METRICS
    ]
    if len(cluster_metrics) <= len(STANDARD_METRICS):
        cluster_metrics = []
    names = [*GRID_METRICS, *cluster_metrics]
    names = [name for name in names if name not in _DRAWN_METRICS and _has_values(view, name)]
    return [name for name in names if view.has_worst_tenth or not name.endswith("_worst_tenth")]


@dataclass(frozen=True)
class _MatrixData:
    """The numbers of a matrix.

    Attributes:
        means: Means, defences by columns.
        half_widths: Half the widths of their intervals.
        shades: Distance to a good value; negative for a better one.
        worst_columns: Column of each defence for each worst column.
    """

    means: pd.DataFrame
    half_widths: pd.DataFrame
    shades: pd.DataFrame
    worst_columns: Mapping[str, Mapping[str, str]]


def _metric_data(view: SettingResults, value: str) -> _MatrixData:
    """Collect the numbers of a metric, shaded by distance to the best."""
    statistics = seed_statistics(view.rows, value)
    worst_columns = {}
    direction = metric_info(value).worse_direction
    if direction != "neither":
        worst_columns[WORST_COLUMN] = view.worst_attacks(statistics, value)
    columns = view.columns(value)
    means, half_widths = _means_and_half_widths(view, statistics, columns, worst_columns)
    shades = means.clip(lower=0.0)
    if direction == "low":
        shades = means.max().max() - means
    return _MatrixData(means, half_widths, shades, worst_columns)


def _regret_data(view: SettingResults, value: str) -> _MatrixData:
    """Collect the regrets in a metric, with the worst ones."""
    statistics = regrets(view.shortfalls(value))
    columns = view.columns(value)
    worst_columns = {}
    for title, excluded in view.worst_column_exclusions.items():
        names = [name for name in columns if name not in excluded]
        worst_columns[title] = worst_attack(statistics, names, highest=True)
    means, half_widths = _means_and_half_widths(view, statistics, columns, worst_columns)
    return _MatrixData(means, half_widths, means.clip(lower=0.0), worst_columns)


def _means_and_half_widths(
    view: SettingResults,
    statistics: pd.DataFrame,
    columns: Sequence[str],
    worst_columns: Mapping[str, Mapping[str, str]],
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Arrange means and half widths, and append the worst columns."""
    tables = []
    for values in (statistics["mean"], statistics.high - statistics["mean"]):
        table = view.pivot(values, columns)
        for title, worst in worst_columns.items():
            table[title] = [
                values.get((name, worst[name])) if name in worst else float("nan")
                for name in table.index
            ]
        tables.append(table)
    return tables[0], tables[1]


def _write_matrix(
    page: Page,
    title: str,
    name: str,
    view: SettingResults,
    table: pd.DataFrame,
    data: _MatrixData,
    caption: str,
) -> None:
    """Write a matrix as a coloured table and as a heat map."""
    page.add_table(title, name, table, caption, shades=shade_intensity(data.shades))
    page.write_file(f"{name}.png", to_png(_draw_matrix(view, data)))


def regret_figure(view: SettingResults, value: str) -> Figure:
    """Draw the regrets in a metric, with the worst ones.

    Args:
        view: Results in one setting.
        value: Name of the metric.

    Returns:
        The heat map of the report.
    """
    return _draw_matrix(view, _regret_data(view, value))


def _draw_matrix(view: SettingResults, data: _MatrixData) -> Figure:
    titles = view.worst_column_exclusions
    columns = [str(name) for name in data.means if name not in titles]
    failed = view.failed_cells(columns).reindex(columns=data.means.columns, fill_value=False)
    marked = view.exceeded_cells(columns).reindex(columns=data.means.columns, fill_value=False)
    for title, worst in data.worst_columns.items():
        marked[title] = [
            name in worst and bool(marked.at[name, worst[name]]) for name in marked.index
        ]
    return draw_heat_map(
        data.means,
        data.half_widths,
        data.shades,
        failed=failed,
        marked=marked,
        separated=[*BASELINES.values(), *titles],
    )


def _write_difference(page: Page, name: str, view: SettingResults, value: str) -> None:
    """Write the differences to the reference as table and heat map."""
    reference = view.results.reference
    statistics = paired_differences(view.rows, value, reference)
    if not len(statistics):
        return
    columns = view.columns(value)
    half = statistics.high - statistics["mean"]
    is_significant = holm_correction(statistics.p) < 1 - CONFIDENCE
    means, half_widths, significant = (
        view.pivot(values, columns).drop(index=reference)
        for values in (statistics["mean"], half, is_significant)
    )

    metric = metric_info(value)
    title = f"{metric.title}: difference to {reference}"
    caption = (
        f"Minus that of {reference}. {_CORRECTION_CAPTION} the table. Violet is better, orange "
        "worse."
    )
    colours = "PuOr_r"
    shades = means
    if metric.worse_direction == "low":
        colours = "PuOr"
        shades = -means
    table = difference_matrix(view, value)
    page.add_table(title, name, table, caption, shades=shade_intensity(shades))
    figure = draw_heat_map(
        means,
        half_widths,
        means,
        colours=colours,
        signed=True,
        bold=significant.eq(True),
        separated=[*BASELINES.values()],
    )
    page.write_file(f"{name}.png", to_png(figure))


def _write_tuning(page: Page, results: GridResults) -> None:
    """Write the candidates of each defence, and their scores."""
    caption = _tuning_caption(results)
    if results.tuning:
        page.add_table("Tuning", "matrices/tuning", tuning_table(results), caption)
        page.write_file("tuning.csv", tuning_rows(results).to_csv(index=False))
    else:
        page.add_heading("Tuning")
        page.add_text(f"{caption} Nothing is chosen yet.")


def _tuning_caption(results: GridResults) -> str:
    plan = results.table["tuning"]
    attacks = []
    for attack in plan["attacks"]:
        if not isinstance(attack, str):
            attack = attack.get("name") or describe_changes(attack)
        attacks.append(attack)
    seeds = ", ".join(map(str, plan["seeds"]))
    setting = ""
    if results.settings[0]:
        setting = f", in the setting {plan.get('setting', results.settings[0])}"
    caption = (
        f"On tuning images, with seeds {seeds}{setting}, against {', '.join(attacks)}. The score "
        "is accuracy minus attack success rate, in percent, mean over attacks and seeds. The "
        "choice holds for all attacks. Every tuned defence began with the same number of "
        f"candidates, and got at most {plan.get('widen', 0)} more while the best one was at an end."
    )
    untuned = [name for name in results.defences if "tune" not in results.table["defences"][name]]
    if untuned:
        caption += f" Not tuned: {', '.join(untuned)}."
    return caption


def _write_definitions(page: Page, results: GridResults) -> None:
    """Add the meaning of each name, and the shared settings."""
    for axis in ("settings", "defences", "attacks"):
        entries = results.table.get(axis)
        if not entries:
            continue
        changes = {}
        for name, entry in entries.items():
            settings = {key: item for key, item in entry.items() if key not in _NON_SETTING_KEYS}
            changes[name] = describe_changes(settings)
        table = pd.DataFrame({"What it changes": changes})
        page.add_heading(axis.capitalize())
        page.show_table(table.rename_axis(axis[:-1].capitalize()), axis.capitalize())

    lists = ("settings", "defences", "attacks", "tuning", "adversary", "set_aside")
    excluded = ("name", "title", "description", "reference", *lists)
    shared = {key: value for key, value in results.table.items() if key not in excluded}
    table = pd.DataFrame({"Value": flatten_to_text(shared)}).rename_axis("Key")
    page.show_table(table, "What all cells share", collapsed=True)


def _long_table(view: SettingResults) -> pd.DataFrame:
    """Build one row for each cell, seed and metric with a value."""
    keys = ["setting", "defence", "attack", "seed"]
    rows = view.rows.melt(keys, metric_names(view.rows), "metric", "value")
    return rows.dropna(subset="value")


def _statistics_table(view: SettingResults) -> pd.DataFrame:
    """Build statistics and differences to the reference, by cell and metric."""
    rows = _long_table(view)
    reference = view.results.reference
    differences = paired_differences(rows, "value", reference, "metric").add_prefix("difference_")
    table = seed_statistics(rows, "value", "metric").join(differences).reset_index()
    table = table.assign(reference=reference)
    table.insert(0, "setting", view.setting)
    return table


def _has_values(view: SettingResults, value: str) -> bool:
    return value in view.rows and bool(view.rows[value].notna().any())


def _file_stem(value: str) -> str:
    return value.replace("_", "-")


def _metric_caption(value: str) -> str:
    metric = metric_info(value)
    if metric.is_percent:
        return metric.caption
    return f"{metric.caption} Not in percent."
