"""All tables and figures of some runs as files, and one HTML page that holds them all and needs no other file."""

import base64
import html
import io
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from fedcb2o.errors import RunError
from fedcb2o.records import Run, atomic_write, last_round, summary
from fedcb2o.report.figures import curves, figure6, sample_images, source_counts, weight_matrix
from fedcb2o.report.render import html_text, readable, to_html, to_latex, to_markdown
from fedcb2o.report.tables import (
    METRICS,
    attacked,
    by_source_count,
    compare,
    labels,
    pair_statistics,
    told_seeds,
    unchecked,
    unfinished,
    without_twins,
)

OVERALL = (
    "Each number is the mean over benign agents. Net attack "
    "success is the rate minus that of the clean twin, the same run whose malicious agents train on true labels. "
    "Malicious weight is what benign agents give to malicious peers, over the last fifth of the rounds."
)
WORST = "As above, for the worst benign agent of each seed: the lowest accuracy, the highest attack success."
TENTH = "As above, for the mean of the worst tenth of the benign agents."
COUNTS = (
    "In percent, by how many samples of the source class an agent has in its validation data, over all benign agents "
    "of all seeds. An agent that has none cannot see the attack; where there is no bar and no number, no agent has so "
    "many."
)
FIGURE6 = (
    "Left: the share of rounds in which a benign agent received a given peer's model; the dotted line is what choosing "
    "at random would give. Right: that share times the peer's mean weight, scaled so that the bars of a cluster sum to "
    "100%. Numbers are percent per available peer over all rounds; the thin lines are ± a standard deviation over "
    "seeds. A method that filters attackers has short dark orange bars on the right."
)
CURVES = "Mean over benign agents; the bands are ± a standard deviation over seeds."
SAMPLES = "The same images as the agents of each cluster see them."
MATRIX = (
    "The weight that each agent (row) gives to each peer's model (column), mean over the last fifth of the rounds and "
    "over seeds; on the diagonal, to its own model. Darker is more. Thick lines part clusters, thin ones benign from "
    "malicious agents."
)
STYLE = """
body { font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; color: #1d1d1f; background: #fff;
       max-width: 62rem; margin: 3rem auto 6rem; padding: 0 1.5rem; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 3rem 0 .6rem; }
p { max-width: 46rem; } .note { color: #6e6e73; font-size: .9rem; margin: .5rem 0 0; }
.warning { border-left: 3px solid #D55E00; padding: .3rem 0 .3rem .8rem; margin: .6rem 0; }
img { max-width: 100%; display: block; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; margin: .6rem 0; }
th, td { padding: .32rem .9rem; text-align: right; vertical-align: top; border-bottom: 1px solid #ececee; }
td { white-space: nowrap; } th { font-weight: 600; } tr > :first-child { text-align: left; padding-left: 0; }
tbody th { font-weight: 400; } thead th { border-bottom: 1.5px solid #1d1d1f; }
sub { font-size: .7em; line-height: 0; } details { margin: .5rem 0; } summary { cursor: pointer; }
"""


def report(runs: Sequence[Run], out: Path) -> list[Path]:
    """Write the tables (CSV, Markdown, LaTeX), the figures (PNG) and `report.html` into `out`; return their paths.

    Runs without an evaluated round are left out and named on the page. Raises RunError if none has one, or if a file
    cannot be written.
    """
    ready = [run for run in runs if not last_round(run.records).empty]
    shown = without_twins(ready)
    if not shown:
        raise RunError("no run here has an evaluated round yet, so there is nothing to report: let one go on first")
    page, names = new_page(out), labels(shown)
    for sentence in filter(None, [*map(unfinished, runs), *map(unchecked, runs), *map(_tuning, shown)]):
        page.body.append(f'<p class="warning">{html_text(sentence)}.</p>')
    page.table("Results", "results", compare(ready), f"{told_seeds(ready)} {OVERALL}")
    page.figure("Over the rounds", "curves", curves(shown), CURVES)
    under_attack = [run for run in shown if attacked(run)]
    page.figure("Who is received, and with what weight", "figure6", figure6(*(under_attack or shown)), FIGURE6)
    page.table("The worst benign agent", "worst", compare(ready, over="worst"), WORST)
    if any(_benign(run) > 10 for run in shown):  # of 10 agents the worst tenth is the worst one
        page.table("The worst tenth of the benign agents", "worst-tenth", compare(ready, over="worst_tenth"), TENTH)
    page.figure("By source-class samples in the validation data", "source-count", source_counts(shown), COUNTS)
    counts = _stack(names, map(by_source_count, shown))
    if len(counts):
        page.table("The same as a table", "source-count", readable(counts, empty=METRICS), "In percent.", fold=True)
    for i, (run, name) in enumerate(zip(shown, names, strict=True), start=1):
        page.figure(f"Weights between agents: {name}", f"weights-{i}-{slug(name)}", weight_matrix(run), MATRIX)
    page.figure("Samples", "samples", _samples(page, max(shown, key=_clusters)), SAMPLES)
    page.file("seeds.csv", _stack(names, [summary(run.records) for run in shown]).to_csv(index=False))
    page.file("pairs.csv", _stack(names, map(pair_statistics, shown)).to_csv(index=False))
    page.settings(names, shown)
    page.write("report.html", f"fedcb2o: {', '.join(names)}")
    return page.paths


