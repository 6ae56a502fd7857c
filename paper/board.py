"""The board of methods that the fixed adversary has judged: its table and its figures.

    .venv/bin/python -m paper.board    # rewrite the table of docs/board.md and the figures

Entries are the files of docs/benchmark/board, written by `fedcb2o assess`.
"""

import functools
import inspect
from pathlib import Path

import matplotlib as mpl
import pandas as pd

from fedcb2o.experiments.grid._assessment import fixed_adversary
from fedcb2o.federated import attacks
from fedcb2o.report.board import Entry, board_figure, board_table, read_entry

DOCS = Path(__file__).parents[1] / "docs"
ENTRIES = DOCS / "benchmark" / "board"
PAGE = DOCS / "board.md"
FIGURES = DOCS / "figures"


@functools.cache
def entries() -> tuple[Entry, ...]:
    """Read all entries."""
    return tuple(read_entry(path) for path in sorted(ENTRIES.glob("*.toml")))


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
    rows["entries so far"] = {"Values": str(len(entries())), "Centre": ""}
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
    """Rewrite the page and the figures."""
    from paper import results

    PAGE.write_text(results.rewrite_page(PAGE), encoding="utf-8")
    draw_figures()


if __name__ == "__main__":
    main()
