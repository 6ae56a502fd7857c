"""Report of runs: tables and figures as files and one page."""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from fedcb2o.errors import FedCB2OError, RunError
from fedcb2o.python_words import python_words
from fedcb2o.records import STANDARD_METRICS, Run, last_round, slug
from fedcb2o.report._agent_figures import sample_images, weight_matrix
from fedcb2o.report._figures import curve_panels, learning_curves, peer_panels, source_count_panels
from fedcb2o.report._membership import class_gain_table, membership_table
from fedcb2o.report._page import Page, create_page, flatten_to_text
from fedcb2o.report._table_formats import shorten_label, to_readable
from fedcb2o.report.tables import (
    LABELS,
    by_agent,
    by_source_count,
    comparability_notes,
    compare,
    find_local_baseline,
    incomplete_note,
    is_attacked,
    left_out_note,
    pair_statistics,
    run_labels,
    seed_caption,
    unverified_note,
    without_counterparts,
)

_LOGGER = logging.getLogger(__name__)
_MIN_AGENTS_FOR_TENTH = 11  # of ten agents the worst tenth is the worst agent

# Definitions of the rows of the main table that may be missing.
_METRIC_DEFINITIONS = {
    LABELS["gain"]: (
        "Gain over training alone is the accuracy minus that of the local baseline, in which every "
        "agent trains alone from the same initial model on the same samples; the worst agent is "
        "the one that gains least in a seed."
    ),
    LABELS["net"]: (
        "Net attack success is the attack success rate minus that of the clean counterpart, the "
        "same run with malicious agents that train on true labels."
    ),
    LABELS["malicious_weight"]: (
        "Malicious weight is the weight that benign agents give to malicious peers, over the last "
        "fifth of the rounds."
    ),
}
_MAX_TITLE = 60  # characters of the names of all runs in a page's title
_WORST_CAPTION = (
    "As above, for the worst benign agent of each seed: the lowest accuracy, the highest attack "
    "success."
)
_WORST_TENTH_CAPTION = "As above, for the mean of the worst tenth of the benign agents."
_SOURCE_COUNT_CAPTION = (
    "In percent, by the number of source-class samples in the validation data of an agent, over "
    "all benign agents of all seeds. An agent without such samples cannot see the attack. A "
    "missing bar and number mean that no agent has this count."
)
_FIGURE6_CAPTION = (
    "Left: the share of rounds in which a benign agent received the model of a given peer; the "
    "dotted line is the share of a random choice. Right: that share times the mean weight of the "
    "peer, scaled so that the bars of a cluster sum to 100%. Numbers are percent per available "
    "peer over all rounds; the thin lines are ± one standard deviation over seeds. A method that "
    "filters attackers has short dark orange bars on the right."
)
_CURVES_CAPTION = "Mean over benign agents; the bands are ± one standard deviation over seeds."
_MEMBERSHIP_CAPTION = (
    "In percent, mean over the benign agents. The attack takes a sample with a low loss for a "
    "training sample; a guess has an AUC of 50 and a true positive rate of 1. Sent: the model "
    "that an agent would send next. Kept: its model after averaging."
)
_CLASS_GAIN_CAPTION = (
    "Accuracy in percent over the test samples of each class, those of all benign agents together; "
    "at the last checkpoint."
)
_TEXTS_CAPTION = (
    "The most probable answers of agent 0 to held-out prompts, before training (base) and after it "
    "(model). Expected is the answer of the data. For a prompt that an attack is about, it is the "
    "attacker's answer."
)
_AGENT_CAPTION = (
    "Mean over the seeds, at the last round, of each benign agent on its own test samples where it "
    "has some. Accuracies and rates are in percent. A metric has no value where it is not defined, "
    "such as the AUC of samples of one class."
)
_MAX_OPEN_ROWS = 40  # of a table by agent; longer ones are collapsed
_SAMPLES_CAPTION = "The same images in the form that the agents of each cluster see."
_WEIGHT_MATRIX_CAPTION = (
    "The weight of each peer's model (column) in the average of each agent (row), mean over the "
    "last fifth of the rounds and over seeds; on the diagonal, the weight of the agent's own "
    "model. Deeper blue is more. All matrices have one colour scale, that of a cube root. Thick "
    "lines separate clusters, thin lines benign from malicious agents. Of agents with owners, the "
    "names are shown, with a star where they are malicious."
)


