"""HTML pages that need no other file.

A page inlines the style and the script of `report/static`. Figures are inlined as SVG. Every grey
is a mix of the colours of text and background, so that figures follow the light or dark mode of the
reader. A page has one script; its content policy lets a browser run no other.
"""

import base64
import contextlib
import hashlib
import html
import io
import re
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure

_STATIC = resources.files("fedcb2o.report") / "static"
STYLESHEET = Markup(_STATIC.joinpath("page.css").read_text(encoding="utf-8"))
SORT_SCRIPT = Markup(_STATIC.joinpath("sort_tables.js").read_text(encoding="utf-8"))
EXPLORER_STYLESHEET = Markup(_STATIC.joinpath("explorer.css").read_text(encoding="utf-8"))
EXPLORER_SCRIPT = Markup(_STATIC.joinpath("explorer.js").read_text(encoding="utf-8"))
_PIXELS_PER_INCH = 100
_MIN_FIGURE_SCALE = 0.6  # a narrower column makes the figure scroll
_NARROW_PIXELS = 360  # width of a narrow page
_EMPTY_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))


class Section(NamedTuple):
    """A heading in the contents of a page."""

    text: str
    id: str


def content_policy(script: str) -> Markup:
    """Return the content policy of a page, which lets a browser run one script only."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Markup(
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'"
    )


def typeset(text: str | Markup) -> Markup:
    """Escape text for HTML and set T_G as the paper does."""
    return Markup(escape(text).replace("T_G", Markup("<i>T</i><sub>G</sub>")))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("fedcb2o.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["typeset"] = typeset
    return environment


@cache
def _blocks() -> Any:
    return _environment().get_template("blocks.html.jinja").module


def render_block(name: str, *arguments: object) -> Markup:
    """Render a macro of `templates/blocks.html.jinja`; text is escaped, markup is not."""
    return Markup(str(getattr(_blocks(), name)(*arguments)).strip("\n"))


def render_page(title: str, blocks: Sequence[Markup], sections: Sequence[Section] = ()) -> str:
    """Render a whole page, with contents if there are sections."""
    return (
        _environment()
        .get_template("page.html.jinja")
        .render(
            title=title,
            blocks=blocks,
            sections=sections,
            policy=content_policy(SORT_SCRIPT),
            stylesheet=STYLESHEET,
            script=SORT_SCRIPT,
        )
    )


def render_explorer(**values: Any) -> str:
    """Render the page of the results explorer, with its style and its script."""
    template = _environment().get_template("explorer.html.jinja")
    return template.render(
        policy=content_policy(EXPLORER_SCRIPT),
        stylesheet=STYLESHEET + EXPLORER_STYLESHEET,
        script=EXPLORER_SCRIPT,
        **values,
    )


def render_live(**values: Any) -> str:
    """Render the live page of a run or a grid, which has no script."""
    return _environment().get_template("live.html.jinja").render(stylesheet=STYLESHEET, **values)


@contextlib.contextmanager
def _without_glyph_warnings() -> Iterator[None]:
    """Draw characters that the font lacks, such as emoji, as boxes and without a warning each."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        yield


def to_file(figure: Figure, suffix: Literal["png", "pdf"]) -> bytes:
    """Draw a figure as a file; equal figures give equal bytes."""
    buffer = io.BytesIO()
    metadata = {"CreationDate": None} if suffix == "pdf" else None
    with _without_glyph_warnings(), mpl.rc_context({"pdf.fonttype": 42}):
        figure.savefig(buffer, format=suffix, dpi=200, metadata=metadata)
    return buffer.getvalue()


def figure_row(figures: Sequence[Figure], name: str) -> Markup:
    """Render figures in a row that wraps; `name` begins ids, unique on the page."""
    items = []
    for number, figure in enumerate(figures, start=1):
        width = _PIXELS_PER_INCH * figure.get_figwidth()
        items.append(
            {
                "svg": _to_svg(figure, f"{name}-{number}"),
                "width": f"{width:.0f}",
                "scrolls": _MIN_FIGURE_SCALE * width > _NARROW_PIXELS,
            }
        )
    return render_block("figure_row", items)


def _to_svg(figure: Figure, name: str) -> Markup:
    """Draw a figure as SVG; `name` is the prefix of its ids."""
    buffer = io.StringIO()
    # A salt and empty metadata make the same figure the same bytes each time.
    with mpl.rc_context({"svg.hashsalt": name}), _without_glyph_warnings():
        figure.savefig(buffer, format="svg", dpi=2 * _PIXELS_PER_INCH, metadata=_EMPTY_METADATA)

    text = buffer.getvalue()
    # Inside HTML an XML declaration is no markup.
    text = text[text.index("<svg") :]
    text = re.sub(
        r"<!--.*?-->|\n\s*", lambda match: " " if match[0].isspace() else "", text, flags=re.DOTALL
    )
    text = re.sub(r'(?<= id=")|(?<=href="#)|(?<=url\(#)', f"{name}-", text)
    # Greys follow the reader's light or dark mode; colours of data stay.
    text = re.sub(r"#([0-9a-f]{2})\1\1\b", lambda match: _css_grey(int(match[1], 16) / 255), text)

    width, height = figure.get_size_inches()
    pixels = _PIXELS_PER_INCH * width
    sizes = f"max-width: {pixels:.0f}px; min-width: {_MIN_FIGURE_SCALE * pixels:.0f}px"
    start = (
        f'<svg role="img" aria-label="{html.escape(_describe(figure), quote=True)}" '
        f'viewBox="0 0 {72 * width:g} {72 * height:g}" style="{sizes}">'
    )
    return Markup(start + text[text.index(">") + 1 :].strip())


def _describe(figure: Figure) -> str:
    """Return the label of a figure, or the titles of its panels with the names drawn in them."""
    panels = []
    for ax in figure.axes:
        title = ax.get_title(loc="left") or ax.get_title() or ax.get_ylabel()
        names = ", ".join(map(str, ax.get_legend_handles_labels()[1]))
        panels.append(": ".join(filter(None, [title, names])))
    text = str(figure.get_label()) or "; ".join(filter(None, panels))
    return re.sub(r"(?<!\\)\$|\\(?=\$)", "", text)  # without the marks of mathematics


def _css_grey(brightness: float) -> str:
    """Return a grey as a mix of text and background colour."""
    share = round(100 * (1 - brightness))
    if share == 0:
        return "var(--paper)"
    if share == 100:
        return "var(--ink)"
    return f"color-mix(in srgb, var(--ink) {share}%, var(--paper))"
