"""A table as text: for the terminal (rich), Markdown, LaTeX and HTML. Numbers that are fractions become percent."""

import html
import re
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fedcb2o.report.tables import LABELS

_VALUE_PATTERN = re.compile(
    r"(\S+) (\[.*?\])( \(.*\))?( [*†])?"
)  # with its interval, the case it is of, and a mark
_PROSE_LENGTH, _TEXT_CLASS = (
    40,
    ' class="text"',
)  # a column is prose where a cell without a value has more characters
_SUFFIX_LABELS = {"_worst_tenth": ", worst tenth", "_worst": ", worst agent", "": ""}
_HEADINGS = {
    **{
        metric + end: label + words
        for metric, label in LABELS.items()
        for end, words in _SUFFIX_LABELS.items()
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
    """The same table as text under readable headings, its first column as index; floats in percent, clusters from 1.

    Columns named in `empty` are dropped where they hold nothing.
    """
    table = table.drop(
        columns=[name for name in empty if name in table and table[name].isna().all()]
    )
    columns = {}
    for name in table.columns:
        values = table[name] + 1 if name == "cluster" else table[name]
        if pd.api.types.is_float_dtype(values):
            columns[name] = ["–" if pd.isna(value) else f"{100 * value:.2f}" for value in values]
        else:
            columns[name] = [str(value) for value in values]
    heading = {name: _HEADINGS.get(name, str(name).capitalize()) for name in columns}
    return pd.DataFrame(columns).rename(columns=heading).set_index(heading[str(table.columns[0])])


def to_rich(
    table: pd.DataFrame, *, title: str | None = None, caption: str | None = None, width: int = 80
) -> Table:
    """The table for a terminal of `width` characters, the index first.

    Where it does not fit, it is turned on its side, and if need be intervals go on a line of their own.
    """
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
    # Numbers never wrap; headings do where there is no room, and labels have what the numbers leave.
    widths = _min_column_widths(table)
    whole = [
        max(pair)
        for pair in zip(_min_column_widths(table), map(len, _header_row(table)[1:]), strict=True)
    ]
    longest = max([len(_header_row(table)[0]), *map(len, map(str, table.index))])
    least = _longest_word(table.index)
    if longest + sum(whole) + 2 * len(whole) <= width:
        widths = whole
    label = max(min(longest, width - sum(widths) - 2 * len(widths)), least)
    for i, (name, wide) in enumerate(zip(_header_row(table), [label, *widths], strict=True)):
        drawn.add_column(Text(name), justify="right" if i else "left", width=wide)
    for row in _body_rows(table):
        drawn.add_row(*map(Text, row))
    return drawn


def to_markdown(table: pd.DataFrame) -> str:
    """The table in Markdown; the index is its first column."""
    head = [name.replace("|", "\\|") for name in _header_row(table)]
    rows = [[cell.replace("|", "\\|") for cell in row] for row in _body_rows(table)]
    lines = [head, ["---", *["---:"] * len(table.columns)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def to_latex(table: pd.DataFrame) -> str:
    """The table in LaTeX, for the package booktabs; the index is its first column."""
    head = " & ".join(map(_latex_text, _header_row(table))).strip()
    rows = [" & ".join(map(_latex_text, row)) + r" \\" for row in _body_rows(table)]
    begin = rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}"
    return "\n".join(
        [
            begin,
            r"\toprule",
            head + r" \\",
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def to_html(table: pd.DataFrame, shades: pd.DataFrame | None = None) -> str:
    """The table in HTML; the index is its first column. `shades`, of the same cells, colour them: from 1, worst, to -1,
    best."""
    rows = _body_rows(table)
    dark = np.zeros(table.shape) if shades is None else shades.to_numpy(float)
    prose = [
        any(len(row[i]) > _PROSE_LENGTH and not _VALUE_PATTERN.fullmatch(row[i]) for row in rows)
        for i in range(table.shape[1] + 1)
    ]
    names = zip(_header_row(table), prose, strict=True)
    head = "".join(
        f'<th scope="col"{_TEXT_CLASS * long}>{html_text(name)}</th>' for name, long in names
    )
    body = "".join(
        f'<tr><th scope="row">{html_text(first)}</th>{"".join(map(_cell_html, rest, own, prose[1:]))}</tr>\n'
        for (first, *rest), own in zip(rows, dark, strict=True)
    )
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>\n"


def _cell_html(text: str, shade: float, prose: bool) -> str:
    """A cell; of a value with its interval, and the case in which it is reached, each has a line of its own."""
    look = (
        f' class="{"worse" if shade > 0 else "better"}" style="--shade:{abs(shade):.2f}"'
        if abs(shade) > 0.005
        else ""
    )
    if parts := _VALUE_PATTERN.fullmatch(text):
        value, interval, case, mark = (html_text(part or "") for part in parts.groups())
        below = "".join(f" <small>{line}</small>" for line in (interval, case.strip()) if line)
        return f"<td{look}>{value}{mark}{below}</td>"
    return f"<td{look or _TEXT_CLASS * prose}>{html_text(text)}</td>"


def html_text(text: str) -> str:
    """Text for HTML, with the paper's T_G set as it is there."""
    return html.escape(text).replace("T_G", "<i>T</i><sub>G</sub>")


def _latex_text(text: str) -> str:
    """Text for LaTeX, with the paper's T_G set as it is there."""
    text = text.replace("\\", r"\textbackslash ")
    text = re.sub(r"([%&#_${}])", r"\\\1", text.replace("–", "--"))
    return text.replace(r"T\_G", "$T_G$")


def _longest_word(texts: Iterable[object]) -> int:
    return max((len(word) for text in texts for word in str(text).split()), default=0)


def _min_column_widths(table: pd.DataFrame) -> list[int]:
    """The least width of each column: no cell wraps, a heading does at its spaces."""
    cells = {
        name: [line for cell in table[name] for line in str(cell).splitlines()] for name in table
    }
    return [max([_longest_word([name]), *map(len, lines)]) for name, lines in cells.items()]


def _min_table_width(table: pd.DataFrame) -> int:
    return _longest_word(table.index) + sum(_min_column_widths(table)) + 2 * table.shape[1]


def _header_row(table: pd.DataFrame) -> list[str]:
    return [str(table.index.name or ""), *map(str, table.columns)]


def _body_rows(table: pd.DataFrame) -> list[list[str]]:
    return [
        [str(name), *map(str, row)]
        for name, row in zip(table.index, table.itertuples(index=False), strict=True)
    ]
