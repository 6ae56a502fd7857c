"""Copies of records in trackers, during a run or afterwards."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from fedcb2o import records
from fedcb2o.errors import ConfigError, FedCB2OError, RunError
from fedcb2o.printable import one_line
from fedcb2o.records import Manifest, Run
from fedcb2o.tracking.scalars import SeedRun, round_scalars
from fedcb2o.tracking.trackers import TrackerWriter, open_writer, validate_targets

_LOGGER = logging.getLogger(__name__)
_T = TypeVar("_T")

SYNC_INTERVAL_SECONDS = 2.0  # time between two reads of the records of a run in progress
_GRID_FILE = "grid.toml"
_MAX_REASON_LENGTH = 300  # characters


class TrackerSync:
    """The copy of a run or a grid in one tracker."""

    def __init__(self, root: Path, target: str) -> None:
        self.root = root
        self.target = target
        self.writer: TrackerWriter = self._guard(lambda: open_writer(target, root))
        self.copied_rounds: dict[SeedRun, int] = {}
        self.finished: set[SeedRun] = set()

    def sync(self) -> None:
        """Copy the rounds since the last call."""
        for seed_run in find_seed_runs(self.root):
            if seed_run not in self.finished:
                self._sync_seed(seed_run)

    def close(self) -> None:
        """End the copies of the seeds that have not finished."""
        for seed_run in self.copied_rounds.keys() - self.finished:
            self._end(seed_run, complete=False)

    def _sync_seed(self, seed_run: SeedRun) -> None:
        # The manifest comes first: a seed that is complete by it has all its lines.
        manifest = Manifest.read(seed_run.folder)
        malicious = records.read_json(seed_run.folder / "agents.json")["malicious"]
        if seed_run not in self.copied_rounds:
            self.copied_rounds[seed_run] = self._guard(lambda: self.writer.begin(seed_run))

        scalars = []
        path = records.log_path(seed_run.folder, "metrics")
        for _, line in records.read_lines(path, skip=self.copied_rounds[seed_run]):
            scalars += list(round_scalars(line, malicious))
        if scalars:
            self._guard(lambda: self.writer.write(seed_run, scalars))
            self.copied_rounds[seed_run] = scalars[-1][0]

        rounds = seed_run.settings().get("rounds", 0)
        if manifest is not None and manifest.has_finished(rounds):
            self._end(seed_run, complete=True)

    def _end(self, seed_run: SeedRun, *, complete: bool) -> None:
        self._guard(lambda: self.writer.end(seed_run, complete))
        self.finished.add(seed_run)

    def _guard(self, step: Callable[[], _T]) -> _T:
        """Return the result of a tracker's step, or raise a RunError."""
        try:
            return step()
        except FedCB2OError:
            raise
        except Exception as error:  # of a library, a disk or a server
            reason = one_line(str(error))[:_MAX_REASON_LENGTH]
            raise RunError(
                f"cannot track {self.root} by {self.target} ({type(error).__name__}: {reason}): "
                "make it reachable, or run without it and call `fedcb2o track` later"
            ) from error


def find_seed_runs(root: Path) -> Iterator[SeedRun]:
    """Find the seeds of a run or a grid that have begun: those with an agents.json."""
    names = [""]
    if (root / _GRID_FILE).exists():
        path = root / "cells.json"
        cells = records.read_cells(path) if path.exists() else []
        # Runs of a choice are many, short, and of no interest afterwards.
        names = [cell["folder"] for cell in cells if cell["kind"] != "tuning"]
    for name in names:
        if (root / name / "config.toml").exists():
            for seed, folder in records.find_seeds(root / name).items():
                if (folder / "agents.json").exists():
                    yield SeedRun(root / name, seed, name)


def track(folder: str | Path, to: str | Sequence[str]) -> None:
    """Copy the records of a run or a grid to trackers.

    Rounds that a tracker already has are not copied again.

    Args:
        folder: Folder of the run or the grid.
        to: Targets: "tensorboard", "tensorboard=DIR", "mlflow" or "mlflow=URI". Without a location
            the copy is in `folder`.

    Raises:
        ConfigError: There is no target, or its extra is missing.
        RunError: The folder has no run, or a tracker fails.
    """
    targets = validate_targets(to)
    root = Path(folder)
    if not targets:
        raise ConfigError(
            "there is no tracker to copy to: name one, such as 'tensorboard' or 'mlflow'"
        )
    if not (root / _GRID_FILE).exists():
        Run(root)  # raises RunError for another folder
    for target in targets:
        copy = TrackerSync(root, target)
        copy.sync()
        copy.close()


@contextlib.contextmanager
def follow(root: Path, targets: Sequence[str]) -> Iterator[None]:
    """Copy a run or a grid while this context writes it.

    A thread copies, so that no tracker delays a round. A tracker that fails later is logged, and
    the run continues without it.
    """
    copies = [TrackerSync(root, target) for target in targets]
    if not copies:
        yield
        return
    is_over = threading.Event()
    thread = threading.Thread(
        target=_sync_until, args=(is_over, copies), name="tracking", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _sync_until(is_over: threading.Event, copies: list[TrackerSync]) -> None:
    """Copy at intervals until the event, and once after it."""
    is_last = False
    while copies and not is_last:
        is_last = is_over.wait(SYNC_INTERVAL_SECONDS)
        for copy in list(copies):
            try:
                copy.sync()
                if is_last:
                    copy.close()
            except Exception as error:
                copies.remove(copy)
                _LOGGER.warning(
                    "%s. The run goes on; `fedcb2o track %s --to %s` copies the rest.",
                    error,
                    copy.root,
                    copy.target,
                )
