"""The intervals that pages quote in their sentences: of what each is, and whether it still comes out.

    .venv/bin/python benchmarks/quotes.py            # computes all again; tells those that differ or are not known
    .venv/bin/python benchmarks/quotes.py "3.6 [3."  # what the quotes that begin so are of

docs/quotes.csv has a line for each, made of the values that are kept beside the pages: `of` is what the interval is of,
and `less` what is taken from it, seed by seed. Both are a folder of docs with a grid's `summary.csv`, its setting if it
has several, a defence, a value and a column:

    benchmark/digits | FedCBO | accuracy | Trash                       a measure, in percent where it is a share
    benchmark/digits | FedCBO | accuracy | mean                        its mean over all attacks that have one
    benchmark/digits | FedCBO | accuracy regret | Trash                by how much it is behind the best of the column
    benchmark/digits | FedCBO | regret | Either, worst but Backdoor    the same in the worst column of a contest

or a folder of `benchmarks/claims.py`, a method, a metric, and `last` for the last round, `later` for the mean of the
evaluations in the second half of the rounds or `all` for that of all evaluations. Means and Student's intervals at 95%
are over the seeds that both have, and of these over those from the first to the last of `seeds` where it names two. A
line without `of` says in `note` why there is nothing to compute. A test holds pages to this, and wants a line for each
interval that they quote.
"""

import argparse
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from claims import interval, read_later, read_values

from fedcb2o.errors import ConfigError, RunError
from fedcb2o.report import read_grid
from fedcb2o.report.grid_tables import View, contests, measure
from fedcb2o.report.regret import minimax

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("../README.md", "benchmark.md", "claims.md", "criteria.md")
NUMBER = r"-?\d+(?:\.\d+)?"
QUOTE = re.compile(rf"(?<![\d.])({NUMBER})%? \[({NUMBER}), ({NUMBER})\]")
"""An interval in a sentence, such as 3.6 [3.1, 4.2]."""


def sentences(page: Path) -> str:
    """A page without its tables and commands, on one line."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return " ".join(line.strip() for line in text.splitlines() if not line.lstrip().startswith("|"))


def quoted(page: Path) -> set[str]:
    """The intervals that a page's sentences quote."""
    return {found[0].replace("%", "") for found in QUOTE.finditer(sentences(page))}


def listed(docs: Path) -> pd.DataFrame:
    """The lines of quotes.csv."""
    return pd.read_csv(docs / "quotes.csv", dtype=str, keep_default_na=False)


def recomputed(docs: Path, of: str, less: str, seeds: str, decimals: int = 1) -> str:
    """What a line of quotes.csv is of, as it is quoted. Raises ConfigError where that names nothing that is kept."""
    each, scale = term(docs, of)
    if less:
        each = each - term(docs, less)[0]
    if seeds:
        first, last = map(int, seeds.split("-"))
        each = each[(each.index >= first) & (each.index <= last)]
    mean, low, high = (f"{scale * value:z.{decimals}f}" for value in interval(each))
    return f"{mean} [{low}, {high}]"


@functools.cache
def term(docs: Path, of: str) -> tuple["pd.Series[float]", float]:
    """For each seed, what a term names; and by what it is multiplied when it is quoted."""
    try:
        folder, *setting, who, value, column = of.split(" | ")
        if (docs / folder / "values.csv").is_file():
            read = {"last": read_values, "later": read_later, "all": functools.partial(read_later, after=0.0)}[column]
            return read(docs / folder)[who][value], 1.0
        view = _view(docs / folder, *setting)
        name = value.removesuffix(" regret")
        scale = 100.0 if name == "regret" or measure(name).percent else 1.0
        found = _by_seed(view, who, value, column)
    except (KeyError, ValueError, RunError) as error:
        raise ConfigError(f"{of!r} is nothing that is kept ({error})") from error
    if found.empty:
        raise ConfigError(f"{of!r} has no value")
    return found, scale


@functools.cache
def _view(folder: Path, setting: str = "") -> View:
    return View(read_grid(folder), setting)


def _by_seed(view: View, who: str, value: str, column: str) -> "pd.Series[float]":
    if value == "regret":
        rows, among = contests(view)[column]
        at, value = minimax(rows, among).attack[who], "regret"
    elif value.endswith(" regret"):
        rows, at, value = view.short(value.removesuffix(" regret")), column, "regret"
    elif column == "mean":
        mine = view.rows[(view.rows.defence == who) & view.rows.attack.isin(view.having(value))]
        return mine.pivot(index="seed", columns="attack", values=value).mean(axis="columns", skipna=False).dropna()
    else:
        rows, at = view.rows, column
    return rows[(rows.defence == who) & (rows.attack == at)].set_index("seed")[value].dropna()


def faults(docs: Path) -> Iterator[str]:
    """What is wrong: intervals that no line tells, lines that no page quotes, and those that do not come out."""
    lines = listed(docs)
    for page in PAGES:
        here, mine = quoted(docs / page), lines[lines.page == page]
        yield from (f"{page}: {quote} is not listed" for quote in sorted(here - {*mine.quote}))
        for line in mine.itertuples():
            if line.quote not in here:
                yield f"{page}: {line.quote} is listed, and not quoted"
            elif line.of:
                decimals = len(line.quote.split(" ")[0].partition(".")[2])
                try:
                    found = recomputed(docs, line.of, line.less, line.seeds, decimals)
                except ConfigError as error:
                    found = str(error)
                if found != line.quote:
                    yield f"{page}: {line.quote} is {found}: {line.of}{' less ' * bool(line.less)}{line.less}"
            elif not line.note:
                yield f"{page}: {line.quote} has nothing to compute it of, and no note why"


def main() -> None:
    """Tell what some quotes are of, or what is wrong with any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quote", nargs="?", help="how a quote begins")
    wanted = parser.parse_args().quote
    lines = listed(DOCS)
    if wanted is not None:
        for line in lines[lines.quote.str.startswith(wanted)].itertuples():
            of = f"{line.of}{' less ' * bool(line.less)}{line.less}{', seeds ' * bool(line.seeds)}{line.seeds}"
            print(f"{line.page}: {line.quote}: {of or line.note}")
        return
    found = list(faults(DOCS))
    print(*found, f"{len(lines)} quotes, {len(found)} faults", sep="\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
