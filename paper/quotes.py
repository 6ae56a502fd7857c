"""The intervals that pages quote in their sentences: of what each is, and whether it still comes out.

    .venv/bin/python -m paper.quotes            # computes all again; tells those that differ or are not known
    .venv/bin/python -m paper.quotes "3.6 [3."  # what the quotes that begin so are of
    .venv/bin/python -m paper.quotes --mark     # writes the degree signs anew

docs/quotes.csv has a line for each, made of the values that are kept beside the pages; of equal quotes on a page the
first line is the first one's. `of` is what the interval is of, and `less` what is taken from it, seed by seed. Both are
a folder of docs with a grid's `summary.csv`, its setting if it has several, a defence, a value and a column:

    benchmark/digits | FedCBO | accuracy | Trash                       a measure, in percent where it is a share
    benchmark/digits | FedCBO | accuracy | mean                        its mean over all attacks that have one
    benchmark/digits | FedCBO | accuracy regret | Trash                by how much it is behind the best of the column
    benchmark/digits | FedCBO | regret | Either, worst but Backdoor    the same in the worst column of a contest

or a folder of `paper/claims.py`, a method, a metric, and `last` for the last round, `later` for the mean of the
evaluations in the second half of the rounds or `all` for that of all evaluations. Means and Student's intervals at 95%
are over the seeds that both have. A degree sign follows a difference that is told, as 0 is not in its interval, but
not after Holm's correction over all differences of its folder that are quoted. A line without `of` says in `note` why
there is nothing to compute. A test holds pages to this, and wants a line for each interval that they quote, but in
tables that are held by a test of their own.
"""

import argparse
import contextlib
import functools
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from paper.claims import interval, read_mean, read_values

from fedcb2o.errors import ConfigError, RunError
from fedcb2o.report import read_grid, statistics
from fedcb2o.report.grid_tables import SettingResults, metric_info, regret_contests
from fedcb2o.report.regret import worst_regret
from fedcb2o.report.statistics import CONFIDENCE, group_statistics, holm_correction

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("../README.md", "benchmark.md", "claims.md", "configuration.md", "criteria.md")
NUMBER = r"-?\d+(?:\.\d+)?"
MARK = "°"
QUOTE = re.compile(rf"(?<![\d.])({NUMBER})%?\s+\[({NUMBER}),\s+({NUMBER})\]({MARK}?)")
"""An interval in a sentence, such as 3.6 [3.1, 4.2]."""
BRACKET = re.compile(r"\[[-+−\d.,]+ ?%?(?:, ?|; ?| to | ?– ?)[-+−\d.,]+ ?%?\]")
"""What may be one that is written otherwise."""
HELD = re.compile(r"^<!-- .*-->\n\n(?:^\|.*\n)+", re.MULTILINE)
"""A table below a comment that says what holds it."""
COMMANDS = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`]*`")
READ = {"last": read_values, "later": read_mean, "all": functools.partial(read_mean, after=0.0)}


def sentences(page: Path) -> str:
    """A page without its commands, what is set as code, and tables that are held elsewhere, on one line."""
    return " ".join(
        CODE.sub("``", HELD.sub("", COMMANDS.sub("", page.read_text(encoding="utf-8")))).split()
    )


def quoted(text: str) -> list[str]:
    """The intervals that sentences quote, one after the other."""
    return [_plain(found) for found in QUOTE.finditer(text)]


def _plain(found: re.Match[str]) -> str:
    return f"{found[1]} [{found[2]}, {found[3]}]"


def listed(docs: Path) -> pd.DataFrame:
    """The lines of quotes.csv."""
    return pd.read_csv(docs / "quotes.csv", dtype=str, keep_default_na=False)


def told_alone(docs: Path) -> set[tuple[str, str]]:
    """The differences, `of` and `less`, that are told by themselves, not among all of their folder that are quoted."""
    p: dict[tuple[str, ...], float] = {}
    lines = {(line.of, line.less) for line in listed(docs).itertuples() if line.less}
    for of, less in lines:
        with contextlib.suppress(ConfigError):  # which `faults` tells
            each = (term(docs, of)[0] - term(docs, less)[0]).dropna()
            if len(each) > 1:
                chance = float(group_statistics(each.groupby(lambda _: "all")).p.iloc[0])
                p[of.partition(" | ")[0], *sorted((of, less))] = chance
    if not p:
        return set()
    found = pd.Series(p, index=pd.MultiIndex.from_tuples(p, names=["folder", "one", "other"]))
    corrected = found.groupby("folder").transform(holm_correction)
    alone = {
        tuple(pair)
        for _, *pair in found.index[(found < 1 - CONFIDENCE) & (corrected >= 1 - CONFIDENCE)]
    }
    return {line for line in lines if tuple(sorted(line)) in alone}


def remarked(docs: Path, page: Path, alone: set[tuple[str, str]]) -> str:
    """The page with the degree signs where they belong, at what is told alone."""
    text = page.read_text(encoding="utf-8")
    left = defaultdict(list)
    for line in listed(docs).itertuples():
        if docs / line.page == page:
            left[line.quote].append((line.of, line.less) in alone)
    apart = [found.span() for pattern in (HELD, COMMANDS, CODE) for found in pattern.finditer(text)]

    def mark(found: re.Match[str]) -> str:
        if any(start <= found.start() < end for start, end in apart) or not left[_plain(found)]:
            return found[0]
        return found[0].removesuffix(MARK) + MARK * left[_plain(found)].pop(0)

    return QUOTE.sub(mark, text)


