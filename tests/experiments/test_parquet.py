"""Records in Parquet: the values of JSON lines, for all agents, through a kill and a resume."""

import logging
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pandas as pd
import pytest
from tests.tiny import ENVIRONMENT, StopError, run_cli, stop_after, tiny, write

from fedcb2o import Run
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.experiments import run
from fedcb2o.records import RoundLog, _parquet, log_path, read_lines
from fedcb2o.report._live import live_page

parquet = pytest.importorskip("pyarrow.parquet", reason="the extra parquet")

MULTI_KRUM = {"name": "by_rule", "rule": "multi_krum"}  # with f


def columns(folder):
    """Return the content of the files of the records, by name."""
    return {path.name + path.parent.name: path.read_bytes() for path in folder.rglob("*.parquet/*")}


@pytest.fixture(scope="module")
def settings():
    return tiny(rounds=4, evaluate_every=2, checkpoint_every=2, algorithm=MULTI_KRUM)


@pytest.fixture(scope="module")
def runs(settings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parquet")
    formats = ("jsonl", "parquet")
    return [run({**settings, "records": kind}, out=folder / kind, workers=1) for kind in formats]


def test_both_formats_have_the_same_values_by_one_reader(runs):
    lines, table = runs
    pd.testing.assert_frame_equal(table.records, lines.records)
    assert table.summary().equals(lines.summary())
    assert table.pairs.drop(columns="weight").equals(lines.pairs.drop(columns="weight"))
    # Lines have six digits, columns float32.
    np.testing.assert_allclose(table.pairs.weight, lines.pairs.weight, rtol=5e-6)
    for name in ("metrics", "pairs"):
        kinds = [
            [line for _, line in read_lines(log_path(found.folder / "seed-1000", name))]
            for found in runs
        ]
        assert [line.keys() for line in kinds[1]] == [line.keys() for line in kinds[0]]
    assert kinds[1][0]["asked"] == kinds[0][0]["asked"]
    assert not list(table.folder.rglob("pairs.jsonl"))
    assert threading.active_count() == 1


def test_other_programs_read_the_folder(runs):
    table = pd.read_parquet(runs[1].folder / "seed-1000" / "pairs.parquet")
    assert table.columns[:2].tolist() == ["round", "agent"]
    assert len(table) == 4 * len(runs[1].agents)


def test_tables_and_the_live_page_read_both(runs, tmp_path):
    out = [run_cli("compare", found.folder).out for found in runs]
    assert out[1] == out[0].replace(str(runs[0].folder), str(runs[1].folder))
    for found in runs:
        summary = found.folder / "seed-1000" / "summary.json"
        summary.rename(tmp_path / "summary.json")
        assert "round 3 of 4" in live_page(found.folder, refresh=3)
        (tmp_path / "summary.json").rename(summary)


KILL = """
import os, signal, sys
from fedcb2o.records import _files, _jsonl
whole = _jsonl.atomic_write
def strike(path, content):
    if path.name == "00000004.parquet" and path.parent.name == "pairs.parquet":
        path.with_name(path.name + ".tmp").write_bytes(content[:100])
        os.kill(os.getpid(), signal.SIGKILL)
    whole(path, content)
_jsonl.atomic_write = strike
from fedcb2o.cli import main
main()
"""


def test_a_run_killed_while_it_writes_is_resumed_with_the_same_bits(runs, settings, tmp_path):
    path = write(tmp_path / "tiny.toml", **settings, records="parquet")
    out = tmp_path / "run"
    arguments = ["fedcb2o", "run", str(path), "--out", str(out), "--workers", "1"]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.argv[:] = {arguments}\n{KILL}"],
        env=ENVIRONMENT,
        capture_output=True,
        timeout=100,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(Run(out).pairs["round"].unique()) == 3
    assert len(list(out.rglob("*.parquet.tmp"))) == 1
    # A later choice of the key does not change the format of a seed that has begun.
    assert run_cli(*arguments[1:], "--resume", "--set", "records=jsonl").status == 0
    assert columns(out) == columns(runs[1].folder)
    assert not list(out.rglob("*.tmp"))
    Run(out).check()


def test_a_start_killed_before_a_checkpoint_may_change_the_format(settings, tmp_path):
    for before, after in (("jsonl", "parquet"), ("parquet", "jsonl")):
        out = tmp_path / after
        with pytest.raises(StopError):
            run({**settings, "records": before}, out=out, workers=1, watch=stop_after(1))
        run({**settings, "records": after}, out=out, workers=1, resume=True)
        assert len(list(out.rglob(f"pairs.{before}"))) == 0
        Run(out).check()


@pytest.mark.parametrize("damage", ["cut", "gone", "all gone", "exchanged", "link"])
def test_damaged_columns_are_refused_by_name(runs, tmp_path, damage):
    out = tmp_path / "run"
    shutil.copytree(runs[1].folder, out)
    folder = out / "seed-1000" / "metrics.parquet"
    file = folder / "00000002.parquet"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "gone":
        file.unlink()
    elif damage == "all gone":
        shutil.rmtree(folder)
    elif damage == "exchanged":
        file.write_bytes((folder / "00000004.parquet").read_bytes())
    else:
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=r"metrics\.parquet"):
        _ = Run(out).records
    with pytest.raises(RunError, match=r"metrics\.parquet"):
        Run(out).check()