def _samples(page: "Page", run: Run) -> Figure | None:
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

    def file(self, name: str, content: str | bytes) -> None:
        """Write a file, and make the folder that its name begins with, if any."""
        (self.out / name).parent.mkdir(parents=True, exist_ok=True)
        atomic_write(self.out / name, content.encode() if isinstance(content, str) else content)
        self.paths.append(self.out / name)

    def table(self, title: str, name: str, table: pd.DataFrame, caption: str, *, fold: bool = False) -> None:
        """A table on the page, folded away if asked, and as CSV, Markdown and LaTeX."""
        self.file(f"{name}.csv", table.to_csv())
        self.file(f"{name}.md", to_markdown(table))
        self.file(f"{name}.tex", to_latex(table))
        body = f'<div class="scroll">{to_html(table)}</div><p class="note">{html_text(caption)}</p>'
        head = f"<details><summary>{html_text(title)}</summary>" if fold else f"<h2>{html_text(title)}</h2>"
        self.body.append(head + body + "</details>" * fold)

    def figure(self, title: str, name: str, figure: Figure | None, caption: str) -> None:
        """A figure on the page and as PNG; nothing where there is none."""
        if figure is None:
            return
        content, shown = image(title, figure)
        self.file(f"{name}.png", content)
        self.body.append(f'<h2>{html_text(title)}</h2>{shown}<p class="note">{html_text(caption)}</p>')

    def settings(self, names: Sequence[str], runs: Sequence[Run]) -> None:
        """What the runs were asked to do: first where they differ, then what they share."""
        flat = pd.DataFrame({name: flattened(run.config) for name, run in zip(names, runs, strict=True)}).fillna("–")
        flat = flat.drop(index=["name", "title", "description"], errors="ignore")
        differ = flat.nunique(axis="columns") > 1
        if differ.any():
            self.body.append(f'<h2>Settings that differ</h2><div class="scroll">{to_html(flat[differ])}</div>')
        alike = flat.loc[~differ].iloc[:, :1].set_axis(["value"], axis="columns")
        kind = "All settings" if len(runs) == 1 else "Settings that all runs share"
        self.body.append(f"<details><summary>{kind}</summary>{to_html(alike)}</details>")
        self.body.append("<h2>Runs</h2>" + "".join(_about(run, name) for name, run in zip(names, runs, strict=True)))

    def write(self, name: str, title: str) -> None:
        """Write the page itself."""
        self.file(name, document(title, self.body))


def image(title: str, figure: Figure) -> tuple[bytes, str]:
    """A figure as PNG, and the same inside a page that needs no other file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=200)
    data = base64.b64encode(buffer.getvalue()).decode()
    width = round(100 * figure.get_figwidth())
    return buffer.getvalue(), f'<img src="data:image/png;base64,{data}" width="{width}" alt="{html_text(title)}">'


def document(title: str, body: Sequence[str]) -> str:
    """A whole page under its title, from the parts of its body, which are HTML."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><style>{STYLE}</style>'
    start = f'<!doctype html>\n<html lang="en"><head><title>{html.escape(title)}</title>{head}</head>'
    inside = f"<h1>{html_text(title)}</h1>\n" + "\n".join(body)
    return f"{start}\n<body>{inside}</body></html>\n"


def new_page(out: Path) -> Page:
    """A page in a folder, which is made; raises RunError where it cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make the folder {out} ({error.strerror}): name another with --out") from error
    return Page(out)


def _stack(names: Sequence[str], tables: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """The tables of all runs as one; its first column names the run."""
    named = [table.assign(run=run) for run, table in zip(names, tables, strict=True)]
    table = pd.concat([table for table in named if len(table)] or named, ignore_index=True)
    return table[["run", *table.columns.drop("run")]]


def _about(run: Run, name: str) -> str:
    seeds = ", ".join(map(str, run.seeds))
    about = f"{run.config.get('description', '')} {len(run.agents) // max(len(run.seeds), 1)} agents, seeds {seeds}."
    return f"<p><b>{html_text(name)}</b> ({html_text(run.folder.name)}). {html_text(about.strip())}</p>\n"


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """{"agents": {"budget": 6}} as {"agents.budget": "6"}."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        flat |= flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: str(value)}
    return flat


def _tuning(run: Run) -> str | None:
    """A warning where a run was not measured on the test set."""
    on = run.config.get("evaluate_on", "test")
    return None if on != "tuning" else f"{run.title} was measured on {on} data, not on the test set"


def _clusters(run: Run) -> int:
    return int(run.agents.cluster.nunique())


def _benign(run: Run) -> int:
    """How many benign agents a seed has."""
    return int((~run.agents.malicious).groupby(run.agents.seed).sum().max())


def slug(text: str) -> str:
    """A title as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
