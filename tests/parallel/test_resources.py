"""Memory and processors of a process: values of the system and limits of control groups."""

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
@pytest.mark.parametrize("group_path", [".", "pod", "pod/box"])
def test_control_groups_limit_the_free_memory(tmp_path, line, limit, used, group_path):
    """Parent groups are limits too. File pages count as free, because the system can drop them."""
    group = tmp_path / "sys/fs/cgroup" / line.split(":")[1] / group_path
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


def test_half_of_the_memory_is_free_without_system_information(tmp_path):
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert _resources.free_memory(tmp_path) == whole // 2


def test_the_processor_model_is_read_from_cpuinfo(tmp_path):
    assert _resources.processor_model(tmp_path) == _resources.processor_model(tmp_path / "none")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        "processor\t: 0\nmodel\t\t: 85\nmodel name\t: Abacus 9: B\n\nprocessor\t: 1\n"
    )
    assert _resources.processor_model(tmp_path) == "Abacus 9: B"


def test_malformed_lines_hide_no_limit(tmp_path, sixty_four_processors):
    group = group_of(tmp_path, "\n0\n0::/pod/box\n", "pod/box", kinds="")
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 800 kB\n\na:b:c\n")
    (group / "memory.max").write_text("1000")
    (group / "memory.current").write_text("10")
    assert _resources.free_memory(tmp_path) == 990  # there is no memory.stat
    (group / "memory.stat").write_text("odd\nactive_file 5\n\n")
    assert _resources.free_memory(tmp_path) == 995
    (group / "cpu.max").write_text("100000 100000")
    assert _resources.available_processors(tmp_path) == 1


def group_of(root, line, group_path, kinds=None):
    """Create a control group of a process in /pod/box, with `line` in the list of its groups."""
    kinds = line.split(":")[1] if kinds is None else kinds
    group = root / "sys/fs/cgroup" / ("cpu" if kinds else "") / group_path
    group.mkdir(parents=True)
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"3:memory:/other\n{line}\n")
    return group


@pytest.fixture
def sixty_four_processors(monkeypatch):
    monkeypatch.setattr(os, "process_cpu_count", lambda: 64, raising=False)


@pytest.mark.parametrize("group_path", [".", "pod", "pod/box"])
@pytest.mark.parametrize(
    ("quota", "expected"), [("max", 64), (200_000, 2), (150_000, 2), (10_000, 1), (10_000_000, 64)]
)
def test_control_groups_limit_the_processors(
    tmp_path, sixty_four_processors, group_path, quota, expected
):
    group = group_of(tmp_path, "0::/pod/box", group_path)
    assert _resources.available_processors(tmp_path) == 64
    (group / "cpu.max").write_text(f"{quota} 100000\n")
    assert _resources.available_processors(tmp_path) == expected


@pytest.mark.parametrize(
    "line", ["4:cpu:/pod/box", "4:cpu,cpuacct:/pod/box", "4:cpuacct,cpu:/pod/box"]
)
@pytest.mark.parametrize("group_path", [".", "pod", "pod/box"])
@pytest.mark.parametrize(("quota", "expected"), [(-1, 64), (200_000, 4), (10_000, 1)])
def test_control_groups_of_version_1_limit_the_processors(
    tmp_path, sixty_four_processors, line, group_path, quota, expected
):
    group = group_of(tmp_path, line, group_path)
    (group / "cpu.cfs_period_us").write_text("50000\n")
    assert _resources.available_processors(tmp_path) == 64
    (group / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    assert _resources.available_processors(tmp_path) == expected


def test_the_tightest_of_several_groups_counts(tmp_path, sixty_four_processors):
    group = group_of(tmp_path, "0::/pod/box", "pod/box")
    (group / "cpu.max").write_text("300000 100000\n")
    (group.parent / "cpu.max").write_text("200000 100000\n")
    (group.parent.parent / "cpu.max").write_text("max 100000\n")
    assert _resources.available_processors(tmp_path) == 2


def test_affinity_limits_the_available_processors(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "process_cpu_count", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 6}, raising=False)
    assert _resources.available_processors(tmp_path) == 3


@pytest.mark.parametrize(("count", "expected"), [(8, 8), (None, 1)])
def test_without_affinity_all_processors_count(tmp_path, monkeypatch, count, expected):
    """macOS lacks affinity before Python 3.13."""
    for name in ("process_cpu_count", "sched_getaffinity"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert _resources.available_processors(tmp_path) == expected


def test_a_run_needs_no_features_of_linux(tmp_path, monkeypatch):
    """macOS lacks /proc, /sys, /dev/shm, affinity, fallocate and mallopt."""
    fedcb2o.run(tiny(), out=tmp_path / "linux", workers=2)
    for name in ("process_cpu_count", "sched_getaffinity", "posix_fallocate"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    is_dir, read_text = Path.is_dir, Path.read_text

    def is_visible_dir(path):
        return not path.is_relative_to("/dev/shm") and is_dir(path)

    def read(path, *args, **kwargs):
        if any(map(path.is_relative_to, ("/proc", "/sys"))):
            raise FileNotFoundError(path)
        return read_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "is_dir", is_visible_dir)
    monkeypatch.setattr(Path, "read_text", read)
    _resources.retain_freed_memory()
    assert _shared_memory._candidate_folders() == [Path(tempfile.gettempdir())]
    assert _resources.available_processors() == os.cpu_count()
    assert _resources.free_memory() > 2**29
    fedcb2o.run(tiny(), out=tmp_path / "elsewhere", workers=2)
    assert bits(tmp_path / "elsewhere") == bits(tmp_path / "linux")


def test_space_is_reserved_without_posix_fallocate(tmp_path, monkeypatch):
    """macOS lacks `posix_fallocate`."""
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    path = tmp_path / "room"
    with path.open("xb") as file:
        _shared_memory._reserve(file.fileno(), 2**21 + 5)
    assert path.read_bytes() == bytes(2**21 + 5)
