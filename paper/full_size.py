"""Table 1 and Table 2 at the paper's full size, entry by entry.

    .venv/bin/python -m paper.full_size                # the entries; the table in docs/claims.md
    .venv/bin/python -m paper.full_size --next         # run the next missing entry
    .venv/bin/python -m paper.full_size --next 9 --minutes 8 --copy $OUT

An entry is a preset of the authors' released code and a seed. `--next` runs missing entries in the
order of `ENTRIES`. An entry that was stopped continues from its last checkpoint. When an entry
ends, its statistics are added to values.csv and curves.csv of docs/reproduction/full-size, and both
files are copied to `--copy`. With `--minutes` no entry starts that would end later, if it took as
long as the last one. The options of `DEVICE_SETTINGS` apply where PyTorch finds a CUDA device.
"""

import argparse
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from paper.claims import METRIC_NAMES, METRICS, PAPER, seed_curves, seed_values

import fedcb2o
from fedcb2o.experiments import load

Entry = tuple[str, int]
"""A preset without its prefix "emnist-", and a seed."""

ROWS = {  # method of an entry: row of the paper's tables
    "fedcbo-released": "FedCBO",
    "fedcb2o-released": "FedCB2O",
    "oracle-max-released": "Oracle Max",
    "oracle-min-released": "Oracle Min",
    "fedcb2o-released-tg30": "FedCB2O with T_G",
    "fedcb2o-released-tg20": "with an earlier T_G",
    "fedcb2o-released-tg40": "with a later T_G",
}
ENTRIES = tuple((method, seed) for seed in range(3) for method in ROWS)
DOCS = Path(__file__).parents[1] / "docs"
FOLDER = DOCS / "reproduction" / "full-size"
EARLIER = DOCS / "reproduction" / "emnist-150"  # FedCBO and FedCB2O, 150 rounds
PAGE = DOCS / "claims.md"
MARKER = re.compile(r"(?<=<!-- generated: full_size -->\n\n)(?:\|.*\n)*")
RUNS = Path("runs") / "full-size"
DEVICE_SETTINGS = {
    "device": "cuda",
    "training.precision": "bfloat16",
    "convolution": "mixed",
    "together": 100,
}


def missing(folder: Path) -> list[Entry]:
    """Return the entries without values, in order.

    Args:
        folder: Folder of values.csv.

    Returns:
        Methods and seeds.
    """
    done = set(read_values(folder).index)
    return [entry for entry in ENTRIES if entry not in done]


def read_values(folder: Path) -> pd.DataFrame:
    """Read the values of a folder; empty if there are none.

    Args:
        folder: Folder of values.csv.

    Returns:
        One row per method and seed.
    """
    path = folder / "values.csv"
    if not path.exists():
        index = pd.MultiIndex.from_tuples([], names=["method", "seed"])
        return pd.DataFrame(columns=[*METRICS], index=index)
    return pd.read_csv(path, index_col=["method", "seed"])


def run_entry(
    entry: Entry, runs: Path, folder: Path, changes: Mapping[str, Any], data_dir: Path | None
) -> None:
    """Run one entry, from its last checkpoint, and add its statistics to the folder.

    Args:
        entry: Method and seed.
        runs: Folder of the runs.
        folder: Folder of values.csv and curves.csv.
        changes: Changes of the preset, by dotted key.
        data_dir: Folder of the data sets.
    """
    method, seed = entry
    experiment = load(f"emnist-{method}", {**changes, "seeds": [seed]})
    out = runs / f"{method}-{seed}"
    run = fedcb2o.run(experiment, out=out, resume=out.exists(), data_dir=data_dir)
    folder.mkdir(parents=True, exist_ok=True)
    tables = {"values.csv": seed_values(run).round(4), "curves.csv": seed_curves(run)}
    for name, table in tables.items():
        add_rows(folder / name, pd.concat({method: table}, names=["method"]))


def add_rows(path: Path, rows: pd.DataFrame) -> None:
    """Add rows to a table in a file, in place of earlier rows of the same index.

    Args:
        path: CSV file, which may be missing.
        rows: The rows, with named index levels.
    """
    table = rows
    if path.exists():
        earlier = pd.read_csv(path, index_col=[str(name) for name in rows.index.names])
        table = pd.concat([earlier[~earlier.index.isin(rows.index)], rows])
    partial = path.with_suffix(".partial")
    table.to_csv(partial)
    partial.replace(path)


def run_missing(
    count: int,
    minutes: float,
    folder: Path,
    run: Callable[[Entry], None],
    copy: Path | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Entry]:
    """Run the next missing entries.

    Args:
        count: Largest number of entries.
        minutes: No entry starts that would end later.
        folder: Folder of values.csv and curves.csv.
        run: Runs an entry.
        copy: Folder for a copy of both files after each entry.
        clock: Seconds since any start.

    Returns:
        The entries that were run.
    """
    start = clock()
    last = 0.0
    ended = []
    for entry in missing(folder)[:count]:
        begin = clock()
        if begin - start + last > 60 * minutes:
            break
        run(entry)
        last = clock() - begin
        ended.append(entry)
        if copy is not None:
            copy.mkdir(parents=True, exist_ok=True)
            for name in ("values.csv", "curves.csv"):
                shutil.copy(folder / name, copy / name)
    return ended


def tables(folder: Path, earlier: Path = EARLIER) -> str:
    """Return Table 1 and Table 2 so far, next to the paper's numbers, in Markdown.

    Args:
        folder: Folder of values.csv.
        earlier: Folder of the values of rows that have none, from runs of 150 rounds.

    Returns:
        One row per method: means, and standard deviations over seeds as in the paper.
    """
    values = {"": read_values(folder), " (150 rounds)": read_values(earlier)}
    header = ["", "Seeds"]
    for metric in METRICS:
        header += [METRIC_NAMES[metric], "the paper"]
    lines = [header, ["---", "---:", *["---:"] * (2 * len(METRICS))]]
    for method, row in ROWS.items():
        rows = {note: table[table.index.isin([method], "method")] for note, table in values.items()}
        note = next((note for note, found in rows.items() if len(found)), "")
        found = rows[note]
        cells = [row + note, str(len(found))]
        for metric in METRICS:
            cells += [_cell(found[metric]), f"{float(PAPER[row][metric]):.2f}"]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(values: "pd.Series[float]") -> str:
    if not len(values):
        return "–"
    if len(values) == 1:
        return f"{values.iloc[0]:.2f}"
    return f"{values.mean():.2f} ± {values.std(ddof=1):.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run missing entries, and print the tables so far.

    Args:
        arguments: Command-line arguments; None for those of the process.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--next", type=int, nargs="?", const=1, default=0, help="entries to run")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--copy", type=Path, help="folder for a copy of the values")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of the values")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the runs")
    parser.add_argument("--data-dir", type=Path, help="folder of the data sets")
    options = parser.parse_args(arguments)

    changes = DEVICE_SETTINGS if torch.cuda.is_available() else {}

    def run(entry: Entry) -> None:
        run_entry(entry, options.runs, options.folder, changes, options.data_dir)

    run_missing(options.next, options.minutes, options.folder, run, options.copy)
    left = missing(options.folder)
    print(f"{len(left)} of {len(ENTRIES)} entries are missing: {', '.join(map(_label, left))}")
    table = tables(options.folder)
    print(table)
    if options.folder == FOLDER:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(MARKER.sub(lambda _: f"{table}\n", page), encoding="utf-8")


def _label(entry: Entry) -> str:
    return f"{entry[0]} ({entry[1]})"


if __name__ == "__main__":
    main()
