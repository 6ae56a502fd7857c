"""The matrices of a grid as files, and one HTML page that holds them all: defences by attacks, setting by setting."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import tomli_w
from matplotlib.figure import Figure

from fedcb2o.errors import RunError
from fedcb2o.records import EVALUATED_METRICS
from fedcb2o.report.attack_strengths import write_strengths
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
from fedcb2o.report.heat_map import draw_heat_map, shade_intensity
from fedcb2o.report.html import scrollable_table, to_png
from fedcb2o.report.ineffective_attacks import ineffective_attack_notes
from fedcb2o.report.page import Page, create_page, flatten_to_text, slug
from fedcb2o.report.regret import regrets
from fedcb2o.report.statistics import (
    CONFIDENCE,
    holm_correction,
    paired_differences,
    seed_statistics,
    worst_attack,
)
from fedcb2o.report.table_formats import html_text

_DEFINITIONS = (
    "Rows are defences, columns attacks. Numbers are in percent, over benign agents, after the last round: the mean "
    "over seeds with its interval. The hyperparameters of a defence are the same against all attacks.",
    "To every attacked run belong two floors, the same run without attack: in one its malicious agents train on true "
    "labels, in the other they are removed. An attack's rate is the share of source samples, or of those of all other "
    "classes, that are taken for the target; of a backdoor, with its trigger. It has none where it has no target.",
    "The regret of a defence in a column is by how much it falls short of the best defence there, sought among those "
    "with the most seeds; its worst regret says what it may cost to have chosen it, whatever comes.",
    "The worst attack on a defence is that with the worst mean over seeds. Differences between defences are paired: "
    "with equal seeds agents hold equal samples. Intervals are Student's, of 95%, over seeds; images of one picture "
    "that are turned for several clusters are one value of a seed. Decimals are added where 0 lies in an interval and "
    "would not be seen. An interval at a worst column takes that column as given.",
    "Where a dagger (†) stands, a benign agent received more malicious models in a round than its rule assumes.",
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
    "A defence for which an attack is missing or failed has neither mean nor worst attack."
)
_HEADLINE_CAPTION = (
    "What each defence loses at most by being chosen: its regret in its worst column, in points of percent; in "
    "accuracy, in the success of attacks, and in either."
)
_BASELINE_CAPTION = (
    "The most that an attack takes from a defence, and the most that one achieves, against the better of its own two "
    "floors: where even the best of a column lost much, its regret is 0, and this is not."
)
_CORRECTION_CAPTION = (
    "Points of percent; an asterisk where it is not 0, after Holm's correction over"
)
_REGRET_CAPTION = "Points of percent behind the best defence of each column, paired by seeds. Deeper orange is worse."


def report_grid(results: GridResults, out: Path) -> list[Path]:
    """Write the matrices (CSV, Markdown, LaTeX, PNG), the numbers behind them and `report.html` into `out`.

    Returns the paths; with `grid.toml` and `summary.csv`, which are among them, the report can be made again. Raises
    RunError where no run is done yet, or a file cannot be written.
    """
    if results.rows.accuracy.isna().all():
        raise RunError(
            f"no run in {results.folder} is done yet, so there is nothing to report: let it go on first"
        )
    page = create_page(out)
    views = [SettingResults(results, setting) for setting in results.settings]
    page.body += [
        f'<p class="warning">{html_text(sentence)}.</p>' for sentence in grid_notes(results)
    ]
    page.body += [f"<p>{html_text(text)}</p>" for text in _DEFINITIONS]
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
    page.write_file("cells.csv", pd.concat(map(_long_table, views)).to_csv(index=False))
    page.write_file("statistics.csv", pd.concat(map(_statistics_table, views)).to_csv(index=False))
    page.write_file("summary.csv", results.summary_csv())
    page.write_file("grid.toml", tomli_w.dumps(results.table))
    if results.tuning:
        page.write_file("tuning.json", json.dumps(results.tuning, indent=1) + "\n")
    page.write_page("report.html", f"fedcb2o: {results.title}")
    return page.paths


def grid_notes(results: GridResults) -> Iterator[str]:
    """What is missing, what failed, and what was not measured on test images; a sentence each, without its stop."""
    views = [SettingResults(results, setting).rows for setting in results.settings]
    shown = pd.concat([each[each.role == "attack"] for each in views])
    seeds = sum(len(results.defence_seeds(defence)) for defence in results.defences)
    wanted = len(results.settings) * len(results.attacks) * seeds
    rows = results.rows[results.rows.role == "attack"]
    failed = int((rows.error != "").sum())
    done = int(shown.accuracy.notna().sum())
    if done < wanted:
        told = f", {failed} of the others failed" if failed else ""
        yield f"This report is partial: {done} of {wanted} runs under attack are done{told}"
    fewer = [
        f"{name} {len(few)}"
        for name in results.defences
        if (few := results.defence_seeds(name)) != results.seeds
    ]
    if fewer:
        yield f"Fewer than {len(results.seeds)} seeds were run with some defences: {', '.join(fewer)}"
    if unknown := int((shown.accuracy.notna() & shown.lost.isna() & (shown.floor != "")).sum()):
        yield f"Of {unknown} attacked runs what the attack did is not known, since the better floor is missing"
    for _, row in (
        results.rows[results.rows.error != ""]
        .drop_duplicates([*KEY_COLUMNS[:-1], "error"])
        .iterrows()
    ):
        attack = row.attack or BASELINES[row.role].lower()
        yield f"{', '.join(filter(None, [row.setting, row.defence, attack]))} failed: {row.error}"
    if results.table.get("evaluate_on") == "tuning":
        yield "All of this was measured on tuning data, not on the test set"


def _write_setting(page: Page, view: SettingResults) -> None:
    """All tables and figures of one setting."""
    start = f"matrices/{slug(view.setting)}/" if view.setting else "matrices/"
    reference = view.results.reference
    page.add_table("Worst regret", f"{start}regret", worst_regrets(view), _HEADLINE_CAPTION)
    if len(found := losses_against_baselines(view)):
        page.add_table(
            "Worst against the own floor",
            f"{start}floors",
            found,
            _BASELINE_CAPTION,
            collapsed=True,
        )
    if len(found := worst_regret_differences(view)):
        title = f"Worst regret: difference to {reference}"
        hint = f"Less that of {reference}. {_CORRECTION_CAPTION} a column."
        page.add_table(title, f"{start}regret-difference", found, hint, collapsed=True)
    rivals = [value for value in COMPARED_METRICS if _has_values(view, value)]
    for value in rivals:
        title = f"Regret: {metric_info(value).title.lower()}"
        name = f"{start}{_file_stem(value)}-regret"
        _write_matrix(
            page,
            title,
            name,
            view,
            regret_matrix(view, value),
            _regret_data(view, value),
            _REGRET_CAPTION,
        )
    page.add_table("Overview", f"{start}overview", defence_overview(view), _OVERVIEW_CAPTION)
    page.body += [
        f'<p class="warning">{html_text(sentence)}.</p>'
        for sentence in ineffective_attack_notes(view.rows, view.attacks)
    ]
    for value in _DRAWN_METRICS:
        if _has_values(view, value):
            what = metric_info(value)
            name = f"{start}{_file_stem(value)}"
            hint = f"{what.caption} Deeper orange is worse."
            _write_matrix(
                page,
                what.title,
                name,
                view,
                metric_matrix(view, value),
                _metric_data(view, value),
                hint,
            )
    for value in rivals:
        found = paired_differences(view.rows, value, reference)
        if len(found):
            title = f"{metric_info(value).title}: difference to {reference}"
            _write_difference(
                page, title, f"{start}{_file_stem(value)}-difference", view, value, found
            )
    page.add_heading("More")
    for value in _remaining_metrics(view):
        page.add_table(
            metric_info(value).title,
            f"{start}{_file_stem(value)}",
            metric_matrix(view, value),
            _metric_caption(value),
            collapsed=True,
        )


def _write_across(page: Page, results: GridResults, views: Sequence[SettingResults]) -> None:
    """What defences are compared in, one column after the other, in all settings side by side."""
    page.add_heading("Across settings", is_section=True)
    for value in COMPARED_METRICS:
        for column in dict.fromkeys(
            name for view in views if _has_values(view, value) for name in view.columns(value)
        ):
            name = f"matrices/across/{_file_stem(value)}/{slug(column)}"
            table = compare_settings(results, value, column)
            page.add_table(
                f"{metric_info(value).title}: {column}",
                name,
                table,
                metric_info(value).caption,
                collapsed=True,
            )


def _remaining_metrics(view: SettingResults) -> list[str]:
    """The measures that have a table only, those of single clusters among them where there are several."""
    clusters = [
        name for name in metric_names(view.rows) if "_cluster_" in name and name not in GRID_METRICS
    ]
    several = clusters if len(clusters) > len(EVALUATED_METRICS) else []
    names = [
        name
        for name in (*GRID_METRICS, *several)
        if name not in _DRAWN_METRICS and _has_values(view, name)
    ]
    return [name for name in names if view.has_worst_tenth or not name.endswith("_worst_tenth")]


@dataclass(frozen=True)
class _MatrixData:
    """What a matrix shows: means, halves of their intervals, and how much worse than good each is (better below 0).

    `at` says of each column of worst values where each defence has its own.
    """

    means: pd.DataFrame
    half_widths: pd.DataFrame
    shades: pd.DataFrame
    worst_columns: Mapping[str, Mapping[str, str]]


def _metric_data(view: SettingResults, value: str) -> _MatrixData:
    """A measure with the worst attack; each mean is as bad as it is worse than the best value of all."""
    found = seed_statistics(view.rows, value)
    columns = view.columns(value)
    at = {}
    if metric_info(value).worse_direction != "neither":
        at = {WORST_COLUMN: view.worst_attacks(found, value)}
    means, halves = _means_and_half_widths(view, found, columns, at)
    shades = (
        means.max().max() - means
        if metric_info(value).worse_direction == "low"
        else means.clip(lower=0.0)
    )
    return _MatrixData(means, halves, shades, at)


def _regret_data(view: SettingResults, value: str) -> _MatrixData:
    """The regrets in a measure, with the worst ones."""
    short = view.shortfalls(value)
    columns = view.columns(value)
    at = {
        title: worst_attack(
            regrets(short), [name for name in columns if name not in aside], highest=True
        )
        for title, aside in view.worst_column_exclusions.items()
    }
    means, halves = _means_and_half_widths(view, regrets(short), columns, at)
    return _MatrixData(means, halves, means.clip(lower=0.0), at)


def _means_and_half_widths(
    view: SettingResults,
    found: pd.DataFrame,
    columns: Sequence[str],
    at: Mapping[str, Mapping[str, str]],
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Means and halves of intervals, defences by columns, then what stands in the column that is each one's worst."""
    tables = []
    for values in (found["mean"], found.high - found["mean"]):
        table = view.pivot(values, columns)
        for title, those in at.items():
            table[title] = [
                values.get((name, those[name])) if name in those else float("nan")
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
    numbers: _MatrixData,
    hint: str,
) -> None:
    """A matrix as a table with the colours of its picture, and the picture beside the page."""
    page.add_table(title, name, table, hint, shades=shade_intensity(numbers.shades))
    page.write_file(f"{name}.png", to_png(_draw_matrix(view, numbers)))


