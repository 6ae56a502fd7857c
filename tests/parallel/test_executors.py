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
from fedcb2o.parallel._executors import (
    Executor,
    PoolExecutor,
    SerialExecutor,
    balance_load,
    one_thread,
)
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


def who(world):
    return os.getpid()


def same(tensors):
    return tensors


class TwoWordsError(Exception):
    """Goes to bytes, but not back: pickle gives it one of its two arguments."""

    def __init__(self, one, two):
        super().__init__(one)


def odd(world, kind):
    if kind == "error":
        raise TwoWordsError(1, 2)
    return threading.Lock()


def stuck(world, path):
    """A worker whose own child holds its pipe open, and which then dies."""
    if (child := os.fork()) == 0:
        time.sleep(60)
        os._exit(0)
    path.write_text(str(child))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def pool():
    with _shared_memory.allocate_shared(SPECS) as shared:
        yield PoolExecutor(2, shared, same)


def test_workers_change_the_tensors_in_place_with_one_thread_each(pool):
    found = pool.map(fill, [(0, 1.0), (1, 2.0), (2, 3.0)])
    assert pool.shared_tensors.tensors()["models"].tolist() == [[1.0] * 5, [2.0] * 5, [3.0] * 5]
    assert all(pid != os.getpid() for pid, _ in found)
    assert {threads for _, threads in found} == {1}


def test_results_come_in_the_order_of_the_tasks(pool):
    assert pool.map(slowly, [(0.2, "a"), (0.0, "b"), (0.1, "c"), (0.0, "d")]) == [
        "a",
        "b",
        "c",
        "d",
    ]
    assert pool.map(slowly, []) == []


