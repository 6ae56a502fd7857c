"""The progress of a run: bars on a terminal, lines elsewhere."""

import sys
import time
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Column

from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.records import METRICS, OPTIONAL_METRICS, STANDARD_METRICS

RoundCallback = Callable[[Experiment, int, Mapping[str, Any]], None]
"""A function called after every round with the experiment, the seed, and the metrics record."""


class Progress:
    """A display of finished rounds, the last scores and the current phase."""

    def __init__(
        self, console: Console | None = None, every: float = 15.0, verbose: bool = False
    ) -> None:
        """Create the display, by default on standard error with lines `every` few seconds."""
        self.console = console or Console(stderr=True)
        self.every = every
        self.verbose = verbose
        self._last_print = 0.0
        self._tasks: dict[tuple[str, int], TaskID] = {}
        self._scores: dict[tuple[str, int], tuple[int, str]] = {}  # with the round of the scores
        # The text at the end wraps; the other columns keep their width.
        fixed = Column(min_width=7, no_wrap=True)
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=12, table_column=Column(min_width=12)),
            MofNCompleteColumn(table_column=fixed),
            TimeRemainingColumn(table_column=fixed),
            TextColumn("{task.fields[status]}", markup=False, table_column=Column()),
            console=self.console,
            disable=not self.console.is_terminal,
        )

    def __enter__(self) -> "Progress":
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def __call__(self, experiment: Experiment, seed: int, line: Mapping[str, Any]) -> None:
        """Show that a round is done."""
        done = int(line["round"])
        if "accuracy" in line:
            self._scores[experiment.name, seed] = done, _format_scores(line)
        self._show(experiment, seed, done, "", now=done == experiment.rounds)

    def log(self, line: str) -> None:
        """Print a line if the display is verbose."""
        if self.verbose:
            self.console.print(line, highlight=False, soft_wrap=True)

    def phase(self, experiment: Experiment, seed: int, n: int, phase: str) -> None:
        """Show the phase of the current round n, counted from 1."""
        is_first = (experiment.name, seed) not in self._tasks
        self._show(experiment, seed, n - 1, phase, now=is_first)

    def _show(self, experiment: Experiment, seed: int, done: int, phase: str, *, now: bool) -> None:
        """Update the bar; without a terminal print a line, `now` or after some time."""
        key = (experiment.name, seed)
        name = f"{experiment.name} seed {seed}"
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task(name, total=experiment.rounds, status="")
        n, scores = self._scores.get(key, (0, ""))
        status = "\n".join(filter(None, (scores, phase)))
        self._bars.update(self._tasks[key], completed=done, status=status)
        is_due = now or time.monotonic() - self._last_print > self.every
        if not self.console.is_terminal and is_due:
            self._last_print = time.monotonic()
            current = done + bool(phase)
            line = _format_status(experiment.rounds, n, scores, current, phase or "done")
            print(f"{name}: {line}", file=sys.stderr, flush=True)


def _format_status(rounds: int, n: int, scores: str, current: int, phase: str) -> str:
    """Return the scores after round `n`, and the phase of the current round."""
    if not scores:
        return f"round {current}/{rounds} {phase}"
    status = f"round {n}/{rounds} {scores}"
    return f"{status}; {current}: {phase}" if current > n else status


def _format_scores(line: Mapping[str, Any]) -> str:
    """Return the means over agents as text."""
    scores = []
    for name in (*STANDARD_METRICS, *OPTIONAL_METRICS):
        known = [value for value in line.get(name, ()) if value is not None]
        if not known:
            continue
        scores.append(METRICS[name].format_short(fmean(known)))
    return ", ".join(scores)
