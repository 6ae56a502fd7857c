"""The run of a grid: several processes, each with one cell at a time.

A run of a grid is a run like any other, in a folder of its own. `cells.json` maps runs to cells,
with times and errors. The chosen candidates are frozen in `tuning.json`, and the strengths of
attacks in `strengths.json`, before the cells that depend on them begin.
"""

import fcntl
import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcb2o import records, tracking
from fedcb2o.data import Dataset
from fedcb2o.errors import RunError
from fedcb2o.experiments.config import arguments
from fedcb2o.experiments.config.datasets import load_dataset
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.experiments.grid import _attack_strength, _tuning
from fedcb2o.experiments.grid._definition import Cell, CellKey, Grid, StrengthKey
from fedcb2o.experiments.grid._eta import GridProgress, TimeEstimate
from fedcb2o.experiments.grid._loading import load_grid
from fedcb2o.experiments.runs import _remote_runs
from fedcb2o.experiments.runs._cluster_backend import pluralize
from fedcb2o.experiments.runs._memory_plan import clip_workers
from fedcb2o.experiments.runs._recovery import has_ended
from fedcb2o.experiments.runs._remote_job import format_error
from fedcb2o.experiments.runs._run_directory import describe_difference
from fedcb2o.experiments.runs._runner import run_loaded
from fedcb2o.kernels import devices
from fedcb2o.parallel import _resources
from fedcb2o.parallel._process_pool import current_pool
from fedcb2o.python_words import python_words
from fedcb2o.records import DamagedError
from fedcb2o.safe_stdio import safe_streams

_LOG = logging.getLogger(__name__)

# A function (count, cells, on_result, on_idle) that runs cells, `count` at once. Each cell comes
# with (experiment, folder). `on_result` gets the cell and (seconds, error).
_MapCells = Callable[..., None]


@dataclass(frozen=True)
class GridResult:
    """The outcome of a grid.

    Attributes:
        folder: Folder of the grid.
        cells: Number of runs.
        failed: The message of each run that failed, by the title of its cell.
    """

    folder: Path
    cells: int
    failed: dict[str, str]


@safe_streams()
@python_words()
def bench(
    grid: str | Path | Mapping[str, Any],
    *,
    changes: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    jobs: int | None = None,
    data_dir: str | Path | None = None,
    resume: bool = False,
    watch: GridProgress | None = None,
    cluster: str | None = None,
    track: str | Sequence[str] | None = None,
) -> GridResult:
    """Run every cell of a grid for all of its seeds.

    A cell that fails does not stop the others.

    Args:
        grid: The name of a built-in grid, a TOML file, a file of ByzFL (.json) or FLPoison (.yaml),
            or a mapping.
        changes: New values for all cells, such as {"rounds": 5}.
        out: The grid's folder, by default runs/NAME.
        jobs: Number of processes, by default and at most one per processor. They share a GPU. It
            changes no bit of the results.
        data_dir: Folder of downloaded data sets.
        resume: Whether a stopped grid continues. Cells that failed are tried again.
        watch: The progress display.
        cluster: Address of a Ray cluster: "HOST:PORT", "auto" for the one of this machine, or
            "local" for one on this machine alone. Cells run on its nodes, by default one per
            processor, and their files come back.
        track: Trackers that receive the records, as in `run`.

    Returns:
        The folder, and the cells that failed.

    Raises:
        ConfigError: If an argument or a setting is not valid.
        DataError: If a data set is missing or damaged.
        RunError: If the grid cannot be started or continued.
    """
    arguments.check_count("jobs", jobs)
    arguments.check_address(cluster)
    targets = tracking.validate_targets(track)
    arguments.check_path("out", out)
    arguments.check_path("data_dir", data_dir)
    data = None if data_dir is None else Path(data_dir)
    plan = load_grid(grid, changes, data)
    folder = Path("runs") / plan.name if out is None else Path(out)

    # All data sets are checked before anything begins; nodes of a cluster receive them.
    datasets = []
    for settings, dataset in _load_datasets(plan, data):
        if cluster is not None:
            datasets.append((settings, dataset))
    if cluster is None:
        for device in {cell.experiment.device for cell in plan.cells()}:
            devices.resolve_device(device)

    # Two grids in one folder would overwrite each other's choices.
    with records.exclusive_lock(folder):
        records.check_parts(folder, ())
        candidates = _tuning.read_choices(folder, plan)
        plan = _tuning.with_added_candidates(plan, candidates)
        strengths = _attack_strength.read_choices(folder, plan)
        best = _tuning.best_candidates(candidates)
        worst = _attack_strength.worst_strengths(strengths)
        cells = [*plan.trials(), *plan.probes(best), *plan.cells(best, worst)]
        _open_grid(folder, plan, candidates, strengths, cells, resume)
        state = _GridState(folder, cells)
        # Trials of choices that were made are not run again.
        pending = [
            cell
            for cell in cells
            if cell.kind != "tuning"
            or (cell.key.strength is None and cell.key.defence not in candidates)
            or (cell.key.strength is not None and plan.strength_key(cell.key) not in strengths)
        ]
        missing = [(cell, len(state.missing_seeds(cell))) for cell in pending]
        unfinished = [(cell, count) for cell, count in missing if count]
        experiments = [cell.experiment for cell, _ in unfinished]
        progress = watch or GridProgress()
        description = f"{plan.name}: {pluralize(len(unfinished), 'cell')}"
        address = cluster if unfinished else None
        with (
            _remote_runs.connect_executor(address, description, experiments, datasets) as remote,
            _cell_workers(remote, data) as (processors, map_cells),
            tracking.follow(folder, targets),
            progress,
        ):
            requested = jobs or min(processors, len(state.cells))
            count = clip_workers(requested, len(state.cells), "cells", processors)
            scheduler = _GridScheduler(state, count, map_cells, progress, unfinished)
            _run_phases(scheduler, plan, candidates, strengths)
    failed = {state.cells[name].key.title: error for name, error in state.errors.items()}
    return GridResult(folder, len(state.cells), failed)