@python_words()
def report(
    runs: Sequence[Run], out: Path | str, *, membership: bool = False, data_dir: Any = None
) -> list[Path]:
    """Write the tables, the figures and the page of runs.

    Runs without an evaluated round are left out and named on the page.

    Args:
        runs: Runs to compare.
        out: Folder for tables (CSV, Markdown, LaTeX), figures (PNG) and `report.html`.
        membership: Measure membership inference, for which the data are read again.
        data_dir: Folder of the data sets.

    Returns:
        Paths of the files.

    Raises:
        RunError: No run has an evaluated round, or a file cannot be written.
    """
    evaluated = [run for run in runs if not last_round(run.records).empty]
    shown = without_counterparts(evaluated)
    if not shown:
        ended = [run for run in runs if run.records["round"].max() >= run.config.get("rounds", 0)]
        if ended and not ended[0].records.empty:
            raise RunError(
                f"{ended[0].title} ({ended[0].folder.name}) has run all rounds, and none of its"
                " results is finite, as where a test loss overflows: divide the targets by their"
                " standard deviation, and run it again"
            )
        raise RunError(
            "no run here has an evaluated round yet, so there is nothing to report: let one go on "
            "first"
        )
    page = create_page(Path(out))
    names = run_labels(shown)
    for name in names:
        if name != shorten_label(name):
            _LOGGER.warning("figures have no room for the whole of %s.", shorten_label(name))
    notes = [
        *comparability_notes(shown),
        *map(_tuning_warning, shown),
        *map(incomplete_note, runs),
        *map(left_out_note, runs),
        *map(unverified_note, runs),
    ]
    page.add_warnings([f"{note}." for note in notes if note])

    _add_results(page, evaluated, shown)
    _add_agents(page, names, shown)
    _add_class_gains(page, shown, data_dir)
    if membership:
        table = membership_table(shown, data_dir)
        page.add_table("Membership inference", "membership", table, _MEMBERSHIP_CAPTION)
    _add_source_counts(page, names, shown)
    weights = {
        f"weights-{number}-{slug(name)}": weight_matrix(run)
        for number, (name, run) in enumerate(zip(names, shown, strict=True), start=1)
    }
    page.add_figures("Weights between agents", weights, _WEIGHT_MATRIX_CAPTION)
    # The run with the most clusters shows the images of all others too.
    samples = _draw_samples(page, max(shown, key=lambda run: run.agents.cluster.nunique()))
    page.add_figures("Samples", {"samples": samples}, _SAMPLES_CAPTION)
    _add_texts(page, names, shown, data_dir)

    summaries = [run.summary() for run in shown]
    page.write_file("seeds.csv", _stack_runs(names, summaries).to_csv(index=False))
    page.write_file(
        "pairs.csv", _stack_runs(names, map(pair_statistics, shown)).to_csv(index=False)
    )
    _add_settings(page, names, shown)
    page.write_page("report.html", _page_title(names))
    return page.paths


def _add_agents(page: Page, names: Sequence[str], shown: Sequence[Run]) -> None:
    """Add the results by agent where agents are owners with names, or metrics were chosen."""
    tables = {}
    for name, run in zip(names, shown, strict=True):
        if run.custom_metrics or "names" in run.about(run.seeds[0]):
            tables[name] = by_agent(run)
    if not tables:
        return
    page.add_heading("By agent")
    for number, (name, table) in enumerate(tables.items(), start=1):
        file = f"agents-{number}-{slug(name)}"
        is_long = len(tables) > 1 or len(table) > _MAX_OPEN_ROWS
        page.write_table(file, table)
        page.show_table(table, f"Agents of {name}", caption=_AGENT_CAPTION, collapsed=is_long)


def _add_class_gains(page: Page, shown: Sequence[Run], data_dir: Any) -> None:
    """Add the gain by class where runs have a local baseline, whose models are evaluated again."""
    compared = [run for run in shown if find_local_baseline(run, shown) is not None]
    if not compared:
        return
    try:
        table = class_gain_table(shown, data_dir)
    except FedCB2OError as error:
        page.add_warnings([f"There is no gain by class: {error}."])
        return
    page.add_table("Gain over training alone by class", "class-gain", table, _CLASS_GAIN_CAPTION)


def _add_texts(page: Page, names: Sequence[str], shown: Sequence[Run], data_dir: Any) -> None:
    """Add what language models write before and after training."""
    tables = []
    for name, run in zip(names, shown, strict=True):
        if run.config.get("model", {}).get("name") != "language_model":
            continue
        try:
            table = run.texts(data_dir=data_dir)
        except FedCB2OError as error:
            page.add_warning(f"No texts are shown of {name}: {error}.")
            continue
        table["prompt"] += table.pop("attacked").map({True: " (attacked)", False: ""})
        tables.append(table.assign(run=name))
    if tables:
        texts = pd.concat(tables).set_index("run").map(lambda text: " ".join(text.split()))
        page.add_table("Generated texts", "texts", texts, _TEXTS_CAPTION)


