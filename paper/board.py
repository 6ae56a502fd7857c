"""The board of methods that the fixed adversary has judged: its table and its figures.

    .venv/bin/python -m paper.board              # the tables of docs/board.md and the figures
    .venv/bin/python -m paper.board --measure    # measure missing entries first

Entries are the files of docs/benchmark/board, written by `fedcb2o assess`. The methods to measure
are in paper/board.toml. A stopped measurement continues.
"""

import argparse
import functools
import inspect
import tomllib
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
import tomli_w

from fedcb2o.experiments.grid._assessment import assess, fixed_adversary
from fedcb2o.federated import attacks
from fedcb2o.report.board import (
    Entry,
    board_figure,
    board_table,
    entry_toml,
    make_entry,
    read_entry,
)

DOCS = Path(__file__).parents[1] / "docs"
ENTRIES = DOCS / "benchmark" / "board"
PAGE = DOCS / "board.md"
FIGURES = DOCS / "figures"
METHODS = Path(__file__).with_name("board.toml")
RUNS = Path("runs") / "board"


@functools.cache
def entries() -> tuple[Entry, ...]:
    """Read all entries."""
    return tuple(read_entry(path) for path in sorted(ENTRIES.glob("*.toml")))


def missing() -> dict[str, dict[str, Any]]:
    """Return the methods without an entry, by the names of their files."""
    methods = tomllib.loads(METHODS.read_text(encoding="utf-8"))
    return {name: t for name, t in methods.items() if not (ENTRIES / f"{name}.toml").exists()}


def measure() -> None:
    """Assess the methods without an entry, one after the other."""
    RUNS.mkdir(parents=True, exist_ok=True)
    for name, method in missing().items():
        source = RUNS / f"{name}.toml"
        source.write_text(tomli_w.dumps(method), encoding="utf-8")
        result = assess(source, out=RUNS / name)
        if result.failed:
            print(f"{name}: {len(result.failed)} cells failed: {min(result.failed.values())}")
            continue
        entry = entry_toml(make_entry(result.folder))
        (ENTRIES / source.name).write_text(entry, encoding="utf-8")


def table() -> pd.DataFrame:
    """Return the table of the board, as text."""
    return board_table(entries())


def adversary_table() -> pd.DataFrame:
    """Return the attacks of the newest adversary, from its file and the attacks' docstrings."""
    rows = {}
    for name, entry in fixed_adversary().table["attacks"].items():
        settings = entry["attack"]
        function = getattr(attacks, settings["name"])
        tried = [strength["attack"] for strength in entry.get("strengths", [])]
        shown = {key: value for key, value in settings.items() if key not in ("name", "data")}
        rows[name] = {
            "Function": f"`{settings['name']}`",
            "Attackers": inspect.getdoc(function).partition("\n")[0],
            "Parameters": ", ".join(f"{key} {_word(value)}" for key, value in shown.items()),
            "Strengths tried": "; ".join(
                ", ".join(f"{key} {_word(value)}" for key, value in one.items()) for one in tried
            ),
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("Attack")


def forms_table() -> pd.DataFrame:
    """Return the values of each axis, and the size of the forms, of the newest adversary."""
    adversary = fixed_adversary()
    centre = adversary.table["centre"]
    rows = {}
    for key, axis in (("shares", "share"), ("graphs", "graph"), ("skews", "skew")):
        rows[key] = {"Values": ", ".join(adversary.table[key]), "Centre": centre[axis]}
    samples = [
        f"{name}: {entry['agents']['benign_samples']}"
        for name, entry in adversary.table["data"].items()
    ]
    rows["data: samples of an agent"] = {"Values": ", ".join(samples), "Centre": "each"}
    for form in ("quick", "full"):
        table = {**adversary.table["shared"], **adversary.table[form]}
        count = len(adversary.settings(full=form == "full"))
        size = f"{count} settings, {table['rounds']} rounds, seeds: {len(table['seeds'])}"
        rows[f"{form} form"] = {"Values": size, "Centre": ""}
    rows["entries"] = {"Values": str(len(entries())), "Centre": ""}
    waiting = f"{len(missing())} methods of `paper/board.toml`"
    rows["not measured yet"] = {"Values": waiting, "Centre": ""}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("Axis")


def _word(value: object) -> str:
    return str(value).lower()


def draw_figures() -> None:
    """Draw the curves of each data set."""
    names = dict.fromkeys(row.data for entry in entries() for row in entry.settings)
    # A fixed salt gives equal entries an equal file.
    with mpl.rc_context({"svg.hashsalt": "board", "svg.fonttype": "none"}):
        for data in names:
            figure = board_figure(entries(), data)
            figure.savefig(FIGURES / f"board-{data.lower()}.svg", metadata={"Date": None})


def main() -> None:
    """Rewrite the page and the figures; measure missing entries first, if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", action="store_true", help="measure missing entries first")
    if parser.parse_args().measure:
        measure()
    from paper import results

    PAGE.write_text(results.rewrite_page(PAGE), encoding="utf-8")
    draw_figures()


if __name__ == "__main__":
    main()
