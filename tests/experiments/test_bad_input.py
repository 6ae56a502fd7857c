"""Bad input on the command line: a one-line error, status 2, no traceback, no partial output."""

import fcntl
import json
import math
import os
import re
from pathlib import Path

import pytest
from tests.tiny import bits, run_cli, tiny, write
from torch import nn

from fedcb2o.errors import ConfigError, RunError
from fedcb2o.experiments import load, run
from fedcb2o.experiments.config.tables import parse_value


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "tiny.toml")


@pytest.mark.parametrize(
    "change", ["roundz=3", "algorithm.alfa=1", "agents.budget=6", "training.gamma=nan"]
)
def test_a_wrong_setting_gives_a_one_line_error(tmp_path, path, change):
    line = run_cli("run", path, "--out", tmp_path / "run", "--set", change).one_line()
    assert line.startswith(f"{path} with changes: ")
    key, _, value = change.partition("=")
    with pytest.raises(ConfigError, match=re.escape(line)):
        load(path, {key: parse_value(value)})
    assert not (tmp_path / "run").exists()


NAMES = {
    "digit-fedcb2o": "there is no preset `digit-fedcb2o`. Did you mean `digits-fedcbo`?",
    "nothing-like-it-at-all": "there is no preset `nothing-like-it-at-all`. `fedcb2o presets` lists them",
    "missing.toml": "cannot read missing.toml: No such file or directory",
    "folder.toml": "cannot read folder.toml: it is a folder, not a regular file",
    "binary.toml": "cannot read binary.toml: it is not text in UTF-8 (byte 0xff at position 0): save it in this",
    "wrong.toml": "cannot read wrong.toml: it is not TOML: ",
    "deep.toml": "cannot read deep.toml: its lists or tables are nested too deeply",
    "tables.toml": "cannot read tables.toml: its lists or tables are nested too deeply",
    "grid": "grid is a grid's folder: `fedcb2o bench grid/grid.toml --out grid --resume` continues the grid",
    "empty.toml": "empty.toml: the key `rounds` is missing",
    "extends.toml": "there is no preset `digits-fedcb2`. Did you mean `digits-fedcbo`?",
    "number.toml": "there is no preset `3`",
    "old": "old is a run's folder: `fedcb2o run old/config.toml --out old --resume` continues the run; without",
}