def regret_figure(view: SettingResults, value: str) -> Figure:
    """The regrets in a measure, with the worst ones, as the report draws them."""
    return _draw_matrix(view, _regret_data(view, value))


def _draw_matrix(view: SettingResults, numbers: _MatrixData) -> Figure:
    means = numbers.means
    columns = [str(name) for name in numbers.means if name not in view.worst_column_exclusions]
    failed, noted = (
        table.reindex(columns=means.columns, fill_value=False)
        for table in (view.failed_cells(columns), view.exceeded_cells(columns))
    )
    for title, those in numbers.worst_columns.items():
        noted[title] = [name in those and bool(noted.at[name, those[name]]) for name in noted.index]
    apart = [*BASELINES.values(), *view.worst_column_exclusions]
    return draw_heat_map(
        means, numbers.half_widths, numbers.shades, failed=failed, marked=noted, separated=apart
    )


def _write_difference(
    page: Page, title: str, name: str, view: SettingResults, value: str, found: pd.DataFrame
) -> None:
    """The differences to the reference in the same way."""
    reference = view.results.reference
    lower = metric_info(value).worse_direction == "low"
    found = found.assign(
        sure=holm_correction(found.p) < 1 - CONFIDENCE, half=found.high - found["mean"]
    )
    means, halves, sure = (
        view.pivot(found[field], view.columns(value)).drop(index=reference)
        for field in ("mean", "half", "sure")
    )
    told = f"Less that of {reference}. {_CORRECTION_CAPTION} the table. Violet is better, orange worse."
    page.add_table(
        title,
        name,
        difference_matrix(view, value),
        told,
        shades=shade_intensity(-means if lower else means),
    )
    colours = "PuOr" if lower else "PuOr_r"
    bold = sure.eq(True)
    drawn = draw_heat_map(
        means,
        halves,
        means,
        colours=colours,
        signed=True,
        bold=bold,
        separated=[*BASELINES.values()],
    )
    page.write_file(f"{name}.png", to_png(drawn))


