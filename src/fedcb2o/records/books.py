"""The books that a grid keeps of its runs, cells.json and tuning.json: both can be made again from the runs."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from fedcb2o.errors import RunError
from fedcb2o.records.files import read_json

KEYS = ("folder", "kind", "setting", "defence", "attack", "floor", "rounds", "seconds", "error")


def read_book(path: Path, keys: Collection[str] = ()) -> dict[str, Any]:
    """The object in one of a grid's books, whose values are tables that have some keys; raises RunError where it holds
    something else."""
    try:
        book = read_json(path)
    except RunError as error:
        raise _unreadable(path) from error
    if keys and not all(isinstance(line, dict) and line.keys() >= set(keys) for line in book.values()):
        raise _unreadable(path)
    return book


def read_cells(folder: Path) -> list[dict[str, Any]]:
    """The lines of a grid's cells.json, one for each of its runs; raises RunError where it holds something else."""
    path = folder / "cells.json"
    cells = read_book(path).get("cells")
    if not isinstance(cells, list) or not all(isinstance(line, dict) and line.keys() >= set(KEYS) for line in cells):
        raise _unreadable(path)
    return cells


def _unreadable(path: Path) -> RunError:
    return RunError(
        f"{path} is damaged: remove this file alone; `fedcb2o bench {path.parent / 'grid.toml'} --out {path.parent} "
        "--resume` makes it again from the runs, which stay as they are"
    )
