"""Executors and shared memory: order of results, errors, and no process or file left."""

import contextlib
import fcntl
import functools
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.processes import needs_proc

from fedcb2o.errors import ConfigError, RunError
from fedcb2o.parallel import _shared_memory
from fedcb2o.parallel._executors import PoolExecutor, SerialExecutor, balance_load, one_thread
from fedcb2o.parallel._process_pool import current_pool

SPECS = {
    "models": (torch.float32, (3, 5)),
    "labels": (torch.int64, (7,)),
    "none": (torch.uint8, (0, 2)),
}


def fill(world, row, value):
    world["models"][row] = value
    return os.getpid(), torch.get_num_threads()


def slowly(world, seconds, value):
    time.sleep(seconds)
    return value


def fail(world, kind):
    if kind == "config":
        raise ConfigError("the rule returned nonsense")
    os.kill(os.getpid(), signal.SIGKILL)


def process_id(world):
    return os.getpid()


def identity(tensors):
    return tensors


class TwoWordsError(Exception):
    """An exception that pickles but does not unpickle: pickle passes one of two arguments."""

    def __init__(self, one, two):
        super().__init__(one)


def raise_or_return_unpicklable(world, kind):
    if kind == "error":
        raise TwoWordsError(1, 2)
    return threading.Lock()


def die_with_child(world, path):
    """Start a child that holds the pipe of the worker open, and kill the worker."""
    if (child := os.fork()) == 0:
        time.sleep(60)
        os._exit(0)
    path.write_text(str(child))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def pool():
    with _shared_memory.allocate_shared(SPECS) as shared:
        yield PoolExecutor(2, shared, identity)


def test_workers_change_the_tensors_in_place_with_one_thread_each(pool):
    results = pool.map(fill, [(0, 1.0), (1, 2.0), (2, 3.0)])
    assert pool.shared_tensors.tensors()["models"].tolist() == [[1.0] * 5, [2.0] * 5, [3.0] * 5]
    assert all(pid != os.getpid() for pid, _ in results)
    assert {threads for _, threads in results} == {1}


def test_results_come_in_the_order_of_the_tasks(pool):
    result = pool.map(slowly, [(0.2, "a"), (0.0, "b"), (0.1, "c"), (0.0, "d")])
    assert result == ["a", "b", "c", "d"]
    assert pool.map(slowly, []) == []


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(3, dtype=torch.bfloat16),
        torch.ones(2, 3, requires_grad=True),
        torch.eye(3).to_sparse(),
        torch.zeros(0, 4),
        torch.tensor(3.0),
        torch.arange(6).view(2, 3).T,
        torch.tensor([True, False]),
    ],
)
def test_tensors_survive_the_round_trip(pool, value):
    """User functions may hold tensors that NumPy does not support."""
    (result,) = pool.map(slowly, [(0, value)])
    actual = (result.dtype, result.layout, result.requires_grad)
    assert actual == (value.dtype, value.layout, value.requires_grad)
    assert result.shape == value.shape
    assert result.to_dense().equal(value.to_dense())


def test_an_error_keeps_its_type_and_the_pool_keeps_working(pool):
    with pytest.raises(ConfigError, match=r"^the rule returned nonsense$"):
        pool.map(fail, [("config",)])
    assert pool.map(slowly, [(0.0, 1)]) == [1]


def test_a_dead_worker_is_a_run_error_and_is_replaced(pool):
    message = "a worker process was killed, perhaps because memory is short"
    with pytest.raises(RunError, match=message):
        pool.map(fail, [("die",), ("die",)])
    assert pool.map(slowly, [(0.0, 1)]) == [1]


def pids(pool):
    return set(pool.map(process_id, [()] * 8))


def has_ended(pid):
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.slow
def test_an_idle_worker_that_is_killed_is_replaced(pool):
    pool.map(slowly, [(0.2, 0)] * 2)
    victim, other = current_pool().workers
    os.kill(victim.process.pid, signal.SIGKILL)
    assert victim.pipe.poll(10)  # wait for the end of all its threads, not only of the first one
    assert pool.map(slowly, [(0.2, k) for k in range(4)]) == [0, 1, 2, 3]
    assert len(current_pool().workers) == 2
    assert other in current_pool().workers
    assert victim not in current_pool().workers


