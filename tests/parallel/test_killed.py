"""Killed processes: no process survives, and a resumed run has the undisturbed bits."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
from tests.processes import assert_gone, needs_proc, start
from tests.tiny import bits, run_cli, write

from fedcb2o.parallel import _shared_memory
from fedcb2o.rng import stream

# A user module that kills its own or the other process at a point set in the environment.
SABOTEUR = '''
import atexit
import os
import signal
import time
from pathlib import Path

from torch import nn

from fedcb2o.federated.criteria import average_loss
from fedcb2o.records import _files as files
from fedcb2o.simulation import checkpoint, local_engine

PLACE, VICTIM, NUMBER = os.environ.get("SABOTAGE", "nowhere parent 0").split()
calls = 0


def strike():
    """Kill at the NUMBER-th call in a process."""
    global calls
    calls += 1
    if calls != int(NUMBER):
        return
    pid = os.getpid()
    in_worker = "--workers" not in Path("/proc/self/cmdline").read_text()
    if VICTIM == "parent" and in_worker:
        pid = os.getppid()
    elif VICTIM == "worker" and not in_worker:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        pid = int(children[0])
    os.kill(pid, signal.SIGKILL)


class Network(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.first, self.last = nn.Linear(64, 8), nn.Linear(8, classes)

    def forward(self, x):
        if PLACE == "training" and self.training:
            strike()
        if PLACE == "slowly":
            time.sleep(0.005)
        return self.last(self.first(x.flatten(1)).tanh())


def network(shape, classes):
    return Network(classes)


def criterion(judged):
    if PLACE == "judging":
        strike()
    return average_loss(judged)


if PLACE == "leaving" and "--workers" not in Path("/proc/self/cmdline").read_text():
    atexit.register(time.sleep, 1000)

if PLACE == "mixing":
    whole = local_engine.mix_

    def mix_(pool, mixture, start, stop, *, through_copy=False):
        middle = (start + stop) // 2
        whole(pool, mixture, start, middle)
        strike()
        whole(pool, mixture, middle, stop)

    local_engine.mix_ = mix_

if PLACE == "writing":
    whole_file = checkpoint._write

    def save_half(path, metadata, tensors):
        whole_file(path, metadata, tensors)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        strike()
        path.write_bytes(content)

    checkpoint._write = save_half

if PLACE == "renaming":
    fsync = files.fsync

    def fsync_then(path):
        fsync(path)
        if path.name == "checkpoint.safetensors.tmp":
            strike()

    files.fsync = fsync_then
'''

ROUNDS = 6


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return an experiment, and the bits of an undisturbed run of it."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "saboteur.py").write_text(SABOTEUR)
    path = write(
        folder / "tiny.toml",
        rounds=ROUNDS,
        checkpoint_every=2,
        agents={"participation": 0.8},
        model={"name": "saboteur:network"},
        algorithm={"criterion": "saboteur:criterion"},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        assert run_cli("run", path, "--out", folder / "undisturbed", "--workers", 1).status == 0
        yield path, bits(folder / "undisturbed")


def start_run(path, out, sabotage="nowhere parent 0"):
    """Start `fedcb2o run` with two workers."""
    return start(
        "run", path, "--out", out, "--workers", 2, "--resume", cwd=path.parent, SABOTAGE=sabotage
    )


def left_by(pid: int) -> set[Path]:
    """Return the shared files of a process that still exist."""
    return {
        path
        for folder in _shared_memory._candidate_folders()
        for path in folder.iterdir()
        if f"-{pid}-" in path.name
    }


PLACES = {"training": 40, "judging": 8, "mixing": 3, "writing": 2, "renaming": 2}
"""Points to kill at, and the least number of passes of a process before the last round."""

QUICK = {("mixing", "worker")}

MOMENTS = [
    pytest.param(
        place,
        victim,
        id=f"{place}-{victim}",
        marks=() if (place, victim) in QUICK else pytest.mark.slow,
    )
    for place in PLACES
    for victim in ("parent", "worker")
]


@needs_proc
@pytest.mark.parametrize(("place", "victim"), MOMENTS)
def test_a_kill_in_the_middle_changes_no_bit(undisturbed, tmp_path, place, victim):
    path, expected = undisturbed
    number = int(stream(0, "killed", place, victim).integers(1, PLACES[place] + 1))
    out = tmp_path / "run"
    process = start_run(path, out, f"{place} {victim} {number}")
    _, errors = process.communicate(timeout=100)
    if victim == "parent":
        assert process.returncode == -signal.SIGKILL, errors
    elif process.returncode == 0:  # the idle worker was replaced before its death was noticed
        assert place in ("writing", "renaming"), errors
        assert bits(out) == expected
        return
    else:
        assert process.returncode == 2, errors
        assert errors.splitlines()[-1].startswith("Error: a worker process was killed"), errors
        assert "Traceback" not in errors
    assert_gone(process.pid)
    assert not (out / "seed-1000" / "summary.json").exists()
    assert_resumes_to(expected, path, out)
    assert not left_by(process.pid)


def assert_resumes_to(expected: dict[str, bytes], path: Path, out: Path) -> None:
    """Resume the run in `out` with one worker, and compare its bits."""
    done = run_cli("run", path, "--out", out, "--workers", 1, "--resume")
    assert (done.status, "Error" in done.err) == (0, False), done.err
    assert bits(out) == expected
    assert not list(out.rglob("*.tmp"))


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_kills_at_any_time_change_no_bit(undisturbed, tmp_path, seed):
    path, expected = undisturbed
    draw, out = stream(seed, "any time"), tmp_path / "run"
    for _ in range(3):
        process = start_run(path, out)
        time.sleep(draw.uniform(1.5, 6))
        process.kill()
        process.communicate()
        assert_gone(process.pid)
    assert_resumes_to(expected, path, out)


WAYS = {
    "group-SIGINT": (130, "Interrupted"),
    "group-SIGTERM": (143, "Terminated"),
    "parent-SIGTERM": (143, "Terminated"),
}
"""Status and message. Ctrl-C goes to a process group, `kill` to one process."""


def wait_for_rounds(out: Path) -> None:
    """Wait until a run has recorded some rounds."""
    pairs = out / "seed-1000" / "pairs.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if pairs.exists() and pairs.read_bytes().count(b"\n") >= 3:
            return
        time.sleep(0.01)


@needs_proc
@pytest.mark.slow
def test_a_run_that_starts_with_sigint_ignored_ignores_it(undisturbed, tmp_path):
    path, expected = undisturbed
    out = tmp_path / "run"
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a background job of a script
    try:
        process = start_run(path, out, "slowly nobody 0")
    finally:
        signal.signal(signal.SIGINT, previous)
    wait_for_rounds(out)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert bits(out) == expected


@needs_proc
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if "SIGINT" in way else pytest.mark.slow) for way in WAYS]
)
def test_a_signal_ends_a_run_with_one_line_and_leaves_no_files(undisturbed, tmp_path, way):
    path, expected = undisturbed
    out = tmp_path / "run"
    process = start_run(path, out, "slowly nobody 0")
    wait_for_rounds(out)
    victim, name = way.split("-")
    (os.killpg if victim == "group" else os.kill)(process.pid, signal.Signals[name])
    output, errors = process.communicate(timeout=60)
    status, word = WAYS[way]
    assert process.returncode == status, errors
    messages = [line for line in errors.splitlines() if not line.startswith("tiny seed")]
    assert messages == [
        f"{word}. What is written stays; a run goes on from its last checkpoint with --resume."
    ]
    assert output == ""
    assert_gone(process.pid)
    assert left_by(process.pid) == set()
    assert_resumes_to(expected, path, out)


@needs_proc
@pytest.mark.parametrize("after", [0.0, 2.0, 4.0])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.slow
def test_a_group_killed_while_workers_start_leaves_no_files(undisturbed, tmp_path, number, after):
    path, _ = undisturbed
    out = tmp_path / "run"
    process = start_run(path, out)
    deadline = time.monotonic() + 60
    while not (out / "seed-1000").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(after)
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    assert "resource_tracker" not in errors
    assert_gone(process.pid)
    if number is not signal.SIGKILL:
        assert left_by(process.pid) == set()
    _shared_memory.remove_stale()  # as the next start does
    assert left_by(process.pid) == set()


@needs_proc
@pytest.mark.slow
def test_a_worker_that_does_not_exit_does_not_delay_the_run(undisturbed, tmp_path):
    path, expected = undisturbed
    process = start_run(path, tmp_path / "run", "leaving nobody 0")
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert_gone(process.pid)
    assert left_by(process.pid) == set()
    assert bits(tmp_path / "run") == expected


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("after", [0.0, 0.05, 0.1, 0.15, 0.2])
def test_a_worker_killed_after_the_end_does_not_delay_the_run(undisturbed, tmp_path, after):
    path, expected = undisturbed
    process = start_run(path, tmp_path / "run")
    children: list[str] = []
    for line in process.stderr:
        children = (
            children or Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        )
        if line.startswith("Done."):
            break
    time.sleep(after)
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(children[0]), signal.SIGKILL)
    process.communicate(timeout=20)
    assert process.returncode == 0
    assert_gone(process.pid)
    assert left_by(process.pid) == set()
    assert bits(tmp_path / "run") == expected


@needs_proc
@pytest.mark.slow
def test_the_next_start_removes_files_of_a_killed_run(undisturbed, tmp_path):
    path, expected = undisturbed
    stale = (
        _shared_memory._candidate_folders()[0]
        / f"{_shared_memory.PREFIX}0-left{_shared_memory.SUFFIX}"
    )
    stale.write_bytes(bytes(64))
    process = start_run(path, tmp_path / "run")
    process.communicate(timeout=100)
    assert process.returncode == 0
    assert not stale.exists()
    assert not left_by(process.pid)
    assert bits(tmp_path / "run") == expected
