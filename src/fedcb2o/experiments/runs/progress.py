"""How far a run is: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Column

from fedcb2o.experiments.config.settings import Experiment

RoundCallback = Callable[[Experiment, int, Mapping[str, Any]], None]
"""Called after every round with the experiment, the seed, and the round's line of metrics."""


class Progress:
    """Shows rounds as they are done, with the last accuracies, and what the round at hand is at."""

    def __init__(
        self, console: Console | None = None, every: float = 15.0, verbose: bool = False
    ) -> None:
        self.console = console or Console(stderr=True)
        self.every = every
        self._last_print = 0.0
        self.verbose = verbose
        self._tasks: dict[tuple[str, int], TaskID] = {}
        self._scores: dict[tuple[str, int], tuple[int, str]] = {}  # after which round
        whole = Column(min_width=7, no_wrap=True)  # what is told beside it is what takes more lines
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=12, table_column=Column(min_width=12)),
            MofNCompleteColumn(table_column=whole),
            TimeRemainingColumn(table_column=whole),
            TextColumn("{task.fields[told]}", markup=False, table_column=Column()),
            console=self.console,
            disable=not self.console.is_terminal,
        )

    def __enter__(self) -> "Progress":
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def __call__(self, experiment: Experiment, seed: int, line: Mapping[str, Any]) -> None:
        """Show that a round of a seed is done."""
        done = int(line["round"])
        if "accuracy" in line:
            self._scores[experiment.name, seed] = done, _format_scores(line)
        self._show(experiment, seed, done, "", now=done == experiment.rounds)

    def log(self, line: str) -> None:
        """Print what only some want to know."""
        if self.verbose:
            self.console.print(line, highlight=False, soft_wrap=True)

    def phase(self, experiment: Experiment, seed: int, n: int, phase: str) -> None:
        """Show what round `n` of a seed, counted from 1, is at."""
        self._show(experiment, seed, n - 1, phase, now=(experiment.name, seed) not in self._tasks)

    def _show(self, experiment: Experiment, seed: int, done: int, phase: str, *, now: bool) -> None:
        """Show where a seed is: on a terminal always, elsewhere `now` or after some time."""
        key = (experiment.name, seed)
        name = f"{experiment.name} seed {seed}"
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task(name, total=experiment.rounds, told="")
        n, scores = self._scores.get(key, (0, ""))
        self._bars.update(
            self._tasks[key], completed=done, told="\n".join(filter(None, (scores, phase)))
        )
        if not self.console.is_terminal and (
            now or time.monotonic() - self._last_print > self.every
        ):
            self._last_print = time.monotonic()
            line = _format_status(experiment.rounds, n, scores, done + bool(phase), phase or "done")
            print(f"{name}: {line}", file=sys.stderr, flush=True)


def _format_status(rounds: int, n: int, scores: str, now: int, phase: str) -> str:
    """The scores after round n, and what the round is at that comes after it."""
    if not scores:
        return f"round {now}/{rounds} {phase}"
    return f"round {n}/{rounds} {scores}" + f"; {now}: {phase}" * (now > n)


def _format_scores(line: Mapping[str, Any]) -> str:
    found = []
    for key, word in (
        ("accuracy", "accuracy"),
        ("source_accuracy", "source"),
        ("attack_success_rate", "attack"),
        ("test_loss", "loss"),
        ("global_accuracy", "on the global test set"),
        ("global_loss", "loss on the global test set"),
    ):
        mean = _mean_of_known(line.get(key, ()))
        found += (
            []
            if mean is None
            else [f"{word} {mean:.4g}" if "loss" in key else f"{word} {100 * mean:.1f}%"]
        )
    return ", ".join(found)


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
