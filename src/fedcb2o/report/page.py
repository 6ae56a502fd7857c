"""All tables and figures of some runs as files, and one HTML page that holds them all and needs no other file."""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from fedcb2o.errors import RunError
from fedcb2o.records import Run, atomic_write, flatten, last_round, summary
from fedcb2o.report.agent_figures import sample_images, weight_matrix
from fedcb2o.report.figures import (
    Panels,
    curve_panels,
    draw_panels,
    learning_curves,
    peer_panels,
    source_count_panels,
)
from fedcb2o.report.html import (
    TOP_LEVEL,
    caption_html,
    figure_row,
    heading_html,
    render_document,
    scrollable_table,
    to_png,
)
from fedcb2o.report.table_formats import html_text, to_latex, to_markdown, to_readable
from fedcb2o.report.tables import (
    METRICS,
    by_source_count,
    compare,
    incomplete_note,
    is_attacked,
    pair_statistics,
    run_labels,
    seed_caption,
    unverified_note,
    without_counterparts,
)

_OVERALL_CAPTION = (
    "Each number is the mean over benign agents. Net attack "
    "success is the rate minus that of the clean twin, the same run whose malicious agents train on true labels. "
    "Malicious weight is what benign agents give to malicious peers, over the last fifth of the rounds."
)
_WORST_CAPTION = "As above, for the worst benign agent of each seed: the lowest accuracy, the highest attack success."
_WORST_TENTH_CAPTION = "As above, for the mean of the worst tenth of the benign agents."
_SOURCE_COUNT_CAPTION = (
    "In percent, by how many samples of the source class an agent has in its validation data, over all benign agents "
    "of all seeds. An agent that has none cannot see the attack; where there is no bar and no number, no agent has so "
    "many."
)
_FIGURE6_CAPTION = (
    "Left: the share of rounds in which a benign agent received a given peer's model; the dotted line is what choosing "
    "at random would give. Right: that share times the peer's mean weight, scaled so that the bars of a cluster sum to "
    "100%. Numbers are percent per available peer over all rounds; the thin lines are ± a standard deviation over "
    "seeds. A method that filters attackers has short dark orange bars on the right."
)
_CURVES_CAPTION = "Mean over benign agents; the bands are ± a standard deviation over seeds."
_SAMPLES_CAPTION = "The same images as the agents of each cluster see them."
_WEIGHT_MATRIX_CAPTION = (
    "The weight that each agent (row) gives to each peer's model (column), mean over the last fifth of the rounds and "
    "over seeds; on the diagonal, to its own model. Deeper blue is more, on one scale for all, that of a cube root. "
    "Thick lines part clusters, thin ones benign from malicious agents."
)