def recomputed(docs: Path, of: str, less: str = "", decimals: int = 1) -> str:
    """What a line of quotes.csv is of, as it is to be quoted.

    Raises ConfigError where a term names nothing that is kept, or the two are in other units.
    """
    each, scale = term(docs, of)
    if less:
        other, unit = term(docs, less)
        if unit != scale:
            raise ConfigError(f"{of!r} and {less!r} are in other units")
        each = each - other
    mean, low, high = (scale * value for value in interval(each))
    return statistics.format_interval(mean, low, high, decimals)


@functools.cache
def term(docs: Path, of: str) -> tuple["pd.Series[float]", float]:
    """For each seed, what a term names; and by what it is multiplied when it is quoted. Files are read once."""
    try:
        folder, *setting, who, value, column = of.split(" | ")
        if (docs / folder / "values.csv").is_file():
            if setting:
                raise ValueError("claims have no setting")
            return READ[column](docs / folder)[who][value], 1.0
        (where,) = setting or [""]
        name = value.removesuffix(" regret")
        scale = 100.0 if name == "regret" or metric_info(name).is_percent else 1.0
        found = _by_seed(docs / folder, where, who, value, column)
    except (KeyError, ValueError, OSError, RunError) as error:
        raise ConfigError(f"{of!r} is nothing that is kept ({error})") from error
    if found.empty:
        raise ConfigError(f"{of!r} has no value")
    return found, scale


def _by_seed(folder: Path, setting: str, who: str, value: str, column: str) -> "pd.Series[float]":
    view = _view(folder, setting)
    if value == "regret":
        rows, among = _contests(folder, setting)[column]
        column = worst_regret(rows, among).attack[who]
    elif value.endswith(" regret"):
        rows = _short(folder, setting, value.removesuffix(" regret"))
        value = "regret"
    elif column == "mean":
        mine = view.rows[
            (view.rows.defence == who) & view.rows.attack.isin(view.attacks_with(value))
        ]
        return (
            mine.pivot(index="seed", columns="attack", values=value)
            .mean(axis="columns", skipna=False)
            .dropna()
        )
    else:
        rows = view.rows
    return rows[(rows.defence == who) & (rows.attack == column)].set_index("seed")[value].dropna()


@functools.cache
def _view(folder: Path, setting: str) -> SettingResults:
    return SettingResults(read_grid(folder), setting)


@functools.cache
def _contests(folder: Path, setting: str) -> dict[str, tuple[pd.DataFrame, list[str]]]:
    return regret_contests(_view(folder, setting))


@functools.cache
def _short(folder: Path, setting: str, value: str) -> pd.DataFrame:
    return _view(folder, setting).shortfalls(value)


def faults(docs: Path) -> Iterator[str]:
    """What is wrong: intervals that no line tells, lines that no page quotes, and those that do not come out."""
    lines = listed(docs)
    alone = told_alone(docs)
    yield from (
        f"{page}: none of its quotes are looked at" for page in sorted({*lines.page} - {*PAGES})
    )
    for page in PAGES:
        text = sentences(docs / page)
        left = defaultdict(list)
        for line in lines[lines.page == page].itertuples():
            left[line.quote].append(line)
        for each in QUOTE.finditer(text):
            line = left[quote].pop(0) if left[quote := _plain(each)] else None
            found = _fault(docs, line) if line else "is not listed, or not so often"
            if not found and bool(each[4]) != ((line.of, line.less) in alone):
                found = (
                    f"has {MARK}, and is told"
                    if each[4]
                    else f"lacks {MARK}: it is told by itself alone"
                )
            if found:
                yield f"{page}: {quote} {found}"
        for quote in (line.quote for each in left.values() for line in each):
            yield f"{page}: {quote} is listed, and not quoted, or not so often"
        for found in BRACKET.findall(QUOTE.sub("", text)):
            yield f"{page}: {found} may be an interval, and is not written as one: 1.0 [0.0, 2.0]"


def _fault(docs: Path, line: Any) -> str:
    """What is wrong with a line, if anything."""
    if not line.of:
        return "" if line.note else "has nothing to compute it of, and no note why"
    try:
        found = recomputed(
            docs, line.of, line.less, len(line.quote.split(" ")[0].partition(".")[2])
        )
    except ConfigError as error:
        return str(error)
    return "" if found == line.quote else f"is {found}: {_told(line)}"


def _told(line: Any) -> str:
    """Of what a line is, in words."""
    return (f"{line.of} less {line.less}" if line.less else line.of) or line.note


def main() -> None:
    """Tell what some quotes are of, or what is wrong with any."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("quote", nargs="?", help="how a quote begins")
    parser.add_argument("--mark", action="store_true", help="write the degree signs anew")
    given = parser.parse_args()
    wanted = given.quote
    lines = listed(DOCS)
    if given.mark:
        alone = told_alone(DOCS)
        for page in PAGES:
            path = DOCS / page
            path.write_text(remarked(DOCS, path, alone), encoding="utf-8")
        return
    if wanted is not None:
        mine = lines[lines.quote.str.startswith(wanted)]
        if mine.empty:
            parser.error(f"no quote begins with {wanted!r}")
        print(
            *(f"{line.page}: {line.quote}: {_told(line)}" for line in mine.itertuples()), sep="\n"
        )
        return
    found = list(faults(DOCS))
    print(*found, f"{len(lines)} quotes, {len(found)} faults", sep="\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
