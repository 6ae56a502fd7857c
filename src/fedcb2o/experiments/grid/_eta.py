"""The progress of a grid and its remaining time: a bar on a terminal, lines elsewhere."""

import sys
import time
from collections.abc import Sequence
from math import inf
from statistics import fmean

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from fedcb2o.experiments.grid._definition import Cell


class TimeEstimate:
    """An estimate of the remaining time, by the seconds of ended cells of the same defence."""

    def __init__(self, jobs: int) -> None:
        """Create an estimate."""
        self.jobs = jobs
        self.seconds: dict[tuple[str, str], list[float]] = {}
        self.pending: dict[str, tuple[Cell, int]] = {}

    def add(self, cell: Cell, seeds: int) -> None:
        """Add a cell that will be run."""
        self.pending[cell.folder] = cell, seeds

    def finish(self, cell: Cell, seconds: float | None) -> float | None:
        """Record the end of a cell; return the seconds of a seed, None if it failed."""
        _, seeds = self.pending.pop(cell.folder)
        if seconds is None:
            return None
        self.record(cell, seconds / seeds)
        return seconds / seeds

    def record(self, cell: Cell, seconds: float) -> None:
        """Record the time of a seed."""
        self.seconds.setdefault((cell.key.setting, cell.key.defence), []).append(seconds)

    def weight(self, cell: Cell) -> float:
        """Return the expected seconds; infinity for an unknown defence, which starts first."""
        seconds = self.seconds.get((cell.key.setting, cell.key.defence))
        return inf if seconds is None else fmean(seconds) * self.pending[cell.folder][1]

    def remaining(self) -> float | None:
        """Return the expected seconds until the last cell has ended; None if unknown."""
        if not self.seconds:
            return None
        mean = fmean(value for values in self.seconds.values() for value in values)
        costs = []
        for cell, seeds in self.pending.values():
            weight = self.weight(cell)
            costs.append(seeds * mean if weight == inf else weight)
        # Processes share the work, but one cell is never shared.
        return max([sum(costs) / self.jobs, *costs])


class GridProgress:
    """A display of the finished cells, the running cells and the remaining time."""

    def __init__(self, console: Console | None = None) -> None:
        """Create the display, by default on standard error."""
        self.console = console or Console(stderr=True)
        self.total = 0
        self.done = 0
        self._started = time.monotonic()
        fixed = Column(min_width=9, no_wrap=True)
        ellipsis = Column(no_wrap=True, overflow="ellipsis")
        self._bar = Progress(
            BarColumn(bar_width=12, table_column=Column(min_width=12)),
            TextColumn("{task.completed}/{task.total} cells", table_column=fixed),
            TimeElapsedColumn(table_column=fixed),
            TextColumn("{task.fields[status]}", markup=False, table_column=ellipsis),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("", total=0, status="")

    def __enter__(self) -> "GridProgress":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def start(self, total: int, done: int) -> None:
        """Show the size of the grid and the number of cells that were done before."""
        self.add(total, done)
        if done and not self.console.is_terminal:
            self._print(f"{done} of {total} cells were done before")

    def add(self, total: int, done: int) -> None:
        """Add cells, of which `done` were done before."""
        self.total += total
        self.done += done
        self._bar.update(self._task, total=self.total, completed=self.done)

    def refresh(self, remaining: float | None, running: Sequence[Cell]) -> None:
        """Show the running cells and the expected seconds, on a terminal."""
        names = "; ".join(cell.key.title for cell in running)
        status = ": ".join(filter(None, [_format_remaining(remaining), names]))
        self._bar.update(self._task, status=status)

    def finish(
        self, cell: Cell, seconds: float, error: str | None, remaining: float | None
    ) -> None:
        """Show that a cell has ended."""
        self.done += error is None
        self._bar.update(self._task, completed=self.done)
        if error is not None:
            self._print(f"{cell.key.title} failed: {error}")
        elif not self.console.is_terminal:
            elapsed = format_duration(time.monotonic() - self._started)
            status = f"{self.done} of {self.total} cells in {elapsed}"
            status = ", ".join(filter(None, [status, _format_remaining(remaining)]))
            self._print(f"{status}: {cell.key.title} took {format_duration(seconds)}")

    def _print(self, line: str) -> None:
        if self.console.is_terminal:
            self._bar.console.print(line, markup=False, highlight=False)
        elif not self.console.quiet:
            print(line, file=sys.stderr, flush=True)


def format_duration(seconds: float) -> str:
    """Format a duration for a reader, such as "8 s", "12 min" or "3.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _format_remaining(seconds: float | None) -> str:
    return "" if seconds is None else f"about {format_duration(seconds)} left"
