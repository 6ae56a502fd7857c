"""Processors and memory that this process may use, by the system and its control groups.

The limits of a control group are in files: `cpu.max` and `memory.max` (version 2), or the files
named below (version 1).
"""

import contextlib
import ctypes
import math
import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path

from fedcb2o.errors import RunError

MEMORY_CURES = (
    "let fewer processes work (--workers 1), take fewer agents or a smaller model, "
    "or give more memory (`ulimit -v`)"
)

_ROOT = Path("/")
_MIN_ADDRESS_SPACE = 2**30  # bytes that PyTorch, pandas and scikit-learn map
_OUT_OF_MEMORY_PHRASES = (  # of libraries; and the traceback of an error in a worker
    "allocate memory",
    "not enough memory",
    "failed to map segment",
    "bad_alloc",
    "MemoryError",
)


def available_processors(root: Path = _ROOT) -> int:
    """Return the number of processes that may compute at once.

    It is that of the processors that this process may run on, or its control group's quota of
    processor time, rounded up, if that is smaller.
    """
    count = _affinity_count()
    for group in _control_groups("cpu", root):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            if (group / "cpu.max").exists():
                quota, period = map(int, (group / "cpu.max").read_text().split())
            else:
                quota = int((group / "cpu.cfs_quota_us").read_text())
                period = int((group / "cpu.cfs_period_us").read_text())
            if quota > 0 and period > 0:  # -1 means without a limit
                count = min(count, math.ceil(quota / period))
    return count


def free_memory(root: Path = _ROOT) -> int:
    """Return the bytes of memory that this process may still take.

    It is the smallest of the system's and the control groups' free memory; half of the machine's
    memory where none of them is known, as on macOS.
    """
    limits = [*_system_free_memory(root)]
    for group in _control_groups("memory", root):
        limits += _group_free_memory(group)
    if limits:
        return max(0, min(limits))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def processor_model(root: Path = _ROOT) -> str:
    """Return the system's name for the processor model, on which bits of results may depend."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def free_address_space(root: Path = _ROOT) -> float:
    """Return the bytes that this process may still map (`ulimit -v`), files included.

    Infinite without a limit.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return math.inf
    mapped = 0
    with contextlib.suppress(OSError):
        pages = int((root / "proc/self/statm").read_text().split()[0])
        mapped = pages * resource.getpagesize()
    return max(0, limit - mapped)


def check_address_space() -> None:
    """Refuse an address space smaller than the libraries alone need, by RunError."""
    free = free_address_space()
    # With less, some libraries fail in obscure ways.
    if free < _MIN_ADDRESS_SPACE:
        raise RunError(
            f"this process may map {format_bytes(int(free))} more (`ulimit -v`), "
            f"and PyTorch takes {format_bytes(_MIN_ADDRESS_SPACE)}: raise it"
        )


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an error, of any library or worker process, reports exhausted memory."""
    if isinstance(error, MemoryError):
        return True
    return any(phrase in str(error) for phrase in _OUT_OF_MEMORY_PHRASES)


def retain_freed_memory() -> None:
    """Make this process retain the memory that it frees (glibc)."""
    # The gradients of a large layer are allocated and freed in every step. If the system got their
    # pages back, it would clear and map them anew each time, and a step of the paper's network
    # would take 11% longer in float32 and 22% in bfloat16.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX: no separate mappings
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: return nothing


def format_bytes(count: int) -> str:
    """Format a number of bytes for people, in GiB, MiB or KiB."""
    if count >= 2**27:
        return f"{count / 2**30:.2f} GiB"
    if count >= 2**18:
        return f"{count / 2**20:.1f} MiB"
    return f"{count / 2**10:.1f} KiB"


def _affinity_count() -> int:
    count_usable = getattr(os, "process_cpu_count", None)  # from Python 3.13 on
    if count_usable is None and hasattr(os, "sched_getaffinity"):  # macOS has none
        return len(os.sched_getaffinity(0))
    return (count_usable or os.cpu_count)() or 1


def _system_free_memory(root: Path) -> Iterator[int]:
    with contextlib.suppress(OSError, LookupError, ValueError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        values = dict(line.partition(":")[::2] for line in lines)
        yield int(values["MemAvailable"].split()[0]) * 1024


def _group_free_memory(group: Path) -> Iterator[int]:
    """Yield the free memory of a control group, of version 2 and of version 1."""
    cache = 0
    with contextlib.suppress(OSError, ValueError):
        lines = (group / "memory.stat").read_text().splitlines()
        values = dict(line.partition(" ")[::2] for line in lines)
        # The system reclaims the cache of files before memory is short.
        cache = int(values.get("inactive_file", 0)) + int(values.get("active_file", 0))
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            yield int((group / limit).read_text()) - int((group / usage).read_text()) + cache


def _control_groups(controller: str, root: Path) -> list[Path]:
    """Return the folders of this process's control groups and of their parents."""
    groups: list[Path] = []
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = (*line.split(":", 2), "?", "?")[:3]  # a truncated line
            if controllers and controller not in controllers.split(","):
                continue
            # "cpu" also exists where the system mounts "cpu,cpuacct".
            top = root / "sys/fs/cgroup" / (controller if controllers else "")
            group = top / path.lstrip("/")
            groups += [folder for folder in (group, *group.parents) if folder.is_relative_to(top)]
    return groups
