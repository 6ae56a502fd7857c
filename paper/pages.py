"""The tables and pictures of a page that are a grid's: made again from the results that are kept beside it.

    .venv/bin/python -m paper.pages docs/benchmark.md README.md    # writes anew what results have changed

A table stands below a comment that says which it is, by the folder of the grid's `summary.csv` beside the page and the
table's name in the report: `<!-- table: benchmark/rules 3-of-10/regret -->`. So do those of `paper/parts.py`,
which no report has. A picture of a matrix of regrets stands below such a comment, too, `<!-- picture: benchmark/attacks
accuracy-regret -->`; its file says what table it was drawn of. A test holds pages to this.
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
from fedcb2o.report import read_grid, to_markdown
from fedcb2o.report.attack_strengths import chosen_strengths_table, read_choices
from fedcb2o.report.grid_page import regret_figure
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
from fedcb2o.report.page import slug

TABLE = re.compile(
    r"(?P<mark>^<!-- table: (?P<folder>\S+) (?P<name>\S+) -->\n\n)(?:^\|.*\n)*\n?", re.MULTILINE
)
PICTURE = re.compile(
    r"^<!-- picture: (?P<folder>\S+) (?P<name>\S+)-regret -->\n\n!\[[^]]*\]\((?P<file>\S+)\)",
    re.MULTILINE,
)
DOTS, DRAWN_OF = 120, "Drawn of"  # of a picture, an inch; where its file says of which table
WHOLE = {
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


def rewritten(page: Path) -> str:
    """The page with its tables as the results have them."""
    results = _beside(page)

    def table(found: re.Match[str]) -> str:
        return found["mark"] + to_markdown(named(results(found["folder"]), found["name"])) + "\n"

    return TABLE.sub(table, page.read_text(encoding="utf-8"))


def named(results: GridResults, name: str) -> pd.DataFrame:
    """A table of a grid's report by its name there, or one of its parts; raises ConfigError where there is none."""
    *where, last = name.split("/")
    if where[:1] == ["across"]:
        value = where[1].replace("-", "_")
        attack = next(
            each
            for each in SettingResults(results, results.settings[0]).columns(value)
            if slug(each) == last
        )
        return compare_settings(results, value, attack)
    view = _view(results, name)
    value = last.replace("-", "_")
    if last in WHOLE:
        return WHOLE[last](view)
    if value.endswith("_regret"):
        return regret_matrix(view, value.removesuffix("_regret"))
    if value.endswith("_difference"):
        return difference_matrix(view, value.removesuffix("_difference"))
    return metric_matrix(view, value)


def _beside(page: Path) -> Callable[[str], GridResults]:
    """What reads the grids of a page by their folders, each once."""
    return functools.cache(lambda folder: read_grid(page.parent / folder))


def _view(results: GridResults, name: str) -> SettingResults:
    where = name.rpartition("/")[0]
    setting = next((each for each in results.settings if slug(each) == where), None)
    if setting is None:
        raise ConfigError(f"{results.folder} has no table {name}")
    return SettingResults(results, setting)


@dataclass(frozen=True)
class Picture:
    """A picture on a page: its file, and the regrets in `value` that it shows."""

    file: Path
    view: SettingResults
    value: str

    def digest(self) -> str:
        """Of the table that it shows: what its file says it was drawn of."""
        return hashlib.sha256(
            to_markdown(regret_matrix(self.view, self.value)).encode()
        ).hexdigest()

    def draw(self) -> None:
        """Write the file, in 256 colours, unless it was drawn of the same table."""
        if drawn_of(self.file) == self.digest():
            return
        buffer = io.BytesIO()
        told = PngInfo()
        regret_figure(self.view, self.value).savefig(buffer, format="png", dpi=DOTS)
        told.add_text(DRAWN_OF, self.digest())
        Image.open(buffer).convert("RGB").quantize(256).save(self.file, optimize=True, pnginfo=told)


def pictures(page: Path) -> Iterator[Picture]:
    """The pictures of a page that are a grid's."""
    results = _beside(page)
    for found in PICTURE.finditer(page.read_text(encoding="utf-8")):
        view = _view(results(found["folder"]), found["name"])
        yield Picture(
            page.parent / found["file"], view, found["name"].rpartition("/")[2].replace("-", "_")
        )


def drawn_of(file: Path) -> str:
    """The digest of the table that a picture was drawn of; nothing where there is none."""
    if not file.exists():
        return ""
    with Image.open(file) as image:
        return str(image.info.get(DRAWN_OF, ""))


def main() -> None:
    """Write the tables and pictures of the pages that are named anew."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", type=Path, nargs="+")
    given: list[Path] = parser.parse_args().pages
    if missing := [str(page) for page in given if not page.is_file()]:
        parser.error(f"there is no page {', '.join(missing)}")
    for page in given:
        page.write_text(rewritten(page), encoding="utf-8")
        for picture in pictures(page):
            picture.draw()


if __name__ == "__main__":
    main()