def _run_phases(
    scheduler: "_GridScheduler",
    plan: Grid,
    candidates: dict[str, Any],
    strengths: dict[StrengthKey, dict[str, Any]],
) -> None:
    """Choose candidates, then strengths, then run the cells."""
    folder = scheduler.state.folder
    errors = scheduler.state.errors

    # 1. Candidates.
    scheduler.run([cell for cell in plan.trials() if cell.key.defence not in candidates])
    while True:
        # A better candidate at the end of a range calls for one beyond it, until the limit `widen`.
        extended = _tuning.extend(folder, plan, candidates, errors)
        if extended is plan:
            break
        plan = extended
        scheduler.add(plan.trials())
        scheduler.run(plan.trials())
    unfit = _tuning.choose(folder, plan, candidates, errors)
    best = _tuning.best_candidates(candidates)

    # 2. Strengths.
    probes = scheduler.pending(plan.probes(best))
    scheduler.fail_pending(probes, lambda key: unfit.get(key.defence))
    scheduler.run(probes)
    failed = _attack_strength.choose(folder, plan, strengths, errors)
    worst = _attack_strength.worst_strengths(strengths)

    # 3. Cells.
    cells = plan.cells(best, worst)
    scheduler.fail_pending(
        cells, lambda key: unfit.get(key.defence) or failed.get(plan.strength_key(key))
    )
    scheduler.run(cells)


def _load_datasets(plan: Grid, data: Path | None) -> Iterator[tuple[Any, Dataset]]:
    """Yield each data set once, with the settings that name it."""
    seen: list[Any] = []
    known = plan.take_datasets()
    for cell in [*plan.trials(), *plan.cells()]:
        settings = cell.experiment.data
        if settings in seen:
            continue
        seen.append(settings)
        # A class that the attack lacks fails its cell alone.
        experiment = cell.experiment.model_copy(update={"attack": None})
        found = [dataset for component, dataset in known if component == settings]
        yield settings, found[0] if found else load_dataset(experiment, data)


# The folder


