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
from fedcb2o.experiments.config.datasets import dataset_of
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.experiments.grid import attack_strength, tuning
from fedcb2o.experiments.grid.definition import Cell, Grid, Place, Tried
from fedcb2o.experiments.grid.eta import GridProgress, Pace
from fedcb2o.experiments.grid.loading import load_grid
from fedcb2o.experiments.runs import remote_runs
from fedcb2o.experiments.runs.cluster_backend import several
from fedcb2o.experiments.runs.memory_plan import bounded
from fedcb2o.experiments.runs.recovery import has_ended
from fedcb2o.experiments.runs.remote_job import told
from fedcb2o.experiments.runs.run_directory import alone, difference_of, told_anew
from fedcb2o.experiments.runs.runner import run
from fedcb2o.kernels import devices
from fedcb2o.parallel import resources
from fedcb2o.parallel.process_pool import crew
from fedcb2o.records import DamagedError
from fedcb2o.safe_stdio import kept


@dataclass(frozen=True)
class Bench:
    """What came of a grid: its folder, how many runs it has, and the message of each that failed."""

    folder: Path
    cells: int
    failed: dict[str, str]


@kept()
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
) -> Bench:
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
    targets = tracking.check(track)
    for name, path in (("out", out), ("data_dir", data_dir)):
        arguments.check_path(name, path)
    plan = load_grid(grid, changes)
    folder = Path(out) if out is not None else Path("runs") / plan.name
    data = None if data_dir is None else Path(data_dir)
    sets = []
    for each in _data_sets(plan, data):  # all are looked at before anything begins
        sets += [each] * (cluster is not None)  # nodes are sent them
    for device in {cell.experiment.device for cell in plan.cells() if cluster is None}:
        devices.device_of(device)
    with alone(folder):
        frozen = tuning.frozen(folder, plan)
        plan = tuning.widened(plan, frozen)
        worst = attack_strength.frozen(folder, plan)
        trials, probes = plan.trials(), plan.probes(tuning.best(frozen))
        cells = plan.cells(tuning.best(frozen), attack_strength.worst(worst))
        _prepare(folder, plan, frozen, worst, [*trials, *probes, *cells], resume)
        ledger = _Ledger(folder, [*trials, *probes, *cells])
        trials = [cell for cell in trials if cell.place.defence not in frozen]
        probes = [cell for cell in probes if plan.tried(cell.place) not in worst]
        lacking = [(cell, len(seeds)) for cell in [*trials, *probes, *cells] if (seeds := ledger.lacks(cell))]
        elsewhere, experiments = cluster if lacking else None, [cell.experiment for cell, _ in lacking]
        progress = watch or GridProgress()
        what = f"{plan.name}: {several(len(lacking), 'cell')}"
        with (
            remote_runs.joined(elsewhere, what, experiments, sets) as there,
            _workers(there, data) as (most, work),
            tracking.following(folder, targets),
            progress,
        ):
            jobs = bounded(jobs or min(most, len(ledger.cells)), len(ledger.cells), "cells", most)
            team = _Team(ledger, jobs, work, progress, lacking)
            team.run(trials)
            while (wider := tuning.wider(folder, plan, frozen, ledger.errors)) is not plan:
                plan = wider
                team.add(plan.trials())
                team.run(plan.trials())
            unfit = tuning.freeze(folder, plan, frozen, ledger.errors)
            probes = team.waiting(plan.probes(tuning.best(frozen)))
            team.drop(probes, lambda place: unfit.get(place.defence))
            team.run(probes)
            lost = attack_strength.freeze(folder, plan, worst, ledger.errors)
            cells = plan.cells(tuning.best(frozen), attack_strength.worst(worst))
            team.drop(cells, lambda place: unfit.get(place.defence) or lost.get(plan.tried(place)))
            team.run(cells)
    return Bench(folder, len(ledger.cells), {ledger.cells[key].place.title: e for key, e in ledger.errors.items()})


def _data_sets(plan: Grid, data: Path | None) -> Iterator[tuple[Any, Dataset]]:
    """Each data set once, with the settings that name it; raises DataError or ConfigError where one is not there."""
    seen: list[Any] = []
    for cell in [*plan.trials(), *plan.cells()]:
        if (wanted := cell.experiment.data) not in seen:
            seen.append(wanted)
            dataset = dataset_of(cell.experiment.model_copy(update={"attack": None}), data)  # which fails its cell
            if not dataset.class_names:
                raise ConfigError(
                    "a grid compares accuracies, and its data have no classes: run its experiments one by one, and "
                    "`fedcb2o compare` them"
                )
            yield wanted, dataset


