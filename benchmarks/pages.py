"""The tables of a page that are a grid's: made again from the results that are kept beside it.

    .venv/bin/python -m benchmarks.pages docs/benchmark.md      # writes the tables anew where the results have changed

A table stands below a comment that says which it is, by the folder of the grid's `summary.csv` beside the page and the
table's name in the report: `<!-- table: benchmark/digits unknown-clusters/regret -->`. So do those of
`benchmarks/parts.py`, which no report has. A test holds pages to this.
"""

import argparse
import functools
import re
from pathlib import Path

import pandas as pd
from benchmarks.parts import FAMILIES, parts_table

from fedcb2o.errors import ConfigError
from fedcb2o.report import read_grid, to_markdown
from fedcb2o.report.grid import GridResults
from fedcb2o.report.grid_tables import (
    View,
    across,
    against_floors,
    differences,
    headline,
    headline_differences,
    matrix,
    overview,
    regret_matrix,
    tuning_table,
)
from fedcb2o.report.page import slug
from fedcb2o.report.strengths import choices_of, chosen_table

TABLE = re.compile(r"(?P<mark>^<!-- table: (?P<folder>\S+) (?P<name>\S+) -->\n\n)(?:^\|.*\n)*\n?", re.MULTILINE)
WHOLE = {
    "regret": headline,
    "floors": against_floors,
    "regret-difference": headline_differences,
    "overview": overview,
    "strengths": lambda view: chosen_table(choices_of(view.results), view.setting),
    "tuning": lambda view: tuning_table(view.results),
    **{f"parts-{name}": functools.partial(parts_table, family=family) for name, family in FAMILIES.items()},
}


def rewritten(page: Path) -> str:
    """The page with its tables as the results have them."""
    results = functools.cache(lambda folder: read_grid(page.parent / folder))

    def table(found: re.Match[str]) -> str:
        return found["mark"] + to_markdown(named(results(found["folder"]), found["name"])) + "\n"

    return TABLE.sub(table, page.read_text(encoding="utf-8"))


def named(results: GridResults, name: str) -> pd.DataFrame:
    """A table of a grid's report by its name there, or one of its parts; raises ConfigError where there is none."""
    *where, last = name.split("/")
    if where[:1] == ["across"]:
        value = where[1].replace("-", "_")
        attack = next(each for each in View(results, results.settings[0]).columns(value) if slug(each) == last)
        return across(results, value, attack)
    setting = next((each for each in results.settings if slug(each) == "/".join(where)), None)
    if setting is None:
        raise ConfigError(f"{results.folder} has no table {name}")
    view, value = View(results, setting), last.replace("-", "_")
    if last in WHOLE:
        return WHOLE[last](view)
    if value.endswith("_regret"):
        return regret_matrix(view, value.removesuffix("_regret"))
    if value.endswith("_difference"):
        return differences(view, value.removesuffix("_difference"))
    return matrix(view, value)


def main() -> None:
    """Write the tables of the pages that are named anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path, nargs="+")
    for page in parser.parse_args().pages:
        page.write_text(rewritten(page), encoding="utf-8")


if __name__ == "__main__":
    main()