def _write_tuning(page: Page, results: GridResults) -> None:
    """How hyperparameters were chosen: the candidates of each defence and their scores."""
    plan = results.table["tuning"]
    attacks = ", ".join(
        each if isinstance(each, str) else each.get("name") or describe_changes(each)
        for each in plan["attacks"]
    )
    untuned = [name for name in results.defences if "tune" not in results.table["defences"][name]]
    where = f", in the setting {plan.get('setting', results.settings[0])}" * bool(
        results.settings[0]
    )
    seeds = ", ".join(map(str, plan["seeds"]))
    told = (
        f"On tuning images, with seeds {seeds}{where}, against {attacks}. The score is accuracy less attack success "
        "rate, in percent, mean over attacks and seeds. What was chosen holds for all attacks. Every tuned "
        f"defence began with as many candidates, and got at most {plan.get('widen', 0)} more while the best one lay at "
        "an end." + f" Not tuned: {', '.join(untuned)}." * bool(untuned)
    )
    if results.tuning:
        page.add_table("Tuning", "matrices/tuning", tuning_table(results), told)
        page.write_file("tuning.csv", tuning_rows(results).to_csv(index=False))
    else:
        page.add_heading("Tuning")
        page.body.append(f"<p>{html_text(told)} Nothing is chosen yet.</p>")