@pytest.mark.slow
@needs_proc
def test_a_dead_worker_is_detected_and_its_child_is_ended(pool, tmp_path):
    with pytest.raises(RunError, match="a worker process was killed"):
        pool.map(die_with_child, [(tmp_path / "child",)])
    child, deadline = int((tmp_path / "child").read_text()), time.monotonic() + 3
    while not has_ended(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert has_ended(child)


@pytest.mark.parametrize("kind", ["error", pytest.param("result", marks=pytest.mark.slow)])
def test_results_that_cannot_be_returned_are_errors(pool, kind):
    expected = {
        "error": (RuntimeError, "^TwoWordsError: 1$"),
        "result": (RunError, "cannot be sent to another process"),
    }
    error, message = expected[kind]
    with pytest.raises(error, match=message):
        pool.map(raise_or_return_unpicklable, [(kind,)])


def test_arguments_that_cannot_be_sent_are_errors(pool):
    deep = functools.reduce(lambda inner, _: [inner], range(100_000), [])
    for argument in (threading.Lock(), deep):
        message = r"cannot be sent to another process .*: take --workers 1"
        with pytest.raises(RunError, match=message):
            pool.map(slowly, [(0, argument)])


@pytest.mark.slow
def test_new_workers_start_after_an_interrupted_termination(pool, monkeypatch):
    before = pids(pool)

    def interrupt(member):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(current_pool().workers[0]), "has_exited", interrupt)
        with pytest.raises(KeyboardInterrupt):
            current_pool().terminate()
    assert not pids(pool) & before


TERMINAL = """
import fcntl, sys, termios

import torch

from fedcb2o.parallel import _shared_memory as shared_memory
from fedcb2o.parallel._executors import PoolExecutor

fcntl.ioctl(0, termios.TIOCSCTTY, 0)
modes = termios.tcgetattr(0)
modes[3] |= termios.TOSTOP
termios.tcsetattr(0, termios.TCSANOW, modes)


def say(world):
    return print("said", file=sys.stderr, flush=True)


with shared_memory.allocate_shared({"models": (torch.uint8, (9,))}) as shared:
    PoolExecutor(1, shared, dict).map(say, [()])
"""


@pytest.mark.slow
def test_a_printing_worker_is_not_stopped_by_a_tostop_terminal():
    controller, terminal = os.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", TERMINAL],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()
        assert b"said" in os.read(controller, 10_000)
    finally:
        os.close(controller)
        os.close(terminal)


@pytest.mark.slow
def test_workers_are_reused_until_the_import_path_changes(pool, monkeypatch, tmp_path):
    pool.map(slowly, [(0.1, 0)] * 2)
    before = {member.process.pid for member in current_pool().workers}
    assert pids(pool) <= before
    monkeypatch.syspath_prepend(tmp_path)
    assert not pids(pool) & before


@pytest.mark.slow
def test_a_reloaded_module_is_reloaded_in_workers(tmp_path, monkeypatch):
    file = tmp_path / "own_part_loaded_again.py"
    file.write_text("def value(world):\n    return 'old'\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(file.stem)
    with _shared_memory.allocate_shared(SPECS) as shared:
        assert PoolExecutor(1, shared, identity).map(module.value, [()]) == ["old"]
        before = pids(PoolExecutor(1, shared, identity))
        assert PoolExecutor(1, shared, identity).map(module.value, [()]) == ["old"]
        assert pids(PoolExecutor(1, shared, identity)) == before
        file.write_text("def value(world):\n    return 'another'\n")
        importlib.reload(module)
        assert PoolExecutor(1, shared, identity).map(module.value, [()]) == ["another"]


@pytest.mark.slow
def test_a_fork_has_its_own_workers_and_keeps_its_parents_workers(pool):
    before = pids(pool)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        child_pids = pids(pool)
        current_pool().terminate()
        os.write(write, bytes([not child_pids & before]))
        os._exit(0)
    os.close(write)
    assert os.read(read, 1) == b"\1"
    os.waitpid(child, 0)
    os.close(read)
    assert pids(pool) <= {member.process.pid for member in current_pool().workers}
    assert before & {member.process.pid for member in current_pool().workers}


def test_the_serial_executor_works_like_a_pool(pool):
    world = {"models": torch.zeros(3, 5)}
    before = torch.get_num_threads()
    serial = SerialExecutor(world)
    assert serial.map(fill, [(1, 2.0)]) == [(os.getpid(), 1)]
    assert torch.get_num_threads() == before
    assert world["models"][1].tolist() == [2.0] * 5
    assert (serial.count, pool.count) == (1, 2)


def test_one_thread_restores_the_number_of_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with contextlib.suppress(KeyError), one_thread():
            assert torch.get_num_threads() == 1
            raise KeyError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def mapped_by(path):
    """Return the ids of the processes that map a file, deleted or not."""
    maps = {maps.parent.name: maps for maps in Path("/proc").glob("[0-9]*/maps")}
    process_ids = set()
    for pid, maps_file in maps.items():
        with contextlib.suppress(OSError):
            process_ids |= {int(pid)} if str(path) in maps_file.read_text() else set()
    return process_ids


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells what is mapped")
def test_workers_unmap_removed_shared_memory():
    with _shared_memory.allocate_shared(SPECS) as shared:
        results = PoolExecutor(2, shared, identity).map(slowly, [(0.1, 0)] * 4)
        assert results == [0] * 4
        assert mapped_by(shared.path) - {os.getpid()}
    end = time.monotonic() + 10
    while mapped_by(shared.path) and time.monotonic() < end:
        time.sleep(0.05)
    assert not mapped_by(shared.path)


class SlowContext:
    """A context that is slow to delete, like mapped memory, and records start and end."""

    def __init__(self, folder):
        self.folder = folder

    def __del__(self):
        (self.folder / f"begun-{os.getpid()}").touch()
        time.sleep(1.0)
        (self.folder / f"gone-{os.getpid()}").touch()


def slow(tensors, folder):
    return SlowContext(folder)


@pytest.mark.slow
def test_an_ending_worker_finishes_deleting_its_context(tmp_path):
    """A thread that is interrupted within PyTorch aborts its process: "terminate called"."""
    with _shared_memory.allocate_shared(SPECS) as shared:
        worker_pids = set(
            PoolExecutor(2, shared, functools.partial(slow, folder=tmp_path)).map(
                process_id, [()] * 4
            )
        )
    end = time.monotonic() + 30
    while len(list(tmp_path.glob("begun-*"))) < len(worker_pids) and time.monotonic() < end:
        time.sleep(0.01)
    current_pool().map_unordered(0, process_id, [], print)
    assert {int(path.name.removeprefix("gone-")) for path in tmp_path.glob("gone-*")} == worker_pids


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 50))
def test_balanced_shares_hold_every_agent_once(costs, count):
    shares = balance_load(range(len(costs)), costs, count)
    assert sorted(j for share in shares for j in share) == list(range(len(costs)))
    assert len(shares) == min(count, len(costs))
    loads = [sum(costs[j] for j in share) for share in shares]
    assert max(loads) <= sum(costs) / len(shares) + max(costs)


