r"""Tables as text: for the terminal (rich), Markdown, LaTeX and HTML."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
from markupsafe import Markup
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fedcb2o.report._html import render_block
from fedcb2o.report.tables import LABELS

# A value with its interval, the case it belongs to, and a mark.
_VALUE_PATTERN = re.compile(r"(\S+) (\[.*?\])( \(.*\))?( [*†])?")
_PROSE_LENGTH = 40  # a column with a longer cell that is no value is prose
_MAX_LABEL = 60  # characters of a run's label in a figure or a table for the terminal
_SUFFIX_LABELS = {"_worst_tenth": ", worst tenth", "_worst": ", worst agent", "": ""}
_LATEX_COMMANDS = {
    "–": "--",
    "−": "$-$",
    "†": "$^\\dagger$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "…": r"\dots ",
}
_HEADINGS = {
    **{
        metric + suffix: label + words
        for metric, label in LABELS.items()
        for suffix, words in _SUFFIX_LABELS.items()
    },
    "run": "Run",
    "samples": "Source-class samples in validation",
    "cluster": "Selecting cluster",
    "peer": "Peer",
    "relation": "Cluster of the peer",
    "mean_weight": "Mean weight when received",
    "share": "Share of weight per peer",
}


def to_readable(table: pd.DataFrame, *, empty: Sequence[str] = ()) -> pd.DataFrame:
    """Convert a table of numbers to text under readable headings.

    Args:
        table: Table with metrics as fractions of 1 and clusters from 0.
        empty: Columns to drop where all values are missing.

    Returns:
        Table of text with the first column as index, floats in percent and clusters from 1.
    """
    unused = [name for name in empty if name in table and table[name].isna().all()]
    table = table.drop(columns=unused)
    columns = {}
    for name in table.columns:
        values = table[name]
        if name == "cluster":
            values = values + 1
        if pd.api.types.is_float_dtype(values):
            texts = ["–" if pd.isna(value) else f"{100 * value:.2f}" for value in values]
        else:
            texts = [str(value) for value in values]
        columns[name] = texts
    headings = {name: _HEADINGS.get(name, str(name).capitalize()) for name in columns}
    first = headings[str(table.columns[0])]
    return pd.DataFrame(columns).rename(columns=headings).set_index(first)


def shorten_label(label: str) -> str:
    """Cut a label to 60 characters for figures and terminals by leaving out its middle."""
    return label if len(label) <= _MAX_LABEL else f"{label[: _MAX_LABEL - 20]} … {label[-17:]}"


def to_rich(
    table: pd.DataFrame, *, title: str | None = None, caption: str | None = None, width: int = 80
) -> Table:
    """Convert a table of text to a table for the terminal.

    A table that is too wide is transposed. If it is still too wide, intervals go on a line of their
    own.

    Args:
        table: Table of text; the index is its first column.
        title: Title above the table.
        caption: Caption below the table.
        width: Width of the terminal in characters.

    Returns:
        A rich table.
    """
    table = table.rename(index=shorten_label, columns=shorten_label)
    if min(_min_table_width(table), _min_table_width(table.T)) > width:
        table = table.map(lambda cell: str(cell).replace(" [", "\n["))
    if _min_table_width(table) > width >= _min_table_width(table.T):
        table = table.T

    drawn = Table(
        title=title, caption=caption, title_justify="left", caption_justify="left", box=SIMPLE_HEAD
    )
    drawn.padding = (0, 1, 0, 0)
    drawn.pad_edge = False
    drawn.show_edge = False
    for i, (name, column_width) in enumerate(
        zip(_header_row(table), _column_widths(table, width), strict=True)
    ):
        drawn.add_column(Text(name), justify="right" if i else "left", width=column_width)
    for row in _body_rows(table):
        drawn.add_row(*map(Text, row))
    return drawn


def _column_widths(table: pd.DataFrame, width: int) -> list[int]:
    """Compute column widths: numbers never wrap, headings may, labels get the rest."""
    header = _header_row(table)
    widths = _min_column_widths(table)
    full_widths = [max(pair) for pair in zip(widths, map(len, header[1:]), strict=True)]
    longest = max([len(header[0]), *map(len, map(str, table.index))])
    if longest + sum(full_widths) + 2 * len(full_widths) <= width:
        widths = full_widths
    rest = width - sum(widths) - 2 * len(widths)
    return [max(min(longest, rest), _longest_word(table.index)), *widths]


def to_markdown(table: pd.DataFrame) -> str:
    """Convert a table of text to Markdown.

    Args:
        table: Table of text; the index is its first column.

    Returns:
        One line per row.
    """
    header = [name.replace("|", "\\|") for name in _header_row(table)]
    lines = [header, ["---", *["---:"] * len(table.columns)]]
    for row in _body_rows(table):
        lines.append([cell.replace("|", "\\|") for cell in row])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def to_latex(table: pd.DataFrame) -> str:
    """Convert a table of text to LaTeX for the package booktabs.

    Args:
        table: Table of text; the index is its first column.

    Returns:
        A tabular environment.
    """
    header = " & ".join(map(latex_text, _header_row(table))).strip()
    rows = [" & ".join(map(latex_text, row)) + r" \\" for row in _body_rows(table)]
    begin = rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}"
    lines = [begin, r"\toprule", header + r" \\", r"\midrule", *rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def to_html(table: pd.DataFrame) -> Markup:
    """Convert a table of text to HTML.

    Args:
        table: Table of text; the index is its first column.

    Returns:
        Markup of the table.
    """
    rows = _body_rows(table)
    columns = list(zip(*rows, strict=True)) or [()] * (table.shape[1] + 1)
    is_prose = [any(map(_is_prose, column)) for column in columns]
    body = []
    for label, *texts in rows:
        body.append((label, list(map(_cell, texts, is_prose[1:]))))
    return render_block("table", list(zip(_header_row(table), is_prose, strict=True)), body)


def _is_prose(text: str) -> bool:
    return len(text) > _PROSE_LENGTH and not _VALUE_PATTERN.fullmatch(text)


def _cell(text: str, is_prose: bool) -> dict[str, Any]:
    """Split a cell into its value and the lines below it."""
    cell: dict[str, Any] = {"text": text, "lines": [], "css_class": ""}
    match = _VALUE_PATTERN.fullmatch(text)
    if match:
        value, interval, case, mark = (part or "" for part in match.groups())
        cell["text"] = value + mark
        cell["lines"] = list(filter(None, (interval, case.strip())))
    elif is_prose:
        cell["css_class"] = "text"
    return cell


def latex_text(text: str) -> str:
    """Escape text for LaTeX and set T_G as the paper does."""
    text = text.replace("\\", r"\textbackslash ")
    text = re.sub(r"([%&#_${}])", r"\\\1", text)
    for character, command in _LATEX_COMMANDS.items():
        text = text.replace(character, command)
    text = text.replace("~", r"\textasciitilde ").replace("^", r"\textasciicircum ")
    return text.replace(r"T\_G", "$T_G$")


def _longest_word(texts: Iterable[object]) -> int:
    return max((len(word) for text in texts for word in str(text).split()), default=0)


def _min_column_widths(table: pd.DataFrame) -> list[int]:
    """Compute the smallest width of each column in which no cell wraps."""
    widths = []
    for name in table:
        lines = [line for cell in table[name] for line in str(cell).splitlines()]
        widths.append(max([_longest_word([name]), *map(len, lines)]))
    return widths


def _min_table_width(table: pd.DataFrame) -> int:
    return _longest_word(table.index) + sum(_min_column_widths(table)) + 2 * table.shape[1]


def _header_row(table: pd.DataFrame) -> list[str]:
    return [str(table.index.name or ""), *map(str, table.columns)]


def _body_rows(table: pd.DataFrame) -> list[list[str]]:
    rows = zip(table.index, table.itertuples(index=False), strict=True)
    return [[str(label), *map(str, row)] for label, row in rows]