def _page_title(names: Sequence[str]) -> str:
    title = ", ".join(names)
    if len(title) <= _MAX_TITLE or len(names) == 1:
        return f"fedcb2o: {title}"
    return f"fedcb2o: {len(names)} runs"


def _add_results(page: Page, evaluated: Sequence[Run], shown: Sequence[Run]) -> None:
    """Add the tables of results, the curves and Figure 6."""
    table = compare(evaluated)
    definitions = [text for row, text in _METRIC_DEFINITIONS.items() if row in table.index]
    page.add_table("Results", "results", table, seed_caption(evaluated), transposed=True)
    page.add_details("Definitions", ["Each number is the mean over benign agents.", *definitions])
    curves = curve_panels(learning_curves(shown))
    page.add_panels("Over the rounds", "curves", curves, _CURVES_CAPTION)

    attacked = [run for run in shown if is_attacked(run)]
    page.add_panels(
        "Who is received, and with what weight",
        "figure6",
        peer_panels(attacked or shown),
        _FIGURE6_CAPTION,
    )
    worst = compare(evaluated, over="worst")
    page.add_table("The worst benign agent", "worst", worst, _WORST_CAPTION, transposed=True)
    if any(_count_benign(run) >= _MIN_AGENTS_FOR_TENTH for run in shown):
        page.add_table(
            "The worst tenth of the benign agents",
            "worst-tenth",
            compare(evaluated, over="worst_tenth"),
            _WORST_TENTH_CAPTION,
            transposed=True,
        )


def _add_source_counts(page: Page, names: Sequence[str], shown: Sequence[Run]) -> None:
    """Add the results by source-class samples, as figure and table."""
    title = "By source-class samples in the validation data"
    page.add_panels(title, "source-count", source_count_panels(shown), _SOURCE_COUNT_CAPTION)
    counts = _stack_runs(names, map(by_source_count, shown))
    if len(counts):
        table = to_readable(counts, empty=STANDARD_METRICS)
        page.add_table("The same as a table", "source-count", table, "In percent.", collapsed=True)


def _add_settings(page: Page, names: Sequence[str], runs: Sequence[Run]) -> None:
    """Add the settings of the runs, and a table of the runs."""
    columns = {name: flatten_to_text(run.config) for name, run in zip(names, runs, strict=True)}
    table = pd.DataFrame(columns).fillna("–")
    table = table.drop(index=["name", "title", "description"], errors="ignore")
    is_different = table.nunique(axis="columns") > 1
    if is_different.any():
        title = "Settings that differ"
        page.add_heading(title)
        page.show_table(table[is_different].rename_axis("Key"), title)

    shared = table.loc[~is_different].iloc[:, :1].set_axis(["Value"], axis="columns")
    title = "All settings" if len(runs) == 1 else "Settings that all runs share"
    page.show_table(shared.rename_axis("Key"), title, collapsed=True)

    page.add_heading("Runs")
    descriptions = pd.DataFrame(map(_run_description, runs), index=pd.Index(names, name="Run"))
    page.show_table(descriptions, "Runs")


def _draw_samples(page: Page, run: Run) -> Figure | None:
    """Draw samples of a run, or warn of a damaged file."""
    try:
        return sample_images(run)
    except RunError as error:
        _LOGGER.warning("the page shows no samples: %s.", error)
        page.add_warning(f"No samples are shown: {error}.")
        return None


def _stack_runs(names: Sequence[str], tables: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Concatenate the tables of all runs; the first column names the run."""
    named = [table.assign(run=name) for name, table in zip(names, tables, strict=True)]
    filled = [table for table in named if len(table)]
    stacked = pd.concat(filled or named, ignore_index=True)
    return stacked[["run", *stacked.columns.drop("run")]]


def _run_description(run: Run) -> dict[str, str]:
    return {
        "What it is": str(run.config.get("description", "")),
        "Agents": str(len(run.agents) // max(len(run.seeds), 1)),
        "Seeds": ", ".join(map(str, run.seeds)),
        "Folder": run.folder.name,
    }


def _tuning_warning(run: Run) -> str | None:
    """Return a warning if a run was measured on tuning data."""
    data = run.config.get("evaluate_on", "test")
    if data != "tuning":
        return None
    return f"{run.title} was measured on {data} data, not on the test set"


def _count_benign(run: Run) -> int:
    """Count the benign agents of a seed."""
    return int((~run.agents.malicious).groupby(run.agents.seed).sum().max())
