"""Killed processes on a cluster of three nodes: runs continue with the same bits."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
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
STORE = 100 * 2**20
ROUNDS = 200


@pytest.fixture
def three() -> Iterator[Cluster]:
    """Start a cluster: a head with one processor, and two nodes with two processors each."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False},
    )
    cluster.others = [cluster.add_node(num_cpus=2, object_store_memory=STORE) for _ in range(2)]
    yield cluster
    ray.shutdown()
    for node in (*cluster.others, cluster.head_node):  # the shutdown of the cluster needs its head
        node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)


def ray_commands(pid: int) -> list[str]:
    """List the living processes of the Ray session that a command started.

    They have files of the session open, or name it in their command line.
    """
    commands, session = [], re.compile(rf"/session_[\d_-]+_{pid}/")
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_text().replace("\0", " ")
            if any(
                session.search(path)
                for path in (command, *(str(file.readlink()) for file in folder.glob("fd/*")))
            ):
                commands.append(command)
    return commands


def until(condition, seconds: float = 60.0) -> bool:
    """Wait until a condition is true; return False after a timeout."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return False


def test_a_run_continues_after_a_node_is_replaced(three, undisturbed, tmp_path, capfd, caplog):  # noqa: F811
    def kill(experiment, seed, line):
        if line["round"] == 2 and three.others:
            before = actors_now()
            three.remove_node(three.others.pop(), allow_graceful=False)
            assert until(lambda: not all(Path(f"/proc/{pid}").exists() for pid in before))

    run(spread(3), out=tmp_path / "run", cluster=three.address, blocks=5, watch=kill)
    errors = capfd.readouterr().err
    assert "continues from the last checkpoint" in caplog.text
    assert "3 blocks on 2 nodes, not 5: there are 3 processors\n" in errors
    three.add_node(num_cpus=2, object_store_memory=STORE)
    run(spread(4), out=tmp_path / "run", cluster=three.address, blocks=5, resume=True)
    assert "not 5" not in capfd.readouterr().err
    assert whole(tmp_path / "run") == undisturbed


@pytest.fixture(scope="module")
def reference_files(tmp_path_factory):
    """Return the files of an uninterrupted run of `ROUNDS` rounds on one machine."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    run(spread(ROUNDS), out=folder, workers=1)
    return whole(folder)


def start_run(folder: Path, address: str) -> subprocess.Popen[str]:
    """Start a command and wait for its first checkpoint."""
    path = folder.with_suffix(".toml")
    path.write_text(tomli_w.dumps(spread(ROUNDS)))
    process = subprocess.Popen(
        [*COMMAND, str(path), "--out", str(folder), "--cluster", address, "--blocks", "3"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert until(lambda: (folder / "seed-1000" / "checkpoint.safetensors").exists(), 120)
    return process


def last_line(process: subprocess.Popen[str]) -> str:
    """Return the last line of a command; the others are only progress and retries."""
    *lines, last = process.communicate(timeout=200)[1].splitlines()
    known = (
        "Joining the cluster ",
        "Starting Ray ",
        "tiny seed 1000: ",
        "Note: a part of the cluster is lost ",
    )
    assert all(line.startswith(known) for line in lines), lines
    return last


def resume_locally(folder: Path) -> dict[str, bytes]:
    """Resume a run on one machine and return its files."""
    run(spread(ROUNDS), out=folder, workers=1, resume=True)
    return whole(folder)


def test_a_run_continues_after_an_actor_is_killed_within_a_round(three, reference_files, tmp_path):
    process = start_run(tmp_path / "run", three.address)
    os.kill(actors_now()[-1], signal.SIGKILL)
    assert last_line(process).startswith("Done.")
    assert process.returncode == 0
    assert until(lambda: not actors_now())
    assert whole(tmp_path / "run") == reference_files


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_command_stopped_within_a_round_can_be_resumed(three, reference_files, tmp_path, number):
    process = start_run(tmp_path / "run", three.address)
    process.send_signal(number)
    message = last_line(process)
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number
        assert "a run goes on from its last checkpoint with --resume" in message
    assert until(lambda: not actors_now())
    assert resume_locally(tmp_path / "run") == reference_files


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_ends_its_local_ray(tmp_path, number):
    process = start_run(tmp_path / "run", "local")
    assert ray_commands(process.pid)
    process.send_signal(number)
    process.wait(60)
    process.stderr.close()
    # agents of Ray check for their parent once a minute
    assert until(lambda: not ray_commands(process.pid), 150)
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number