# What the folder holds


def _prepare(
    folder: Path,
    plan: Grid,
    frozen: Mapping[str, Any],
    worst: Mapping[Tried, Any],
    cells: Sequence[Cell],
    resume: bool,
) -> None:
    """Write grid.toml, or check that what is there is this grid: cells may be added, but none may be another."""
    path = folder / "grid.toml"
    if not path.exists() and any(inside.name != f"{path.name}.tmp" for inside in folder.iterdir()):
        raise RunError(f"{folder} is not empty and holds no grid: choose another --out")
    begun = [cell for cell in cells if (folder / cell.folder / "config.toml").is_file()]
    if not begun and any(folder.glob("*/**/config.toml")):
        raise RunError(f"{folder} holds another grid, which has no cell of this one: choose another --out")
    for cell in begun:
        place = cell.place
        if place.candidate is None and place.defence in plan.candidates.keys() - frozen.keys():
            continue  # it is not known with which candidate
        if cell.kind == "cell" and place.attack in plan.strengths and plan.tried(place) not in worst:
            continue  # nor how strong the attack is
        try:
            there, here = records.Run(folder / cell.folder).config, cell.experiment
        except DamagedError:  # its run writes it anew, or says what is wrong
            continue
        if difference := difference_of(there, here.settings()):
            raise RunError(f"{folder} holds another grid ({cell.place.title}: {difference}): choose another --out")
        if there.get("rounds", 0) > here.rounds:
            raise RunError(
                f"{folder} holds {cell.place.title} with `rounds` = {there['rounds']} and the grid says {here.rounds}: "
                "runs can only be made longer; or choose another --out"
            )
    if begun and not resume:
        raise RunError(f"{folder} already holds runs of this grid: --resume goes on with it, or choose another --out")
    records.write_toml(path, plan.table())
    records.sweep(folder)  # what a killed process left; runs sweep their own folders


def _cells(path: Path) -> list[dict[str, Any]]:
    """The lines of cells.json; none where it is damaged, since what it tells beside the runs can be done without."""
    try:
        return records.read_cells(path) if path.exists() else []
    except DamagedError:
        told_anew(path)
        return []


class _Ledger:
    """cells.json: which run is which cell, the seconds that a seed of it took, and why it failed, if it did."""

    def __init__(self, folder: Path, cells: Sequence[Cell]) -> None:
        self.folder, self.cells = folder, {cell.folder: cell for cell in cells}
        mine = [line for line in _cells(folder / "cells.json") if line["folder"] in self.cells]
        self.seconds: dict[str, float] = {line["folder"]: line["seconds"] for line in mine if line["seconds"]}
        failed = [line for line in mine if line["error"] and self.lacks(self.cells[line["folder"]])]
        self.errors: dict[str, str] = {line["folder"]: line["error"] for line in failed}
        self.write()

    def note(self, cell: Cell, seconds: float | None, error: str | None) -> None:
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
        lines, order = [], sorted(self.cells, key=lambda key: (0, key) if self.cells[key].kind == "tuning" else (1, ""))
        for folder, cell in ((folder, self.cells[folder]) for folder in order):
            place, ended = cell.place, {"seconds": self.seconds.get(folder), "error": self.errors.get(folder)}
            where = {"setting": place.setting, "defence": place.defence, "attack": place.attack}
            what = {"floor": cell.floor, "rounds": cell.experiment.rounds}
            lines.append({"folder": folder, "kind": cell.kind, **where, **what, **ended})
        records.write_sealed(self.folder / "cells.json", {"cells": lines})

    def lacks(self, cell: Cell) -> list[int]:
        """The seeds of a cell that have not run to their end, or are not whole: a run goes on with both."""
        folder, rounds = self.folder / cell.folder, cell.experiment.rounds
        try:
            records.read_config(folder / "config.toml")
        except DamagedError:  # or gone
            return list(cell.experiment.seeds)
        return [seed for seed in cell.experiment.seeds if not has_ended(folder / f"seed-{seed}", rounds, whole=True)]


