"""HTML of a page that needs no other file: how it looks, by day and by night, wide and narrow; its figures and tables.

Figures are drawn into the page as SVG, in which every grey is a mix of the page's ink and paper, so that they follow
the reader's light or dark mode. The only script sorts tables; the page's policy lets a browser run no other.
"""

import base64
import hashlib
import html
import io
import re
from collections.abc import Sequence

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from fedcb2o.report.alt_text import describe_figure
from fedcb2o.report.table_formats import html_text, to_html

STYLESHEET = """
:root { color-scheme: light dark; --ink: #1d1d1f; --paper: #fff; --dim: #62626a; --line: #e4e4e8;
        --link: #0060a8; --worse: 213 94 0; --better: 140 110 190; }
@media (prefers-color-scheme: dark) { :root { --ink: #e9e9ec; --paper: #17181b; --dim: #a3a3ab; --line: #37383d;
        --link: #7cc0f5; --worse: 168 66 0; --better: 94 72 145; } }
html { scroll-padding-top: 1rem; }
body { font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; color: var(--ink); background: var(--paper);
       max-width: 79rem; margin: 3rem auto 6rem; padding: 0 1.5rem; }
h1 { font-size: 1.7rem; margin: 0 0 .6rem; line-height: 1.25; } h2 { font-size: 1.3rem; margin: 3rem 0 .6rem; }
h3 { font-size: 1.08rem; margin: 2.4rem 0 .5rem; } h4 { font-size: 1rem; margin: 1.2rem 0 .4rem; }
p { max-width: 46rem; } a { color: var(--link); } code { overflow-wrap: anywhere; }
.note { color: var(--dim); font-size: .9rem; margin: .5rem 0 0; }
.warning { border-left: 3px solid #D55E00; padding: .3rem 0 .3rem .8rem; margin: .6rem 0; }
nav { margin: 1.2rem 0; } nav ul { list-style: none; margin: 0; padding: 0; columns: 17rem; }
nav ul ul { padding-left: 1.1rem; columns: auto; font-size: .92rem; } nav li { break-inside: avoid-column; }
nav li:has(li) { break-inside: auto; }
.up { position: fixed; right: .8rem; bottom: .8rem; padding: .25rem .7rem; border-radius: 1rem; font-size: .85rem;
      background: var(--paper); border: 1px solid var(--line); }
figure { margin: 0; } .panels { display: flex; flex-wrap: wrap; gap: .8rem 1.2rem; align-items: flex-start; }
.panels > * { flex: 0 1 auto; min-width: 0; max-width: 100%; }
svg { width: 100%; height: auto; display: block; color: var(--ink); fill: currentColor; } img { max-width: 100%; }
.scroll { overflow-x: auto; max-width: 100%; margin: .6rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .32rem .8rem; text-align: right; vertical-align: top; border-bottom: 1px solid var(--line); }
tr > :first-child { text-align: left; padding-left: 0; position: sticky; left: 0; background: var(--paper); }
th { font-weight: 600; } tbody th { font-weight: 400; } thead th { border-bottom: 1.5px solid var(--ink); }
thead th { vertical-align: bottom; } td { white-space: nowrap; } td.text { white-space: normal; }
tr > .text { text-align: left; }
td.worse { background: rgb(var(--worse) / var(--shade)); } td.better { background: rgb(var(--better) / var(--shade)); }
td small { display: block; font-size: .78em; line-height: 1.25; }
.many th, .many td { padding: .25rem .4rem; font-size: .82rem; } .many tr > :first-child { padding-left: 0; }
th button { all: unset; cursor: pointer; } th button:hover { text-decoration: underline; }
th button::after { content: "\\a0\\2195"; color: var(--dim); font-weight: 400; }
[aria-sort=ascending] button::after { content: "\\a0\\2191"; }
[aria-sort=descending] button::after { content: "\\a0\\2193"; }
:is(button, a, summary, .scroll):focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
sub { font-size: .7em; line-height: 0; } details { margin: .5rem 0; } summary { cursor: pointer; }
@media (max-width: 40rem) { body { margin-top: 1.2rem; padding: 0 1rem; } table { font-size: .8rem; }
        th, td { padding: .3rem; } .many tbody th { max-width: 7.5rem; overflow-wrap: break-word; } }
"""

SORT_SCRIPT = """
// A click on a heading sorts by it: ascending, descending, as it was. What is no number comes last.
for (const th of document.querySelectorAll("thead th")) {
  const body = th.closest("table").tBodies[0], rows = [...body.rows], button = document.createElement("button");
  if (rows.length < 2 || !th.textContent) continue;
  button.append(...th.childNodes);
  th.append(button);
  const key = row => {
    const text = row.cells[th.cellIndex].textContent.replaceAll(",", "");
    const unit = {k: 1e3, M: 1e6, G: 1e9, T: 1e12}[text.match(/ ([kMGT])B$/)?.[1]] ?? 1;
    return text === "best" ? 0 : parseFloat(text) * unit;
  };
  const words = row => row.cells[th.cellIndex].textContent;
  const numbers = rows.some(row => !isNaN(key(row)));
  button.onclick = () => {
    const next = {ascending: "descending", descending: null}[th.getAttribute("aria-sort")], way = next ?? "ascending";
    for (const other of th.parentNode.cells) other.removeAttribute("aria-sort");
    if (next === null) return body.append(...rows);
    th.setAttribute("aria-sort", way);
    const sign = way === "ascending" ? 1 : -1;
    const compare = numbers
      ? (a, b) => isNaN(key(a)) - isNaN(key(b)) || sign * (key(a) - key(b)) || 0
      : (a, b) => sign * words(a).localeCompare(words(b));
    body.append(...[...rows].sort(compare));
  };
}
"""
_SCRIPT_DIGEST = base64.b64encode(hashlib.sha256(SORT_SCRIPT.encode()).digest()).decode()
_CONTENT_POLICY = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{_SCRIPT_DIGEST}'"
TOP_LEVEL = 2  # the level of the headings below the title
_PIXELS_PER_INCH = 100  # of the page for an inch of a figure
_MIN_FIGURE_SCALE, _NARROW_PIXELS = (
    0.6,
    360,
)  # a figure is shrunk to this share of its size, then scrolls; the pixels of a narrow page
_EMPTY_METADATA = dict.fromkeys(
    ("Date", "Creator", "Format", "Type")
)  # metadata that an SVG does without


