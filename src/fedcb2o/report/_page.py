"""Builder of report pages and of the files next to them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure

from fedcb2o.errors import RunError
from fedcb2o.records import atomic_write, flatten, slug
from fedcb2o.report._html import Section, figure_row, render_block, render_page, to_file
from fedcb2o.report._panels import Panels, draw_legend, draw_panels
from fedcb2o.report._table_formats import to_html, to_latex, to_markdown

_MANY_COLUMNS = 6  # a table with more columns has smaller letters


@dataclass
class Page:
    """An HTML page under construction, and the files written so far."""

    out: Path
    # Blocks of the page, in order.
    blocks: list[Markup] = field(default_factory=list)
    # Headings, for the contents.
    sections: list[Section] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)

    def write_file(self, name: str, content: str | bytes) -> None:
        """Write a file into the folder of the page, and make missing folders."""
        path = self.out / name
        for parent in path.relative_to(self.out).parents:
            if parent != Path() and (self.out / parent).is_symlink():
                raise RunError(
                    f"{self.out / parent} is a link, and a report writes into its own folder only: "
                    "remove it, or choose another --out"
                )
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            content = content.encode()
        atomic_write(path, content)
        self.paths.append(path)

    def write_table(self, name: str, table: pd.DataFrame) -> None:
        """Write a table as CSV, Markdown and LaTeX; `name` has no suffix."""
        self.write_file(f"{name}.csv", table.to_csv())
        self.write_file(f"{name}.md", to_markdown(table))
        self.write_file(f"{name}.tex", to_latex(table))

    def add_heading(self, title: str) -> None:
        """Add a heading to the page and to its contents."""
        # The number keeps the ids of equal titles apart.
        section = Section(title, f"{slug(title)}-{len(self.sections) + 1}")
        self.sections.append(section)
        self.blocks.append(render_block("heading", title, section.id))

    def add_text(self, text: str | Markup) -> None:
        """Add a paragraph; text is escaped, markup is not."""
        self.blocks.append(render_block("paragraph", text))

    def add_warning(self, text: str) -> None:
        """Add a highlighted paragraph."""
        self.blocks.append(render_block("paragraph", text, "warning"))

    def add_warnings(self, texts: Sequence[str]) -> None:
        """Add highlighted paragraphs, folded into one line if there are more than two."""
        if texts:
            self.blocks.append(render_block("warnings", list(texts)))

    def add_note(self, text: str) -> None:
        """Add a small paragraph below a table or a figure."""
        self.blocks.append(render_block("paragraph", text, "note"))

    def add_details(self, title: str, texts: Sequence[str]) -> None:
        """Add paragraphs that are hidden until a click on their title."""
        content = Markup("").join(render_block("paragraph", text) for text in texts)
        self.blocks.append(render_block("details", title, content))

    def show_table(
        self, table: pd.DataFrame, name: str, *, caption: str = "", collapsed: bool = False
    ) -> None:
        """Add a table without files or heading; a click opens a collapsed one by its `name`."""
        has_many_columns = table.shape[1] > _MANY_COLUMNS
        content = render_block("frame", to_html(table), name, has_many_columns)
        if caption:
            content += render_block("paragraph", caption, "note")
        if collapsed:
            content = render_block("details", name, content)
        self.blocks.append(content)

    def show_figures(self, figures: Sequence[Figure], name: str, *, caption: str = "") -> None:
        """Add figures side by side, without files; `name` begins ids, unique on the page."""
        self.blocks.append(figure_row(figures, name))
        if caption:
            self.add_note(caption)

    def add_table(
        self,
        title: str,
        name: str,
        table: pd.DataFrame,
        caption: str,
        *,
        collapsed: bool = False,
        transposed: bool = False,
    ) -> None:
        """Add a table under a heading, or collapsed under its title, and write its files."""
        self.write_table(name, table)
        if not collapsed:
            self.add_heading(title)
        if transposed:
            table = table.T
        self.show_table(table, title, caption=caption, collapsed=collapsed)

    def add_figures(self, title: str, figures: Mapping[str, Figure | None], caption: str) -> None:
        """Add figures under a heading and write them as PNG and PDF, by names without suffix."""
        drawn = {name: figure for name, figure in figures.items() if figure is not None}
        for name, figure in drawn.items():
            self.write_figure(name, figure)
        if drawn:
            self.add_heading(title)
            self.show_figures(list(drawn.values()), slug(title), caption=caption)

    def write_figure(self, name: str, figure: Figure) -> None:
        """Write a figure as PNG and as PDF, by its name without suffix."""
        self.write_file(f"{name}.png", to_file(figure, "png"))
        self.write_file(f"{name}.pdf", to_file(figure, "pdf"))

    def add_panels(self, title: str, name: str, panels: Panels, caption: str) -> None:
        """Add panels, if there are any, under a heading and write them as one figure."""
        if not panels.draw_functions:
            return
        self.write_figure(name, draw_panels(panels))
        self.add_heading(title)
        figures = [
            draw_panels(panels, function, with_legend=False) for function in panels.draw_functions
        ]
        # One legend for all panels: on a narrow page each panel is in a row of its own.
        legend = draw_legend(draw_panels(panels))
        if legend is not None:
            self.show_figures([legend], f"{slug(title)}-legend")
        self.show_figures(figures, slug(title), caption=caption)

    def write_page(self, name: str, title: str) -> None:
        """Write the page itself."""
        self.write_file(name, render_page(title, self.blocks, self.sections))


def create_page(out: Path) -> Page:
    """Create an empty page and its folder."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"cannot make the folder {out} ({error.strerror}): name another with --out"
        ) from error
    return Page(out)


def flatten_to_text(config: Mapping[str, Any]) -> dict[str, str]:
    """Convert nested settings to text with dotted keys."""
    return {key: str(value) for key, value in flatten(config).items()}
