"""What of the machine this process may use: processors and memory, as the system and control groups around it say.

A control group's limits lie in files: "cpu.max" and "memory.max" (version 2), or those named below (version 1).
"""

import contextlib
import ctypes
import math
import os
import platform
import resource
from pathlib import Path

from fedcb2o.errors import RunError

_MIN_ADDRESS_SPACE = 2**30  # bytes of addresses that PyTorch, pandas and scikit-learn take
MEMORY_CURES = "let fewer processes work (--workers 1), take fewer agents or a smaller model, or give more memory (`ulimit -v`)"
# What libraries say; and the traceback of an error in a worker.
_OUT_OF_MEMORY_PHRASES = (
    "allocate memory",
    "not enough memory",
    "failed to map segment",
    "bad_alloc",
    "MemoryError",
)


def available_processors(root: Path = Path("/")) -> int:
    """How many processes may compute at once: the processors that this one may run on, or fewer where a control group
    has a quota of their time, rounded up."""
    known = getattr(os, "process_cpu_count", None)  # from Python 3.13 on
    if known is None and hasattr(os, "sched_getaffinity"):  # macOS has none
        found = len(os.sched_getaffinity(0))
    else:
        found = (known or os.cpu_count)() or 1
    for group in _control_groups("cpu", root):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            if (group / "cpu.max").exists():
                quota, period = map(int, (group / "cpu.max").read_text().split())
            else:
                quota, period = (
                    int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period")
                )
            if quota > 0 and period > 0:  # -1 is no limit
                found = min(found, math.ceil(quota / period))
    return found


def free_memory(root: Path = Path("/")) -> int:
    """The bytes of memory that this process may still take; half of the machine's where neither the system nor a
    control group says so, as on macOS."""
    found = []
    with contextlib.suppress(OSError, LookupError, ValueError):
        lines = dict(
            line.partition(":")[::2] for line in (root / "proc/meminfo").read_text().splitlines()
        )
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for group in _control_groups("memory", root):
            cache = 0
            with contextlib.suppress(OSError, ValueError):
                stat = dict(
                    line.partition(" ")[::2]
                    for line in (group / "memory.stat").read_text().splitlines()
                )
                cache = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
            with contextlib.suppress(OSError, ValueError):
                found.append(
                    int((group / limit).read_text()) - int((group / used).read_text()) + cache
                )
    return (
        max(0, min(found))
        if found
        else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    )


def processor_model(root: Path = Path("/")) -> str:
    """The model of the processors, which the bits of a run may depend on, as the system names it."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def free_address_space(root: Path = Path("/")) -> float:
    """The bytes that this process may still map (`ulimit -v`), models on a disk included; infinite without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return math.inf
    used = 0
    with contextlib.suppress(OSError):
        used = int((root / "proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return max(0, limit - used)


def check_address_space() -> None:
    """Raises RunError where this process may map less than the libraries alone take, some of which then fail oddly."""
    if (room := free_address_space()) < _MIN_ADDRESS_SPACE:
        raise RunError(
            f"this process may map {format_bytes(int(room))} more (`ulimit -v`), and PyTorch takes {format_bytes(_MIN_ADDRESS_SPACE)}: raise it"
        )


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that there is no more memory."""
    return isinstance(error, MemoryError) or any(
        words in str(error) for words in _OUT_OF_MEMORY_PHRASES
    )


def retain_freed_memory() -> None:
    """Have this process keep the memory that it frees (glibc).

    The gradients of a large layer come and go in every step. Were they handed back to the system, it would clear and
    map their pages anew each time, and a step of the paper's network take 11% longer in float32, 22% in bfloat16.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX: nothing mapped by itself
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: nothing given back


def format_bytes(count: int) -> str:
    """A number of bytes for people."""
    if count >= 2**27:
        return f"{count / 2**30:.2f} GiB"
    return f"{count / 2**20:.1f} MiB" if count >= 2**18 else f"{count / 2**10:.1f} KiB"


def _control_groups(kind: str, root: Path) -> list[Path]:
    """The folders of this process's control groups of a kind and those around them, any of which may limit it."""
    found: list[Path] = []
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, kinds, path = (*line.split(":", 2), "?", "?")[:3]  # a line cut short names no group
            if not kinds or kind in kinds.split(","):
                top = (
                    root / "sys/fs/cgroup" / (kind if kinds else "")
                )  # "cpu" is there for "cpu,cpuacct" too
                group = top / path.lstrip("/")
                found += [each for each in (group, *group.parents) if each.is_relative_to(top)]
    return found
