"""Copies records to trackers: what is there, and meanwhile or afterwards what comes."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from fedcb2o import records
from fedcb2o.errors import ConfigError, FedCB2OError, RunError
from fedcb2o.records import Manifest, Run
from fedcb2o.tracking.scalars import SeedRun, round_scalars
from fedcb2o.tracking.trackers import TrackerWriter, open_writer, validate_targets

_T = TypeVar("_T")

SYNC_INTERVAL_SECONDS = 2.0  # seconds between two looks at the records of a run under way
_GRID_FILE = "grid.toml"


class TrackerSync:
    """One tracker's copy of the records of a run or a grid; raises RunError where the tracker fails."""

    def __init__(self, root: Path, target: str) -> None:
        self.root = root
        self.target = target
        self.writer: TrackerWriter = self._guard(lambda: open_writer(target, root))
        self.copied_rounds: dict[SeedRun, int] = {}  # up to which round it is there
        self.finished: set[SeedRun] = set()

    def sync(self) -> None:
        """Copy what has been written since it was last looked at."""
        for place in find_seed_runs(self.root):
            if place not in self.finished:
                self._sync_seed(place)

    def close(self) -> None:
        """Say of the seeds that have not ended that nothing more comes."""
        for place in self.copied_rounds.keys() - self.finished:
            self._end(place, complete=False)

    def _sync_seed(self, place: SeedRun) -> None:
        sums = Manifest.read(place.folder)  # first: what is complete by it has all lines
        malicious = records.read_json(place.folder / "agents.json")["malicious"]
        if place not in self.copied_rounds:
            self.copied_rounds[place] = self._guard(lambda: self.writer.begin(place))
        found = []
        for _, line in records.read_lines(
            place.folder / "metrics.jsonl", skip=self.copied_rounds[place]
        ):
            found += list(round_scalars(line, malicious))
        if found:
            self._guard(lambda: self.writer.write(place, found))
            self.copied_rounds[place] = found[-1][0]
        if sums is not None and sums.has_finished(place.settings().get("rounds", 0)):
            self._end(place, complete=True)

    def _end(self, place: SeedRun, *, complete: bool) -> None:
        self._guard(lambda: self.writer.end(place, complete))
        self.finished.add(place)

    def _guard(self, step: Callable[[], _T]) -> _T:
        """What a step of the tracker's returns; whatever fails in it is a RunError of one line."""
        try:
            return step()
        except FedCB2OError:
            raise
        except Exception as error:  # of a library, a disk or a server
            told = " ".join(str(error).split())[:300]
            raise RunError(
                f"cannot track {self.root} by {self.target} ({type(error).__name__}: {told}): see that it can be "
                "reached, or run without it, and `fedcb2o track` when it can"
            ) from error


def find_seed_runs(root: Path) -> Iterator[SeedRun]:
    """The seeds that have begun, of a run or of the cells and floors of a grid."""
    names = [""]
    if (root / _GRID_FILE).exists():
        path = root / "cells.json"
        cells = records.read_cells(path) if path.exists() else []
        names = [cell["folder"] for cell in cells if cell["kind"] != "tuning"]
    for name in names:
        if (root / name / "config.toml").exists():
            for seed, folder in records.find_seeds(root / name).items():
                if (folder / "agents.json").exists():
                    yield SeedRun(root / name, seed, name)


def track(folder: str | Path, to: str | Sequence[str]) -> None:
    """Copy the records of a run or a grid to trackers: "tensorboard", "tensorboard=DIR", "mlflow" or "mlflow=URI".

    Without a place of its own the copy lies in the folder itself. What is there already is not there twice. Raises
    ConfigError where an extra is missing, RunError where the folder is no run's, or the tracker fails.
    """
    targets = validate_targets(to)
    root = Path(folder)
    if not targets:
        raise ConfigError(
            "there is no tracker to copy to: name one, such as 'tensorboard' or 'mlflow'"
        )
    if not (root / _GRID_FILE).exists():
        Run(root)  # raises where it is none
    for target in targets:
        copy = TrackerSync(root, target)
        copy.sync()
        copy.close()


@contextlib.contextmanager
def follow(root: Path, targets: Sequence[str]) -> Iterator[None]:
    """While in this block a run or a grid is written, copy it: by a thread, so that no tracker holds up a round.

    Raises RunError where a tracker cannot be opened. One that fails later is told of, and the run goes on without it.
    """
    copies = [TrackerSync(root, target) for target in targets]
    if not copies:
        yield
        return
    over = threading.Event()

    def copy() -> None:
        last = False
        while copies and not last:
            last = over.wait(SYNC_INTERVAL_SECONDS)
            for each in list(copies):
                try:
                    each.sync()
                    if last:
                        each.close()
                except Exception as error:
                    copies.remove(each)
                    print(
                        f"Note: {error}. The run goes on; `fedcb2o track {root} --to {each.target}` copies the rest.",
                        file=sys.stderr,
                    )

    thread = threading.Thread(target=copy, name="tracking", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
