"""What a run needs of memory, and so how many processes work and where its models lie: decided before it starts.

Nearly all of it are the models, 4 N d bytes and as much again for each further row of the pool. They lie in memory or,
where that is too small, in a file that is mapped; other numbers than these N d do not leave memory.
"""

import itertools
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from fedcb2o.data._dataset import Dataset
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.experiments.config.datasets import samples_of, shared_data
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.federated.batched_training import SMALL
from fedcb2o.federated.mixing import WIDE
from fedcb2o.nn import parameters
from fedcb2o.parallel import resources, shared_memory
from fedcb2o.parallel.resources import gib
from fedcb2o.simulation import checkpoint

WORTH = 2e9  # floating-point operations of training a round below which one process is as fast as several
PROCESS = 2**28  # bytes of PyTorch and of a batch's activations in each process
UNITS = {"": 1, "b": 1, "byte": 1, "bytes": 1}
UNITS |= {f"{c}b": 1000 ** (k + 1) for k, c in enumerate("kmgt")}
UNITS |= {f"{c}{end}": 1024 ** (k + 1) for k, c in enumerate("kmgt") for end in ("", "i", "ib")}


@dataclass(frozen=True)
class Plan:
    """How many `processes` work on a run, what it needs, in bytes, and where its models go: `folder` is that of their
    file, None for memory; there so many `columns` of them are mixed at once by each process."""

    processes: int
    models: int
    rest: int
    folder: Path | None = None
    columns: int | None = None

    def __str__(self) -> str:
        where = "in memory" if self.folder is None else f"on disk, in {self.folder}"
        return f"models {gib(self.models)} {where}, data and processes {gib(self.rest)}"


def plan(
    experiment: Experiment, dataset: Dataset, dim: int, count: int | None, memory: int | None, folder: Path
) -> Plan:
    """Where the models go under a budget of memory, by default what is free, and how many processes work: `count`, or
    as many as are worth it and fit. `folder` is that of the seed. Models on another device than the CPU stay there.

    Raises RunError where they fit neither in memory nor on the disk, and says how many agents or processes would.
    """
    agents, row = experiment.agents.num_agents, 4 * parameters.row_stride(dim)
    pool = experiment.num_models * row
    data = sum(tensor.nbytes for tensor in shared_data(dataset).values())
    team = max(dim, min(SMALL, dim * agents), dim * min(agents, experiment.together or 1))
    training = 12 * team  # gradients, momentum and a copy
    most = choose_workers(experiment, dataset, dim) if count is None else count

    def rest(processes: int) -> int:
        shared = PROCESS + data if processes > 1 else 0
        return data + processes * (PROCESS + training) + shared

    if experiment.device is not None:  # that device's own memory holds them
        return Plan(most, pool, rest(most))
    if pool + data + training > (room := resources.addresses()):
        raise RunError(
            f"{agents} agents need {gib(pool)} for models, in memory or on disk, and a process may map "
            f"{gib(int(room))} more (`ulimit -v`): raise it, or take fewer agents or a smaller model"
        )
    shared_memory.sweep(folder)  # what a killed run left takes memory, or room there
    budget = resources.free_memory() if memory is None else memory
    small = memory is None and pool <= data + training
    disk = shutil.disk_usage(_there(folder)).free
    once = (folder / checkpoint.FILE).exists() or experiment.checkpoint_every >= experiment.rounds
    on_disk = pool + agents * row * (1 if once else 2)  # with checkpoints
    column = 8 * experiment.num_models  # what each process that mixes takes for one

    def in_memory(processes: int) -> Plan | None:
        fits = pool <= budget - rest(processes) or (small and processes in (count, 1))
        return Plan(processes, pool, rest(processes)) if fits else None

    def in_file(processes: int) -> Plan | None:
        left = budget - rest(processes)
        if left < processes * column * min(dim, WIDE) or on_disk > disk:
            return None
        return Plan(processes, pool, rest(processes), folder, min(dim, left // (processes * column)))

    def best(counts: range) -> Plan | None:
        return next(filter(None, itertools.chain(map(in_memory, counts), map(in_file, counts))), None)

    # Up to half of the processes are given for memory, which a disk is far slower than; for a run at all, any number.
    fewer = range(most, 0, -1)
    place = best(fewer[:1] if count else fewer[: (most + 1) // 2]) or best(fewer)
    if place is not None and count in (None, place.processes):
        return place
    asked = count or 1
    left = budget - rest(asked)
    mixed = left * agents // (asked * column * min(dim, WIDE))
    fit = max(left * agents // pool, min(mixed, disk * agents // on_disk))
    cure = f"{fit} agents would fit" if fit > 1 else "give more memory or take a smaller model"
    if place is not None:
        cure = f"--workers {place.processes} would fit"
    raise RunError(
        f"{agents} agents need {gib(pool)} for models and {gib(rest(asked))} for data and processes, of {gib(budget)} "
        f"of memory, or on disk {gib(on_disk)} with checkpoints, of {gib(disk)} that are free: {cure}"
    )


def choose_workers(experiment: Experiment, dataset: Dataset, dim: int) -> int:
    """One process for a small round, and on another device than the CPU; else one for each processor that this process
    may use."""
    if experiment.device is not None:
        return 1
    agents, training = experiment.agents, experiment.training
    samples = len(dataset.pool)
    if dataset.owners is None:
        benign, malicious = samples_of(experiment)
        samples = agents.num_clusters * (agents.benign * benign + agents.malicious * malicious)
    if 6.0 * dim * samples * training.local_epochs < WORTH:
        return 1
    return min(resources.processors(), agents.num_agents)


def bounded(asked: int, tasks: int, what: str, processors: int | None = None) -> int:
    """As many processes as asked for, but no more than there are processors, by default here, or tasks, which is said:
    more of them take memory and time."""
    processors = processors or resources.processors()
    most = max(1, min(processors, tasks))
    if asked > most:
        why = f"{processors} processors and {tasks} {what}"
        print(f"Note: {most} processes work, not {asked}: there are {why}.", file=sys.stderr)
    return min(asked, most)


def size(text: str | int) -> int:
    """The bytes that "24GiB" (or "24G") and "500 MB" mean, 24 * 1024^3 and 500 * 1000^2; upper and lower case are one.

    Raises ConfigError for what is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(text).strip().lower())
    if match is None or match[2] not in UNITS or len(match[1]) > 20:
        raise ConfigError(f"--memory needs a size such as 24GiB (or 24G, 1024^3 bytes) or 24GB (1000^3), got {text!r}")
    return int(float(match[1]) * UNITS[match[2]])


def _there(folder: Path) -> Path:
    """The nearest folder that is there."""
    return next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
