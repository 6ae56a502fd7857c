"""Intervals quoted in sentences of pages: their sources, and a check of their values.

    .venv/bin/python -m paper.quotes            # recompute all; print faults
    .venv/bin/python -m paper.quotes "3.6 [3."  # sources of the quotes that start like this
    .venv/bin/python -m paper.quotes --mark     # rewrite the degree signs

docs/quotes.csv has one line per quote, computed from the values next to the pages. Equal quotes on
a page have their lines in the order of the page. The column `of` names a term, and `less` the term
that is subtracted from it seed by seed. A term is a folder of docs with a grid's `summary.csv`, its
setting if it has several, a defence, a value and a column:

    benchmark/digits | FedCBO | accuracy | Trash            a metric; shares in percent
    benchmark/digits | FedCBO | accuracy | mean             its mean over all attacks
    benchmark/digits | FedCBO | accuracy regret | Trash     its shortfall from the best
    benchmark/digits | FedCBO | regret | Either, worst     the same in the worst column

or a folder of `paper/claims.py`, a method, a metric, and `last` (last round), `later` (mean of the
evaluations in the second half of the rounds) or `all` (mean of all evaluations). Means and
Student's 95% intervals are over the seeds that both terms have.

A degree sign marks a difference that is significant by itself, but not after Holm's correction over
all quoted differences of its folder. A line without `of` gives the reason in `note`. A test
requires a line for each interval on a page, except in tables that have tests of their own.
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
from paper.claims import mean_interval, read_mean, read_values

from fedcb2o.errors import ConfigError, RunError
from fedcb2o.report import _statistics, read_grid
from fedcb2o.report._regret import worst_regret
from fedcb2o.report._statistics import CONFIDENCE, group_statistics, holm_correction
from fedcb2o.report.grid_tables import SettingResults, metric_info, regret_contests

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("../README.md", "benchmark.md", "claims.md", "configuration.md", "criteria.md")
NUMBER = r"-?\d+(?:\.\d+)?"
MARK = "°"
QUOTE = re.compile(rf"(?<![\d.])({NUMBER})%?\s+\[({NUMBER}),\s+({NUMBER})\]({MARK}?)")
"""An interval in a sentence, such as 3.6 [3.1, 4.2]."""
BRACKET = re.compile(r"\[[-+−\d.,]+ ?%?(?:, ?|; ?| to | ?– ?)[-+−\d.,]+ ?%?\]")
"""Brackets that may be an interval in another notation."""
TESTED_TABLE = re.compile(r"^<!-- .*-->\n\n(?:^\|.*\n)+", re.MULTILINE)
CODE_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`]*`")
READERS = {"last": read_values, "later": read_mean, "all": functools.partial(read_mean, after=0.0)}
Series = pd.Series


def prose(page: Path) -> str:
    """Return a page in one line, without code and tables that have their own tests."""
    text = CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))
    return " ".join(CODE.sub("``", TESTED_TABLE.sub("", text)).split())


def read_lines(docs: Path) -> pd.DataFrame:
    """Read quotes.csv."""
    return pd.read_csv(docs / "quotes.csv", dtype=str, keep_default_na=False)


def uncorrected_only(docs: Path) -> set[tuple[str, str]]:
    """Return the pairs (of, less) whose difference is significant only without correction."""
    p: dict[tuple[str, ...], float] = {}
    pairs = {(line.of, line.less) for line in read_lines(docs).itertuples() if line.less}
    for of, less in pairs:
        with contextlib.suppress(ConfigError):  # `faults` reports it
            difference = (read_term(docs, of)[0] - read_term(docs, less)[0]).dropna()
            if len(difference) > 1:
                value = float(group_statistics(difference.groupby(lambda _: "all")).p.iloc[0])
                p[of.partition(" | ")[0], *sorted((of, less))] = value
    if not p:
        return set()

    raw = pd.Series(p, index=pd.MultiIndex.from_tuples(p, names=["folder", "one", "other"]))
    corrected = raw.groupby("folder").transform(holm_correction)
    only = raw.index[(raw < 1 - CONFIDENCE) & (corrected >= 1 - CONFIDENCE)]
    marked = {tuple(pair) for _, *pair in only}
    return {pair for pair in pairs if tuple(sorted(pair)) in marked}


def rewrite_marks(docs: Path, page: Path, marked: set[tuple[str, str]]) -> str:
    """Return the text of a page with degree signs at the marked differences."""
    text = page.read_text(encoding="utf-8")
    remaining = defaultdict(list)
    for line in read_lines(docs).itertuples():
        if docs / line.page == page:
            remaining[line.quote].append((line.of, line.less) in marked)
    ignored = [
        match.span()
        for pattern in (TESTED_TABLE, CODE_BLOCK, CODE)
        for match in pattern.finditer(text)
    ]

    def mark(match: re.Match[str]) -> str:
        quote = _without_mark(match)
        if any(start <= match.start() < end for start, end in ignored) or not remaining[quote]:
            return match[0]
        return match[0].removesuffix(MARK) + MARK * remaining[quote].pop(0)

    return QUOTE.sub(mark, text)


def _without_mark(match: re.Match[str]) -> str:
    return f"{match[1]} [{match[2]}, {match[3]}]"


def recompute(docs: Path, of: str, less: str = "", decimals: int = 1) -> str:
    """Compute the interval of a line of quotes.csv.

    Args:
        docs: Folder of quotes.csv and of the terms.
        of: The first term.
        less: The term to subtract, or "".
        decimals: Decimals of the numbers.

    Returns:
        The interval as it is quoted.

    Raises:
        ConfigError: If a term has no values, or the terms have different units.
    """
    values, scale = read_term(docs, of)
    if less:
        subtracted, other_scale = read_term(docs, less)
        if other_scale != scale:
            raise ConfigError(f"{of!r} and {less!r} have different units")
        values = values - subtracted
    mean, low, high = (scale * value for value in mean_interval(values))
    return _statistics.format_interval(mean, low, high, decimals)


@functools.cache
def read_term(docs: Path, term: str) -> tuple["Series[float]", float]:
    """Return the values of a term by seed, and their factor in quotes."""
    try:
        folder, *setting, name, value, column = term.split(" | ")
        if (docs / folder / "values.csv").is_file():
            if setting:
                raise ValueError("claims have no setting")
            return READERS[column](docs / folder)[name][value], 1.0

        (setting_name,) = setting or [""]
        metric = value.removesuffix(" regret")
        is_percent = metric == "regret" or metric_info(metric).is_percent
        values = _grid_values(docs / folder, setting_name, name, value, column)
    except (KeyError, ValueError, OSError, RunError) as error:
        raise ConfigError(f"{term!r} has no values ({error})") from error
    if values.empty:
        raise ConfigError(f"{term!r} has no values")
    return values, 100.0 if is_percent else 1.0


def _grid_values(
    folder: Path, setting: str, defence: str, value: str, column: str
) -> "Series[float]":
    """Return the values of a defence in a column of a grid's table, by seed."""
    results = _results(folder, setting)
    if value == "regret":
        rows, attacks = _contests(folder, setting)[column]
        column = worst_regret(rows, attacks).attack[defence]
    elif value.endswith(" regret"):
        rows = _shortfalls(folder, setting, value.removesuffix(" regret"))
        value = "regret"
    elif column == "mean":
        selected = (results.rows.defence == defence) & results.rows.attack.isin(
            results.attacks_with(value)
        )
        table = results.rows[selected].pivot(index="seed", columns="attack", values=value)
        return table.mean(axis="columns", skipna=False).dropna()
    else:
        rows = results.rows
    return (
        rows[(rows.defence == defence) & (rows.attack == column)].set_index("seed")[value].dropna()
    )