def _write_definitions(page: Page, results: GridResults) -> None:
    """What each name stands for, and what all cells share."""
    for axis in ("settings", "defences", "attacks"):
        if entries := results.table.get(axis):
            changes = {
                name: {k: v for k, v in entry.items() if k not in _NON_SETTING_KEYS}
                for name, entry in entries.items()
            }
            table = pd.DataFrame(
                {
                    "What it changes": {
                        name: describe_changes(each) for name, each in changes.items()
                    }
                }
            )
            page.add_heading(axis.capitalize())
            page.body.append(
                scrollable_table(table.rename_axis(axis[:-1].capitalize()), axis.capitalize())
            )
    lists = ("settings", "defences", "attacks", "tuning", "adversary", "set_aside")
    own = ("name", "title", "description", "reference", *lists)
    shared = flatten_to_text({key: value for key, value in results.table.items() if key not in own})
    table = pd.DataFrame({"Value": shared}).rename_axis("Key")
    page.body.append(
        f"<details><summary>What all cells share</summary>{scrollable_table(table, 'What all cells share')}</details>"
    )


def _long_table(view: SettingResults) -> pd.DataFrame:
    """A row for each cell, seed and metric that has a value."""
    rows = view.rows.melt(
        ["setting", "defence", "attack", "seed"], metric_names(view.rows), "metric", "value"
    )
    return rows.dropna(subset="value")


def _statistics_table(view: SettingResults) -> pd.DataFrame:
    """A row for each cell and metric: over seeds, and the difference to the reference."""
    rows = _long_table(view)
    reference = view.results.reference
    other = paired_differences(rows, "value", reference, "metric").add_prefix("difference_")
    table = (
        seed_statistics(rows, "value", "metric")
        .join(other)
        .reset_index()
        .assign(reference=reference)
    )
    table.insert(0, "setting", view.setting)
    return table


def _has_values(view: SettingResults, value: str) -> bool:
    return value in view.rows and bool(view.rows[value].notna().any())


def _file_stem(value: str) -> str:
    return value.replace("_", "-")


def _metric_caption(value: str) -> str:
    what = metric_info(value)
    return what.caption if what.is_percent else f"{what.caption} Not in percent."