def _open_grid(
    folder: Path,
    plan: Grid,
    candidates: Mapping[str, Any],
    strengths: Mapping[StrengthKey, Any],
    cells: Sequence[Cell],
    resume: bool,
) -> None:
    """Write grid.toml, or check that the folder holds this grid; cells may be added."""
    path = folder / "grid.toml"
    parts = {part for cell in cells for part in Path(cell.folder, "_").parents} - {Path()}
    records.check_parts(folder, [folder / part for part in sorted(parts)])
    if not path.exists() and any(file.name != f"{path.name}.tmp" for file in folder.iterdir()):
        raise RunError(f"{folder} is not empty and holds no grid: choose another --out")
    begun = [cell for cell in cells if (folder / cell.folder / "config.toml").is_file()]
    if not begun and any(folder.glob("*/**/config.toml")):
        raise RunError(
            f"{folder} holds another grid, without a cell of this one: choose another --out"
        )
    for cell in begun:
        key = cell.key
        if key.candidate is None and key.defence in plan.candidates.keys() - candidates.keys():
            continue  # its candidate is not known
        has_strengths = cell.kind == "cell" and key.attack in plan.strengths
        if has_strengths and plan.strength_key(key) not in strengths:
            continue  # its strength is not known
        _check_cell(folder, cell)
    if begun and not resume:
        raise RunError(
            f"{folder} already holds runs of this grid: --resume continues it, or choose another "
            "--out"
        )
    records.write_toml(path, plan.to_table())
    records.remove_temporaries(folder)


def _check_cell(folder: Path, cell: Cell) -> None:
    """Raise RunError where the run of a cell has other settings, or more rounds."""
    try:
        existing = records.Run(folder / cell.folder).config
    except DamagedError:  # its run reports it
        return
    difference = describe_difference(existing, cell.experiment.settings())
    if difference:
        raise RunError(
            f"{folder} holds another grid ({cell.key.title}: {difference}): choose another --out"
        )
    rounds = existing.get("rounds", 0)
    if rounds > cell.experiment.rounds:
        raise RunError(
            f"{folder} holds {cell.key.title} with `rounds` = {rounds} and the grid says "
            f"{cell.experiment.rounds}: runs can only be made longer; or choose another --out"
        )


def _read_cells(path: Path) -> list[dict[str, Any]]:
    """Return the lines of cells.json; none where it is damaged, as runs do not depend on it."""
    try:
        if path.exists():
            return records.read_cells(path)
    except DamagedError:
        _LOG.warning("%s was damaged; it is written again.", path)
    return []


class _GridState:
    """The content of cells.json: the run of each cell, its seconds per seed and its error."""

    def __init__(self, folder: Path, cells: Sequence[Cell]) -> None:
        self.folder = folder
        self.cells = {cell.folder: cell for cell in cells}
        self.seconds: dict[str, float] = {}
        self.errors: dict[str, str] = {}
        for line in _read_cells(folder / "cells.json"):
            name = line["folder"]
            if name not in self.cells:
                continue
            if line["seconds"]:
                self.seconds[name] = line["seconds"]
            # A cell that was repaired by a run of its own has no error any more.
            if line["error"] and self.missing_seeds(self.cells[name]):
                self.errors[name] = line["error"]
        self.write()

    def record(self, cell: Cell, seconds: float | None, error: str | None) -> None:
        """Record the seconds of each seed of a cell, None if not known, or its error."""
        self.cells[cell.folder] = cell
        self.errors.pop(cell.folder, None)
        if error is not None:
            self.errors[cell.folder] = error
        elif seconds is not None:
            self.seconds[cell.folder] = seconds
        self.write()

    def write(self) -> None:
        """Replace cells.json. Trials come first, sorted, so that added ones have their place."""
        lines = []
        for folder in sorted(self.cells, key=self._order):
            cell = self.cells[folder]
            lines.append(
                {
                    "folder": folder,
                    "kind": cell.kind,
                    "setting": cell.key.setting,
                    "defence": cell.key.defence,
                    "attack": cell.key.attack,
                    "floor": cell.baseline,
                    "rounds": cell.experiment.rounds,
                    "seconds": self.seconds.get(folder),
                    "error": self.errors.get(folder),
                }
            )
        records.write_json_with_checksum(self.folder / "cells.json", {"cells": lines})

    def _order(self, folder: str) -> tuple[int, str]:
        if self.cells[folder].kind == "tuning":
            return 0, folder
        return 1, ""

    def missing_seeds(self, cell: Cell) -> list[int]:
        """Return the seeds of a cell that have not ended, or whose files are damaged."""
        folder = self.folder / cell.folder
        seeds = cell.experiment.seeds
        rounds = cell.experiment.rounds
        try:
            records.read_config(folder / "config.toml")
        except DamagedError:  # or missing
            return list(seeds)
        return [
            seed for seed in seeds if not has_ended(folder / f"seed-{seed}", rounds, whole=True)
        ]


