"""A remote job without a cluster: updates, files and temporary folders."""

import os
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from tests.tiny import tiny

from fedcb2o.experiments import run
from fedcb2o.experiments.config.datasets import load_dataset
from fedcb2o.experiments.config.loading import load
from fedcb2o.experiments.runs import _provenance, _remote_job
from fedcb2o.experiments.runs._run_directory import open_run
from fedcb2o.records import exclusive_lock

pytest.importorskip("ray")


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch) -> Path:
    """Return the parent folder of temporary folders."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(_remote_job, "REPORT_INTERVAL", 0.0)
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


def job_updates(
    folder: Path, *, watched: bool = True, **changes: object
) -> list[_remote_job.JobUpdate]:
    """Return the updates of a job that continues from the files in a folder."""
    experiment = load(tiny(**changes))
    folder.mkdir(exist_ok=True)
    open_run(folder, experiment, resume=True)
    dataset = load_dataset(experiment, None)
    job = _remote_job.RemoteJob(
        experiment,
        dataset.names,
        _remote_job.dataset_dtypes(dataset),
        None,
        0.0,
        watched,
        str(folder),
    )
    files = {
        str(path.relative_to(folder)): _remote_job.read_bytes(path)
        for path in _remote_job.file_stamps(folder)
    }
    return list(_remote_job.execute(job, files, _remote_job.dataset_bytes(dataset)))


def test_updates_have_all_rounds_and_only_changed_files(tmp_path, temporary):
    run(tiny(rounds=1), out=tmp_path / "one", workers=1)
    updates = job_updates(tmp_path / "one", rounds=6)
    assert [line["round"] for update in updates for _, line in update.rounds] == [2, 3, 4, 5, 6]
    sent = Counter(Path(name).name for update in updates for name in update.files)
    assert sent["checkpoint.safetensors"] > 1
    assert sent["summary.json"] == 1
    assert not {"config.toml", "agents.json", "environment.json"} & sent.keys()
    assert [update.result is not None for update in updates] == [False] * (len(updates) - 1) + [
        True
    ]
    for update in updates:
        _remote_job.write_files(tmp_path / "one", update.files)
    run(tiny(rounds=6), out=tmp_path / "two", workers=1)
    for name in ("metrics.jsonl", "checkpoint.safetensors", "summary.json"):
        assert (tmp_path / "one" / "seed-1000" / name).read_bytes() == (
            tmp_path / "two" / "seed-1000" / name
        ).read_bytes()
    assert not list(temporary.iterdir())


def test_updates_of_an_unwatched_job_have_only_files(tmp_path):
    updates = job_updates(tmp_path / "run", watched=False)
    assert not any(update.rounds for update in updates)
    assert all(update.files for update in updates)
    assert updates[-1].result[1] is None


def test_only_the_files_of_a_run_are_sent(tmp_path):
    run(tiny(rounds=1), out=tmp_path / "one", workers=1)
    names = {path.name for path in _remote_job.file_stamps(tmp_path)}
    for name in ("fedcb2o-1-2.arena", "checkpoint.safetensors.tmp", "notes.md"):
        (tmp_path / "one" / "seed-1000" / name).touch()
    assert names == {path.name for path in _remote_job.file_stamps(tmp_path)}
    assert names > {"config.toml", "checkpoint.safetensors", "metrics.jsonl", "sums.json"}


def test_updates_have_log_messages(tmp_path, monkeypatch):
    run(tiny(rounds=1), out=tmp_path / "one", seeds=[1000], workers=1)
    monkeypatch.setattr(_provenance, "_versions", lambda device: {"python": "4.0"})
    updates = job_updates(tmp_path / "one", rounds=2)
    text = "".join(update.stderr for update in updates)
    assert text.startswith(f"{tmp_path / 'one' / 'seed-1000'} began with python ")


def test_folders_of_killed_processes_are_removed(tmp_path, temporary):
    abandoned, recent, locked = (
        temporary / f"{_remote_job.FOLDER_PREFIX}{name}" for name in ("left", "young", "held")
    )
    for folder in (abandoned, recent, locked):
        (folder / "run").mkdir(parents=True)
        if folder != recent:
            os.utime(folder, (0, 0))
    with exclusive_lock(locked):
        job_updates(tmp_path / "nothing", rounds=1)
    assert set(temporary.iterdir()) == {recent, locked}
