"""Run a grid: some processes, each at one cell with all of its seeds; resumable at any moment.

A run of a grid is a run like any other, in a folder of its own. `cells.json` says which run is which cell and what
failed. What tuning chose is frozen in `tuning.json`, and how strong attacks are in `strengths.json`, before the cells
that depend on it begin.
"""

import fcntl
import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcb2o import records, tracking
from fedcb2o.data._dataset import Dataset
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.experiments.config import arguments
from fedcb2o.experiments.config.datasets import load_dataset
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.experiments.grid import attack_strength, tuning
from fedcb2o.experiments.grid.definition import Cell, CellKey, Grid, StrengthKey
from fedcb2o.experiments.grid.eta import GridProgress, TimeEstimate
from fedcb2o.experiments.grid.loading import load_grid
from fedcb2o.experiments.runs import remote_runs
from fedcb2o.experiments.runs.cluster_backend import pluralize
from fedcb2o.experiments.runs.memory_plan import clip_workers
from fedcb2o.experiments.runs.recovery import has_ended
from fedcb2o.experiments.runs.remote_job import format_error
from fedcb2o.experiments.runs.run_directory import describe_difference, exclusive_lock, log_rewrite
from fedcb2o.experiments.runs.runner import run
from fedcb2o.kernels import devices
from fedcb2o.parallel import resources
from fedcb2o.parallel.process_pool import current_pool
from fedcb2o.records import DamagedError
from fedcb2o.safe_stdio import safe_streams


@dataclass(frozen=True)
class GridResult:
    """What came of a grid: its folder, how many runs it has, and the message of each that failed."""

    folder: Path
    cells: int
    failed: dict[str, str]


@safe_streams()
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
    """Run every cell of a grid for all of its seeds, and say what failed.

    `grid` is the name of a built-in one, a TOML file or a mapping, with some `changes` of what all its cells share
    ({"rounds": 5}); `out` its folder (by default runs/NAME); `jobs` the number of processes (by default one for each
    processor, and never more; it changes no bit of the results), which share a GPU. With `resume` a stopped grid goes
    on, and what failed is tried again. A cell that fails does not stop the others.

    With a `cluster`, the address of one of Ray's, "auto" for the one that this machine is in or "local" for one of this
    machine alone, cells are run on its nodes, by default one for each of their processors; their files come back here.

    With `track` the records of cells and floors are copied to trackers, as `run` has them.

    Raises ConfigError, DataError or RunError, each with one line that says what to do.
    """
    arguments.check_count("jobs", jobs)
    arguments.check_address(cluster)
    targets = tracking.validate_targets(track)
    for name, path in (("out", out), ("data_dir", data_dir)):
        arguments.check_path(name, path)
    plan = load_grid(grid, changes)
    folder = Path(out) if out is not None else Path("runs") / plan.name
    data = None if data_dir is None else Path(data_dir)
    sets = []
    for each in _data_sets(plan, data):  # all are looked at before anything begins
        sets += [each] * (cluster is not None)  # nodes are sent them
    for device in {cell.experiment.device for cell in plan.cells() if cluster is None}:
        devices.resolve_device(device)
    with exclusive_lock(folder):
        frozen = tuning.read_choices(folder, plan)
        plan = tuning.with_added_candidates(plan, frozen)
        worst = attack_strength.read_choices(folder, plan)
        trials = plan.trials()
        probes = plan.probes(tuning.best_candidates(frozen))
        cells = plan.cells(tuning.best_candidates(frozen), attack_strength.worst_strengths(worst))
        _open_grid(folder, plan, frozen, worst, [*trials, *probes, *cells], resume)
        ledger = _GridState(folder, [*trials, *probes, *cells])
        trials = [cell for cell in trials if cell.key.defence not in frozen]
        probes = [cell for cell in probes if plan.strength_key(cell.key) not in worst]
        lacking = [
            (cell, len(seeds))
            for cell in [*trials, *probes, *cells]
            if (seeds := ledger.missing_seeds(cell))
        ]
        elsewhere = cluster if lacking else None
        experiments = [cell.experiment for cell, _ in lacking]
        progress = watch or GridProgress()
        what = f"{plan.name}: {pluralize(len(lacking), 'cell')}"
        with (
            remote_runs.connect_executor(elsewhere, what, experiments, sets) as there,
            _cell_workers(there, data) as (most, work),
            tracking.follow(folder, targets),
            progress,
        ):
            jobs = clip_workers(
                jobs or min(most, len(ledger.cells)), len(ledger.cells), "cells", most
            )
            team = _GridScheduler(ledger, jobs, work, progress, lacking)
            team.run(trials)
            while (wider := tuning.extend(folder, plan, frozen, ledger.errors)) is not plan:
                plan = wider
                team.add(plan.trials())
                team.run(plan.trials())
            unfit = tuning.choose(folder, plan, frozen, ledger.errors)
            probes = team.pending(plan.probes(tuning.best_candidates(frozen)))
            team.fail_pending(probes, lambda place: unfit.get(place.defence))
            team.run(probes)
            lost = attack_strength.choose(folder, plan, worst, ledger.errors)
            cells = plan.cells(
                tuning.best_candidates(frozen), attack_strength.worst_strengths(worst)
            )
            team.fail_pending(
                cells, lambda place: unfit.get(place.defence) or lost.get(plan.strength_key(place))
            )
            team.run(cells)
    return GridResult(
        folder,
        len(ledger.cells),
        {ledger.cells[key].key.title: e for key, e in ledger.errors.items()},
    )


