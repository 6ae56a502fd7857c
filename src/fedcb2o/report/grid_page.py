"""The matrices of a grid as files, and one HTML page that holds them all: defences by attacks, setting by setting."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import tomli_w
from matplotlib.figure import Figure

from fedcb2o.errors import RunError
from fedcb2o.records import EVALUATED
from fedcb2o.report.attack_strengths import write_strengths
from fedcb2o.report.grid_results import FLOORS, KEYS, GridResults, measured
from fedcb2o.report.grid_tables import (
    MEASURES,
    RIVALS,
    WORST,
    View,
    across,
    against_floors,
    changes_told,
    differences,
    headline,
    headline_differences,
    matrix,
    measure,
    overview,
    regret_matrix,
    tuning_rows,
    tuning_table,
)
from fedcb2o.report.heat_map import darkness, heat_map
from fedcb2o.report.html import framed, png
from fedcb2o.report.ineffective_attacks import quiet
from fedcb2o.report.page import Page, flattened, new_page, slug
from fedcb2o.report.regret import regrets
from fedcb2o.report.statistics import CONFIDENCE, holm, paired, statistics, worst
from fedcb2o.report.table_formats import html_text

DEFINITIONS = (
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
DRAWN = ("accuracy", "attack_success_rate", "lost", "success", "source_accuracy", "malicious_weight")
CHOSEN = ("tune", "seeds", "strengths")
OVERVIEW = "A defence for which an attack is missing or failed has neither mean nor worst attack."
HEADLINE = (
    "What each defence loses at most by being chosen: its regret in its worst column, in points of percent; in "
    "accuracy, in the success of attacks, and in either."
)
FLOOR = (
    "The most that an attack takes from a defence, and the most that one achieves, against the better of its own two "
    "floors: where even the best of a column lost much, its regret is 0, and this is not."
)
CORRECTED = "Points of percent; an asterisk where it is not 0, after Holm's correction over"
REGRET = "Points of percent behind the best defence of each column, paired by seeds. Deeper orange is worse."


def report_grid(results: GridResults, out: Path) -> list[Path]:
    """Write the matrices (CSV, Markdown, LaTeX, PNG), the numbers behind them and `report.html` into `out`.

    Returns the paths; with `grid.toml` and `summary.csv`, which are among them, the report can be made again. Raises
    RunError where no run is done yet, or a file cannot be written.
    """
    if results.rows.accuracy.isna().all():
        raise RunError(f"no run in {results.folder} is done yet, so there is nothing to report: let it go on first")
    page, views = new_page(out), [View(results, setting) for setting in results.settings]
    page.body += [f'<p class="warning">{html_text(sentence)}.</p>' for sentence in grid_notes(results)]
    page.body += [f"<p>{html_text(text)}</p>" for text in DEFINITIONS]
    for view in views:
        if view.setting:
            page.heading(view.setting, above=True)
        if view.rows.accuracy.notna().any():
            _write(page, view)
    if len(views) > 1:
        _write_across(page, results, views)
    page.heading("How it was done", above=True)
    if "tuning" in results.table:
        _write_tuning(page, results)
    write_strengths(page, results)
    _write_names(page, results)
    page.file("cells.csv", pd.concat(map(_long, views)).to_csv(index=False))
    page.file("statistics.csv", pd.concat(map(_statistics, views)).to_csv(index=False))
    page.file("summary.csv", results.summary_csv())
    page.file("grid.toml", tomli_w.dumps(results.table))
    if results.tuning:
        page.file("tuning.json", json.dumps(results.tuning, indent=1) + "\n")
    page.write("report.html", f"fedcb2o: {results.title}")
    return page.paths


def grid_notes(results: GridResults) -> Iterator[str]:
    """What is missing, what failed, and what was not measured on test images; a sentence each, without its stop."""
    views = [View(results, setting).rows for setting in results.settings]
    shown = pd.concat([each[each.role == "attack"] for each in views])
    seeds = sum(len(results.seeds_of(defence)) for defence in results.defences)
    wanted = len(results.settings) * len(results.attacks) * seeds
    rows = results.rows[results.rows.role == "attack"]
    failed, done = int((rows.error != "").sum()), int(shown.accuracy.notna().sum())
    if done < wanted:
        told = f", {failed} of the others failed" if failed else ""
        yield f"This report is partial: {done} of {wanted} runs under attack are done{told}"
    fewer = [f"{name} {len(few)}" for name in results.defences if (few := results.seeds_of(name)) != results.seeds]
    if fewer:
        yield f"Fewer than {len(results.seeds)} seeds were run with some defences: {', '.join(fewer)}"
    if unknown := int((shown.accuracy.notna() & shown.lost.isna() & (shown.floor != "")).sum()):
        yield f"Of {unknown} attacked runs what the attack did is not known, since the better floor is missing"
    for _, row in results.rows[results.rows.error != ""].drop_duplicates([*KEYS[:-1], "error"]).iterrows():
        attack = row.attack or FLOORS[row.role].lower()
        yield f"{', '.join(filter(None, [row.setting, row.defence, attack]))} failed: {row.error}"
    if results.table.get("evaluate_on") == "tuning":
        yield "All of this was measured on tuning data, not on the test set"


def _write(page: Page, view: View) -> None:
    """All tables and figures of one setting."""
    start = f"matrices/{slug(view.setting)}/" if view.setting else "matrices/"
    reference = view.results.reference
    page.table("Worst regret", f"{start}regret", headline(view), HEADLINE)
    if len(found := against_floors(view)):
        page.table("Worst against the own floor", f"{start}floors", found, FLOOR, fold=True)
    if len(found := headline_differences(view)):
        title, hint = f"Worst regret: difference to {reference}", f"Less that of {reference}. {CORRECTED} a column."
        page.table(title, f"{start}regret-difference", found, hint, fold=True)
    rivals = [value for value in RIVALS if _has(view, value)]
    for value in rivals:
        title, name = f"Regret: {measure(value).title.lower()}", f"{start}{_file(value)}-regret"
        _write_matrix(page, title, name, view, regret_matrix(view, value), _regrets(view, value), REGRET)
    page.table("Overview", f"{start}overview", overview(view), OVERVIEW)
    page.body += [f'<p class="warning">{html_text(sentence)}.</p>' for sentence in quiet(view.rows, view.attacks)]
    for value in DRAWN:
        if _has(view, value):
            what, name = measure(value), f"{start}{_file(value)}"
            hint = f"{what.caption} Deeper orange is worse."
            _write_matrix(page, what.title, name, view, matrix(view, value), _measured(view, value), hint)
    for value in rivals:
        found = paired(view.rows, value, reference)
        if len(found):
            title = f"{measure(value).title}: difference to {reference}"
            _write_difference(page, title, f"{start}{_file(value)}-difference", view, value, found)
    page.heading("More")
    for value in _others(view):
        page.table(measure(value).title, f"{start}{_file(value)}", matrix(view, value), _caption(value), fold=True)


def _write_across(page: Page, results: GridResults, views: Sequence[View]) -> None:
    """What defences are compared in, one column after the other, in all settings side by side."""
    page.heading("Across settings", above=True)
    for value in RIVALS:
        for column in dict.fromkeys(name for view in views if _has(view, value) for name in view.columns(value)):
            name = f"matrices/across/{_file(value)}/{slug(column)}"
            table = across(results, value, column)
            page.table(f"{measure(value).title}: {column}", name, table, measure(value).caption, fold=True)


def _others(view: View) -> list[str]:
    """The measures that have a table only, those of single clusters among them where there are several."""
    clusters = [name for name in measured(view.rows) if "_cluster_" in name and name not in MEASURES]
    several = clusters if len(clusters) > len(EVALUATED) else []
    names = [name for name in (*MEASURES, *several) if name not in DRAWN and _has(view, name)]
    return [name for name in names if view.has_tenth or not name.endswith("_worst_tenth")]


@dataclass(frozen=True)
class Numbers:
    """What a matrix shows: means, halves of their intervals, and how much worse than good each is (better below 0).

    `at` says of each column of worst values where each defence has its own.
    """

    means: pd.DataFrame
    halves: pd.DataFrame
    shades: pd.DataFrame
    at: Mapping[str, Mapping[str, str]]


def _measured(view: View, value: str) -> Numbers:
    """A measure with the worst attack; each mean is as bad as it is worse than the best value of all."""
    found, columns, at = statistics(view.rows, value), view.columns(value), {}
    if measure(value).worse != "neither":
        at = {WORST: view.worst(found, value)}
    means, halves = _spread(view, found, columns, at)
    shades = means.max().max() - means if measure(value).worse == "low" else means.clip(lower=0.0)
    return Numbers(means, halves, shades, at)


def _regrets(view: View, value: str) -> Numbers:
    """The regrets in a measure, with the worst ones."""
    short, columns = view.short(value), view.columns(value)
    at = {
        title: worst(regrets(short), [name for name in columns if name not in aside], highest=True)
        for title, aside in view.worsts.items()
    }
    means, halves = _spread(view, regrets(short), columns, at)
    return Numbers(means, halves, means.clip(lower=0.0), at)


def _spread(
    view: View, found: pd.DataFrame, columns: Sequence[str], at: Mapping[str, Mapping[str, str]]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Means and halves of intervals, defences by columns, then what stands in the column that is each one's worst."""
    tables = []
    for values in (found["mean"], found.high - found["mean"]):
        table = view.spread(values, columns)
        for title, those in at.items():
            table[title] = [values.get((name, those[name])) if name in those else float("nan") for name in table.index]
        tables.append(table)
    return tables[0], tables[1]


