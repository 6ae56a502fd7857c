"""Report of grids: matrices as files, and one page, the results explorer."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import tomli_w
from matplotlib.figure import Figure

from fedcb2o.errors import RunError
from fedcb2o.python_words import python_words
from fedcb2o.records import STANDARD_METRICS, flatten, read_json_with_checksum, slug
from fedcb2o.report._article import ArticleForm, missing_curves_note, write_article
from fedcb2o.report._explorer import explorer_page
from fedcb2o.report._grid_metrics import GRID_METRICS, chosen_infos
from fedcb2o.report._heat_map import draw_heat_map
from fedcb2o.report._ineffective_attacks import ineffective_attack_notes
from fedcb2o.report._page import Page, create_page
from fedcb2o.report._regret import regrets
from fedcb2o.report._statistics import paired_differences, seed_statistics, worst_attack
from fedcb2o.report._worst_attack import write_worst_attack_maps
from fedcb2o.report.grid_results import BASELINES, KEY_COLUMNS, GridResults, metric_names
from fedcb2o.report.grid_tables import (
    SettingResults,
    compare_settings,
    defence_overview,
    describe_changes,
    difference_matrix,
    losses_against_baselines,
    metric_matrix,
    regret_matrix,
    tuning_rows,
    tuning_table,
    worst_regret_differences,
    worst_regrets,
)

_LOGGER = logging.getLogger(__name__)

# Settings that decide which samples train, validate and test.
_CONDITIONS = (
    *(f"agents.{key}" for key in ("hold_out", "validation", "benign_samples", "malicious_samples")),
    "evaluate_on",
    "rounds",
)


@python_words()
def report_grid(
    results: GridResults | Sequence[GridResults], out: Path | str, form: ArticleForm | None = None
) -> list[Path]:
    """Write the matrices, the data and the page of one or several grids.

    `grid.toml` and `summary.csv` are among the files; from them the report can be made again.
    The files of several grids are in one folder per grid.

    Args:
        results: Results of a grid, or of several grids for one page.
        out: Folder for matrices (CSV, Markdown, LaTeX), figures (PNG, PDF), `report.html`, and
            `article`, the compared metrics as LaTeX tables, heat maps and curves over the rounds.
        form: Form of what is in `article`; by default means and standard deviations, in percent
            with one decimal, under attack only.

    Returns:
        Paths of the files.

    Raises:
        RunError: No run of a grid has finished, or a file cannot be written.
    """
    grids = [results] if isinstance(results, GridResults) else list(results)
    for grid in grids:
        if grid.rows[grid.main].isna().all():
            raise RunError(
                f"no run in {grid.folder} is done yet, so there is nothing to report: let it go "
                "on first"
            )
    page = create_page(Path(out))
    warnings = [f"{note}." for note in _grid_condition_notes(grids)]
    for grid in grids:
        views = [SettingResults(grid, setting) for setting in grid.settings]
        measured = [view for view in views if view.rows[view.main].notna().any()]
        start = f"{slug(grid.title)}/" if len(grids) > 1 else ""
        _write_files(page, grid, measured, start)
        for view in measured:
            write_article(page, view, start, form or ArticleForm())
        if note := missing_curves_note(grid):
            _LOGGER.info("%s%s.", _name_grid(grid, grids), note)
        notes = [*grid_notes(grid), *_ineffective_notes(measured)]
        warnings += [f"{_name_grid(grid, grids)}{note}." for note in notes]
    title = grids[0].title if len(grids) == 1 else f"{len(grids)} grids"
    page.write_file("report.html", explorer_page(grids, title, warnings=warnings))
    return page.paths


def _name_grid(grid: GridResults, grids: Sequence[GridResults]) -> str:
    return f"{grid.title}: " if len(grids) > 1 else ""


def _ineffective_notes(views: Sequence[SettingResults]) -> Iterator[str]:
    for view in views:
        for note in ineffective_attack_notes(view.rows, view.attacks):
            yield f"{view.setting}: {note}" if view.setting else note


def _write_files(
    page: Page, results: GridResults, views: Sequence[SettingResults], start: str
) -> None:
    """Write the matrices of a grid and the data behind them."""
    for view in views:
        _write_setting(page, view, start)
    if len(views) > 1:
        _write_across(page, results, views, start)
    if results.tuning:
        page.write_table(f"{start}matrices/tuning", tuning_table(results))
        page.write_file(f"{start}tuning.csv", tuning_rows(results).to_csv(index=False))
        page.write_file(f"{start}tuning.json", json.dumps(results.tuning, indent=1) + "\n")
    strengths = results.folder / "strengths.json"
    if strengths.is_file():
        choices = read_json_with_checksum(strengths)
        page.write_file(f"{start}strengths.json", json.dumps(choices, indent=1) + "\n")
    write_worst_attack_maps(page, results, start)
    page.write_file(f"{start}cells.csv", pd.concat(map(_long_table, views)).to_csv(index=False))
    statistics = pd.concat(map(_statistics_table, views))
    page.write_file(f"{start}statistics.csv", statistics.to_csv(index=False))
    page.write_file(f"{start}summary.csv", results.summary_csv())
    page.write_file(f"{start}grid.toml", tomli_w.dumps(results.table))


def grid_notes(results: GridResults) -> Iterator[str]:
    """Describe missing and failed runs, and tuning data, in sentences without a full stop."""
    views = [SettingResults(results, setting).rows for setting in results.settings]
    attacked = pd.concat([rows[rows.role == "attack"] for rows in views])
    yield from _progress_notes(results, attacked)

    measured = attacked[attacked[results.main].notna()]
    count = int((measured.lost.isna() & (measured.floor != "")).sum())
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
    yield from _condition_notes(results)
    if results.table.get("evaluate_on") == "tuning":
        yield "All of this was measured on tuning data, not on the test set"


def _condition_notes(results: GridResults) -> Iterator[str]:
    """Name the defences and attacks that train or are evaluated on other samples than the rest."""
    shared = flatten(results.table)
    for kind in ("defences", "attacks"):
        entries = [(name, flatten(entry)) for name, entry in results.table[kind].items()]
        yield from _describe_conditions(kind, entries, shared, "as the grid")


def _grid_condition_notes(grids: Sequence[GridResults]) -> Iterator[str]:
    """Name the grids of one page that train or are evaluated on other samples than the rest."""
    entries = [(grid.title, flatten(grid.table)) for grid in grids]
    first = entries[0][1]
    shared = {
        key: value
        for key, value in first.items()
        if all(key in entry and entry[key] == value for _, entry in entries)
    }
    yield from _describe_conditions("grids", entries, shared, "defaults")


def _describe_conditions(
    kind: str,
    entries: Sequence[tuple[str, Mapping[str, Any]]],
    shared: Mapping[str, Any],
    same: str,
) -> Iterator[str]:
    """Describe the conditions by which named entries differ; `same` stands for the shared ones."""
    groups: dict[str, list[str]] = {}
    for name, entry in entries:
        own = {
            key: value
            for key, value in entry.items()
            if (key in _CONDITIONS or key.startswith("data.")) and value != shared.get(key)
        }
        text = describe_changes(own) if own else same
        groups.setdefault(text, []).append(name)
    if len(groups) > 1:
        parts = [f"{text} ({', '.join(names)})" for text, names in groups.items()]
        yield f"These {kind} differ in samples or evaluation: {'; '.join(parts)}"


def _progress_notes(results: GridResults, attacked: pd.DataFrame) -> Iterator[str]:
    """Describe missing runs under attack, and defences with fewer seeds."""
    seeds = sum(len(results.defence_seeds(defence)) for defence in results.defences)
    wanted = len(results.settings) * len(results.attacks) * seeds
    finished = int(attacked[results.main].notna().sum())
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


def _write_setting(page: Page, view: SettingResults, start: str) -> None:
    """Write all matrices of one setting, and the figures of regrets."""
    folder = f"{start}matrices/"
    if view.setting:
        folder += f"{slug(view.setting)}/"
    tables = {
        "regret": worst_regrets(view),
        "floors": losses_against_baselines(view),
        "regret-difference": worst_regret_differences(view),
        "overview": defence_overview(view),
    }
    for value in _measured(view):
        tables[_file_stem(value)] = metric_matrix(view, value)
    for value in view.compared:
        if value in _measured(view):
            tables[f"{_file_stem(value)}-regret"] = regret_matrix(view, value)
            tables[f"{_file_stem(value)}-difference"] = difference_matrix(view, value)
            page.write_figure(f"{folder}{_file_stem(value)}-regret", regret_figure(view, value))
    for name, table in tables.items():
        if len(table) and len(table.columns):
            page.write_table(f"{folder}{name}", table)


def _write_across(
    page: Page, results: GridResults, views: Sequence[SettingResults], start: str
) -> None:
    """Write the columns of the compared metrics in all settings."""
    for value in dict.fromkeys(value for view in views for value in view.compared):
        columns: dict[str, None] = {}
        for view in views:
            if value in _measured(view):
                columns |= dict.fromkeys(view.columns(value))
        for column in columns:
            name = f"{start}matrices/across/{_file_stem(value)}/{slug(column)}"
            page.write_table(name, compare_settings(results, value, column))


def _measured(view: SettingResults) -> list[str]:
    """Return the names of the metrics with values, those of single clusters included."""
    clusters = [
        name for name in metric_names(view.rows) if "_cluster_" in name and name not in GRID_METRICS
    ]
    if len(clusters) <= len(STANDARD_METRICS):
        clusters = []
    chosen = chosen_infos(view.results.chosen)
    names = [name for name in (*GRID_METRICS, *clusters, *chosen) if name in view.rows]
    names = [name for name in names if view.rows[name].notna().any()]
    return [name for name in names if view.has_worst_tenth or not name.endswith("_worst_tenth")]


def regret_figure(view: SettingResults, value: str) -> Figure:
    """Draw the regrets in a metric, with the worst ones."""
    statistics = regrets(view.shortfalls(value))
    columns = view.columns(value)
    worst_columns = {}
    for title, excluded in view.worst_column_exclusions.items():
        names = [name for name in columns if name not in excluded]
        worst_columns[title] = worst_attack(statistics, names, highest=True)
    tables = []
    for values in (statistics["mean"], statistics.high - statistics["mean"]):
        table = view.pivot(values, columns)
        for title, worst in worst_columns.items():
            table[title] = [
                values.get((name, worst[name])) if name in worst else float("nan")
                for name in table.index
            ]
        tables.append(table)
    means, half_widths = tables

    failed = view.failed_cells(columns).reindex(columns=means.columns, fill_value=False)
    marked = view.exceeded_cells(columns).reindex(columns=means.columns, fill_value=False)
    for title, worst in worst_columns.items():
        marked[title] = [
            name in worst and bool(marked.at[name, worst[name]]) for name in marked.index
        ]
    return draw_heat_map(
        means,
        half_widths,
        failed=failed,
        marked=marked,
        separated=[*BASELINES.values(), *worst_columns],
    )


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


def _file_stem(value: str) -> str:
    return value.replace("_", "-")
