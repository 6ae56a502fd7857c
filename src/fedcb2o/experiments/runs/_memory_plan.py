"""The memory that a run needs, the number of its processes, and the place of its models.

Nearly all of the memory holds models: 4 N d bytes, and as much for each further row of the model
buffer. Models are in memory or, where that is too small, in a mapped file.
"""

import itertools
import logging
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fedcb2o.data import Dataset
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.experiments.config.datasets import dataset_tensors, samples_per_agent
from fedcb2o.experiments.config.network import frozen_bytes
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.federated.local_update import MAX_BATCH_PARAMETERS
from fedcb2o.federated.mixing import REDUCTION_TILE_COLUMNS
from fedcb2o.nn import parameters
from fedcb2o.parallel import _resources, _shared_memory
from fedcb2o.parallel._resources import format_bytes
from fedcb2o.simulation import checkpoint

_LOG = logging.getLogger(__name__)

MIN_PARALLEL_FLOPS = 2e9  # of training in a round; below it one process is as fast as several
CONTACT_BYTES = 40  # id, likelihood, and copies of both in a round
AGENT_BYTES = 2**13  # of decisions and their copies in a round, for M = 20
PROCESS_BYTES = 2**28  # of PyTorch and of a batch's activations in each process

_SIZE_UNITS = {"": 1, "b": 1, "byte": 1, "bytes": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _SIZE_UNITS[f"{_prefix}b"] = 1000**_power
    for _suffix in ("", "i", "ib"):
        _SIZE_UNITS[f"{_prefix}{_suffix}"] = 1024**_power


@dataclass(frozen=True)
class MemoryPlan:
    """The processes, the memory and the place of the models of a run."""

    processes: int
    model_bytes: int
    # Bytes of data, contacts and processes.
    other_bytes: int
    # Folder of the models' file; None for models in memory.
    folder: Path | None = None
    # Number of columns in the file that each process mixes at once.
    columns_per_mix: int | None = None

    def __str__(self) -> str:
        where = "in memory" if self.folder is None else f"on disk, in {self.folder}"
        models = format_bytes(self.model_bytes)
        others = format_bytes(self.other_bytes)
        return f"models {models} {where}, data, contacts and processes {others}"


def plan_memory(
    experiment: Experiment,
    dataset: Dataset,
    dim: int,
    count: int | None,
    memory: int | None,
    folder: Path,
) -> MemoryPlan:
    """Plan the place of the models and the number of processes.

    Models on another device than the CPU stay there. Others are in memory where they fit, else on
    disk. For memory, which is far faster, up to half of the processes are given up. By default
    `count` is what is worth it and fits, and `memory` what is free.
    """
    most = _default_workers(experiment, dataset, dim) if count is None else count
    needs = _Needs(experiment, dataset, dim)
    if experiment.device is not None:  # the memory of that device holds the models
        return MemoryPlan(most, needs.model_bytes, needs.other_bytes(most))

    needs.check_address_space()
    _shared_memory.remove_stale(folder)  # the models of a killed run take memory, or disk
    budget = _resources.free_memory() if memory is None else memory
    existing = (path for path in (folder, *folder.absolute().parents) if path.is_dir())
    disk = shutil.disk_usage(next(existing)).free
    disk_bytes = needs.disk_bytes(folder)
    # What is free now is an estimate. Small models run even where it seems too little.
    is_small = (
        memory is None
        and needs.model_bytes + needs.agent_bytes <= needs.data_bytes + needs.training_bytes
    )

    def in_memory(processes: int) -> MemoryPlan | None:
        others = needs.other_bytes(processes)
        fits = needs.model_bytes <= budget - others
        if fits or (is_small and processes in (count, 1)):
            return MemoryPlan(processes, needs.model_bytes, others)
        return None

    def in_file(processes: int) -> MemoryPlan | None:
        others = needs.other_bytes(processes)
        left = budget - others
        if left < processes * needs.mix_bytes or disk_bytes > disk:
            return None
        columns = min(dim, left // (processes * needs.column_bytes))
        return MemoryPlan(processes, needs.model_bytes, others, folder, columns)

    def first_fit(counts: Iterable[int]) -> MemoryPlan | None:
        counts = list(counts)
        plans = itertools.chain(map(in_memory, counts), map(in_file, counts))
        return next(filter(None, plans), None)

    candidates = range(most, 0, -1)
    # Memory is tried with up to half of the processes before any file, and a file before fewer
    # processes.
    preferred = candidates[:1] if count else candidates[: (most + 1) // 2]
    plan = first_fit(preferred) or first_fit(candidates)
    if plan is not None and count in (None, plan.processes):
        return plan

    # Numbers in the message are those of the user's request, or of the smallest run.
    requested = count or 1
    cure = needs.largest_fit(budget - needs.other_bytes(requested), requested, disk, disk_bytes)
    if plan is not None:
        cure = f"--workers {plan.processes} would fit"
    raise RunError(
        f"{needs.num_agents} agents need {format_bytes(needs.model_bytes)} for models and "
        f"{format_bytes(needs.other_bytes(requested))} for data, contacts and processes, of "
        f"{format_bytes(budget)} of memory, or on disk {format_bytes(disk_bytes)} with "
        f"checkpoints, of {format_bytes(disk)} that are free: {cure}"
    )


class _Needs:
    """The bytes that the parts of a run need."""

    def __init__(self, experiment: Experiment, dataset: Dataset, dim: int) -> None:
        self.experiment = experiment
        self.num_agents = experiment.agents.num_agents
        self.row_bytes = 4 * parameters.row_stride(dim)
        self.model_bytes = experiment.num_models * self.row_bytes
        self.data_bytes = sum(tensor.nbytes for tensor in dataset_tensors(dataset).values())
        batch = max(
            dim,
            min(MAX_BATCH_PARAMETERS, dim * self.num_agents),
            dim * min(self.num_agents, experiment.together or 1),
        )
        # Every peer that an agent asked stays a contact.
        contacts = min(self.num_agents - 1, experiment.agents.budget * experiment.rounds)
        self.agent_bytes = self.num_agents * (AGENT_BYTES + CONTACT_BYTES * contacts)
        self.frozen_bytes = frozen_bytes(experiment)
        self.training_bytes = 12 * batch  # gradients, momentum and a copy
        self.column_bytes = 8 * experiment.num_models  # of a column in a process that mixes
        self.mix_bytes = self.column_bytes * min(dim, REDUCTION_TILE_COLUMNS)

    def other_bytes(self, processes: int) -> int:
        """Return the bytes of data, contacts and processes."""
        # Workers read the data in shared memory, in addition to those of this process.
        shared = PROCESS_BYTES + self.data_bytes if processes > 1 else 0
        private = processes * (PROCESS_BYTES + self.training_bytes)
        return self.data_bytes + self.frozen_bytes + self.agent_bytes + private + shared

    def disk_bytes(self, folder: Path) -> int:
        """Return the bytes of a file of models, and of one or two checkpoints in the folder."""
        has_checkpoint = (folder / checkpoint.FILE).exists()
        is_saved_once = self.experiment.checkpoint_every >= self.experiment.rounds
        checkpoints = 1 if has_checkpoint or is_saved_once else 2
        rows = self.num_agents + self.experiment.num_further_rows
        return self.model_bytes + rows * self.row_bytes * checkpoints

    def check_address_space(self) -> None:
        """Raise RunError where a limit of addresses is too small for the models."""
        available = _resources.free_address_space()
        if self.model_bytes + self.data_bytes + self.training_bytes > available:
            raise RunError(
                f"{self.num_agents} agents need {format_bytes(self.model_bytes)} for models, in "
                f"memory or on disk, and a process may map {format_bytes(int(available))} more "
                "(`ulimit -v`): raise it, or take fewer agents or a smaller model"
            )

    def largest_fit(self, left: int, processes: int, disk: int, disk_bytes: int) -> str:
        """Return the advice of a plan that does not fit: the number of agents, or another cure.

        `left` bytes of memory remain for models; of `disk_bytes`, `disk` are free.
        """
        by_mixing = left * self.num_agents // (processes * self.mix_bytes)
        by_disk = disk * self.num_agents // disk_bytes
        count = max(left * self.num_agents // self.model_bytes, min(by_mixing, by_disk))
        if count > 1:
            return f"{count} agents would fit"
        if self.agent_bytes > self.model_bytes:
            return "give more memory, or take fewer agents, rounds or peers (`agents.budget`)"
        return "give more memory or take a smaller model"


def _default_workers(experiment: Experiment, dataset: Dataset, dim: int) -> int:
    """Return 1 for a small round or a device, else the number of processors."""
    if experiment.device is not None:
        return 1
    agents = experiment.agents
    num_samples = len(dataset.pool)
    if dataset.owners is None:
        benign, malicious = samples_per_agent(experiment)
        num_samples = agents.num_benign * benign + agents.num_malicious * malicious
    if 6.0 * dim * num_samples * experiment.training.local_epochs < MIN_PARALLEL_FLOPS:
        return 1
    return min(_resources.available_processors(), agents.num_agents)


def clip_workers(requested: int, tasks: int, task_word: str, processors: int | None = None) -> int:
    """Limit a number of processes to processors and tasks (`task_word`, a plural), with a note."""
    processors = processors or _resources.available_processors()
    largest = max(1, min(processors, tasks))
    if requested > largest:
        _LOG.warning(
            "%d processes work, not %d: there are %d processors and %d %s.",
            largest,
            requested,
            processors,
            tasks,
            task_word,
        )
    return min(requested, largest)


def parse_size(text: str | int) -> int:
    """Convert a size such as "24GiB" (or "24G", 24 * 1024^3) or "500 MB" to bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(text).strip().lower())
    if match is None or match[2] not in _SIZE_UNITS or len(match[1]) > 20:
        raise ConfigError(
            "--memory needs a size such as 24GiB (or 24G, 1024^3 bytes) or 24GB (1000^3), "
            f"got {text!r}"
        )
    return int(float(match[1]) * _SIZE_UNITS[match[2]])
