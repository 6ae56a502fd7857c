"""Folders to which others may write: links, FIFOs, hard links, and files of other users."""

import functools
import hashlib
import os
import shutil
import signal
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedcb2o import pretrained, records
from fedcb2o.data import downloads
from fedcb2o.data.sets._mnist import EMNIST as RELEASE
from fedcb2o.errors import ConfigError, DataError, RunError
from fedcb2o.experiments import run
from fedcb2o.experiments.grid import bench
from fedcb2o.parallel import _shared_memory
from fedcb2o.report import create_page, read_grid
from tests.tiny import bits, cells_in_this_process, run_cli, tiny

SECRET = b"a file of the user\n"


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    """Fail a test that waits for the writer of a FIFO."""

    def fail(*_: object) -> None:
        raise AssertionError("it waits")

    previous = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """Return a file of the user that no command may read or change."""
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o644)
    return path


def is_intact(secret: Path) -> bool:
    return secret.read_bytes() == SECRET and secret.stat().st_mode & 0o777 == 0o644


@functools.cache
def two_rounds(folder: Path) -> Path:
    """Run two rounds, once, in the folder of all tests of this process."""
    run(tiny(rounds=2), out=folder / "two-rounds", workers=1)
    return folder / "two-rounds"


def started(out: Path) -> Path:
    """Return the folder of a run of two rounds."""
    return Path(shutil.copytree(two_rounds(out.parents[1]), out))


# Writing


def test_a_replaced_file_is_not_written_through_links(tmp_path, secret):
    (tmp_path / "config.toml.tmp").symlink_to(secret)
    (tmp_path / "config.toml").symlink_to(secret)
    records.write_toml(tmp_path / "config.toml", {"rounds": 1})
    assert is_intact(secret)
    assert records.read_toml(tmp_path / "config.toml") == {"rounds": 1}


