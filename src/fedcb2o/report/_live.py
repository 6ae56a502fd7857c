"""Live page of a run or a grid: cells done, time left and curves, by the files alone.

Files of a run that goes on have no checksums yet, so the page reads whole lines and verifies none.
A cell is a run of a grid, or one seed of a single run.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcb2o.errors import RunError
from fedcb2o.records import METRICS, log_path, read_cells, read_config, read_lines, read_toml
from fedcb2o.report._html import render_live
from fedcb2o.report.grid_results import BASELINES, is_grid

Curve = list[tuple[int, float]]
"""Rounds, and the mean over benign agents."""
_WATCHED = ("accuracy", "test_loss", "validation_loss")  # the first that a seed measures is shown
_MAX_CURVES = 24  # cells with a curve on the page
_MAX_BYTES = 2**26  # of a file of metrics
_WIDTH, _HEIGHT = 240, 90  # of a curve's area


@dataclass
class _Cell:
    """Progress of one cell; `seconds` are those of a seed, None if not known."""

    title: str
    method: str
    rounds: int
    done: list[int]
    curves: list[Curve]
    metric: str = ""
    seconds: float | None = None
    error: str = ""

    @property
    def share(self) -> float:
        return sum(self.done) / max(1, self.rounds * len(self.done))

    @property
    def state(self) -> str:
        if self.share >= 1:
            return "done"
        if self.error:
            return f"failed: {self.error}"
        return f"round {max(self.done)} of {self.rounds}" if any(self.done) else "waiting"


def live_page(folder: Path, refresh: int) -> str:
    """Render the state of a run or a grid; the browser loads it again every `refresh` seconds."""
    if is_grid(folder):
        title, cells = _grid_cells(folder)
    elif (folder / "config.toml").is_file():
        title, cells = _run_cells(folder)
    else:
        raise RunError(f"there is no run and no grid in {folder}: give the folder of one")
    done = sum(cell.state == "done" for cell in cells)
    failed = sum(bool(cell.error) for cell in cells)
    status = f"{done} of {len(cells)} cells done"
    status += f", {failed} failed" if failed else ""
    left = _seconds_left(cells)
    if done + failed < len(cells) and left is not None:
        status += f", about {_format_duration(left)} left"
    begun = [cell for cell in cells if any(len(curve) > 1 for curve in cell.curves)]
    running = [cell for cell in begun if cell.state != "done"]
    drawn = [*running, *(cell for cell in reversed(begun) if cell not in running)][:_MAX_CURVES]
    return render_live(
        title=title,
        status=status,
        share=sum(cell.share for cell in cells) / max(1, len(cells)),
        refresh=refresh if done + failed < len(cells) else None,
        charts=[_chart(cell) for cell in drawn],
        cells=[(cell.title, cell.state, _last_value(cell)) for cell in cells],
    )


def _run_cells(folder: Path) -> tuple[str, list[_Cell]]:
    config = read_config(folder / "config.toml")
    rounds = int(config.get("rounds", 1))
    cells = []
    for seed in config.get("seeds", ()):
        place = folder / f"seed-{seed}"
        cell = _measure(_Cell(f"seed {seed}", "", rounds, [], []), [place])
        times = [
            sum(v for k, v in line.items() if k != "round") for line in _lines(place, "timing")
        ]
        cell.seconds = rounds * sum(times) / len(times) if times else None
        cells.append(cell)
    return str(config.get("title") or config.get("name") or folder.name), cells


def _grid_cells(folder: Path) -> tuple[str, list[_Cell]]:
    table = read_toml(folder / "grid.toml")
    lines: Sequence[Mapping[str, Any]] = ()
    if (folder / "cells.json").is_file():
        lines = read_cells(folder / "cells.json")
    # Baselines of one defence differ in the goal, which their attacks have.
    attacks = {
        (line["setting"], line["defence"], line["floor"]): line["attack"]
        for line in reversed(lines)
        if line["floor"]
    }
    cells = []
    for line in lines:
        own = table.get("defences", {}).get(line["defence"], {})
        seeds = own.get("seeds", table.get("seeds", ()))
        column = line["attack"]
        if not column:
            place = (line["setting"], line["defence"], line["folder"].rpartition("/")[2])
            column = f"{BASELINES.get(line['kind'], line['kind'])} ({attacks.get(place, '')})"
        title = ", ".join(filter(None, [line["setting"], line["defence"], column]))
        cell = _Cell(title, str(line["defence"]), int(line["rounds"]), [], [])
        cell.seconds = line["seconds"]
        cell.error = str(line["error"] or "")
        cells.append(_measure(cell, [folder / line["folder"] / f"seed-{seed}" for seed in seeds]))
    return str(table.get("title") or table.get("name") or folder.name), cells


def _measure(cell: _Cell, seeds: Iterable[Path]) -> _Cell:
    """Read the rounds and the curve of each seed."""
    for place in seeds:
        lines = _lines(place, "metrics")
        is_done = (place / "summary.json").is_file()
        cell.done.append(cell.rounds if is_done else min(len(lines), cell.rounds - 1))
        curve: Curve = []
        for metric in _WATCHED if lines else ():
            curve = [
                (int(line["round"]), sum(known) / len(known))
                for line in lines
                if (known := [value for value in line.get(metric) or () if value is not None])
            ]
            if curve:
                cell.metric = metric
                break
        cell.curves.append(curve)
    return cell


def _lines(folder: Path, name: str) -> list[dict[str, Any]]:
    """Read the finished rounds of a log, up to a limit of bytes."""
    lines: list[dict[str, Any]] = []
    size = 0
    with suppress(RunError):
        for content, line in read_lines(log_path(folder, name), stop_at_damage=True):
            size += len(content)
            if size > _MAX_BYTES:
                break
            lines.append(line)
    return lines


def _seconds_left(cells: Sequence[_Cell]) -> float | None:
    """Return the expected seconds, by those of other cells of the method; None if unknown."""
    known = [(cell.method, cell.seconds) for cell in cells if cell.seconds]
    if not known:
        return None
    total = 0.0
    running = 0
    for cell in cells:
        if cell.share < 1 and not cell.error:
            own = [seconds for method, seconds in known if method == cell.method]
            times = own or [seconds for _, seconds in known]
            total += len(cell.done) * (1 - cell.share) * sum(times) / len(times)
            running += any(cell.done)
    return total / max(1, running)


def _format_duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _chart(cell: _Cell) -> dict[str, Any]:
    """Return the title and the lines of a chart, one per seed."""
    is_share = METRICS[cell.metric].is_percent
    top = max(value for curve in cell.curves for _, value in curve)
    top = 1.0 if is_share else top or 1.0
    lines = []
    for curve in filter(None, cell.curves):
        points = [
            f"{_WIDTH * n / cell.rounds:.1f},{_HEIGHT * (1 - value / top):.1f}"
            for n, value in curve
        ]
        lines.append(" ".join(points))
    return {
        "title": f"{cell.title}: {METRICS[cell.metric].label.lower()}, {cell.state}",
        "lines": lines,
        "width": _WIDTH,
        "height": _HEIGHT,
        "top": "100%" if is_share else f"{top:.3g}",
        "rounds": cell.rounds,
    }


def _last_value(cell: _Cell) -> str:
    """Return the mean over seeds of the last values."""
    values = [curve[-1][1] for curve in cell.curves if curve]
    if not values:
        return ""
    mean = sum(values) / len(values)
    return f"{mean:.1%}" if METRICS[cell.metric].is_percent else f"{mean:.4g}"