@pytest.mark.parametrize("name", NAMES)
def test_an_unreadable_experiment_gives_a_one_line_error(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("folder.toml").mkdir()
    Path("binary.toml").write_bytes(b"\xff\xfe\x00")
    Path("wrong.toml").write_text("rounds = = 3")
    Path("deep.toml").write_text(f"a = {'[' * 100_000}{']' * 100_000}")
    Path("tables.toml").write_text(f"a = {'{b=' * 20_000}1{'}' * 20_000}")
    Path("grid").mkdir()
    Path("grid/grid.toml").write_text("rounds = 3")
    Path("empty.toml").write_text("")
    Path("extends.toml").write_text('extends = "digits-fedcb2"')
    Path("number.toml").write_text("extends = 3")
    Path("old").mkdir()
    Path("old/config.toml").write_text("rounds = 3")
    assert NAMES[name] in run_cli("run", name).one_line()
    assert not Path("runs").exists()


DATA = {
    "agents.benign_samples=2000": "clusters cannot be filled: `benign` * `benign_samples` + `malicious` * ",
    "agents.benign=100000000000000000000": "clusters cannot be filled: ",
    "agents.benign_samples=1": "`benign_samples` must be at least 2, got 1",
    "agents.validation=0.01": "leaves agent 0 no validation data among its 20 samples; set another fraction",
    "attack.source=99": "`attack.source` must be between 0 and 9, got 99",
    "attack.target=-1": "`attack.target` must be between 0 and 9, got -1",
    "data.test_per_class=500": "`test_per_class` of digits must be between 1 and 173, got 500",
    "model.hidden=[0]": "model `mlp`: `hidden` needs layers of 1 unit or more, got [0]",
    "model.hidden=[-1]": "model `mlp`: `hidden` needs layers of 1 unit or more, got [-1]",
    "model.hidden=[1000000000000]": "75,000,000,000,010 parameters and needs at least ",
    "training.gamma=1e30": "training diverged: the model or the loss of benign agent ",
}


@pytest.mark.parametrize("change", DATA)
def test_settings_that_do_not_fit_the_data_give_a_one_line_error(tmp_path, path, change):
    out = tmp_path / "run"
    step = ["--set", "algorithm.mixing_factor=1.0"]
    line = run_cli("run", path, "--out", out, "--workers", 1, "--set", change, *step).one_line()
    assert DATA[change] in line
    if change.startswith("training"):
        assert " is not finite in round 1; a smaller `training.gamma` usually helps" in line
    else:  # the folder stays free for the corrected experiment
        assert not out.exists()
        assert run_cli("run", path, "--out", out, "--workers", 1).status == 0


def test_later_divergence_names_agent_and_round_and_keeps_finished_rounds(tmp_path):
    forwards = 0

    class Explodes(nn.Linear):
        def forward(self, x):
            nonlocal forwards
            forwards += self.training
            return super().forward(x.flatten(1)) * (1.0 if forwards <= 36 else math.nan)

    # A round has 16 batches: 2 per benign agent, which train first, and 4 per attacker.
    # The check of the network makes 2 passes, so pass 37 is batch 35: agent 1, round 3.
    experiment = tiny(rounds=5, model={"name": lambda shape, classes: Explodes(64, classes)})
    message = (
        "training diverged: the model or the loss of benign agent 1 is not finite in "
        "round 3; a smaller"
    )
    with pytest.raises(RunError, match=message):
        run(experiment, out=tmp_path, workers=1)
    lines = (tmp_path / "seed-1000/metrics.jsonl").read_text().splitlines()
    assert [json.loads(text)["round"] for text in lines] == [1, 2]
    assert (tmp_path / "seed-1000/checkpoint.safetensors").exists()


def test_missing_and_wrong_data_files_give_a_one_line_error(tmp_path):
    missing = run_cli(
        "run", "emnist-fedassay", "--data-dir", tmp_path, "--out", tmp_path / "run"
    ).one_line()
    assert "EMNIST: no file emnist-balanced-train-images-idx3-ubyte" in missing
    assert "get the files with `fedcb2o data emnist`" in missing
    for part in ("train-images-idx3", "train-labels-idx1", "test-images-idx3", "test-labels-idx1"):
        (tmp_path / f"emnist-balanced-{part}-ubyte").write_bytes(b"no IDX file")
    assert (
        "is not an IDX file" in run_cli("run", "emnist-fedassay", "--data-dir", tmp_path).one_line()
    )
    (tmp_path / "bare").mkdir()
    for source, note in (("nowhere", " (there is no such folder)"), ("bare", "")):
        line = run_cli(
            "data", "emnist", "--from", tmp_path / source, "--data-dir", tmp_path / "x"
        ).one_line()
        assert line.startswith(
            "EMNIST: no file emnist-balanced-train-images-idx3-ubyte or emnist47-train-images-idx3"
        )
        assert line.endswith(
            f"in {tmp_path / source}{note}; DIR in `fedcb2o data emnist --from DIR` must hold "
            f"gzip.zip, or these "
            "files, plain or .gz: emnist-balanced-train-images-idx3-ubyte, "
            "emnist-balanced-train-labels-idx1-ubyte, "
            "emnist-balanced-test-images-idx3-ubyte, emnist-balanced-test-labels-idx1-ubyte"
        )


def test_a_folder_locked_by_another_process_is_refused(tmp_path, path):
    out = tmp_path / "run"
    out.mkdir()
    descriptor = os.open(out, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert "another process is writing to" in run_cli("run", path, "--out", out).one_line()
    assert not list(out.iterdir())
    os.close(descriptor)
    assert run_cli("run", path, "--out", out).status == 0


def test_output_paths_with_other_content_are_refused_and_kept(tmp_path, path):
    out = tmp_path / "run"
    (tmp_path / "file").write_text("mine")
    message = "file is not a folder: choose another"
    assert message in run_cli("run", path, "--out", tmp_path / "file").one_line()
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    message = f"{out} is not empty and holds no run: choose another"
    assert message in run_cli("run", path, "--out", out).one_line()
    assert [entry.name for entry in out.iterdir()] == ["thesis.txt"]
    message = "cannot create the folder"
    assert message in run_cli("run", path, "--out", tmp_path / "file" / "run").one_line()
    assert (tmp_path / "file").read_text() == "mine"


def test_a_byte_order_mark_is_ignored(tmp_path, path):
    marked = tmp_path / "marked.toml"
    marked.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load(marked) == load(path).model_copy(update={"name": "tiny"})


VALUES = {
    f"a={'[' * 100_000}": "--set cannot read the value [[[[[[[",
    f"rounds={'9' * 5000}": "--set cannot read the value 99999",
    f"a{'.a' * 50_000}=1": "there is no key of 50001 parts",
    "rounds=1\nseeds=[5]": "`rounds`: input should be a valid integer",
    "data.name=3": (
        '`data.name` must be the name of a function, "package.module:function", or '
        "in Python a function"
    ),
    "data=3": (
        "`data` must be a section, with keys of its own (a function of your own: "
        '{"name": function}), got 3'
    ),
    "together=100000000000000000000": "`together`: input should be less than or equal to 2147483648",
    "attack.claims=true": "`attack.claims`: input should be a valid integer, got True",
}


@pytest.mark.parametrize("change", VALUES, ids=lambda change: change[:40])
def test_an_invalid_value_gives_a_one_line_error(tmp_path, path, change):
    line = run_cli("run", path, "--out", tmp_path / "run", "--set", change).one_line()
    assert VALUES[change] in line
    assert len(line) < 400
    assert not (tmp_path / "run").exists()


def test_a_deeply_nested_run_configuration_gives_a_one_line_error(tmp_path, path):
    out = tmp_path / "run"
    assert run_cli("run", path, "--out", out, "--workers", 1).status == 0
    (out / "config.toml").write_text(f"a = {'[' * 100_000}{']' * 100_000}")
    for arguments in (
        ("run", path, "--out", out, "--resume"),
        ("compare", out),
        ("report", out, "--out", tmp_path / "page"),
    ):
        assert "config.toml" in (line := run_cli(*arguments).one_line())
        assert "nested too deeply" in line


def test_compare_refuses_the_folder_of_a_grid(tmp_path):
    (tmp_path / "grid.toml").write_text("rounds = 3")
    line = run_cli("compare", tmp_path).one_line()
    assert line.endswith(
        f"it is that of a grid: `fedcb2o report {tmp_path}` shows it, and its runs are in "
        f"its cells/"
    )


@pytest.mark.usefixtures("no_figures")
def test_the_error_of_an_unwritable_report_suggests_the_command_again(tmp_path, path):
    out, page = tmp_path / "run", tmp_path / "page"
    assert run_cli("run", path, "--out", out, "--workers", 1).status == 0
    (page / "report.html").mkdir(parents=True)
    line = run_cli("report", out, "--out", page).one_line()
    assert "report.html: Is a directory" in line
    assert line.endswith(
        "make room (or repair the folder) and give the command again, that of a run with --resume"
    )


@pytest.mark.parametrize(
    "damage",
    ["[[[", "a = 1", "defences = 3\nattacks = 4\nseeds = 5", "\xff", f"a = {'[' * 99_999}"],
)
def test_an_unreadable_grid_file_gives_a_one_line_error(tmp_path, damage):
    (tmp_path / "grid.toml").write_bytes(damage.encode("latin-1"))
    assert f"{tmp_path}/grid.toml cannot be read (" in run_cli("report", tmp_path).one_line()


def test_an_existing_run_is_not_overwritten(tmp_path, path):
    out = tmp_path / "run"
    assert run_cli("run", path, "--out", out, "--workers", 1).status == 0
    before = bits(out)
    again = run_cli("run", path, "--out", out, "--workers", 1).one_line()
    assert again == (
        f"{out} already holds seed 1000 of this run: --resume continues it, --overwrite begins "
        "anew, or choose another --out"
    )
    other = run_cli("run", path, "--out", out, "--set", "agents.budget=2").one_line()
    assert (
        other
        == f"{out} holds another run (`agents.budget` is 3 there and 2 here): choose another --out"
    )
    assert bits(out) == before
    assert run_cli("run", path, "--out", out, "--workers", 1, "--resume").status == 0
    assert bits(out) == before
    # another seed is added
    assert run_cli("run", path, "--out", out, "--workers", 1, "--seeds", "1001").status == 0
    for name, content in bits(out).items():
        assert name == "config.toml" or content == before[name]
    (out / "config.toml").write_text("rounds = = 3")
    assert "config.toml cannot be read" in run_cli("run", path, "--out", out).one_line()
    assert "config.toml cannot be read" in run_cli("compare", out).one_line()
    assert "config.toml cannot be read" in run_cli("run", path, "--out", out, "--resume").one_line()
    assert (out / "config.toml").read_text() == "rounds = = 3"


def test_unreadable_runs_give_a_one_line_error(tmp_path, path):
    assert "there is no run in " in run_cli("compare", tmp_path / "nowhere").one_line()
    message = "was not written by `fedcb2o run`"
    assert message in run_cli("report", tmp_path, "--out", tmp_path / "report").one_line()
    assert not (tmp_path / "report").exists()