def render_document(
    title: str, body: Sequence[str], contents: Sequence[tuple[int, str, str]] = ()
) -> str:
    """A whole page under its title, from the parts of its body, which are HTML.

    `contents` are its headings: their levels from 2 on, what they say, and their ids.
    """
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_CONTENT_POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLESHEET}</style>'
    )
    start = (
        f'<!doctype html>\n<html lang="en"><head><title>{html.escape(title)}</title>{head}</head>'
    )
    inside = "\n".join(["<main>", *body, "</main>"])
    if contents:
        inside = f'{_contents(contents)}\n{inside}\n<a class="up" href="#contents">Contents</a>'
    return f"{start}\n<body><h1>{html_text(title)}</h1>\n{inside}\n<script>{SORT_SCRIPT}</script></body></html>\n"


def _contents(headings: Sequence[tuple[int, str, str]]) -> str:
    """A list of links to headings; those below another one are in a list of their own."""
    tree: list[tuple[str, list[str]]] = []
    for level, text, where in headings:
        link = f'<a href="#{where}">{html_text(text)}</a>'
        if level == TOP_LEVEL:
            tree.append((link, []))
        else:
            tree[-1][1].append(f"<li>{link}</li>")
    items = "".join(f"<li>{link}<ul>{''.join(below)}</ul></li>\n" for link, below in tree).replace(
        "<ul></ul>", ""
    )
    return f'<nav id="contents" aria-label="Contents"><ul>{items}</ul></nav>'


def heading_html(level: int, text: str, where: str) -> str:
    """A heading that can be linked to."""
    return f'<h{level} id="{where}">{html_text(text)}</h{level}>'


def caption_html(text: str) -> str:
    """What is said of a table or a figure, below it."""
    return f'<p class="note">{html_text(text)}</p>'


def scrollable_table(table: pd.DataFrame, name: str, shades: pd.DataFrame | None = None) -> str:
    """A table in a frame that scrolls where it is too wide, by keys too; `name` is what a screen reader calls it."""
    name = html.escape(name, quote=True)
    many = " many" * (table.shape[1] > 6)
    return f'<div class="scroll{many}" role="region" aria-label="{name}" tabindex="0">{to_html(table, shades)}</div>'


def to_png(figure: Figure) -> bytes:
    """A figure as a file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=200)
    return buffer.getvalue()


def _to_svg(figure: Figure, name: str) -> str:
    """A figure as a part of a page, in the page's own ink; `name` tells its ids from those of other figures."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", dpi=2 * _PIXELS_PER_INCH, metadata=_EMPTY_METADATA)
    text = buffer.getvalue()
    text = re.sub(
        r"<!--.*?-->|\n\s*",
        lambda m: " " if m[0].isspace() else "",
        text[text.index("<svg") :],
        flags=re.S,
    )
    text = re.sub(r'(?<= id=")|(?<=href="#)|(?<=url\(#)', f"{name}-", text)
    text = re.sub(r"#([0-9a-f]{2})\1\1\b", lambda m: _css_grey(int(m[1], 16) / 255), text)
    width, height = figure.get_size_inches()
    sizes = f"max-width: {_PIXELS_PER_INCH * width:.0f}px; min-width: {_MIN_FIGURE_SCALE * _PIXELS_PER_INCH * width:.0f}px"
    start = (
        f'<svg role="img" aria-label="{html.escape(describe_figure(figure), quote=True)}" '
        f'viewBox="0 0 {72 * width:g} {72 * height:g}" style="{sizes}">'
    )
    return start + text[text.index(">") + 1 :].strip()


def figure_row(figures: Sequence[Figure], name: str) -> str:
    """Figures in a row as far as there is room, else one below the other; `name` as in `svg`."""
    shown = []
    for i, figure in enumerate(figures, start=1):
        width = _PIXELS_PER_INCH * figure.get_figwidth()
        wide = ' class="scroll" tabindex="0"' if _MIN_FIGURE_SCALE * width > _NARROW_PIXELS else ""
        shown.append(
            f'<div{wide} style="width: {width:.0f}px">{_to_svg(figure, f"{name}-{i}")}</div>'
        )
    return f'<div class="panels">{"".join(shown)}</div>'


def _css_grey(brightness: float) -> str:
    """A grey as a mix of ink and paper."""
    share = round(100 * (1 - brightness))
    return {0: "var(--paper)", 100: "var(--ink)"}.get(
        share, f"color-mix(in srgb, var(--ink) {share}%, var(--paper))"
    )
