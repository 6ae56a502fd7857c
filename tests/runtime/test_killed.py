"""Processes that are killed in the middle of things: nobody lives on, and a resume ends in the undisturbed bits."""

import os
import signal
import time
from pathlib import Path

import pytest
from tests.processes import assert_gone, needs_proc, start
from tests.tiny import bits, here, write

from fedcb2o.runtime import arena
from fedcb2o.streams import stream

# A user's module that kills its own process, or the other one, at a moment that the environment names.
SABOTEUR = '''
import os
import signal
import time
from pathlib import Path

from torch import nn

from fedcb2o.federated.criteria import average_loss
from fedcb2o.records import files
from fedcb2o.runtime import checkpoint, shared

PLACE, VICTIM, NUMBER = os.environ.get("SABOTAGE", "nowhere parent 0").split()
calls = 0


def strike():
    """Kill at the NUMBER-th call in a process."""
    global calls
    calls += 1
    if calls != int(NUMBER):
        return
    pid = os.getpid()
    in_worker = "fedcb2o.runtime" in Path("/proc/self/cmdline").read_text()
    if VICTIM == "parent" and in_worker:
        pid = os.getppid()
    elif VICTIM == "worker" and not in_worker:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        pid = int(next(c for c in children if "fedcb2o.runtime" in Path(f"/proc/{c}/cmdline").read_text()))
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


if PLACE == "mixing":
    whole = shared.mix_

    def mix_(pool, mixture, start, stop, *, copied=False):
        middle = (start + stop) // 2
        whole(pool, mixture, start, middle)
        strike()
        whole(pool, mixture, middle, stop)

    shared.mix_ = mix_

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
    """The experiment, and the bits of a run of it that nobody disturbed."""
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
        assert here("run", path, "--out", folder / "undisturbed", "--workers", 1).status == 0
        yield path, bits(folder / "undisturbed")


def start_run(path, out, sabotage="nowhere parent 0"):
    """`fedcb2o run` with two workers."""
    return start("run", path, "--out", out, "--workers", 2, "--resume", cwd=path.parent, SABOTAGE=sabotage)


def arenas() -> set[Path]:
    return {path for folder in arena._folders() for path in folder.glob(f"{arena.PREFIX}*{arena.SUFFIX}")}


def arenas_of(pid: int) -> set[Path]:
    return {path for path in arenas() if path.name.startswith(f"{arena.PREFIX}{pid}-")}


PLACES = {"training": 40, "judging": 8, "mixing": 3, "writing": 2, "renaming": 2}
"""A moment inside which to kill, and how often one process passes it at least, before the last round ends."""

QUICK = {("training", "parent"), ("mixing", "worker"), ("writing", "parent")}

MOMENTS = [
    pytest.param(place, victim, id=f"{place}-{victim}", marks=() if (place, victim) in QUICK else pytest.mark.slow)
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
    elif process.returncode == 0:  # it had nothing to do, and others took its place before it was missed
        assert place in ("writing", "renaming"), errors
        assert bits(out) == expected
        return
    else:
        assert process.returncode == 2, errors
        assert errors.splitlines()[-1].startswith("Error: a worker process was killed"), errors
        assert "Traceback" not in errors
    assert_gone(process.pid)
    assert not (out / "seed-1000" / "summary.json").exists()
    goes_on_to(expected, path, out)
    assert not arenas_of(process.pid)


def goes_on_to(expected: dict[str, bytes], path: Path, out: Path) -> None:
    """The run that was stopped in `out` has the expected bits when it is resumed, here with one worker."""
    done = here("run", path, "--out", out, "--workers", 1, "--resume")
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
    goes_on_to(expected, path, out)


@needs_proc
def test_an_interrupt_is_one_line_and_a_worker_does_not_answer_it(undisturbed, tmp_path):
    path, expected = undisturbed
    out = tmp_path / "run"
    process = start_run(path, out, "slowly nobody 0")
    pairs, deadline = out / "seed-1000" / "pairs.jsonl", time.monotonic() + 60
    while not (pairs.exists() and pairs.read_bytes().count(b"\n") >= 3) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C on a terminal is: everybody gets it
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    said = [line for line in errors.splitlines() if not line.startswith("tiny seed")]
    assert said == ["Interrupted. What is written stays; a run goes on from its last checkpoint with --resume."]
    assert output == ""
    assert_gone(process.pid)
    assert not arenas_of(process.pid)
    goes_on_to(expected, path, out)


@needs_proc
@pytest.mark.slow
def test_the_next_start_sweeps_what_a_killed_one_left(undisturbed, tmp_path):
    path, expected = undisturbed
    left = arena._folders()[0] / f"{arena.PREFIX}0-left{arena.SUFFIX}"
    left.write_bytes(bytes(64))
    process = start_run(path, tmp_path / "run")
    process.communicate(timeout=100)
    assert process.returncode == 0
    assert not left.exists()
    assert not arenas_of(process.pid)
    assert bits(tmp_path / "run") == expected
