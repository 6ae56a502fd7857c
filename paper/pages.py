"""Tables and figures of grids on a page, made from the results next to the page.

    .venv/bin/python -m paper.pages docs/benchmark.md README.md  # rewrite tables and figures

A table follows a comment with the folder of the grid's `summary.csv` and the table's name in the
report: `<!-- table: benchmark/rules 3-of-10/regret -->`. Tables of `paper/parts.py`, which no
report has, work in the same way. A figure of a matrix of regrets follows `<!-- picture:
benchmark/attacks accuracy-regret -->`; its file contains a checksum of its table. A test compares
pages with the results.
"""

import argparse
import functools
import hashlib
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from paper.parts import FAMILIES, parts_table
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from fedcb2o.errors import ConfigError
from fedcb2o.records import slug
from fedcb2o.report import read_grid, to_markdown
from fedcb2o.report._attack_strengths import chosen_strengths_table, read_choices
from fedcb2o.report._grid_page import regret_figure
from fedcb2o.report.grid_results import GridResults
from fedcb2o.report.grid_tables import (
    SettingResults,
    compare_settings,
    defence_overview,
    difference_matrix,
    losses_against_baselines,
    metric_matrix,
    regret_matrix,
    tuning_table,
    worst_regret_differences,
    worst_regrets,
)

TABLE = re.compile(
    r"(?P<mark>^<!-- table: (?P<folder>\S+) (?P<name>\S+) -->\n\n)(?:^\|.*\n)*\n?", re.MULTILINE
)
FIGURE = re.compile(
    r"^<!-- picture: (?P<folder>\S+) (?P<name>\S+)-regret -->\n\n!\[[^]]*\]\((?P<file>\S+)\)",
    re.MULTILINE,
)
DOTS_PER_INCH = 120
CHECKSUM_KEY = "Drawn of"  # in the metadata of a figure's file
SETTING_TABLES = {
    "regret": worst_regrets,
    "floors": losses_against_baselines,
    "regret-difference": worst_regret_differences,
    "overview": defence_overview,
    "strengths": lambda view: chosen_strengths_table(read_choices(view.results), view.setting),
    "tuning": lambda view: tuning_table(view.results),
    **{
        f"parts-{name}": functools.partial(parts_table, family=family)
        for name, family in FAMILIES.items()
    },
}


def rewrite_page(page: Path) -> str:
    """Return the text of a page with tables made from the current results."""
    results = _grid_reader(page)

    def table(match: re.Match[str]) -> str:
        return (
            match["mark"] + to_markdown(named_table(results(match["folder"]), match["name"])) + "\n"
        )

    return TABLE.sub(table, page.read_text(encoding="utf-8"))


def named_table(results: GridResults, name: str) -> pd.DataFrame:
    """Return a table of a grid by its name in the report.

    Args:
        results: The results of the grid.
        name: SETTING/TABLE, TABLE or across/VALUE/ATTACK.

    Returns:
        The table.

    Raises:
        ConfigError: If the grid has no such setting.
    """
    *path, last = name.split("/")
    if path[:1] == ["across"]:
        value = path[1].replace("-", "_")
        columns = SettingResults(results, results.settings[0]).columns(value)
        attack = next(column for column in columns if slug(column) == last)
        return compare_settings(results, value, attack)

    view = _setting_results(results, name)
    value = last.replace("-", "_")
    if last in SETTING_TABLES:
        return SETTING_TABLES[last](view)
    if value.endswith("_regret"):
        return regret_matrix(view, value.removesuffix("_regret"))
    if value.endswith("_difference"):
        return difference_matrix(view, value.removesuffix("_difference"))
    return metric_matrix(view, value)


def _grid_reader(page: Path) -> Callable[[str], GridResults]:
    """Return a cached reader of the grids next to a page."""
    return functools.cache(lambda folder: read_grid(page.parent / folder))


def _setting_results(results: GridResults, name: str) -> SettingResults:
    """Return the results of the setting in a table's name."""
    path = name.rpartition("/")[0]
    for setting in results.settings:
        if slug(setting) == path:
            return SettingResults(results, setting)
    raise ConfigError(f"{results.folder} has no table {name}")


@dataclass(frozen=True)
class RegretFigure:
    """A figure of the regrets in `value` on a page."""

    file: Path
    view: SettingResults
    value: str

    def digest(self) -> str:
        """Return the checksum of the figure's table."""
        return hashlib.sha256(
            to_markdown(regret_matrix(self.view, self.value)).encode()
        ).hexdigest()

    def draw(self) -> None:
        """Write the file, in 256 colours, unless it has the checksum of the table."""
        if table_digest(self.file) == self.digest():
            return
        buffer = io.BytesIO()
        regret_figure(self.view, self.value).savefig(buffer, format="png", dpi=DOTS_PER_INCH)
        metadata = PngInfo()
        metadata.add_text(CHECKSUM_KEY, self.digest())
        Image.open(buffer).convert("RGB").quantize(256).save(
            self.file, optimize=True, pnginfo=metadata
        )


def page_figures(page: Path) -> Iterator[RegretFigure]:
    """Yield the figures of regrets on a page."""
    results = _grid_reader(page)
    for match in FIGURE.finditer(page.read_text(encoding="utf-8")):
        view = _setting_results(results(match["folder"]), match["name"])
        value = match["name"].rpartition("/")[2].replace("-", "_")
        yield RegretFigure(page.parent / match["file"], view, value)


def table_digest(file: Path) -> str:
    """Return the table's checksum in a figure's file, or "" without one."""
    if not file.exists():
        return ""
    with Image.open(file) as image:
        return str(image.info.get(CHECKSUM_KEY, ""))


def main() -> None:
    """Rewrite the tables and figures of pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", type=Path, nargs="+")
    pages: list[Path] = parser.parse_args().pages
    if missing := [str(page) for page in pages if not page.is_file()]:
        parser.error(f"page not found: {', '.join(missing)}")
    for page in pages:
        page.write_text(rewrite_page(page), encoding="utf-8")
        for figure in page_figures(page):
            figure.draw()


if __name__ == "__main__":
    main()