# Who works

Work = Callable[..., None]
"""(how many at once, (cell, (experiment, folder)) of each, what hears each cell with its seconds and why it failed if
it did, what is done meanwhile)."""


@contextmanager
def _workers(there: remote_runs.Away | None, data: Path | None) -> Iterator[tuple[int, Work]]:
    """How many processors there are, and what works on them: those of a cluster, or of this machine, whose processes
    are gone with the block however it ends, and which raise RunError where one of them is killed."""
    if there is not None:
        yield there.processors, there.work
        return
    processes = crew()
    processes.renew()

    def work(count: int, cells: Iterable[Any], *others: Callable[..., object]) -> None:
        processes.work(count, functools.partial(_work, data), cells, *others)

    try:
        yield resources.processors(), work
    finally:
        processes.dismiss()


class _Team:
    """Those that work on a grid, so many at once, and this process, which keeps the books: how many seeds each of the
    cells lacks, and what those took that have ended."""

    def __init__(
        self, ledger: _Ledger, count: int, work: Work, progress: GridProgress, lacking: Sequence[tuple[Cell, int]]
    ) -> None:
        self.ledger, self.count, self.work, self.progress, self.pace = ledger, count, work, progress, Pace(count)
        for cell, seeds in lacking:
            self.pace.expect(cell, seeds)
        for folder, seconds in ledger.seconds.items():
            self.pace.learn(ledger.cells[folder], seconds)
        progress.begin(len(ledger.cells), len(ledger.cells) - len(self.pace.waiting))

    def add(self, cells: Sequence[Cell]) -> None:
        """More cells, among some that there were."""
        new = [cell for cell in cells if cell.folder not in self.ledger.cells]
        self.ledger.cells.update({cell.folder: cell for cell in new})
        self.ledger.write()
        for cell in new:
            if lacks := self.ledger.lacks(cell):
                self.pace.expect(cell, len(lacks))
        waiting = len(self.waiting(new))
        self.progress.add(len(new), len(new) - waiting)

    def waiting(self, cells: Sequence[Cell]) -> list[Cell]:
        """Those of some cells that have not ended."""
        return [cell for cell in cells if cell.folder in self.pace.waiting]

    def run(self, cells: Sequence[Cell]) -> None:
        """Run those of some cells that wait: one of each defence first, then those that take longest."""
        todo = {cell.folder: cell for cell in self.waiting(cells)}
        running: dict[str, Cell] = {}

        def runs() -> Iterator[tuple[Cell, tuple[Experiment, Path]]]:
            while todo:
                cell = todo.pop(max(todo.values(), key=self.pace.weight).folder)
                running[cell.folder] = cell
                self.pace.begin(cell)
                yield cell, (cell.experiment, self.ledger.folder / cell.folder)

        def heard(cell: Cell, result: tuple[float, str | None]) -> None:
            del running[cell.folder]
            self.end(cell, *result)

        def meanwhile() -> None:
            self.progress.refresh(self.pace.left(), list(running.values()))

        self.work(self.count, runs(), heard, meanwhile)

    def drop(self, cells: Sequence[Cell], why: Callable[[Place], str | None]) -> None:
        """Note that those of some cells that wait fail before they begin, where there is a reason why."""
        for cell in self.waiting(cells):
            if told := why(cell.place):
                self.end(cell, 0.0, told)

    def end(self, cell: Cell, seconds: float, error: str | None) -> None:
        """Note that a cell has ended after so many seconds, or failed."""
        self.ledger.note(cell, self.pace.end(cell, None if error else seconds), error)
        self.progress.end(cell, seconds, error, self.pace.left())


def _work(data: Path | None, experiment: Experiment, folder: Path) -> tuple[float, str | None]:
    """Run a cell; its seconds, and why it failed if it did. This is done in a process of its own."""
    began, error = time.monotonic(), None
    try:
        _wait_for(folder)
        run(experiment, out=folder, data_dir=data, workers=1, resume=True, watch=lambda *_: None)
    except Exception as failure:  # a fault of ours costs this cell, not the night
        error = told(failure)
    return time.monotonic() - began, error


def _wait_for(folder: Path) -> None:
    """Wait for the process of a killed grid that may still write there; it ends within a moment."""
    with suppress(FileNotFoundError):
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.close(descriptor)
