"""What a run needs of memory, and so where its models lie: decided, and said, before it starts.

Nearly all of it are the models, 4 N d bytes and as much again for each further row of the pool. They lie in memory or,
where that is too small, in a file that is mapped; other numbers than these N d do not leave memory.
"""

import contextlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from fedcb2o import models
from fedcb2o.data.shard import Dataset
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.experiments.assemble import shared_data
from fedcb2o.experiments.config import Experiment
from fedcb2o.federated.together import SMALL
from fedcb2o.runtime import checkpoint
from fedcb2o.runtime.phases import WIDE

PROCESS = 2**28  # bytes of PyTorch and of a batch's activations in each process
UNITS = {"": 1, "B": 1, **{f"{c}B": 1000 ** (k + 1) for k, c in enumerate("kMGT")}}
UNITS |= {f"{c}iB": 1024 ** (k + 1) for k, c in enumerate("KMGT")}


@dataclass(frozen=True)
class Plan:
    """What a run needs, in bytes, and where its models go: `folder` is that of their file, None for memory; there so
    many `columns` of them are mixed at once by each process."""

    models: int
    rest: int
    folder: Path | None = None
    columns: int | None = None

    def __str__(self) -> str:
        where = "in memory" if self.folder is None else f"on disk, in {self.folder}"
        return f"models {gib(self.models)} {where}, data and processes {gib(self.rest)}"


def plan(experiment: Experiment, dataset: Dataset, dim: int, count: int, memory: int | None, folder: Path) -> Plan:
    """Where the models go under a budget of memory, by default what is free; `folder` is that of the seed. Those on
    another device than the CPU stay there.

    Raises RunError where they fit neither in memory nor on the disk, and says how many agents would.
    """
    agents, row = experiment.agents.num_agents, 4 * models.row_stride(dim)
    pool = experiment.num_models * row
    data = (1 + (count > 1)) * sum(tensor.nbytes for tensor in shared_data(dataset).values())
    team = max(dim, min(SMALL, dim * agents), dim * min(agents, experiment.together or 1))
    training = 12 * team  # gradients, momentum and a copy
    rest = data + count * (PROCESS + training) + (PROCESS if count > 1 else 0)
    if experiment.device is not None:  # that device's own memory holds them
        return Plan(pool, rest)
    budget = free() if memory is None else memory
    small = memory is None and pool <= data + training
    if pool + rest <= budget or small:
        return Plan(pool, rest)
    disk = shutil.disk_usage(_there(folder)).free
    once = (folder / checkpoint.FILE).exists() or experiment.checkpoint_every >= experiment.rounds
    checkpoints = agents * row * (1 if once else 2)
    left, column = budget - rest, 8 * experiment.num_models * count
    least = column * min(dim, WIDE)
    if left >= least and pool + checkpoints <= disk:
        return Plan(pool, rest, folder, min(dim, left // column))
    fits = max(left * agents // pool, min(left * agents // least, disk * agents // (pool + checkpoints)))
    cure = f"{fits} agents would fit" if fits > 1 else "take a smaller model or fewer --workers"
    raise RunError(
        f"{agents} agents need {gib(pool)} for models and {gib(rest)} for data and processes, of {gib(budget)} of "
        f"memory, or on disk {gib(pool + checkpoints)} with checkpoints, of {gib(disk)} that are free: {cure}"
    )


def gib(count: int) -> str:
    """A number of bytes for people."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.1f} MiB"


def size(text: str | int) -> int:
    """The bytes that "24GiB" or "500 MB" means. Raises ConfigError for what is no size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(text).strip())
    if match is None or match[2] not in UNITS:
        raise ConfigError(f"--memory needs a size such as 24GiB or 800MB, got {text!r}")
    return int(float(match[1]) * UNITS[match[2]])


def free(root: Path = Path("/")) -> int:
    """The bytes of memory that this process may still take, as the system and its control groups have it; half of the
    machine's where neither says so, as on macOS."""
    found = []
    with contextlib.suppress(OSError, LookupError):
        lines = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        for group in _groups(root):
            with contextlib.suppress(OSError, ValueError):  # "max" is no number
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                cache = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
                found.append(int((group / limit).read_text()) - int((group / used).read_text()) + cache)
    return max(0, min(found)) if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _groups(root: Path) -> list[Path]:
    """The folders of this process's control groups and those around them, any of which may limit its memory."""
    found: list[Path] = []
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds in ("", "memory"):
                top = root / "sys/fs/cgroup" / kinds
                group = top / path.lstrip("/")
                found += [each for each in (group, *group.parents) if each.is_relative_to(top)]
    return found


def _there(folder: Path) -> Path:
    """The nearest folder that is there."""
    return next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