def report(runs: Sequence[Run], out: Path) -> list[Path]:
    """Write the tables (CSV, Markdown, LaTeX), the figures (PNG) and `report.html` into `out`; return their paths.

    Runs without an evaluated round are left out and named on the page. Raises RunError if none has one, or if a file
    cannot be written.
    """
    ready = [run for run in runs if not last_round(run.records).empty]
    shown = without_counterparts(ready)
    if not shown:
        raise RunError(
            "no run here has an evaluated round yet, so there is nothing to report: let one go on first"
        )
    page = create_page(out)
    names = run_labels(shown)
    for sentence in filter(
        None,
        [*map(incomplete_note, runs), *map(unverified_note, runs), *map(_tuning_warning, shown)],
    ):
        page.body.append(f'<p class="warning">{html_text(sentence)}.</p>')
    page.add_table(
        "Results",
        "results",
        compare(ready),
        f"{seed_caption(ready)} {_OVERALL_CAPTION}",
        transposed=True,
    )
    page.add_panels(
        "Over the rounds", "curves", curve_panels(learning_curves(shown)), _CURVES_CAPTION
    )
    under_attack = [run for run in shown if is_attacked(run)]
    page.add_panels(
        "Who is received, and with what weight",
        "figure6",
        peer_panels(under_attack or shown),
        _FIGURE6_CAPTION,
    )
    page.add_table(
        "The worst benign agent",
        "worst",
        compare(ready, over="worst"),
        _WORST_CAPTION,
        transposed=True,
    )
    if any(
        _count_benign(run) > 10 for run in shown
    ):  # of 10 agents the worst tenth is the worst one
        tenth = compare(ready, over="worst_tenth")
        page.add_table(
            "The worst tenth of the benign agents",
            "worst-tenth",
            tenth,
            _WORST_TENTH_CAPTION,
            transposed=True,
        )
    title = "By source-class samples in the validation data"
    page.add_panels(title, "source-count", source_count_panels(shown), _SOURCE_COUNT_CAPTION)
    counts = _stack_runs(names, map(by_source_count, shown))
    if len(counts):
        page.add_table(
            "The same as a table",
            "source-count",
            to_readable(counts, empty=METRICS),
            "In percent.",
            collapsed=True,
        )
    drawn = {
        f"weights-{i}-{slug(names[i - 1])}": weight_matrix(run)
        for i, run in enumerate(shown, start=1)
    }
    page.add_figures("Weights between agents", drawn, _WEIGHT_MATRIX_CAPTION)
    page.add_figures(
        "Samples",
        {"samples": _draw_samples(page, max(shown, key=_count_clusters))},
        _SAMPLES_CAPTION,
    )
    page.write_file(
        "seeds.csv", _stack_runs(names, [summary(run.records) for run in shown]).to_csv(index=False)
    )
    page.write_file(
        "pairs.csv", _stack_runs(names, map(pair_statistics, shown)).to_csv(index=False)
    )
    page.add_settings(names, shown)
    page.write_page("report.html", f"fedcb2o: {', '.join(names)}")
    return page.paths


def _draw_samples(page: "Page", run: Run) -> Figure | None:
    """A few samples of a run; a warning where they are damaged, since the rest of the page does without them."""
    try:
        return sample_images(run)
    except RunError as error:
        print(f"Note: the page shows no samples: {error}.", file=sys.stderr)
        page.body.append(f'<p class="warning">No samples are shown: {html_text(str(error))}.</p>')
        return None


