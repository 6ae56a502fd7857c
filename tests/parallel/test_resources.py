"""What of the machine a process may use: what the system says, and control groups around it."""

import ctypes
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.tiny import bits, tiny

import fedcb2o
from fedcb2o.parallel import _resources, _shared_memory


@pytest.mark.parametrize(
    ("line", "limit", "used"),
    [
        ("0::/pod/box", "memory.max", "memory.current"),
        ("4:memory:/pod/box", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
@pytest.mark.parametrize("where", [".", "pod", "pod/box"])
def test_control_groups_limit_what_is_free(tmp_path, line, limit, used, where):
    """Parent groups limit too. Pages of files do not count, because the system can drop them."""
    group = tmp_path / "sys/fs/cgroup" / line.split(":")[1] / where
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 900 kB\nMemAvailable: 800 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(f"3:cpu:/other\n{line}\n")
    assert _resources.free_memory(tmp_path) == 800 * 1024
    (group / "memory.stat").write_text("anon 1\ninactive_file 40\nactive_file 2\n")
    (group / used).write_text("500\n")
    (group / limit).write_text("max\n")
    assert _resources.free_memory(tmp_path) == 800 * 1024
    (group / limit).write_text("1000\n")
    assert _resources.free_memory(tmp_path) == 542


def test_without_a_word_of_the_system_half_of_the_machine_is_free(tmp_path):
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert _resources.free_memory(tmp_path) == whole // 2


def test_the_model_of_the_processors(tmp_path):
    assert _resources.processor_model(tmp_path) == _resources.processor_model(tmp_path / "none")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        "processor\t: 0\nmodel\t\t: 85\nmodel name\t: Abacus 9: B\n\nprocessor\t: 1\n"
    )
    assert _resources.processor_model(tmp_path) == "Abacus 9: B"


def test_odd_lines_hide_no_limit(tmp_path, sixty_four):
    group = group_of(tmp_path, "\n0\n0::/pod/box\n", "pod/box", kinds="")
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 800 kB\n\na:b:c\n")
    (group / "memory.max").write_text("1000")
    (group / "memory.current").write_text("10")
    assert _resources.free_memory(tmp_path) == 990  # there is no memory.stat
    (group / "memory.stat").write_text("odd\nactive_file 5\n\n")
    assert _resources.free_memory(tmp_path) == 995
    (group / "cpu.max").write_text("100000 100000")
    assert _resources.available_processors(tmp_path) == 1


def group_of(root, line, where, kinds=None):
    """A control group of a process that is in /pod/box, as `line` of its list of groups says."""
    kinds = line.split(":")[1] if kinds is None else kinds
    group = root / "sys/fs/cgroup" / ("cpu" if kinds else "") / where
    group.mkdir(parents=True)
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"3:memory:/other\n{line}\n")
    return group


@pytest.fixture
def sixty_four(monkeypatch):
    monkeypatch.setattr(os, "process_cpu_count", lambda: 64, raising=False)


@pytest.mark.parametrize("where", [".", "pod", "pod/box"])
@pytest.mark.parametrize(
    ("quota", "expected"), [("max", 64), (200_000, 2), (150_000, 2), (10_000, 1), (10_000_000, 64)]
)
def test_control_groups_limit_the_processors(tmp_path, sixty_four, where, quota, expected):
    group = group_of(tmp_path, "0::/pod/box", where)
    assert _resources.available_processors(tmp_path) == 64
    (group / "cpu.max").write_text(f"{quota} 100000\n")
    assert _resources.available_processors(tmp_path) == expected


@pytest.mark.parametrize(
    "line", ["4:cpu:/pod/box", "4:cpu,cpuacct:/pod/box", "4:cpuacct,cpu:/pod/box"]
)
@pytest.mark.parametrize("where", [".", "pod", "pod/box"])
@pytest.mark.parametrize(("quota", "expected"), [(-1, 64), (200_000, 4), (10_000, 1)])
def test_control_groups_of_version_1_limit_the_processors(
    tmp_path, sixty_four, line, where, quota, expected
):
    group = group_of(tmp_path, line, where)
    (group / "cpu.cfs_period_us").write_text("50000\n")
    assert _resources.available_processors(tmp_path) == 64
    (group / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    assert _resources.available_processors(tmp_path) == expected


def test_the_tightest_of_several_groups_counts(tmp_path, sixty_four):
    group = group_of(tmp_path, "0::/pod/box", "pod/box")
    (group / "cpu.max").write_text("300000 100000\n")
    (group.parent / "cpu.max").write_text("200000 100000\n")
    (group.parent.parent / "cpu.max").write_text("max 100000\n")
    assert _resources.available_processors(tmp_path) == 2


def test_processors_are_those_that_the_process_may_run_on(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "process_cpu_count", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 6}, raising=False)
    assert _resources.available_processors(tmp_path) == 3


@pytest.mark.parametrize(("count", "expected"), [(8, 8), (None, 1)])
def test_without_affinity_all_processors_count(tmp_path, monkeypatch, count, expected):
    """As on macOS before Python 3.13."""
    for name in ("process_cpu_count", "sched_getaffinity"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert _resources.available_processors(tmp_path) == expected


def test_a_run_needs_nothing_that_only_linux_has(tmp_path, monkeypatch):
    """As on macOS: no /proc, /sys, /dev/shm, affinity, fallocate or mallopt."""
    fedcb2o.run(tiny(), out=tmp_path / "linux", workers=2)
    for name in ("process_cpu_count", "sched_getaffinity", "posix_fallocate"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    is_dir, read_text = Path.is_dir, Path.read_text

    def there(path):
        return not path.is_relative_to("/dev/shm") and is_dir(path)

    def read(path, *given, **more):
        if any(map(path.is_relative_to, ("/proc", "/sys"))):
            raise FileNotFoundError(path)
        return read_text(path, *given, **more)

    monkeypatch.setattr(Path, "is_dir", there)
    monkeypatch.setattr(Path, "read_text", read)
    _resources.retain_freed_memory()
    assert _shared_memory._candidate_folders() == [Path(tempfile.gettempdir())]
    assert _resources.available_processors() == os.cpu_count()
    assert _resources.free_memory() > 2**29
    fedcb2o.run(tiny(), out=tmp_path / "elsewhere", workers=2)
    assert bits(tmp_path / "elsewhere") == bits(tmp_path / "linux")


def test_room_is_taken_where_the_system_has_no_call_for_it(tmp_path, monkeypatch):
    """As on macOS."""
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    path = tmp_path / "room"
    with path.open("xb") as file:
        _shared_memory._reserve(file.fileno(), 2**21 + 5)
    assert path.read_bytes() == bytes(2**21 + 5)
