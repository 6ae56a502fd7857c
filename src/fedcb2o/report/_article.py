"""Tables and figures of a grid for an article: LaTeX, PDF and PNG."""

import re
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from fedcb2o.errors import ConfigError
from fedcb2o.records import slug
from fedcb2o.report import _regret
from fedcb2o.report._figures import Curve, attack_panels
from fedcb2o.report._heat_map import draw_heat_map
from fedcb2o.report._page import Page
from fedcb2o.report._panels import draw_panels
from fedcb2o.report._statistics import CONFIDENCE, seed_statistics
from fedcb2o.report._table_formats import latex_text, shorten_label
from fedcb2o.report.grid_results import BASELINES, GridResults
from fedcb2o.report.grid_tables import SettingResults

Intervals = Literal["none", "std", "ci"]

_MAX_PRECISION = 6
# Letters of the size \small in 200 and in 400 points, as wide as a column and a page of articles.
_COLUMN_LETTERS, _PAGE_LETTERS = 43, 86
_GAP_LETTERS = 3  # between two columns of a table
_PAGE_LINES = 42
_INTERVAL_TEXTS = {
    "none": "",
    "std": " $\\pm$ standard deviation over seeds",
    "ci": f" with {CONFIDENCE:.0%} confidence intervals over seeds".replace("%", r"\%"),
}


@dataclass(frozen=True)
class ArticleForm:
    """Form of an article's tables and figures.

    Attributes:
        intervals: What follows a mean: "none", "std" for the standard deviation over seeds, or "ci"
            for the interval of the mean.
        precision: Decimals of a value, from 0 to 6.
        baselines: Show the columns without attack, too.
    """

    intervals: Intervals = "std"
    precision: int = 1
    baselines: bool = False

    def __post_init__(self) -> None:
        """Raise ConfigError for a precision out of range."""
        if not 0 <= self.precision <= _MAX_PRECISION:
            raise ConfigError(
                f"the precision must be from 0 to {_MAX_PRECISION}, got {self.precision}"
            )


def write_article(page: Page, view: SettingResults, start: str, form: ArticleForm) -> None:
    """Write each compared metric and its regret as a LaTeX table and a heat map, and its curves."""
    folder = f"{start}article/"
    if view.setting:
        folder += f"{slug(view.setting)}/"
    for value, title in view.compared.items():
        columns = view.columns(value) if form.baselines else view.attacks_with(value)
        if not columns:
            continue
        short = view.shortfalls(value)
        is_high_worse = view.is_high_worse(value)
        tables = {
            value: (title, seed_statistics(view.rows, value), is_high_worse),
            f"{value}-regret": (f"Regret in {title.lower()}", _regret.regrets(short), True),
        }
        for stem, (caption, statistics, is_low_best) in tables.items():
            name = stem.replace("_", "-")
            label = f"tab:{slug('-'.join(filter(None, (view.setting, name))))}"
            text = _latex_table(view, value, statistics, columns, caption, label, form, is_low_best)
            page.write_file(f"{folder}{name}.tex", text)
            means = view.pivot(statistics["mean"], columns)
            spreads = view.pivot(_spreads(statistics, form), columns)
            shades = view.pivot(_regret.regrets(short)["mean"], columns)
            scale = 1.0 if view.results.info(value).is_percent else 0.01  # the map shows percent
            marked = view.exceeded_cells(columns)
            figure = draw_heat_map(scale * means, scale * spreads, shades=shades, marked=marked)
            page.write_figure(f"{folder}{name}", figure)
        curves = _curves_by_column(view, value, columns)
        if curves:
            figure = draw_panels(attack_panels(curves, value))
            page.write_figure(f"{folder}{value.replace('_', '-')}-curves", figure)


def missing_curves_note(results: GridResults) -> str | None:
    """Return why the article of a grid has no curves, and the remedy; None if it has some."""
    if results.curves.empty:
        return "`article` has no curves, which need the runs: summary.csv has the last round only"
    if results.curves["round"].groupby(results.curves.setting).nunique().max() > 1:
        return None
    return (
        "`article` has no curves, because the runs were evaluated in one round: run the grid with "
        "`evaluate_every` smaller than `rounds`"
    )


def _curves_by_column(
    view: SettingResults, value: str, columns: list[str]
) -> dict[str, list[Curve]]:
    """Select one curve per defence for each column with several evaluated rounds."""
    table = view.results.curves
    if value not in table:
        return {}
    table = table[table.setting == view.setting].dropna(subset=value)
    names = table.attack.where(table.role == "attack", table.role.map(BASELINES))
    curves = {}
    for column in columns:
        shown = table[names == column]
        if shown["round"].nunique() > 1:
            curves[column] = [
                _defence_curve(shown[shown.defence == name], name) for name in view.results.defences
            ]
    return curves


def _defence_curve(table: pd.DataFrame, name: str) -> Curve:
    switch = 0 if table.empty else int(table.criterion_from_round.max())
    return Curve(shorten_label(name).replace("$", r"\$"), table, switch)