def _data_sets(plan: Grid, data: Path | None) -> Iterator[tuple[Any, Dataset]]:
    """Each data set once, with the settings that name it; raises DataError or ConfigError where one is not there."""
    seen: list[Any] = []
    for cell in [*plan.trials(), *plan.cells()]:
        if (wanted := cell.experiment.data) not in seen:
            seen.append(wanted)
            dataset = load_dataset(
                cell.experiment.model_copy(update={"attack": None}), data
            )  # which fails its cell
            if not dataset.class_names:
                raise ConfigError(
                    "a grid compares accuracies, and its data have no classes: run its experiments one by one, and "
                    "`fedcb2o compare` them"
                )
            yield wanted, dataset


# What the folder holds


def _open_grid(
    folder: Path,
    plan: Grid,
    frozen: Mapping[str, Any],
    worst: Mapping[StrengthKey, Any],
    cells: Sequence[Cell],
    resume: bool,
) -> None:
    """Write grid.toml, or check that what is there is this grid: cells may be added, but none may be another."""
    path = folder / "grid.toml"
    if not path.exists() and any(inside.name != f"{path.name}.tmp" for inside in folder.iterdir()):
        raise RunError(f"{folder} is not empty and holds no grid: choose another --out")
    begun = [cell for cell in cells if (folder / cell.folder / "config.toml").is_file()]
    if not begun and any(folder.glob("*/**/config.toml")):
        raise RunError(
            f"{folder} holds another grid, which has no cell of this one: choose another --out"
        )
    for cell in begun:
        place = cell.key
        if place.candidate is None and place.defence in plan.candidates.keys() - frozen.keys():
            continue  # it is not known with which candidate
        if (
            cell.kind == "cell"
            and place.attack in plan.strengths
            and plan.strength_key(place) not in worst
        ):
            continue  # nor how strong the attack is
        try:
            there = records.Run(folder / cell.folder).config
            here = cell.experiment
        except DamagedError:  # its run writes it anew, or says what is wrong
            continue
        if difference := describe_difference(there, here.settings()):
            raise RunError(
                f"{folder} holds another grid ({cell.key.title}: {difference}): choose another --out"
            )
        if there.get("rounds", 0) > here.rounds:
            raise RunError(
                f"{folder} holds {cell.key.title} with `rounds` = {there['rounds']} and the grid says {here.rounds}: "
                "runs can only be made longer; or choose another --out"
            )
    if begun and not resume:
        raise RunError(
            f"{folder} already holds runs of this grid: --resume goes on with it, or choose another --out"
        )
    records.write_toml(path, plan.to_table())
    records.remove_temporaries(folder)  # what a killed process left; runs sweep their own folders


def _read_cells(path: Path) -> list[dict[str, Any]]:
    """The lines of cells.json; none where it is damaged, since what it tells beside the runs can be done without."""
    try:
        return records.read_cells(path) if path.exists() else []
    except DamagedError:
        log_rewrite(path)
        return []


class _GridState:
    """cells.json: which run is which cell, the seconds that a seed of it took, and why it failed, if it did."""

    def __init__(self, folder: Path, cells: Sequence[Cell]) -> None:
        self.folder = folder
        self.cells = {cell.folder: cell for cell in cells}
        mine = [line for line in _read_cells(folder / "cells.json") if line["folder"] in self.cells]
        self.seconds: dict[str, float] = {
            line["folder"]: line["seconds"] for line in mine if line["seconds"]
        }
        failed = [
            line
            for line in mine
            if line["error"] and self.missing_seeds(self.cells[line["folder"]])
        ]
        self.errors: dict[str, str] = {line["folder"]: line["error"] for line in failed}
        self.write()

    def record(self, cell: Cell, seconds: float | None, error: str | None) -> None:
        """A cell ended, its seeds having taken so many seconds each, or failed."""
        self.cells[cell.folder] = cell
        self.errors.pop(cell.folder, None)
        if error is not None:
            self.errors[cell.folder] = error
        elif seconds is not None:
            self.seconds[cell.folder] = seconds
        self.write()

    def write(self) -> None:
        """Replace cells.json; what was added to a tuning stands where it does after a resume."""
        lines = []
        order = sorted(
            self.cells, key=lambda key: (0, key) if self.cells[key].kind == "tuning" else (1, "")
        )
        for folder, cell in ((folder, self.cells[folder]) for folder in order):
            place = cell.key
            ended = {"seconds": self.seconds.get(folder), "error": self.errors.get(folder)}
            where = {"setting": place.setting, "defence": place.defence, "attack": place.attack}
            what = {"floor": cell.baseline, "rounds": cell.experiment.rounds}
            lines.append({"folder": folder, "kind": cell.kind, **where, **what, **ended})
        records.write_json_with_checksum(self.folder / "cells.json", {"cells": lines})

    def missing_seeds(self, cell: Cell) -> list[int]:
        """The seeds of a cell that have not run to their end, or are not whole: a run goes on with both."""
        folder = self.folder / cell.folder
        rounds = cell.experiment.rounds
        try:
            records.read_config(folder / "config.toml")
        except DamagedError:  # or gone
            return list(cell.experiment.seeds)
        return [
            seed
            for seed in cell.experiment.seeds
            if not has_ended(folder / f"seed-{seed}", rounds, whole=True)
        ]