def test_a_temporary_fifo_is_replaced(tmp_path):
    os.mkfifo(tmp_path / "config.toml.tmp")
    records.write_toml(tmp_path / "config.toml", {"rounds": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


@pytest.mark.parametrize("kind", ["link", "hard link", "FIFO"])
def test_a_log_is_appended_to_its_own_regular_file_only(tmp_path, secret, kind):
    path = tmp_path / "metrics.jsonl"
    if kind == "link":
        path.symlink_to(secret)
    elif kind == "hard link":
        os.link(secret, path)
    else:
        os.mkfifo(path)
    with pytest.raises(RunError, match=rf"cannot write .*metrics\.jsonl: it .*{kind}"):
        records.RoundLog(tmp_path).append("metrics", {"round": 1})
    assert is_intact(secret)


def test_temporary_files_are_removed_and_folders_stay(tmp_path):
    (tmp_path / "config.toml.tmp").mkdir()
    (tmp_path / "agents.json.tmp").write_bytes(b"")
    records.remove_temporaries(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml.tmp"]


# Runs and grids


@pytest.mark.parametrize(
    "name", ["config.toml", "seed-1000", "seed-1000/metrics.jsonl", "seed-1000/sums.json"]
)
@pytest.mark.parametrize("kind", ["link", "FIFO"])
def test_a_run_with_a_foreign_part_is_not_continued(tmp_path, name, kind):
    out = started(tmp_path / "run")
    path = out / name
    path.rename(tmp_path / "elsewhere")
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        os.mkfifo(path)
    with pytest.raises(RunError, match=rf"{path}.* it is a {kind}|{path} is a {kind}"):
        run(tiny(rounds=3), out=out, workers=1, resume=True)


def test_a_run_with_a_hard_linked_log_is_not_continued(tmp_path):
    out = started(tmp_path / "run")
    path = out / "seed-1000" / "metrics.jsonl"
    os.link(path, tmp_path / "other")
    before = path.read_bytes()
    with pytest.raises(RunError, match=r"metrics\.jsonl has another name too"):
        run(tiny(rounds=3), out=out, workers=1, resume=True)
    (tmp_path / "copy").write_bytes(before)  # the cure
    (tmp_path / "copy").rename(path)
    run(tiny(rounds=3), out=out, workers=1, resume=True)
    assert (tmp_path / "other").read_bytes() == before


def test_entries_that_no_run_uses_may_be_links(tmp_path):
    out = started(tmp_path / "run")
    (out / "latest").symlink_to("seed-1000")
    (out / "seed-1000" / "notes").symlink_to("/etc/passwd")
    (out / "seed-1000").chmod(0o775)
    run(tiny(rounds=3), out=out, workers=1, resume=True)
    assert bits(out) == bits(run(tiny(rounds=3), out=tmp_path / "two", workers=1).folder)
    assert (out / "seed-1000").stat().st_mode & 0o777 == 0o700


def test_a_run_with_files_of_another_user_is_not_continued(tmp_path, monkeypatch):
    out = started(tmp_path / "run")
    monkeypatch.setattr("fedcb2o.records._files.owner_of_new_files", lambda _: os.getuid() + 1)
    with pytest.raises(RunError, match=r"belongs to another user .*`cp -r`"):
        run(tiny(rounds=3), out=out, workers=1, resume=True)


def test_a_mount_that_stores_another_owner_is_accepted(tmp_path, monkeypatch):
    out = started(tmp_path / "run")
    monkeypatch.setattr("fedcb2o.safe_files.os.geteuid", lambda: os.getuid() + 1)
    run(tiny(rounds=3), out=out, workers=1, resume=True)


def test_the_folder_of_a_run_may_be_a_link_of_the_user(tmp_path):
    started(tmp_path / "run")
    (tmp_path / "link").symlink_to("run")
    run(tiny(rounds=3), out=tmp_path / "link", workers=1, resume=True)


def test_a_grid_with_a_linked_folder_is_not_continued(tmp_path):
    shared = {key: value for key, value in tiny(rounds=1).items() if key != "attack"}
    attacks = {"Label flip": {"attack": tiny()["attack"]}}
    grid = {**shared, "name": "grid", "defences": {"FedCB2O": {}}, "attacks": attacks}
    with cells_in_this_process():
        bench(grid, out=tmp_path / "grid", jobs=1)
    cells = tmp_path / "grid" / "cells"
    cells.rename(tmp_path / "elsewhere")
    cells.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="cells is a link"):
        bench(grid, out=tmp_path / "grid", jobs=1, resume=True)


# Reading


def test_a_report_reads_no_file_outside_its_folder(tmp_path, secret):
    out = started(tmp_path / "run")
    path = out / "seed-1000" / "agents.json"
    path.rename(tmp_path / "agents.json")
    path.symlink_to(tmp_path / "agents.json")
    with pytest.raises(RunError, match=r"agents\.json: it is a link"):
        records.Run(out).about(1000)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RunError, match=r"agents\.json: it is a FIFO"):
        records.Run(out).about(1000)


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoint.safetensors", "samples.safetensors"])
def test_a_fifo_in_a_run_stops_its_reading(tmp_path, name):
    out = started(tmp_path / "run")
    (out / "seed-1000" / name).unlink(missing_ok=True)
    os.mkfifo(out / "seed-1000" / name)
    with pytest.raises(RunError, match=r"FIFO|no file of this seed"):
        records.Run(out).check()


def test_a_line_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("fedcb2o.records._jsonl._MAX_LINE_BYTES", 100)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"round": 1}\n' + b" " * 200)
    with pytest.raises(RunError, match="line 2 is longer than 100 bytes"):
        list(records.read_lines(path))
    assert len(list(records.read_lines(path, stop_at_damage=True))) == 1


def test_a_huge_json_file_is_not_read(tmp_path):
    path = tmp_path / "agents.json"
    path.touch()
    os.truncate(path, 2**40)  # sparse
    with pytest.raises(RunError, match="longer than"):
        records.read_json(path)


def test_the_number_of_seeds_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("fedcb2o.records.run._MAX_SEEDS", 3)
    for seed in range(5):
        (tmp_path / f"seed-{seed}").mkdir()
        (tmp_path / f"seed-{seed}" / "agents.json").touch()
    with pytest.raises(RunError, match="more than 3 seeds"):
        records.find_seeds(tmp_path)


def test_a_seed_that_is_a_link_is_not_read(tmp_path):
    out = started(tmp_path / "run")
    (out / "seed-1000").rename(tmp_path / "elsewhere")
    (out / "seed-1000").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="seed-1000 is a link"):
        records.Run(out)