@pytest.mark.parametrize(
    "given",
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
def test_any_tensor_goes_there_and_back(pool, given):
    """Users' functions may hold what NumPy has not."""
    (found,) = pool.map(slowly, [(0, given)])
    assert (found.dtype, found.layout, found.requires_grad) == (
        given.dtype,
        given.layout,
        given.requires_grad,
    )
    assert found.shape == given.shape
    assert found.to_dense().equal(given.to_dense())


def test_an_error_arrives_as_it_is_and_the_pool_works_on(pool):
    with pytest.raises(ConfigError, match=r"^the rule returned nonsense$"):
        pool.map(fail, [("config",)])
    assert pool.map(slowly, [(0.0, 1)]) == [1]


def test_a_dead_worker_is_a_run_error_and_the_next_map_has_new_ones(pool):
    with pytest.raises(
        RunError, match="a worker process was killed, perhaps because memory is short"
    ):
        pool.map(fail, [("die",), ("die",)])
    assert pool.map(slowly, [(0.0, 1)]) == [1]


def pids(pool):
    return set(pool.map(who, [()] * 8))


def gone(pid):
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.slow
def test_a_worker_killed_while_it_has_nothing_to_do_is_replaced(pool):
    pool.map(slowly, [(0.2, 0)] * 2)
    victim, other = current_pool().workers
    os.kill(victim.process.pid, signal.SIGKILL)
    assert victim.pipe.poll(10)  # all of its threads are gone, and not its first one alone
    assert pool.map(slowly, [(0.2, k) for k in range(4)]) == [0, 1, 2, 3]
    assert len(current_pool().workers) == 2
    assert other in current_pool().workers
    assert victim not in current_pool().workers


@pytest.mark.slow
@needs_proc
def test_a_worker_with_a_child_of_its_own_that_dies_is_missed_and_its_child_goes_with_it(
    pool, tmp_path
):
    with pytest.raises(RunError, match="a worker process was killed"):
        pool.map(stuck, [(tmp_path / "child",)])
    child, deadline = int((tmp_path / "child").read_text()), time.monotonic() + 3
    while not gone(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone(child)


@pytest.mark.parametrize("kind", ["error", pytest.param("result", marks=pytest.mark.slow)])
def test_what_cannot_come_back_is_told(pool, kind):
    expected = {
        "error": (RuntimeError, "^TwoWordsError: 1$"),
        "result": (RunError, "cannot be sent to another process"),
    }
    error, words = expected[kind]
    with pytest.raises(error, match=words):
        pool.map(odd, [(kind,)])


def test_what_cannot_be_sent_is_told(pool):
    deep = functools.reduce(lambda inner, _: [inner], range(100_000), [])
    for what in (threading.Lock(), deep):
        with pytest.raises(
            RunError, match=r"cannot be sent to another process .*: take --workers 1"
        ):
            pool.map(slowly, [(0, what)])


@pytest.mark.slow
def test_after_a_second_ctrl_c_that_stops_the_end_of_workers_others_come(pool, monkeypatch):
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
def test_a_worker_that_prints_is_not_stopped_by_a_terminal_that_stops_the_background():
    ours, theirs = os.openpty()
    try:
        done = subprocess.Popen(
            [sys.executable, "-c", TERMINAL],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        try:
            assert done.wait(60) == 0
        finally:
            done.kill()
        assert b"said" in os.read(ours, 10_000)
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.slow
def test_workers_stay_for_the_next_run_and_with_another_path_others_come(
    pool, monkeypatch, tmp_path
):
    pool.map(slowly, [(0.1, 0)] * 2)
    before = {member.process.pid for member in current_pool().workers}
    assert pids(pool) <= before
    monkeypatch.syspath_prepend(tmp_path)
    assert not pids(pool) & before


@pytest.mark.slow
def test_a_module_that_is_loaded_again_is_the_new_one_in_workers_too(tmp_path, monkeypatch):
    file = tmp_path / "own_part_loaded_again.py"
    file.write_text("def value(world):\n    return 'old'\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module(file.stem)
    with _shared_memory.allocate_shared(SPECS) as shared:
        assert PoolExecutor(1, shared, same).map(own.value, [()]) == ["old"]
        before = pids(PoolExecutor(1, shared, same))
        assert PoolExecutor(1, shared, same).map(own.value, [()]) == ["old"]
        assert pids(PoolExecutor(1, shared, same)) == before
        file.write_text("def value(world):\n    return 'another'\n")
        importlib.reload(own)
        assert PoolExecutor(1, shared, same).map(own.value, [()]) == ["another"]


@pytest.mark.slow
def test_a_fork_has_workers_of_its_own_and_ends_none_of_ours(pool):
    before = pids(pool)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        own = pids(pool)
        current_pool().terminate()
        os.write(write, bytes([not own & before]))
        os._exit(0)
    os.close(write)
    assert os.read(read, 1) == b"\1"
    os.waitpid(child, 0)
    os.close(read)
    assert pids(pool) <= {member.process.pid for member in current_pool().workers}
    assert before & {member.process.pid for member in current_pool().workers}


def test_one_process_gives_the_same_and_both_are_workers(pool):
    world = {"models": torch.zeros(3, 5)}
    before = torch.get_num_threads()
    one = SerialExecutor(world)
    assert one.map(fill, [(1, 2.0)]) == [(os.getpid(), 1)]
    assert torch.get_num_threads() == before
    assert world["models"][1].tolist() == [2.0] * 5
    assert isinstance(one, Executor)
    assert isinstance(pool, Executor)
    assert (one.count, pool.count) == (1, 2)


def test_one_thread_puts_back_what_was_there():
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
    """The processes that map a file, its name gone or not."""
    maps = {maps.parent.name: maps for maps in Path("/proc").glob("[0-9]*/maps")}
    found = set()
    for pid, each in maps.items():
        with contextlib.suppress(OSError):
            found |= {int(pid)} if str(path) in each.read_text() else set()
    return found


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells what is mapped")
def test_workers_let_go_of_an_arena_that_is_gone():
    with _shared_memory.allocate_shared(SPECS) as shared:
        found = PoolExecutor(2, shared, same).map(slowly, [(0.1, 0)] * 4)
        assert found == [0] * 4
        assert mapped_by(shared.path) - {os.getpid()}
    end = time.monotonic() + 10
    while mapped_by(shared.path) and time.monotonic() < end:
        time.sleep(0.05)
    assert not mapped_by(shared.path)


class Slow:
    """A context that is slow to delete, like mapped memory, and records start and end."""

    def __init__(self, folder):
        self.folder = folder

    def __del__(self):
        (self.folder / f"begun-{os.getpid()}").touch()
        time.sleep(1.0)
        (self.folder / f"gone-{os.getpid()}").touch()


def slow(tensors, folder):
    return Slow(folder)


@pytest.mark.slow
def test_a_worker_that_ends_first_gives_back_what_it_is_giving_back(tmp_path):
    """A thread that is cut short within PyTorch takes its process down: "terminate called"."""
    with _shared_memory.allocate_shared(SPECS) as shared:
        pids = set(
            PoolExecutor(2, shared, functools.partial(slow, folder=tmp_path)).map(who, [()] * 4)
        )
    end = time.monotonic() + 30
    while len(list(tmp_path.glob("begun-*"))) < len(pids) and time.monotonic() < end:
        time.sleep(0.01)
    current_pool().map_unordered(0, who, [], print)
    assert {int(path.name.removeprefix("gone-")) for path in tmp_path.glob("gone-*")} == pids


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 50))
def test_blocks_hold_every_agent_once_in_fair_shares(costs, count):
    shares = balance_load(range(len(costs)), costs, count)
    assert sorted(j for share in shares for j in share) == list(range(len(costs)))
    assert len(shares) == min(count, len(costs))
    loads = [sum(costs[j] for j in share) for share in shares]
    assert max(loads) <= sum(costs) / len(shares) + max(costs)


def test_an_arena_holds_zeros_shared_and_aligned_and_is_removed():
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


def test_an_arena_that_is_gone_is_not_made_again(tmp_path):
    with _shared_memory.allocate_shared(SPECS, tmp_path) as shared:
        pass
    with pytest.raises(
        FileNotFoundError
    ):  # a worker that starts while its run ends is late, and is heard by nobody
        shared.tensors()
    assert list(tmp_path.iterdir()) == []


def test_an_arena_is_removed_after_an_error():
    with pytest.raises(KeyError), _shared_memory.allocate_shared(SPECS) as shared:
        raise KeyError
    assert not shared.path.exists()


def test_sweeping_takes_what_was_left_and_nothing_that_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(_shared_memory, "_candidate_folders", lambda: [tmp_path])
    left, used, other = (
        tmp_path / f"fedcb2o-{name}" for name in ("1-a.tensors", "2-b.tensors", "notes.txt")
    )
    for path in (left, used, other):
        path.write_bytes(b"x")
    with used.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with _shared_memory.allocate_shared(SPECS) as shared:
            assert not left.exists()
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
def test_runs_that_start_at_once_in_one_folder_do_not_sweep_what_another_is_making(tmp_path):
    command = [sys.executable, "-c", RACE, str(tmp_path)]
    runs = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    assert [run.communicate()[1] for run in runs] == ["", "", ""]
    assert list(tmp_path.iterdir()) == []


def test_where_whatever_is_made_goes_again_that_is_an_error_in_the_end(tmp_path, monkeypatch):
    flock = fcntl.flock

    def swept(file, how):
        flock(file, how)
        for path in tmp_path.iterdir():
            path.unlink()

    monkeypatch.setattr(fcntl, "flock", swept)
    with pytest.raises(RunError, match="no room to share"):
        _shared_memory.allocate_shared(SPECS, tmp_path).__enter__()


def test_no_room_is_one_clear_error_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(_shared_memory, "_candidate_folders", lambda: [tmp_path])
    with pytest.raises(
        RunError, match=r"no room to share 4194304\.00 GiB of models and data between processes: "
    ):
        _shared_memory.allocate_shared({"models": (torch.float32, (2**20, 2**30))}).__enter__()
    assert list(tmp_path.iterdir()) == []
