"""The judgement of `benchmarks/crash.py`: it finds wrong bits, files that were left, processes that live on, hangs."""

import dataclasses
import importlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.processes import needs_proc
from tests.tiny import tiny

from fedcb2o.experiments import run

SLEEPER = "import time; time.sleep(60)"


@pytest.fixture(scope="module")
def crash():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        yield importlib.import_module("crash")


@pytest.fixture(scope="module")
def undisturbed(crash, tmp_path_factory):
    """A run that nobody disturbed, and what the driver keeps of it."""
    folder = tmp_path_factory.mktemp("crash") / "undisturbed"
    run(tiny(rounds=2), out=folder, workers=1)
    return folder, crash.Undisturbed(crash.digests(folder), crash.files(folder), 1.0, 0.1, 0.1)


@pytest.fixture
def copy(undisturbed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed[0], folder)
    folder.with_suffix(".temp").mkdir()
    return folder


def changed_byte(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


WRONG = {
    "one bit of a model": ("checkpoint.safetensors", None, "checkpoint models (row 0)"),
    "a line of metrics": ("metrics.jsonl", b'"train_loss":', "metrics.jsonl (train_loss of round 1)"),
    "a line of pairs": ("pairs.jsonl", b'"asked":', "pairs.jsonl (asked of round 1)"),
    "a result": ("summary.json", b'"accuracy":', "summary.json (accuracy)"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_bit_is_found(crash, undisturbed, copy, what):
    file, key, told = WRONG[what]
    path = copy / "seed-1000" / file
    content = path.read_bytes()
    if key is None:  # the first number of the first model
        place = 8 + int.from_bytes(content[:8], "little")
    else:
        place = re.compile(rb"[^0-9]*[0-9]").match(content, content.index(key)).end() - 1
    assert crash.wrong_bits(copy, undisturbed[1]) is None
    changed_byte(path, place)
    assert crash.wrong_bits(copy, undisturbed[1]) == f"seed-1000 {told}"


@pytest.mark.parametrize("file", ["checkpoint.safetensors", "metrics.jsonl", "summary.json"])
def test_a_missing_or_damaged_file_is_found(crash, undisturbed, copy, file):
    path = copy / "seed-1000" / file
    path.write_bytes(path.read_bytes()[:-20])
    assert crash.wrong_bits(copy, undisturbed[1])
    path.unlink()
    assert "FileNotFoundError" in crash.wrong_bits(copy, undisturbed[1])
    assert crash.left_on_disk(copy, undisturbed[1]) == [f"seed-1000/{file}"]


def test_timing_may_differ(crash, undisturbed, copy):
    (copy / "seed-1000" / "timing.jsonl").write_text("")
    (copy / "seed-1000" / "environment.json").write_text("{}")
    assert crash.wrong_bits(copy, undisturbed[1]) is None


def test_files_that_were_left_are_found(crash, undisturbed, copy, tmp_path):
    assert crash.left_on_disk(copy, undisturbed[1]) == []
    for name in ("seed-1000/checkpoint.safetensors.tmp", "seed-1000/fedcb2o-12-ab.arena"):
        (copy / name).write_text("")
    (copy.with_suffix(".temp") / "joblib").mkdir()
    (copy.with_suffix(".temp") / "joblib" / "left").write_text("")
    left = ["seed-1000/checkpoint.safetensors.tmp", "seed-1000/fedcb2o-12-ab.arena", "joblib/left"]
    assert crash.left_on_disk(copy, undisturbed[1]) == left
    names = ["fedcb2o-123-ab12.arena", "sem.loky-123-x", "sem.loky-1234-x", "torch_77_123_0"]
    for name in names:
        (tmp_path / name).write_text("")
    found = crash.left_shared({123, 5}, tmp_path)
    assert sorted(path.name for path in found) == [name for name in names if "1234" not in name]


def started(crash, monkeypatch, tmp_path, code, limit=20.0, setting="label flip"):
    """A command that runs some code in place of fedcb2o."""
    monkeypatch.setattr(crash, "GRACE", 0.3)
    instead = dataclasses.replace(crash.settings()[setting], program=code)
    return crash.Command(instead, tmp_path / "run", f"{os.getpid()}: {tmp_path.name}.", limit)


@needs_proc
@pytest.mark.parametrize(
    ("code", "killed", "faults"),
    [
        ("print('Done.')", None, []),
        ("import sys; print('Error: a worker process was killed'); sys.exit(2)", "worker", []),
        ("import sys; print('Error: a worker process was killed'); sys.exit(2)", None, ["failed"]),
        ("import sys; print('Error: the checkpoint is damaged'); sys.exit(2)", "worker", ["failed"]),
        ("raise ValueError", "worker", ["failed"]),
        ("print('Traceback (most recent call last):')", None, ["failed"]),
        ("print('Done.')", "parent", []),  # it had ended before
        (SLEEPER, None, ["hangs"]),
        (
            f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', '{SLEEPER}'], start_new_session=True)",
            None,
            ["alive"],
        ),
    ],
)
def test_a_bad_end_a_hang_and_a_process_that_lives_on_are_found(crash, monkeypatch, tmp_path, code, killed, faults):
    command, tally = (
        started(crash, monkeypatch, tmp_path, code, limit=1.0 if faults == ["hangs"] else 20.0),
        crash.Tally(),
    )
    crash.end(command, tally, killed)
    assert tally.counts == Counter(faults), tally.notes
    assert crash.survivors(command.mark, 5.0) == []  # what was killed may take a moment to go


@needs_proc
@pytest.mark.parametrize("who", ["parent", "group", "worker"])
def test_who_is_to_be_killed_is_and_nobody_else(crash, monkeypatch, tmp_path, who):
    other = subprocess.Popen([sys.executable, "-c", SLEEPER])
    command = started(
        crash, monkeypatch, tmp_path,
        "import subprocess, sys; child = [sys.executable, '-c', 'import time; time.sleep(20)', 'work_' 'for'];"
        "sys.exit(subprocess.Popen(child).wait() and 0)",
    )  # fmt: skip
    # The child is a worker by its command line, which it has once it is no longer a copy of its parent, who is none.
    while not any("work_for" in line for line in crash.living(command.mark).values()):
        time.sleep(0.01)
    try:
        assert command.kill(who) == who
        assert command.process.wait(10) == (0 if who == "worker" else -9)
        # What was killed may take a moment to go; a child that was not lives for 20 s.
        assert len(crash.survivors(command.mark, 0.0 if who == "parent" else 5.0)) == (1 if who == "parent" else 0)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@needs_proc
@pytest.mark.slow
def test_a_whole_little_campaign_finds_nothing(crash, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["crash.py", "--kills", "2", "--only", "one process"])
    assert crash.main() == 0
    assert ": 2 kills, " in capsys.readouterr().out.splitlines()[-1]