def test_short_lines_fill_no_huge_table(tmp_path, monkeypatch):
    out = started(tmp_path / "run")  # three agents, two rounds
    monkeypatch.setattr("fedcb2o.records.run._MAX_ROWS", 5)
    with pytest.raises(RunError, match="more than 5 values"):
        _ = records.Run(out).records


def test_cells_of_a_grid_are_in_its_folder(tmp_path):
    cell = dict.fromkeys(
        ["kind", "setting", "defence", "attack", "floor", "rounds", "seconds", "error"]
    )
    for folder in ("../run", "/etc", "a/../../b", "", 3):
        content = {"cells": [{**cell, "folder": folder}]}
        records.write_json_with_checksum(tmp_path / "cells.json", content)
        with pytest.raises(RunError, match="in this folder"):
            records.read_cells(tmp_path / "cells.json")


def test_a_report_is_not_written_through_links(tmp_path, secret):
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "matrices").symlink_to(target)
    (tmp_path / "report" / "seeds.csv").symlink_to(secret)
    page = create_page(tmp_path / "report")
    with pytest.raises(RunError, match="matrices is a link"):
        page.write_file("matrices/all.csv", "x")
    page.write_file("seeds.csv", "x")
    assert is_intact(secret)
    assert not list(target.iterdir())


@pytest.mark.parametrize("kind", ["link", "FIFO"])
def test_a_summary_of_a_grid_is_a_regular_file(tmp_path, secret, kind):
    definition = {"defences": {"A": {}}, "attacks": {"B": {}}, "seeds": [1]}
    records.write_toml(tmp_path / "grid.toml", definition)
    (tmp_path / "summary.csv").symlink_to(secret)
    if kind == "FIFO":
        (tmp_path / "summary.csv").unlink()
        os.mkfifo(tmp_path / "summary.csv")
    with pytest.raises(RunError, match=r"it is a link|no run and no summary\.csv"):
        read_grid(tmp_path)


def test_new_files_replace_no_link(tmp_path):
    (tmp_path / "mine.py").symlink_to(tmp_path / "nowhere")
    assert "mine.py exists" in run_cli("new", tmp_path).one_line()
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("options", [(), ("--membership",)])
def test_a_report_runs_no_code_that_a_run_names(tmp_path, options):
    """Two runs, one of them without communication, have a table that needs their models."""
    trap = tmp_path / "trap"
    folders = [started(tmp_path / name) for name in ("run", "alone")]
    for folder, name in zip(folders, ("fedcb2o", "local_training"), strict=True):
        config = records.read_toml(folder / "config.toml")
        algorithm = {"name": name, **({"alpha": 2.0} if name == "fedcb2o" else {})}
        data = {"name": "os:system", "command": f"touch {trap}"}
        records.write_toml(folder / "config.toml", {**config, "data": data, "algorithm": algorithm})
        (folder / "seed-1000" / "sums.json").unlink()
    result = run_cli("report", *folders, "--out", tmp_path / "report", *options)
    assert not trap.exists()
    if options:
        assert "names 'os:system', code that would run here: read it, and allow it with --own" in (
            result.one_line()
        )
    else:
        assert result.status == 0, result.err
        assert "&#39;os:system&#39;" in (tmp_path / "report" / "report.html").read_text()


# Temporary folders of all users


def test_files_of_killed_runs_are_removed_if_they_are_own_files(tmp_path, secret, monkeypatch):
    names = [f"fedcb2o-{name}.tensors" for name in ("own", "fifo", "link", "other")]
    own, fifo, link, _ = (tmp_path / name for name in names)
    own.touch()
    os.mkfifo(fifo)
    link.symlink_to(secret)
    _shared_memory.remove_stale(tmp_path)
    assert not own.exists()
    assert fifo.is_fifo()
    assert link.is_symlink()

    own.touch()
    monkeypatch.setattr("fedcb2o.parallel._shared_memory.os.geteuid", lambda: os.getuid() + 1)
    _shared_memory.remove_stale(tmp_path)
    assert own.exists()


def test_folders_of_killed_jobs_are_removed_if_they_are_own_folders(tmp_path, monkeypatch):
    remote_job = pytest.importorskip("fedcb2o.experiments.runs._remote_job")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "fedcb2o-run-link").symlink_to(target)
    (tmp_path / "fedcb2o-run-open").mkdir()
    (tmp_path / "fedcb2o-run-open").chmod(0o777)
    (tmp_path / "fedcb2o-run-own").mkdir()
    for path in tmp_path.iterdir():
        os.utime(path, (0, time.time() - 3600), follow_symlinks=False)
    with remote_job._temporary_folder():
        pass
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"target", "fedcb2o-run-link", "fedcb2o-run-open"}