def _write_matrix(
    page: Page, title: str, name: str, view: View, table: pd.DataFrame, numbers: Numbers, hint: str
) -> None:
    """A matrix as a table with the colours of its picture, and the picture beside the page."""
    page.table(title, name, table, hint, shades=darkness(numbers.shades))
    page.file(f"{name}.png", png(_picture(view, numbers)))


def regret_picture(view: View, value: str) -> Figure:
    """The regrets in a measure, with the worst ones, as the report draws them."""
    return _picture(view, _regrets(view, value))


def _picture(view: View, numbers: Numbers) -> Figure:
    means, columns = numbers.means, [str(name) for name in numbers.means if name not in view.worsts]
    failed, noted = (
        table.reindex(columns=means.columns, fill_value=False)
        for table in (view.failed(columns), view.exceeded(columns))
    )
    for title, those in numbers.at.items():
        noted[title] = [name in those and bool(noted.at[name, those[name]]) for name in noted.index]
    apart = [*FLOORS.values(), *view.worsts]
    return heat_map(means, numbers.halves, numbers.shades, failed=failed, noted=noted, apart=apart)


def _write_difference(page: Page, title: str, name: str, view: View, value: str, found: pd.DataFrame) -> None:
    """The differences to the reference in the same way."""
    reference, lower = view.results.reference, measure(value).worse == "low"
    found = found.assign(sure=holm(found.p) < 1 - CONFIDENCE, half=found.high - found["mean"])
    means, halves, sure = (
        view.spread(found[field], view.columns(value)).drop(index=reference) for field in ("mean", "half", "sure")
    )
    told = f"Less that of {reference}. {CORRECTED} the table. Violet is better, orange worse."
    page.table(title, name, differences(view, value), told, shades=darkness(-means if lower else means))
    colours, bold = "PuOr" if lower else "PuOr_r", sure.eq(True)
    drawn = heat_map(means, halves, means, colours=colours, signed=True, bold=bold, apart=[*FLOORS.values()])
    page.file(f"{name}.png", png(drawn))


