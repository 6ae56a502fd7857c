"""A cluster of three nodes whose processes are killed: never a wrong bit, no
orphan, and it goes on."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import tomli_w
from tests.experiments.test_cluster import actors_now, spread, undisturbed, whole  # noqa: F401 (a fixture)
from tests.processes import needs_proc

from fedcb2o.experiments import run

pytest.importorskip("ray")

import ray
from ray.cluster_utils import Cluster

pytestmark = [needs_proc, pytest.mark.slow]

COMMAND = [sys.executable, "-c", "from fedcb2o.cli import main; main()", "run"]
IN_THE_BACKGROUND = [
    "sh",
    "-c",
    'trap "" INT; exec "$@"',
    "sh",
]  # as a shell has it: deaf to Ctrl-C
STORE = 100 * 2**20
ROUNDS = 200


@pytest.fixture
def three() -> Iterator[Cluster]:
    """Three nodes with two processors each."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False},
    )
    made.others = [made.add_node(num_cpus=2, object_store_memory=STORE) for _ in range(2)]
    yield made
    ray.shutdown()
    for node in (*made.others, made.head_node):  # the cluster's own way needs its head
        node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)


def of_ray(pid: int) -> list[str]:
    """The living processes of the Ray that a command began: they have its session's files open."""
    found, session = [], re.compile(rf"/session_[\d_-]+_{pid}/")
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            told = (folder / "cmdline").read_text().replace("\0", " ")
            if any(
                session.search(each)
                for each in (told, *(str(file.readlink()) for file in folder.glob("fd/*")))
            ):
                found.append(told)
    return found


def until(there, seconds: float = 60.0) -> bool:
    """Whether something comes true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if there():
            return True
        time.sleep(0.1)
    return False


def test_a_node_is_killed_and_another_joins(three, undisturbed, tmp_path, capfd, caplog):  # noqa: F811
    def kill(experiment, seed, line):
        if line["round"] == 2 and three.others:
            before = actors_now()
            three.remove_node(three.others.pop(), allow_graceful=False)
            assert until(lambda: not all(Path(f"/proc/{pid}").exists() for pid in before))

    run(spread(3), out=tmp_path / "run", cluster=three.address, blocks=5, watch=kill)
    told = capfd.readouterr().err
    assert "continues from the last checkpoint" in caplog.text
    assert "3 blocks on 2 nodes, not 5: there are 3 processors\n" in told
    three.add_node(num_cpus=2, object_store_memory=STORE)
    run(spread(4), out=tmp_path / "run", cluster=three.address, blocks=5, resume=True)
    assert "not 5" not in capfd.readouterr().err
    assert whole(tmp_path / "run") == undisturbed


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The files of `ROUNDS` rounds on one machine, which nobody disturbed."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    run(spread(ROUNDS), out=folder, workers=1)
    return whole(folder)


def begun(folder: Path, address: str, before: Sequence[str] = ()) -> subprocess.Popen[str]:
    """A command within a round, with a checkpoint; `before` is the program that runs it."""
    path = folder.with_suffix(".toml")
    path.write_text(tomli_w.dumps(spread(ROUNDS)))
    process = subprocess.Popen(
        [*before, *COMMAND, str(path), "--out", str(folder), "--cluster", address, "--blocks", "3"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert until(lambda: (folder / "seed-1000" / "checkpoint.safetensors").exists(), 120)
    return process


def last_words(process: subprocess.Popen[str]) -> str:
    """The last line of a command, which printed only its progress and its retries."""
    *lines, last = process.communicate(timeout=200)[1].splitlines()
    known = (
        "Joining the cluster ",
        "Starting Ray ",
        "tiny seed 1000: ",
        "Note: a part of the cluster is lost ",
    )
    assert all(line.startswith(known) for line in lines), lines
    return last


def gone_on(folder: Path) -> dict[str, bytes]:
    """The files of a run that went on by --resume on one machine."""
    run(spread(ROUNDS), out=folder, workers=1, resume=True)
    return whole(folder)


def test_an_actor_is_killed_within_a_round(three, alone, tmp_path):
    process = begun(tmp_path / "run", three.address)
    os.kill(actors_now()[-1], signal.SIGKILL)
    assert last_words(process).startswith("Done.")
    assert process.returncode == 0
    assert until(lambda: not actors_now())
    assert whole(tmp_path / "run") == alone


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_the_command_is_stopped_within_a_round(three, alone, tmp_path, number):
    process = begun(tmp_path / "run", three.address)
    process.send_signal(number)
    told = last_words(process)
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number
        assert "a run goes on from its last checkpoint with --resume" in told
    assert until(lambda: not actors_now())
    assert gone_on(tmp_path / "run") == alone


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("gcs_server", "the head of the cluster at "),
        ("raylet", "this machine's node of the cluster"),
    ],
)
def test_the_head_is_killed(three, alone, tmp_path, kind, told):
    process = begun(tmp_path / "run", three.address, IN_THE_BACKGROUND)
    three.head_node.all_processes[kind][0].process.kill()
    last = last_words(process)
    assert last.startswith(f"Error: {told}")
    assert last.endswith(" is gone: start the cluster again, and continue with --resume")
    assert process.returncode == 2
    assert gone_on(tmp_path / "run") == alone


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_run_with_a_ray_of_its_own_is_stopped(tmp_path, number):
    process = begun(tmp_path / "run", "local")
    assert of_ray(process.pid)
    process.send_signal(number)
    process.wait(60)
    process.stderr.close()
    assert until(
        lambda: not of_ray(process.pid), 150
    )  # agents of Ray look after their parent once a minute
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number