def test_shared_memory_is_zeroed_aligned_and_removed():
    with _shared_memory.allocate_shared(SPECS) as shared:
        first, second = shared.tensors(), shared.tensors()
        assert {name: (t.dtype, tuple(t.shape)) for name, t in first.items()} == SPECS
        assert all(not t.any() for t in first.values())
        assert all(t.data_ptr() % 64 == 0 for t in first.values() if len(t))
        first["models"][1, 2] = 7
        first["labels"][6] = 9
        assert second["models"][1, 2] == 7
        assert second["labels"].tolist() == [0] * 6 + [9]
        assert second["models"].sum() == 7
        path = shared.path
    assert not path.exists()
    assert first["models"][1, 2] == 7  # a mapping outlives its file


def test_removed_shared_memory_is_not_created_again(tmp_path):
    with _shared_memory.allocate_shared(SPECS, tmp_path) as shared:
        pass
    with pytest.raises(FileNotFoundError):  # a worker that starts while its run ends is too late
        shared.tensors()
    assert list(tmp_path.iterdir()) == []


def test_shared_memory_is_removed_after_an_error():
    with pytest.raises(KeyError), _shared_memory.allocate_shared(SPECS) as shared:
        raise KeyError
    assert not shared.path.exists()


def test_cleanup_removes_only_unused_files(tmp_path, monkeypatch):
    monkeypatch.setattr(_shared_memory, "_candidate_folders", lambda: [tmp_path])
    stale, used, other = (
        tmp_path / f"fedcb2o-{name}" for name in ("1-a.tensors", "2-b.tensors", "notes.txt")
    )
    for path in (stale, used, other):
        path.write_bytes(b"x")
    with used.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with _shared_memory.allocate_shared(SPECS) as shared:
            assert not stale.exists()
            assert used.exists()
            assert other.exists()
            _shared_memory.remove_stale()  # as another run does
            assert shared.path.exists()


RACE = """
import sys
from pathlib import Path

import torch

from fedcb2o.parallel import _shared_memory as shared_memory

for _ in range(100):
    with shared_memory.allocate_shared({"models": (torch.uint8, (9,))}, Path(sys.argv[1])):
        pass
"""


@pytest.mark.slow
def test_concurrent_starts_do_not_remove_new_files_of_each_other(tmp_path):
    command = [sys.executable, "-c", RACE, str(tmp_path)]
    runs = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    assert [run.communicate()[1] for run in runs] == ["", "", ""]
    assert list(tmp_path.iterdir()) == []


def test_files_that_always_disappear_are_an_error(tmp_path, monkeypatch):
    flock = fcntl.flock

    def lock_and_remove(file, operation):
        flock(file, operation)
        for path in tmp_path.iterdir():
            path.unlink()

    monkeypatch.setattr(fcntl, "flock", lock_and_remove)
    with pytest.raises(RunError, match="no room to share"):
        _shared_memory.allocate_shared(SPECS, tmp_path).__enter__()


def test_insufficient_space_is_an_error_and_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr(_shared_memory, "_candidate_folders", lambda: [tmp_path])
    message = r"no room to share 4194304\.00 GiB of models and data between processes: "
    with pytest.raises(RunError, match=message):
        _shared_memory.allocate_shared({"models": (torch.float32, (2**20, 2**30))}).__enter__()
    assert list(tmp_path.iterdir()) == []