def _write_tuning(page: Page, results: GridResults) -> None:
    """How hyperparameters were chosen: the candidates of each defence and their scores."""
    plan = results.table["tuning"]
    attacks = ", ".join(
        each if isinstance(each, str) else each.get("name") or changes_told(each) for each in plan["attacks"]
    )
    untuned = [name for name in results.defences if "tune" not in results.table["defences"][name]]
    where = f", in the setting {plan.get('setting', results.settings[0])}" * bool(results.settings[0])
    seeds = ", ".join(map(str, plan["seeds"]))
    told = (
        f"On tuning images, with seeds {seeds}{where}, against {attacks}. The score is accuracy less attack success "
        "rate, in percent, mean over attacks and seeds. What was chosen holds for all attacks. Every tuned "
        f"defence began with as many candidates, and got at most {plan.get('widen', 0)} more while the best one lay at "
        "an end." + f" Not tuned: {', '.join(untuned)}." * bool(untuned)
    )
    if results.tuning:
        page.table("Tuning", "matrices/tuning", tuning_table(results), told)
        page.file("tuning.csv", tuning_rows(results).to_csv(index=False))
    else:
        page.heading("Tuning")
        page.body.append(f"<p>{html_text(told)} Nothing is chosen yet.</p>")


def _write_names(page: Page, results: GridResults) -> None:
    """What each name stands for, and what all cells share."""
    for axis in ("settings", "defences", "attacks"):
        if entries := results.table.get(axis):
            changes = {name: {k: v for k, v in entry.items() if k not in CHOSEN} for name, entry in entries.items()}
            table = pd.DataFrame({"What it changes": {name: changes_told(each) for name, each in changes.items()}})
            page.heading(axis.capitalize())
            page.body.append(framed(table.rename_axis(axis[:-1].capitalize()), axis.capitalize()))
    lists = ("settings", "defences", "attacks", "tuning", "adversary", "set_aside")
    own = ("name", "title", "description", "reference", *lists)
    shared = flattened({key: value for key, value in results.table.items() if key not in own})
    table = pd.DataFrame({"Value": shared}).rename_axis("Key")
    page.body.append(
        f"<details><summary>What all cells share</summary>{framed(table, 'What all cells share')}</details>"
    )


def _long(view: View) -> pd.DataFrame:
    """A row for each cell, seed and metric that has a value."""
    rows = view.rows.melt(["setting", "defence", "attack", "seed"], measured(view.rows), "metric", "value")
    return rows.dropna(subset="value")


def _statistics(view: View) -> pd.DataFrame:
    """A row for each cell and metric: over seeds, and the difference to the reference."""
    rows, reference = _long(view), view.results.reference
    other = paired(rows, "value", reference, "metric").add_prefix("difference_")
    table = statistics(rows, "value", "metric").join(other).reset_index().assign(reference=reference)
    table.insert(0, "setting", view.setting)
    return table


def _has(view: View, value: str) -> bool:
    return value in view.rows and bool(view.rows[value].notna().any())


def _file(value: str) -> str:
    return value.replace("_", "-")


def _caption(value: str) -> str:
    what = measure(value)
    return what.caption if what.percent else f"{what.caption} Not in percent."