def test_a_file_that_claims_other_rounds_or_too_many_values_is_refused(tmp_path, monkeypatch):
    log = RoundLog(tmp_path, columns=["metrics"])
    log.append("metrics", {"round": 1, "hours": 0.5, "train_loss": [1.0, float("inf")]})
    path = log.path("metrics")
    [(_, record)] = read_lines(path)
    assert record == {"round": 1, "hours": 0.5, "train_loss": [1.0, None]}
    shutil.copy(path / "00000001.parquet", path / "00000002.parquet")
    with pytest.raises(RunError, match=r"00000002\.parquet is no record of a round \(it holds"):
        list(read_lines(path))
    monkeypatch.setattr(_parquet, "_MAX_VALUES", 7)
    with pytest.raises(RunError, match="more than 7 values"):
        list(read_lines(path))


def test_many_agents_choose_columns_of_all_where_the_extra_is(
    runs, settings, tmp_path, monkeypatch, caplog
):
    count = len(runs[0].agents)
    monkeypatch.setattr(_parquet, "MAX_PAIR_AGENTS", count - 2)
    caplog.set_level(logging.WARNING, "fedcb2o")
    large = run(settings, out=tmp_path / "large", workers=1)
    assert f"records of all {count} agents in Parquet, at most about " in caplog.text
    budget, rounds = settings["agents"]["budget"], settings["rounds"]
    peers = min(count - 1, budget * rounds)
    assert f"contacts of up to {peers} peers take at most " in caplog.text
    assert columns(large.folder) == columns(runs[1].folder)

    monkeypatch.setattr(_parquet, "find_spec", lambda name: None)
    caplog.clear()
    lines = run(settings, out=tmp_path / "lines", workers=1)
    assert f"pairs.jsonl has 10000 of {count} agents; `pip install" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(_parquet, "MAX_PAIR_AGENTS", count - 2)
    # The reader takes the agents that lines have.
    assert large.pairs.drop(columns="weight").equals(lines.pairs.drop(columns="weight"))


def test_without_the_extra_an_error_names_it(runs, settings, tmp_path, monkeypatch):
    monkeypatch.setattr(_parquet, "find_spec", lambda name: None)
    message = r"its module pyarrow is missing: pip install 'fedcb2o\[parquet\]'"
    with pytest.raises(ConfigError, match=message):
        run({**settings, "records": "parquet"}, out=tmp_path / "run", workers=1)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=message):
        _ = Run(runs[1].folder).records
