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
from fedcb2o.experiments.config.datasets import dataset_tensors, samples_per_agent
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.federated.batched_training import MAX_BATCH_PARAMETERS
from fedcb2o.federated.mixing import REDUCTION_TILE_COLUMNS
from fedcb2o.nn import parameters
from fedcb2o.parallel import resources, shared_memory
from fedcb2o.parallel.resources import format_bytes
from fedcb2o.simulation import checkpoint

MIN_PARALLEL_FLOPS = 2e9  # floating-point operations of training a round below which one process is as fast as several
PROCESS_BYTES = 2**28  # bytes of PyTorch and of a batch's activations in each process
_SIZE_UNITS = {"": 1, "b": 1, "byte": 1, "bytes": 1}
_SIZE_UNITS |= {f"{c}b": 1000 ** (k + 1) for k, c in enumerate("kmgt")}
_SIZE_UNITS |= {
    f"{c}{end}": 1024 ** (k + 1) for k, c in enumerate("kmgt") for end in ("", "i", "ib")
}


@dataclass(frozen=True)
class MemoryPlan:
    """How many `processes` work on a run, what it needs, in bytes, and where its models go: `folder` is that of their
    file, None for memory; there so many `columns` of them are mixed at once by each process."""

    processes: int
    model_bytes: int
    other_bytes: int
    folder: Path | None = None
    columns_per_mix: int | None = None

    def __str__(self) -> str:
        where = "in memory" if self.folder is None else f"on disk, in {self.folder}"
        return f"models {format_bytes(self.model_bytes)} {where}, data and processes {format_bytes(self.other_bytes)}"


def plan_memory(
    experiment: Experiment,
    dataset: Dataset,
    dim: int,
    count: int | None,
    memory: int | None,
    folder: Path,
) -> MemoryPlan:
    """Where the models go under a budget of memory, by default what is free, and how many processes work: `count`, or
    as many as are worth it and fit. `folder` is that of the seed. Models on another device than the CPU stay there.

    Raises RunError where they fit neither in memory nor on the disk, and says how many agents or processes would.
    """
    agents = experiment.agents.num_agents
    row = 4 * parameters.row_stride(dim)
    pool = experiment.num_models * row
    data = sum(tensor.nbytes for tensor in dataset_tensors(dataset).values())
    team = max(
        dim, min(MAX_BATCH_PARAMETERS, dim * agents), dim * min(agents, experiment.together or 1)
    )
    training = 12 * team  # gradients, momentum and a copy
    most = _default_workers(experiment, dataset, dim) if count is None else count

    def rest(processes: int) -> int:
        shared = PROCESS_BYTES + data if processes > 1 else 0
        return data + processes * (PROCESS_BYTES + training) + shared

    if experiment.device is not None:  # that device's own memory holds them
        return MemoryPlan(most, pool, rest(most))
    if pool + data + training > (room := resources.free_address_space()):
        raise RunError(
            f"{agents} agents need {format_bytes(pool)} for models, in memory or on disk, and a process may map "
            f"{format_bytes(int(room))} more (`ulimit -v`): raise it, or take fewer agents or a smaller model"
        )
    shared_memory.remove_stale(folder)  # what a killed run left takes memory, or room there
    budget = resources.free_memory() if memory is None else memory
    small = memory is None and pool <= data + training
    disk = shutil.disk_usage(_nearest_folder(folder)).free
    once = (folder / checkpoint.FILE).exists() or experiment.checkpoint_every >= experiment.rounds
    on_disk = pool + agents * row * (1 if once else 2)  # with checkpoints
    column = 8 * experiment.num_models  # what each process that mixes takes for one

    def in_memory(processes: int) -> MemoryPlan | None:
        fits = pool <= budget - rest(processes) or (small and processes in (count, 1))
        return MemoryPlan(processes, pool, rest(processes)) if fits else None

    def in_file(processes: int) -> MemoryPlan | None:
        left = budget - rest(processes)
        if left < processes * column * min(dim, REDUCTION_TILE_COLUMNS) or on_disk > disk:
            return None
        return MemoryPlan(
            processes, pool, rest(processes), folder, min(dim, left // (processes * column))
        )

    def best(counts: range) -> MemoryPlan | None:
        return next(
            filter(None, itertools.chain(map(in_memory, counts), map(in_file, counts))), None
        )

    # Up to half of the processes are given for memory, which a disk is far slower than; for a run at all, any number.
    fewer = range(most, 0, -1)
    place = best(fewer[:1] if count else fewer[: (most + 1) // 2]) or best(fewer)
    if place is not None and count in (None, place.processes):
        return place
    asked = count or 1
    left = budget - rest(asked)
    mixed = left * agents // (asked * column * min(dim, REDUCTION_TILE_COLUMNS))
    fit = max(left * agents // pool, min(mixed, disk * agents // on_disk))
    cure = f"{fit} agents would fit" if fit > 1 else "give more memory or take a smaller model"
    if place is not None:
        cure = f"--workers {place.processes} would fit"
    raise RunError(
        f"{agents} agents need {format_bytes(pool)} for models and {format_bytes(rest(asked))} for data and processes, of {format_bytes(budget)} "
        f"of memory, or on disk {format_bytes(on_disk)} with checkpoints, of {format_bytes(disk)} that are free: {cure}"
    )


def _default_workers(experiment: Experiment, dataset: Dataset, dim: int) -> int:
    """One process for a small round, and on another device than the CPU; else one for each processor that this process
    may use."""
    if experiment.device is not None:
        return 1
    agents = experiment.agents
    training = experiment.training
    samples = len(dataset.pool)
    if dataset.owners is None:
        benign, malicious = samples_per_agent(experiment)
        samples = agents.num_clusters * (agents.benign * benign + agents.malicious * malicious)
    if 6.0 * dim * samples * training.local_epochs < MIN_PARALLEL_FLOPS:
        return 1
    return min(resources.available_processors(), agents.num_agents)


def clip_workers(requested: int, tasks: int, task_word: str, processors: int | None = None) -> int:
    """As many processes as asked for, but no more than there are processors, by default here, or tasks, which is said:
    more of them take memory and time."""
    processors = processors or resources.available_processors()
    most = max(1, min(processors, tasks))
    if requested > most:
        why = f"{processors} processors and {tasks} {task_word}"
        print(f"Note: {most} processes work, not {requested}: there are {why}.", file=sys.stderr)
    return min(requested, most)


def parse_size(text: str | int) -> int:
    """The bytes that "24GiB" (or "24G") and "500 MB" mean, 24 * 1024^3 and 500 * 1000^2; upper and lower case are one.

    Raises ConfigError for what is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(text).strip().lower())
    if match is None or match[2] not in _SIZE_UNITS or len(match[1]) > 20:
        raise ConfigError(
            f"--memory needs a size such as 24GiB (or 24G, 1024^3 bytes) or 24GB (1000^3), got {text!r}"
        )
    return int(float(match[1]) * _SIZE_UNITS[match[2]])


def _nearest_folder(folder: Path) -> Path:
    """The nearest folder that is there."""
    return next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