@pytest.mark.parametrize("name", ["../x.json", "/tmp/x.json", "seed-1/../../x.json", "x.py"])
def test_a_node_of_a_cluster_writes_into_the_run_only(tmp_path, name):
    remote_job = pytest.importorskip("fedcb2o.experiments.runs._remote_job")
    (tmp_path / "run").mkdir()
    with pytest.raises(RunError, match="no file of a run"):
        remote_job.write_files(tmp_path / "run", {name: np.zeros(3, np.uint8)})
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_events_are_not_written_through_links(tmp_path, secret):
    tensorboard = pytest.importorskip("fedcb2o.tracking.tensorboard")
    scalars = pytest.importorskip("fedcb2o.tracking.scalars")
    out = started(tmp_path / "run")
    (tmp_path / "events").mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / "events" / "seed-1000").symlink_to(tmp_path / "target")
    writer = tensorboard.TensorBoardWriter(tmp_path / "events")
    with pytest.raises(RunError, match="is a link"):
        writer.begin(scalars.SeedRun(out, 1000, ""))
    assert not list((tmp_path / "target").iterdir())


# Caches and archives


def test_abandoned_folders_of_a_download_are_removed_if_they_are_own_folders(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / ".incoming-link").symlink_to("target")
    os.mkfifo(tmp_path / ".incoming-fifo")
    (tmp_path / ".incoming-own").mkdir()
    with downloads._staging(RELEASE, tmp_path):
        pass
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"target", ".incoming-link", ".incoming-fifo"}


@pytest.mark.parametrize("fault", ["long", "twice"])
def test_files_of_an_archive_are_bounded_and_unique(tmp_path, monkeypatch, fault):
    monkeypatch.setattr(downloads, "_MAX_FILE_BYTES", 1000)
    name = "emnist-balanced-train-images-idx3-ubyte"
    with zipfile.ZipFile(tmp_path / str(RELEASE.archive), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"gzip/{name}", bytes(2000 if fault == "long" else 10))
        if fault == "twice":
            archive.writestr(f"other/{name}", b"")
    with pytest.raises(DataError, match=r"longer than 1000 bytes|File exists"):
        downloads.import_files(RELEASE, tmp_path, tmp_path / "target")
    assert not list((tmp_path / "target").iterdir())


@pytest.mark.parametrize("kind", ["link", "writable by others", "file is a link"])
def test_a_base_of_others_in_the_cache_is_refused(tmp_path, monkeypatch, kind):
    pytest.importorskip("transformers")
    monkeypatch.setattr(pretrained.pooch, "os_cache", lambda _: tmp_path)
    monkeypatch.setattr(pretrained, "_locate", lambda base: (base, {}, (base,)))
    monkeypatch.setattr("fedcb2o.pretrained.os.geteuid", lambda: os.getuid() or 1)
    key = hashlib.sha256(repr(("mine",)).encode()).hexdigest()[:16]
    folder = tmp_path / "models" / key
    made = folder.with_name("made")
    made.mkdir(parents=True, mode=0o700)
    os.chown(made, os.getuid() or 1, -1)
    (made / "model.safetensors").write_bytes(b"weights")
    (made / "sha256").write_text(hashlib.sha256(b"weights").hexdigest())
    if kind == "link":
        folder.symlink_to(made)
    else:
        made.rename(folder)
    pretrained.base_folder.cache_clear()
    pretrained.base_checksum.cache_clear()
    if kind == "writable by others":
        assert pretrained.base_checksum("mine") == hashlib.sha256(b"weights").hexdigest()
        (folder / "model.safetensors").write_bytes(b"changed")
        pretrained.base_checksum.cache_clear()
        with pytest.raises(ConfigError, match="damaged, by its SHA-256"):
            pretrained.base_checksum("mine")
        folder.chmod(0o777)
        pretrained.base_folder.cache_clear()
    if kind == "file is a link":
        (folder / "model.safetensors").rename(tmp_path / "elsewhere")
        (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        pretrained.base_folder("mine")
    pretrained.base_folder.cache_clear()