# The processes


@contextmanager
def _cell_workers(
    remote: _remote_runs.RemoteExecutor | None, data: Path | None
) -> Iterator[tuple[int, _MapCells]]:
    """Yield the number of processors, and the function that runs cells on them."""
    if remote is not None:
        yield remote.processors, remote.map
        return
    pool = current_pool()
    # Workers import modules once. Sources that changed since would run in their old version.
    pool.reload_if_stale()

    def map_cells(count: int, cells: Iterable[Any], *callbacks: Callable[..., object]) -> None:
        pool.map_unordered(count, functools.partial(_run_cell, data), cells, *callbacks)

    try:
        yield _resources.available_processors(), map_cells
    finally:
        pool.terminate()


class _GridScheduler:
    """The order of the cells, the results and the expected time."""

    def __init__(
        self,
        state: _GridState,
        count: int,
        map_cells: _MapCells,
        progress: GridProgress,
        unfinished: Sequence[tuple[Cell, int]],
    ) -> None:
        self.state = state
        self.count = count
        self._map_cells = map_cells
        self.progress = progress
        self.estimate = TimeEstimate(count)
        for cell, seeds in unfinished:
            self.estimate.add(cell, seeds)
        for folder, seconds in state.seconds.items():
            self.estimate.record(state.cells[folder], seconds)
        total = len(state.cells)
        progress.start(total, total - len(self.estimate.pending))

    def add(self, cells: Sequence[Cell]) -> None:
        """Add those of some cells that are new."""
        new = [cell for cell in cells if cell.folder not in self.state.cells]
        self.state.cells.update({cell.folder: cell for cell in new})
        self.state.write()
        for cell in new:
            seeds = self.state.missing_seeds(cell)
            if seeds:
                self.estimate.add(cell, len(seeds))
        self.progress.add(len(new), len(new) - len(self.pending(new)))

    def pending(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return those of some cells that have not ended."""
        return [cell for cell in cells if cell.folder in self.estimate.pending]

    def run(self, cells: Sequence[Cell]) -> None:
        """Run the pending cells: one of each defence first, then the longest."""
        # Longest first: a long cell at the end would run alone while other processors wait.
        queue = {cell.folder: cell for cell in self.pending(cells)}
        running: dict[str, Cell] = {}

        def jobs() -> Iterator[tuple[Cell, tuple[Experiment, Path]]]:
            while queue:
                cell = queue.pop(max(queue.values(), key=self.estimate.weight).folder)
                running[cell.folder] = cell
                yield cell, (cell.experiment, self.state.folder / cell.folder)

        def on_result(cell: Cell, result: tuple[float, str | None]) -> None:
            del running[cell.folder]
            self.finish(cell, *result)

        def on_idle() -> None:
            self.progress.refresh(self.estimate.remaining(), list(running.values()))

        self._map_cells(self.count, jobs(), on_result, on_idle)

    def fail_pending(self, cells: Sequence[Cell], reason: Callable[[CellKey], str | None]) -> None:
        """Record the failure of pending cells for which `reason` returns a message."""
        for cell in self.pending(cells):
            message = reason(cell.key)
            if message:
                self.finish(cell, 0.0, message)

    def finish(self, cell: Cell, seconds: float, error: str | None) -> None:
        """Record the end of a cell; `seconds` are those of all seeds that were missing."""
        per_seed = self.estimate.finish(cell, None if error else seconds)
        self.state.record(cell, per_seed, error)
        self.progress.finish(cell, seconds, error, self.estimate.remaining())


def _run_cell(data: Path | None, experiment: Experiment, folder: Path) -> tuple[float, str | None]:
    """Run a cell in this process, and return its seconds and its error."""
    began = time.monotonic()
    error = None
    try:
        _wait_for_lock(folder)
        run_loaded(
            experiment,
            None,
            out=folder,
            data_dir=data,
            workers=1,
            resume=True,
            watch=lambda *_: None,
        )
    except Exception as failure:  # an internal error fails this cell, not the others
        error = format_error(failure)
    return time.monotonic() - began, error


def _wait_for_lock(folder: Path) -> None:
    """Wait for a process of a killed grid that still writes; it ends within a moment."""
    # A cell that has not begun has no folder.
    with suppress(FileNotFoundError):
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.close(descriptor)
