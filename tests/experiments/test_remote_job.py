"""A remote job without a cluster: its updates, its files, and what it leaves."""

import os
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from tests.tiny import tiny

from fedcb2o.experiments import run
from fedcb2o.experiments.config.datasets import load_dataset
from fedcb2o.experiments.config.loading import load
from fedcb2o.experiments.runs import _provenance
from fedcb2o.experiments.runs._remote_job import (
    FOLDER_PREFIX,
    JobUpdate,
    RemoteJob,
    dataset_bytes,
    dataset_dtypes,
    execute,
    file_stamps,
    read_bytes,
    write_files,
)
from fedcb2o.experiments.runs._run_directory import exclusive_lock, open_run

pytest.importorskip("ray")


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch) -> Path:
    """The folder for temporary ones."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr("fedcb2o.experiments.runs._remote_job.REPORT_INTERVAL", 0.0)
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


def done(folder: Path, *, watched: bool = True, **changes: object) -> list[JobUpdate]:
    """What is heard of a run that goes on from the files in a folder."""
    experiment = load(tiny(**changes))
    folder.mkdir(exist_ok=True)
    open_run(folder, experiment, resume=True)
    dataset = load_dataset(experiment, None)
    errand = RemoteJob(
        experiment, dataset.names, dataset_dtypes(dataset), None, 0.0, watched, str(folder)
    )
    files = {str(path.relative_to(folder)): read_bytes(path) for path in file_stamps(folder)}
    return list(execute(errand, files, dataset_bytes(dataset)))


def test_rounds_are_told_and_only_changed_files_come_back(tmp_path, temporary):
    run(tiny(rounds=1), out=tmp_path / "one", workers=1)
    words = done(tmp_path / "one", rounds=6)
    assert [line["round"] for word in words for _, line in word.rounds] == [2, 3, 4, 5, 6]
    sent = Counter(Path(name).name for word in words for name in word.files)
    assert sent["checkpoint.safetensors"] > 1
    assert sent["summary.json"] == 1
    assert not {"config.toml", "agents.json", "environment.json"} & sent.keys()
    assert [word.result is not None for word in words] == [False] * (len(words) - 1) + [True]
    for word in words:
        write_files(tmp_path / "one", word.files)
    run(tiny(rounds=6), out=tmp_path / "two", workers=1)
    for name in ("metrics.jsonl", "checkpoint.safetensors", "summary.json"):
        assert (tmp_path / "one" / "seed-1000" / name).read_bytes() == (
            tmp_path / "two" / "seed-1000" / name
        ).read_bytes()
    assert not list(temporary.iterdir())


def test_who_does_not_watch_hears_of_files_alone(tmp_path):
    words = done(tmp_path / "run", watched=False)
    assert not any(word.rounds for word in words)
    assert all(word.files for word in words)
    assert words[-1].result[1] is None


def test_only_the_files_of_a_run_go_there(tmp_path):
    run(tiny(rounds=1), out=tmp_path / "one", workers=1)
    there = {path.name for path in file_stamps(tmp_path)}
    for name in ("fedcb2o-1-2.arena", "checkpoint.safetensors.tmp", "notes.md"):
        (tmp_path / "one" / "seed-1000" / name).touch()
    assert there == {path.name for path in file_stamps(tmp_path)}
    assert there > {"config.toml", "checkpoint.safetensors", "metrics.jsonl", "sums.json"}


@pytest.mark.parametrize("name", ["agents.json", "metrics.jsonl"])
def test_errors_name_the_folder_at_home(tmp_path, name):
    run(tiny(rounds=1), out=tmp_path / "one", seeds=[1000], workers=1)
    path = tmp_path / "one" / "seed-1000" / name
    path.write_text("nothing")
    (last,) = done(tmp_path / "one", rounds=2)
    assert last.result[1].startswith(f"{path} is damaged")


def test_log_messages_come_with_the_updates(tmp_path, monkeypatch):
    run(tiny(rounds=1), out=tmp_path / "one", seeds=[1000], workers=1)
    monkeypatch.setattr(_provenance, "_versions", lambda device: {"python": "4.0"})
    updates = done(tmp_path / "one", rounds=2)
    text = "".join(update.stderr for update in updates)
    assert text.startswith(f"{tmp_path / 'one' / 'seed-1000'} began with python ")


def test_what_a_killed_process_left_is_removed(tmp_path, temporary):
    left, young, held = (temporary / f"{FOLDER_PREFIX}{name}" for name in ("left", "young", "held"))
    for folder in (left, young, held):
        (folder / "run").mkdir(parents=True)
        if folder != young:
            os.utime(folder, (0, 0))
    with exclusive_lock(held):
        done(tmp_path / "nothing", rounds=1)
    assert set(temporary.iterdir()) == {young, held}
