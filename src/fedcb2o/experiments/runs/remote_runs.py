"""Runs on the nodes of a cluster, each by one process: a run's files go there, and come back while it goes on.

Nodes share no disk with this machine. A run that is lost with its node goes on elsewhere from what had come back.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fedcb2o import records
from fedcb2o.data._dataset import Dataset
from fedcb2o.errors import FedCB2OError, RunError
from fedcb2o.experiments.config.build import own_names
from fedcb2o.experiments.config.datasets import shared_data
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.experiments.runs.cluster_backend import LEAST, check_device, need, note_others, several, unit
from fedcb2o.experiments.runs.progress import Watch
from fedcb2o.experiments.runs.recovery import has_ended
from fedcb2o.experiments.runs.remote_job import Errand, Word, arrays_of, content, do, keep, stamps, told, types_of
from fedcb2o.experiments.runs.run_directory import alone, begin
from fedcb2o.kernels.devices import on_cpu
from fedcb2o.parallel import resources
from fedcb2o.simulation.rounds import LostError

if TYPE_CHECKING:
    from fedcb2o.ray_backend.tasks import Task, Tasks

Ticket = TypeVar("Ticket")
DataSets = Sequence[tuple[Any, Dataset]]
"""Data sets, each with the settings that name it."""

AGAIN = 5  # times that a run goes on by itself from one checkpoint after its process or node was lost
EVERY = 60.0  # seconds after which a run's files come back, if there is a new checkpoint


@dataclass
class _Run(Generic[Ticket]):
    """A run that is away, and what keeps its folder for it."""

    ticket: Ticket
    experiment: Experiment
    folder: Path
    held: contextlib.ExitStack
    losses: int = 0
    ended: bool = False

    def __str__(self) -> str:
        seeds = self.experiment.seeds
        return str(self.folder / f"seed-{seeds[0]}" if len(seeds) == 1 else self.folder)


class Away:
    """Nodes of a cluster, with so many `processors` or GPUs, which have some data sets; a run there may take so much
    `memory`, by default what is free."""

    def __init__(self, tasks: "Tasks", processors: int, sets: DataSets, memory: int | None) -> None:
        self.tasks, self.processors, self.memory = tasks, processors, memory
        self.sets = [(settings, dataset, tasks.put(arrays_of(dataset))) for settings, dataset in sets]

    def work(
        self,
        count: int,
        runs: Iterable[tuple[Ticket, tuple[Experiment, Path]]],
        heard: Callable[[Ticket, tuple[float, str | None]], object],
        meanwhile: Callable[[], object] = lambda: None,
        watch: Watch | None = None,
        *,
        held: bool = False,
    ) -> None:
        """Go on with runs, each (ticket, (experiment, its folder here)), at most `count` at once; `heard` gets each
        ticket with the seconds that its run took, and why it failed if it did, `watch` the rounds as they are done, and
        `meanwhile` is called each second. No other process writes to a folder while its run is away; or it is `held` by
        the caller, as one of several runs is."""
        from fedcb2o.ray_backend.code_shipping import at_home

        folders = contextlib.ExitStack()

        def begun() -> Iterator[_Run[Ticket]]:
            for ticket, (experiment, folder) in runs:
                run = _Run(ticket, experiment, folder, folders.enter_context(contextlib.ExitStack()))
                try:
                    if not held:
                        run.held.enter_context(alone(folder))
                    begin(folder, experiment, resume=True)
                except FedCB2OError as error:
                    end(run, (0.0, told(error)))
                else:
                    yield run

        def end(run: _Run[Ticket], result: tuple[float, str | None]) -> None:
            run.ended = True
            run.held.close()
            heard(run.ticket, result)

        def listen(run: _Run[Ticket], word: Word) -> None:
            keep(run.folder, word.files)
            if any(Path(name).name == records.CHECKPOINT for name in word.files):
                run.losses = 0
            if word.said:
                print(at_home(word.said), end="", file=sys.stderr)
            if watch is not None:
                for seed, line in word.lines:
                    watch(run.experiment, seed, line)
            if word.ended is not None:
                seconds, error = word.ended
                end(run, (seconds, error and at_home(error)))

        def failed(run: _Run[Ticket], error: RunError) -> bool:
            if run.ended:
                return False
            run.losses += 1
            if isinstance(error, LostError) and run.losses <= AGAIN:
                print(f"Note: {error}. {run} goes on from what had come back.", file=sys.stderr)
                return True
            tried = f". It has gone on {AGAIN} times, and gives up" if isinstance(error, LostError) else ""
            end(run, (0.0, f"{told(error)}{tried}"))
            return False

        def task(run: _Run[Ticket]) -> "Task":
            return self._task(run.experiment, run.folder, watch is not None)

        with folders:
            self.tasks.work(count, begun(), task, listen, failed, meanwhile)

    def _task(self, experiment: Experiment, folder: Path, watched: bool) -> "Task":
        """To go on with those seeds of a run that have not ended, from their files here."""
        from fedcb2o.ray_backend.tasks import Task

        paths, rounds = [folder / "config.toml"], experiment.rounds
        seeds = [seed for seed in experiment.seeds if not has_ended(folder / f"seed-{seed}", rounds, whole=True)]
        paths += [path for seed in seeds for path in stamps(folder / f"seed-{seed}")]
        files = {str(path.relative_to(folder)): content(path) for path in paths}
        dataset, arrays = next((dataset, ref) for settings, dataset, ref in self.sets if settings == experiment.data)
        errand = Errand(
            experiment=experiment.model_copy(update={"seeds": tuple(seeds)}),
            names=dataset.names,
            types=types_of(dataset),
            memory=self.memory,
            every=EVERY,
            watched=watched,
            home=str(folder),
        )
        return Task(do, (errand,), (files, arrays), gpus=0 if on_cpu(experiment.device) else 1)


@contextlib.contextmanager
def joined(
    address: str | None, what: str, experiments: Sequence[Experiment], sets: DataSets, memory: int | None = None
) -> Iterator[Away | None]:
    """Within it, this process is in the cluster at an address, whose nodes have what some experiments need, and it is
    told on how many processors of it `what` is done; None without an address."""
    if address is None:
        yield None
        return
    need()
    from fedcb2o.ray_backend import connect, placement, tasks

    own, kinds = {name for each in experiments for name in own_names(each)}, {each.device for each in experiments}
    for device in kinds:
        check_device(device)
    data = sum(tensor.nbytes for _, dataset in sets for tensor in shared_data(dataset).values())
    with connect.joined(address, min(LEAST + 2 * data, resources.free_memory() // 2), resources.processors()):
        device = kinds.pop() if len(kinds) == 1 else None
        nodes = placement.nodes(sorted(own), device)
        if not nodes:
            raise RunError("no node of the cluster has what is needed to run this: see `ray status` there")
        note_others(nodes)
        count = sum(node.processors for node in nodes)
        print(f"{what} on {several(count, unit(device))} of {several(len(nodes), 'node')}", file=sys.stderr, flush=True)
        yield Away(tasks.Tasks(sorted(own)), count, sets, memory)