@functools.cache
def _results(folder: Path, setting: str) -> SettingResults:
    return SettingResults(read_grid(folder), setting)


@functools.cache
def _contests(folder: Path, setting: str) -> dict[str, tuple[pd.DataFrame, list[str]]]:
    return regret_contests(_results(folder, setting))


@functools.cache
def _shortfalls(folder: Path, setting: str, value: str) -> pd.DataFrame:
    return _results(folder, setting).shortfalls(value)


def faults(docs: Path) -> Iterator[str]:
    """Yield unlisted intervals, unquoted lines, and quotes with other values."""
    lines = read_lines(docs)
    marked = uncorrected_only(docs)
    yield from (
        f"{page}: none of its quotes are checked" for page in sorted({*lines.page} - {*PAGES})
    )
    for page in PAGES:
        text = prose(docs / page)
        remaining = defaultdict(list)
        for line in lines[lines.page == page].itertuples():
            remaining[line.quote].append(line)

        for match in QUOTE.finditer(text):
            quote = _without_mark(match)
            fault = "is not listed, or not so often"
            if remaining[quote]:
                line = remaining[quote].pop(0)
                fault = _fault(docs, line) or _mark_fault(
                    bool(match[4]), (line.of, line.less) in marked
                )
            if fault:
                yield f"{page}: {quote} {fault}"

        for line in (line for left in remaining.values() for line in left):
            yield f"{page}: {line.quote} is listed, and not quoted, or not so often"
        for bracket in BRACKET.findall(QUOTE.sub("", text)):
            yield f"{page}: {bracket} may be an interval; write it as 1.0 [0.0, 2.0]"


def _mark_fault(has_mark: bool, needs_mark: bool) -> str:
    """Return the fault of a degree sign, or ""."""
    if has_mark == needs_mark:
        return ""
    if has_mark:
        return f"has {MARK}, and is significant after correction or not at all"
    return f"lacks {MARK}: it is significant without correction only"


def _fault(docs: Path, line: Any) -> str:
    """Return the fault of a line, or ""."""
    if not line.of:
        return "" if line.note else "has no term, and no note with the reason"
    try:
        decimals = len(line.quote.partition(" ")[0].partition(".")[2])
        value = recompute(docs, line.of, line.less, decimals)
    except ConfigError as error:
        return str(error)
    return "" if value == line.quote else f"is {value}: {_source(line)}"


def _source(line: Any) -> str:
    """Return the terms or the note of a line."""
    terms = f"{line.of} less {line.less}" if line.less else line.of
    return str(terms or line.note)


def main() -> None:
    """Print the sources of quotes, or all faults."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("quote", nargs="?", help="start of a quote")
    parser.add_argument("--mark", action="store_true", help="rewrite the degree signs")
    arguments = parser.parse_args()
    lines = read_lines(DOCS)
    if arguments.mark:
        marked = uncorrected_only(DOCS)
        for page in PAGES:
            path = DOCS / page
            path.write_text(rewrite_marks(DOCS, path, marked), encoding="utf-8")
    elif arguments.quote is not None:
        selected = lines[lines.quote.str.startswith(arguments.quote)]
        if selected.empty:
            parser.error(f"no quote starts with {arguments.quote!r}")
        print(
            *(f"{line.page}: {line.quote}: {_source(line)}" for line in selected.itertuples()),
            sep="\n",
        )
    else:
        found_faults = list(faults(DOCS))
        print(*found_faults, f"{len(lines)} quotes, {len(found_faults)} faults", sep="\n")
        sys.exit(bool(found_faults))


if __name__ == "__main__":
    main()
