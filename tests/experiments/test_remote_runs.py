"""Grids and seeds on a cluster: the same files as on one machine, updates, and failures."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
from tests.experiments.test_grid import tuned
from tests.experiments.user_functions import broken
from tests.processes import needs_proc
from tests.tiny import run_cli, tiny, write

import fedcb2o
from fedcb2o import records
from fedcb2o.errors import RunError
from fedcb2o.experiments import load, run
from fedcb2o.experiments.config.datasets import load_dataset
from fedcb2o.experiments.runs import _remote_runs
from fedcb2o.experiments.runs._remote_job import file_stamps
from fedcb2o.records import exclusive_lock

pytest.importorskip("ray")

from fedcb2o.ray_backend import _tasks

# they have times, or checksums of such files
TIMED_FILES = ("environment.json", "timing.jsonl", "cells.json", "sums.json")
SEEDS = [1000, 1001, 1002]


def bits(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in file_stamps(folder)
        if path.name not in TIMED_FILES
    }


def slow_loss(folder: Path) -> dict[str, object]:
    """An algorithm whose slow criterion records process and round in a folder."""
    return {
        "criterion": {
            "name": "tests.experiments.user_functions:slow_loss",
            "folder": str(folder),
            "seconds": 0.1,
        }
    }


def until(condition, seconds: float) -> bool:
    """Wait until a condition is true; return False after a timeout."""
    end = time.monotonic() + seconds
    while not (result := condition()) and time.monotonic() < end:
        time.sleep(0.1)
    return result


def rounds_by(folder: Path) -> dict[int, list[int]]:
    """Return the rounds that each process started."""
    rounds: dict[int, list[int]] = {}
    for n, process in sorted(tuple(map(int, path.name.split("-"))) for path in folder.iterdir()):
        rounds.setdefault(process, []).append(n)
    return rounds


@pytest.fixture
def told(tmp_path) -> Path:
    """Return a folder in which user functions record their calls."""
    (tmp_path / "told").mkdir()
    return tmp_path / "told"


def halves(folder: Path) -> dict[str, object]:
    return {"name": "tests.experiments.user_functions:halves", "folder": str(folder)}


def test_a_grid_has_the_files_of_one_machine_and_loads_its_data_once(
    cluster, tmp_path, told, forbid_cluster
):
    plan = tuned(data=halves(told))
    fedcb2o.bench(plan, out=tmp_path / "one", jobs=1)
    for path in told.iterdir():
        path.unlink()
    done = fedcb2o.bench(plan, out=tmp_path / "many", cluster=cluster)
    assert bits(tmp_path / "one") == bits(tmp_path / "many")
    assert [path.name.rpartition("-")[2] for path in told.iterdir()] == [str(os.getpid())]
    forbid_cluster()
    assert not done.failed
    assert not fedcb2o.bench(plan, out=tmp_path / "many", cluster=cluster, resume=True).failed


def test_seeds_of_one_machine_continue_on_a_cluster_with_updates_of_rounds(
    cluster, tmp_path, told, forbid_cluster
):
    updates: dict[str, list[tuple[int, object]]] = {"one": [], "many": []}

    def watch(where: str):
        return lambda experiment, seed, line: updates[where].append((seed, experiment.seeds, line))

    plan = tiny(data=halves(told))
    run(plan, out=tmp_path / "one", seeds=SEEDS, workers=1, watch=watch("one"))
    out = tmp_path / "many"
    run({**plan, "rounds": 1}, out=out, seeds=SEEDS[:2], workers=1, watch=watch("many"))
    run(plan, out=tmp_path / "many", seeds=SEEDS, cluster=cluster, resume=True, watch=watch("many"))
    assert bits(tmp_path / "one") == bits(tmp_path / "many")
    assert len(list(told.iterdir())) == 3
    one, many = (
        [(seed, line) for seed, _, line in sorted(updates[k], key=lambda update: update[0])]
        for k in updates
    )
    assert one == many
    assert {seeds for _, seeds, _ in updates["many"]} == {tuple(SEEDS[:2]), tuple(SEEDS)}
    forbid_cluster()
    run(plan, out=tmp_path / "many", seeds=SEEDS, cluster=cluster, resume=True)


def test_the_folder_of_a_remote_run_is_locked(cluster, tmp_path):
    """A run does not start in a folder that another process has locked."""
    experiment, folders = load(tiny()), [tmp_path / "mine", tmp_path / "other"]
    is_locked, ended = list[bool](), dict[int, tuple[str | None, bool]]()

    def busy(folder: Path) -> bool:
        try:
            with exclusive_lock(folder):
                return False
        except RunError:
            return True

    def on_result(k: int, result: tuple[float, str | None]) -> None:
        ended[k] = result[1], busy(folders[k])

    datasets = [(experiment.data, load_dataset(experiment, None))]
    with (
        exclusive_lock(folders[1]),
        _remote_runs.connect_executor(cluster, "one run", [experiment], datasets) as executor,
    ):
        runs = [(k, (experiment, folder)) for k, folder in enumerate(folders)]
        executor.map(2, runs, on_result, lambda: is_locked.append(busy(folders[0])))
    assert is_locked[0]
    assert ended[0] == (None, False)
    assert ended[1] == (
        f"another process is writing to {folders[1]}: wait for it, or choose another --out",
        True,
    )


def test_failed_seeds_are_reported_at_the_end(cluster, tmp_path):
    """Seeds 1000 and 1001 are damaged; seed 1002 finishes."""
    run(tiny(rounds=2), out=tmp_path / "run", seeds=[1000, 1001], workers=1)
    damaged = [tmp_path / "run" / f"seed-{seed}" / "metrics.jsonl" for seed in (1000, 1001)]
    for path in damaged:
        path.write_text("nothing\n")
    settings = write(tmp_path / "tiny.toml")
    done = run_cli(
        "run",
        settings,
        "--out",
        tmp_path / "run",
        "--seeds",
        "1000-1002",
        "--cluster",
        cluster,
        "--resume",
    )
    message = done.one_line()
    assert message.startswith("2 of 3 seeds failed, which --resume tries again: seed 1000: ")
    assert f"{damaged[0]} is damaged" in message
    assert f"; seed 1001: {damaged[1]} is damaged" in message
    assert (tmp_path / "run" / "seed-1002" / "summary.json").exists()


def test_an_error_of_a_task_is_reported_after_its_results(cluster, monkeypatch):
    monkeypatch.setattr(_tasks, "RETRY_SECONDS", 0.0)
    events: list[object] = []

    def failed(ticket: str, error: RunError) -> bool:
        events.append((type(error), str(error)))
        return events.count(0) < 2

    _tasks.TaskPool().map_unordered(
        2,
        ["one"],
        lambda _: _tasks.Task(broken, (0,)),
        lambda _, number: events.append(number),
        failed,
    )
    assert (
        events == [0, 1, (RunError, "work on the cluster failed (ValueError: out of numbers)")] * 2
    )


def test_a_failed_task_is_retried_after_a_pause_while_other_tasks_run(cluster, monkeypatch):
    monkeypatch.setattr(_tasks, "RETRY_SECONDS", 4.0)
    times: dict[str, float] = {}

    def on_result(ticket: str, number: int) -> None:
        if ticket == "bad" and number == 0:
            times["again" if "failed" in times else "first"] = time.monotonic()

    def failed(ticket: str, error: RunError) -> bool:
        if ticket != "bad":
            times["others"] = time.monotonic()
        elif "failed" not in times:
            times["failed"] = time.monotonic()
            return True
        return False

    _tasks.TaskPool().map_unordered(
        2, ["bad", *map(str, range(4))], lambda _: _tasks.Task(broken, (0,)), on_result, failed
    )
    assert times["again"] - times["failed"] >= 4
    assert times["others"] < times["again"]


@needs_proc
def test_a_run_continues_from_returned_files_after_its_process_is_killed(
    cluster, tmp_path, told, monkeypatch, caplog
):
    monkeypatch.setattr(_remote_runs, "CHECKPOINT_INTERVAL", 0.0)
    monkeypatch.setattr(_tasks, "RETRY_SECONDS", 0.5)
    killed_in = []

    def kill(experiment, seed, line):
        (process,) = rounds_by(told)
        if line["round"] >= 4 and not killed_in:
            killed_in.append(line["round"])
            os.kill(process, signal.SIGKILL)

    run(
        tiny(rounds=12, algorithm=slow_loss(told)),
        out=tmp_path / "run",
        cluster=cluster,
        watch=lambda *arguments: killed_in or kill(*arguments),
    )
    first, second = rounds_by(told).values()
    assert first[0] == 0
    assert min(second) >= killed_in[0]
    note = f"{tmp_path / 'run' / 'seed-1000'} continues from the files that came back"
    assert note in caplog.text
    run(tiny(rounds=12, algorithm=slow_loss(told)), out=tmp_path / "one", workers=1)
    assert bits(tmp_path / "run") == bits(tmp_path / "one")


@needs_proc
def test_a_run_stops_after_the_maximum_of_retries(cluster, tmp_path, told, monkeypatch):
    monkeypatch.setattr(_remote_runs, "MAX_RETRIES", 1)
    monkeypatch.setattr(_tasks, "RETRY_SECONDS", 0.5)

    def kill(experiment, seed, line):
        for process in rounds_by(told):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    message = r"a part of the cluster is lost .* was retried 1 times, and stops"
    with pytest.raises(RunError, match=message):
        run(
            tiny(rounds=40, algorithm=slow_loss(told)),
            out=tmp_path / "run",
            cluster=cluster,
            watch=kill,
        )
    assert len(rounds_by(told)) == 2


@needs_proc
def test_an_interrupted_run_keeps_returned_files_and_leaves_no_task(
    cluster, tmp_path, told, monkeypatch
):
    monkeypatch.setattr(_remote_runs, "CHECKPOINT_INTERVAL", 0.0)

    def stop(experiment, seed, line):
        if line["round"] >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(
            tiny(rounds=200, algorithm=slow_loss(told)),
            out=tmp_path / "run",
            cluster=cluster,
            watch=stop,
        )
    assert until(
        lambda: not any(Path(f"/proc/{process}").exists() for process in rounds_by(told)), 20
    )
    assert records.Run(tmp_path / "run").records["round"].max() >= 3