def _spreads(statistics: pd.DataFrame, form: ArticleForm) -> "pd.Series[Any]":
    if form.intervals == "none":
        return statistics["mean"] * np.nan
    if form.intervals == "std":
        return statistics.deviation
    return (statistics.high - statistics.low) / 2


def _latex_table(
    view: SettingResults,
    value: str,
    statistics: pd.DataFrame,
    columns: list[str],
    caption: str,
    label: str,
    form: ArticleForm,
    is_low_best: bool,
) -> str:
    """Return a floating table, which needs the package booktabs. The best means are bold."""
    is_percent = view.results.info(value).is_percent
    texts = _cells(statistics, columns, form, 100 if is_percent else 1, is_low_best)
    rows = view.pivot(texts, columns).astype(object).fillna("--")
    exceeded = view.exceeded_cells(columns).reindex(rows.index)
    rows = rows.mask(exceeded, rows + r"$^\dagger$")
    note = ""
    if exceeded.to_numpy().any():
        note = r" $^\dagger$: an agent received more malicious models than the rule assumes."
    where = f", {view.setting}" if view.setting else ""
    unit = ", percent" if is_percent else ""
    seeds = len(view.results.seeds)
    head = latex_text(f"{view.results.title}{where}: {caption[0].lower()}{caption[1:]}{unit}")
    # Too few seeds have neither deviations nor intervals, and the caption must not name any.
    has_spreads = bool(_spreads(statistics, form).notna().any())
    spread = _INTERVAL_TEXTS[form.intervals] * has_spreads
    numbers = f"mean{spread}, {seeds} seed{'s' * (seeds > 1)}"
    blocks = _blocks(rows, _COLUMN_LETTERS)
    environment = "table"
    if len(blocks) > 1:
        blocks = _blocks(rows, _PAGE_LETTERS)
        environment = "table*"
    count = max(1, _PAGE_LINES // (len(rows) + 1))  # blocks in one table
    lines = []
    for first in range(0, len(blocks), count):
        part = blocks[first : first + count]
        caption = f"{head}; {numbers}. Best in bold.{note}"
        lines += [
            rf"\begin{{{environment}}}",
            r"\centering",
            r"\small",
            rf"\caption{{{f'{head}, continued.' if first else caption}}}",
            rf"\label{{{label}{f'-{first // count + 1}' if first else ''}}}",
            rf"\begin{{tabular}}{{@{{}}l{'r' * max(block.shape[1] for block in part)}@{{}}}}",
            r"\toprule",
            "\n\\midrule\n".join(map(_block_lines, part)),
            r"\bottomrule",
            r"\end{tabular}",
            rf"\end{{{environment}}}",
            "",
        ]
    return "\n".join(lines)


def _blocks(rows: pd.DataFrame, letters: int) -> list[pd.DataFrame]:
    """Divide the columns into blocks, one below the other, of at most `letters` in a line."""
    names = max(len(str(name)) for name in rows.index)
    parts: list[list[Any]] = []
    width = letters
    for column in rows:
        texts = [str(column), *(re.sub(r"\\[a-z]+", "x", text) for text in rows[column])]
        needed = _GAP_LETTERS + max(len(re.sub(r"[${}^]", "", text)) for text in texts)
        if width + needed > letters:
            parts.append([])
            width = names
        parts[-1].append(column)
        width += needed
    return [rows[part] for part in parts]


def _block_lines(rows: pd.DataFrame) -> str:
    """Return the lines of some columns of a table, below their names."""
    head = " & ".join(["Defence", *map(latex_text, map(str, rows))])
    body = (
        " & ".join([latex_text(str(name)), *row])
        for name, row in zip(rows.index, rows.to_numpy().tolist(), strict=True)
    )
    return "\n".join([rf"{head} \\", r"\midrule", *(rf"{line} \\" for line in body)])


def _cells(
    statistics: pd.DataFrame,
    columns: list[str],
    form: ArticleForm,
    scale: float,
    is_low_best: bool,
) -> "pd.Series[Any]":
    """Format means with what follows them; equal printed means are equally bold."""

    def number(x: float) -> str:
        return f"{scale * x:z.{form.precision}f}"

    texts: dict[tuple[str, str], str] = {}
    for column in columns:
        part = statistics[statistics.index.get_level_values("attack") == column]
        if part.empty:
            continue
        best = number(part["mean"].min() if is_low_best else part["mean"].max())
        for key, *values in part[["mean", "deviation", "low", "high"]].itertuples(name=None):
            mean, deviation, low, high = map(float, values)
            text = rf"\textbf{{{number(mean)}}}" if number(mean) == best else number(mean)
            if form.intervals == "std" and np.isfinite(deviation):
                text += rf" $\pm$ {number(deviation)}"
            elif form.intervals == "ci" and np.isfinite(low):
                text += f" [{number(low)}, {number(high)}]"
            texts[key] = text
    index = pd.MultiIndex.from_tuples(texts, names=["defence", "attack"])
    return pd.Series(list(texts.values()), index=index, dtype=object)