@dataclass
class Page:
    """The page as it grows, and the files written so far."""

    out: Path
    body: list[str] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    contents: list[tuple[int, str, str]] = field(default_factory=list)
    level: int = TOP_LEVEL

    def write_file(self, name: str, content: str | bytes) -> None:
        """Write a file, and make the folder that its name begins with, if any."""
        (self.out / name).parent.mkdir(parents=True, exist_ok=True)
        atomic_write(self.out / name, content.encode() if isinstance(content, str) else content)
        self.paths.append(self.out / name)

    def add_heading(self, title: str, *, is_section: bool = False) -> None:
        """A heading, which the contents list; those after one that stands `above` are below it."""
        self.level = TOP_LEVEL if is_section else self.level
        where = f"{slug(title)}-{len(self.contents) + 1}"
        self.contents.append((self.level, title, where))
        self.body.append(heading_html(self.level, title, where))
        self.level += is_section

    def add_table(
        self,
        title: str,
        name: str,
        table: pd.DataFrame,
        caption: str,
        *,
        collapsed: bool = False,
        transposed: bool = False,
        shades: pd.DataFrame | None = None,
    ) -> None:
        """A table on the page, and as CSV, Markdown and LaTeX; on the page folded away, `turned` on its side, or with
        the `shades` of its cells, if asked."""
        self.write_file(f"{name}.csv", table.to_csv())
        self.write_file(f"{name}.md", to_markdown(table))
        self.write_file(f"{name}.tex", to_latex(table))
        shown = scrollable_table(table.T if transposed else table, title, shades) + caption_html(
            caption
        )
        if collapsed:
            self.body.append(f"<details><summary>{html_text(title)}</summary>{shown}</details>")
        else:
            self.add_heading(title)
            self.body.append(shown)

    def add_figures(self, title: str, drawn: Mapping[str, Figure | None], caption: str) -> None:
        """Figures on the page, side by side where there is room, and by their names as PNG; without those that are
        none."""
        there = {name: figure for name, figure in drawn.items() if figure is not None}
        for name, figure in there.items():
            self.write_file(f"{name}.png", to_png(figure))
        if there:
            self._add_figure_row(title, list(there.values()), caption)

    def add_panels(self, title: str, name: str, drawn: Panels, caption: str) -> None:
        """Panels as one PNG, and on the page, where a narrow one shows them one below the other, as one figure each;
        nothing where there are none."""
        if drawn.draw_functions:
            self.write_file(f"{name}.png", to_png(draw_panels(drawn)))
            self._add_figure_row(
                title, [draw_panels(drawn, one) for one in drawn.draw_functions], caption
            )

    def _add_figure_row(self, title: str, figures: Sequence[Figure], caption: str) -> None:
        self.add_heading(title)
        self.body.append(figure_row(figures, slug(title)) + caption_html(caption))

    def add_settings(self, names: Sequence[str], runs: Sequence[Run]) -> None:
        """What the runs were asked to do: first where they differ, then what they share."""
        table = pd.DataFrame(
            {name: flatten_to_text(run.config) for name, run in zip(names, runs, strict=True)}
        ).fillna("–")
        table = table.drop(index=["name", "title", "description"], errors="ignore")
        differ = table.nunique(axis="columns") > 1
        if differ.any():
            self.add_heading("Settings that differ")
            self.body.append(
                scrollable_table(table[differ].rename_axis("Key"), "Settings that differ")
            )
        alike = (
            table.loc[~differ].iloc[:, :1].set_axis(["Value"], axis="columns").rename_axis("Key")
        )
        kind = "All settings" if len(runs) == 1 else "Settings that all runs share"
        self.body.append(
            f"<details><summary>{kind}</summary>{scrollable_table(alike, kind)}</details>"
        )
        self.add_heading("Runs")
        self.body.append(
            scrollable_table(
                pd.DataFrame(map(_run_description, runs), index=pd.Index(names, name="Run")), "Runs"
            )
        )

    def write_page(self, name: str, title: str) -> None:
        """Write the page itself."""
        self.write_file(name, render_document(title, self.body, self.contents))


def create_page(out: Path) -> Page:
    """A page in a folder, which is made; raises RunError where it cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"cannot make the folder {out} ({error.strerror}): name another with --out"
        ) from error
    return Page(out)


def _stack_runs(names: Sequence[str], tables: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """The tables of all runs as one; its first column names the run."""
    named = [table.assign(run=run) for run, table in zip(names, tables, strict=True)]
    table = pd.concat([table for table in named if len(table)] or named, ignore_index=True)
    return table[["run", *table.columns.drop("run")]]


def _run_description(run: Run) -> dict[str, str]:
    return {
        "What it is": str(run.config.get("description", "")),
        "Agents": str(len(run.agents) // max(len(run.seeds), 1)),
        "Seeds": ", ".join(map(str, run.seeds)),
        "Folder": run.folder.name,
    }


def flatten_to_text(config: Mapping[str, Any]) -> dict[str, str]:
    """{"agents": {"budget": 6}} as {"agents.budget": "6"}."""
    return {key: str(value) for key, value in flatten(config).items()}


def _tuning_warning(run: Run) -> str | None:
    """A warning where a run was not measured on the test set."""
    on = run.config.get("evaluate_on", "test")
    return None if on != "tuning" else f"{run.title} was measured on {on} data, not on the test set"


def _count_clusters(run: Run) -> int:
    return int(run.agents.cluster.nunique())


def _count_benign(run: Run) -> int:
    """How many benign agents a seed has."""
    return int((~run.agents.malicious).groupby(run.agents.seed).sum().max())


def slug(text: str) -> str:
    """A title as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
