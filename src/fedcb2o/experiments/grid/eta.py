"""How far a grid is, and how long it will still take: a bar on a terminal, a line for each cell elsewhere."""

import sys
import time
from collections.abc import Sequence
from math import inf
from statistics import fmean

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from fedcb2o.experiments.grid.definition import Cell


class TimeEstimate:
    """What cells took, in seconds of one process for one seed, and so what is still to come.

    A cell is taken to cost what those of its defence in its setting did, or else what all did; before one has ended,
    nothing is known.
    """

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.seconds: dict[tuple[str, str], list[float]] = {}
        self.pending: dict[str, tuple[Cell, int]] = {}
        self.started: dict[str, float] = {}

    def add(self, cell: Cell, seeds: int) -> None:
        """A cell will be run, for so many seeds."""
        self.pending[cell.folder] = cell, seeds

    def start(self, cell: Cell) -> None:
        """A cell begins now."""
        self.started[cell.folder] = time.monotonic()

    def finish(self, cell: Cell, seconds: float | None) -> float | None:
        """A cell has ended after so many seconds, or failed; what one of its seeds took."""
        _, seeds = self.pending.pop(cell.folder)
        self.started.pop(cell.folder, None)
        each = None if seconds is None else seconds / seeds
        if each is not None:
            self.record(cell, each)
        return each

    def record(self, cell: Cell, seconds: float) -> None:
        """A seed of a cell took so many seconds."""
        self.seconds.setdefault((cell.key.setting, cell.key.defence), []).append(seconds)

    def weight(self, cell: Cell) -> float:
        """What a cell is taken to cost; where nothing is known of its defence, more than all others."""
        known = self.seed_seconds(cell)
        return inf if known is None else known * self.pending[cell.folder][1]

    def seed_seconds(self, cell: Cell) -> float | None:
        """What one seed of a cell is taken to cost, from others of its defence; None where there is none."""
        took = self.seconds.get((cell.key.setting, cell.key.defence))
        return fmean(took) if took else None

    def remaining(self) -> float | None:
        """Seconds until the last cell will have ended; None where nothing is known."""
        if not self.seconds:
            return None
        usual = fmean(seconds for each in self.seconds.values() for seconds in each)
        now = time.monotonic()
        left = []
        for folder, (cell, seeds) in self.pending.items():
            cost = seeds * (self.seed_seconds(cell) or usual)
            left.append(
                max(cost - (now - self.started[folder]), 0.0) if folder in self.started else cost
            )
        return max([sum(left) / self.jobs, *left])


class GridProgress:
    """Shows how many cells are done, which ones are at hand, and about how long the others will take."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.total = self.done = 0
        self._started = time.monotonic()
        whole = Column(min_width=9, no_wrap=True)
        cut = Column(no_wrap=True, overflow="ellipsis")
        self._bar = Progress(
            BarColumn(bar_width=12, table_column=Column(min_width=12)),
            TextColumn("{task.completed}/{task.total} cells", table_column=whole),
            TimeElapsedColumn(table_column=whole),
            TextColumn("{task.fields[told]}", markup=False, table_column=cut),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("", total=0, told="")

    def __enter__(self) -> "GridProgress":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def start(self, total: int, done: int) -> None:
        """So many cells there are, and so many of them were done before."""
        self.total = total
        self.done = done
        self._bar.update(self._task, total=total, completed=done)
        if done and not self.console.is_terminal:
            self._print(f"{done} of {total} cells were done before")

    def add(self, total: int, done: int) -> None:
        """So many more cells there are, and so many of these were done before."""
        self.total, self.done = self.total + total, self.done + done
        self._bar.update(self._task, total=self.total, completed=self.done)

    def refresh(self, remaining: float | None, running: Sequence[Cell]) -> None:
        """Show what is at hand, on a terminal."""
        names = "; ".join(cell.key.title for cell in running)
        self._bar.update(
            self._task, told=": ".join(filter(None, [_format_remaining(remaining), names]))
        )

    def finish(
        self, cell: Cell, seconds: float, error: str | None, remaining: float | None
    ) -> None:
        """Show that a cell has ended after `seconds`, or failed."""
        self.done += error is None
        self._bar.update(self._task, completed=self.done)
        if error is not None:
            self._print(f"{cell.key.title} failed: {error}")
        elif not self.console.is_terminal:
            elapsed = format_duration(time.monotonic() - self._started)
            so_far = ", ".join(
                filter(
                    None,
                    [
                        f"{self.done} of {self.total} cells in {elapsed}",
                        _format_remaining(remaining),
                    ],
                )
            )
            self._print(f"{so_far}: {cell.key.title} took {format_duration(seconds)}")

    def _print(self, line: str) -> None:
        if self.console.is_terminal:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)


def format_duration(seconds: float) -> str:
    """Seconds as one reads them: "8 s", "12 min", "3.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _format_remaining(left: float | None) -> str:
    return "" if left is None else f"about {format_duration(left)} left"