# Who works

_MapCells = Callable[..., None]
"""(how many at once, (cell, (experiment, folder)) of each, what hears each cell with its seconds and why it failed if
it did, what is done meanwhile)."""


@contextmanager
def _cell_workers(
    remote: remote_runs.RemoteExecutor | None, data: Path | None
) -> Iterator[tuple[int, _MapCells]]:
    """How many processors there are, and what works on them: those of a cluster, or of this machine, whose processes
    are gone with the block however it ends, and which raise RunError where one of them is killed."""
    if remote is not None:
        yield remote.processors, remote.map
        return
    processes = current_pool()
    processes.reload_if_stale()

    def work(count: int, cells: Iterable[Any], *others: Callable[..., object]) -> None:
        processes.map_unordered(count, functools.partial(_run_cell, data), cells, *others)

    try:
        yield resources.available_processors(), work
    finally:
        processes.terminate()


class _GridScheduler:
    """Those that work on a grid, so many at once, and this process, which keeps the books: how many seeds each of the
    cells lacks, and what those took that have ended."""

    def __init__(
        self,
        ledger: _GridState,
        count: int,
        work: _MapCells,
        progress: GridProgress,
        lacking: Sequence[tuple[Cell, int]],
    ) -> None:
        self.state, self.count, self._map_cells, self.progress, self.estimate = (
            ledger,
            count,
            work,
            progress,
            TimeEstimate(count),
        )
        for cell, seeds in lacking:
            self.estimate.add(cell, seeds)
        for folder, seconds in ledger.seconds.items():
            self.estimate.record(ledger.cells[folder], seconds)
        progress.start(len(ledger.cells), len(ledger.cells) - len(self.estimate.pending))

    def add(self, cells: Sequence[Cell]) -> None:
        """More cells, among some that there were."""
        new = [cell for cell in cells if cell.folder not in self.state.cells]
        self.state.cells.update({cell.folder: cell for cell in new})
        self.state.write()
        for cell in new:
            if lacks := self.state.missing_seeds(cell):
                self.estimate.add(cell, len(lacks))
        waiting = len(self.pending(new))
        self.progress.add(len(new), len(new) - waiting)

    def pending(self, cells: Sequence[Cell]) -> list[Cell]:
        """Those of some cells that have not ended."""
        return [cell for cell in cells if cell.folder in self.estimate.pending]

    def run(self, cells: Sequence[Cell]) -> None:
        """Run those of some cells that wait: one of each defence first, then those that take longest."""
        todo = {cell.folder: cell for cell in self.pending(cells)}
        running: dict[str, Cell] = {}

        def runs() -> Iterator[tuple[Cell, tuple[Experiment, Path]]]:
            while todo:
                cell = todo.pop(max(todo.values(), key=self.estimate.weight).folder)
                running[cell.folder] = cell
                self.estimate.start(cell)
                yield cell, (cell.experiment, self.state.folder / cell.folder)

        def heard(cell: Cell, result: tuple[float, str | None]) -> None:
            del running[cell.folder]
            self.finish(cell, *result)

        def meanwhile() -> None:
            self.progress.refresh(self.estimate.remaining(), list(running.values()))

        self._map_cells(self.count, runs(), heard, meanwhile)

    def fail_pending(self, cells: Sequence[Cell], reason: Callable[[CellKey], str | None]) -> None:
        """Note that those of some cells that wait fail before they begin, where there is a reason why."""
        for cell in self.pending(cells):
            if told := reason(cell.key):
                self.finish(cell, 0.0, told)

    def finish(self, cell: Cell, seconds: float, error: str | None) -> None:
        """Note that a cell has ended after so many seconds, or failed."""
        self.state.record(cell, self.estimate.finish(cell, None if error else seconds), error)
        self.progress.finish(cell, seconds, error, self.estimate.remaining())


def _run_cell(data: Path | None, experiment: Experiment, folder: Path) -> tuple[float, str | None]:
    """Run a cell; its seconds, and why it failed if it did. This is done in a process of its own."""
    began = time.monotonic()
    error = None
    try:
        _wait_for_lock(folder)
        run(experiment, out=folder, data_dir=data, workers=1, resume=True, watch=lambda *_: None)
    except Exception as failure:  # a fault of ours costs this cell, not the night
        error = format_error(failure)
    return time.monotonic() - began, error


def _wait_for_lock(folder: Path) -> None:
    """Wait for the process of a killed grid that may still write there; it ends within a moment."""
    with suppress(FileNotFoundError):
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.close(descriptor)
