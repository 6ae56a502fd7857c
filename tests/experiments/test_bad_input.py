"""Bad input on the command line: a one-line error, status 2, no traceback, no partial output."""

import fcntl
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tiny import ENVIRONMENT, CommandResult, bits, run_cli, tiny, write
from torch import nn

from fedcb2o.errors import ConfigError, RunError
from fedcb2o.experiments import load, run
from fedcb2o.experiments.config.tables import parse_value

ROOT = Path(__file__).parents[2]


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


# User functions. The cases run in a process without the run-time checks of the tests.

USER_MODULE = """
import torch
from torch import nn

import fedcb2o
from fedcb2o import Dataset, Shard
from fedcb2o.federated.types import batched

notes = 3


def made(change_x=lambda x: x, change_y=lambda y: y, names=tuple("0123456789")):
    from fedcb2o.data import digits
    d = digits()
    return Dataset(Shard(change_x(d.pool.x), change_y(d.pool.y)), d.test, names)


def data_none(): return None
def data_raises(): raise KeyError("boom")
def data_high(): return made(change_y=lambda y: y + 1)
def data_negative(): return made(change_y=lambda y: y - 1)
def data_short(): return made(change_y=lambda y: y[:-1])
def data_int32(): return made(change_y=lambda y: y.int())
def data_numpy(): return made(lambda x: x.numpy(), lambda y: y.numpy())
def data_nan(): return made(lambda x: x * float("nan"))
def data_empty(): return made(lambda x: x[:0], lambda y: y[:0])
def data_other(): return made(lambda x: x[..., :4])
def flat(s): return Shard(s.x.flatten(1), s.y)
def data_flat(): return Dataset(flat(made().pool), flat(made().test), tuple("0123456789"))
def data_names(): return made(names=10)
def data_one_class():
    d = made()
    return Dataset(Shard(d.pool.x, d.pool.y * 0), Shard(d.test.x, d.test.y * 0), ("all",))

def dense(outputs, inputs=64): return nn.Sequential(nn.Flatten(), nn.Linear(inputs, outputs))
def model_none(shape, classes): return None
def model_raises(shape, classes): raise KeyError("boom")
def model_no_arguments(): return dense(10)
def model_outputs(shape, classes): return dense(classes - 1)
def model_inputs(shape, classes): return dense(classes, 63)
def model_batch_norm(shape, classes):
    norm = nn.BatchNorm1d(64, track_running_stats=False)
    return nn.Sequential(nn.Flatten(), norm, nn.Linear(64, classes))
def model_lazy(shape, classes): return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))
class Masked(nn.Sequential):
    def __init__(self, *parts):
        super().__init__(*parts)
        self.register_buffer("mask", torch.ones(64))

    def forward(self, x):
        if self.training: self.mask *= 0.9
        return super().forward(x * self.mask.view(x.shape[1:]))

def model_buffer(shape, classes): return Masked(nn.Flatten(), nn.Linear(64, classes))
def model_double(shape, classes): return dense(classes).double()
def model_nothing(shape, classes): return nn.Flatten()

class Trains(nn.Sequential):
    def forward(self, x):
        if self.training: raise KeyError("boom")
        return super().forward(x)

class Detached(nn.Sequential):
    def forward(self, x): return super().forward(x).detach()

def model_train_raises(shape, classes): return Trains(nn.Flatten(), nn.Linear(64, classes))
def model_train_detached(shape, classes): return Detached(nn.Flatten(), nn.Linear(64, classes))
def model_train_one(shape, classes):  # mini-batches of one sample
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, classes))

def attack_none(shard, draw): return None
def attack_tuple(shard, draw): return shard.x, shard.y
def attack_fewer(shard, draw): return Shard(shard.x[:5], shard.y[:5])
def attack_shape(shard, draw): return Shard(shard.x[..., :4], shard.y)
def attack_labels(shard, draw): return Shard(shard.x, shard.y + 50)
def attack_raises(shard, draw): return shard.x[10 ** 6]

def criterion_scalar(judged): return judged.losses.mean.sum()
def criterion_wide(judged): return judged.losses.by_class
def criterion_none(judged): return None
def criterion_raises(judged): return judged.no_such_thing
@batched
def criterion_local(judged): return judged.losses.mean + judged.context.malicious_share

def selection_strangers(contacts, candidates, budget, draw): return candidates + 100
def selection_twice(contacts, candidates, budget, draw): return candidates[[0, 0]]
def selection_many(contacts, candidates, budget, draw): return candidates[:budget + 1]
def selection_none(contacts, candidates, budget, draw): return None
def selection_floats(contacts, candidates, budget, draw): return candidates[:2] + 0.5
def selection_raises(contacts, candidates, budget, draw): return candidates[10 ** 6]

def rule_short(judged): return torch.ones(1)
def rule_sum(judged): return torch.ones(len(judged.received.ids))
def rule_negative(judged): return torch.tensor([2.0, -1.0] + [0.0] * (len(judged.received.ids) - 2))
def rule_nan(judged): return torch.full((len(judged.received.ids),), float("nan"))
def rule_none(judged): return None
def rule_raises(judged): return 1 / 0
@batched
def rule_local(judged): return torch.full(judged.received.ids.shape, judged.context.draw.random())

def algorithm_none(): return None
"""

SEVERAL = (
    "TypeError: `inputs.context` is one agent's, and a function declared `batched` gets "
    "several agents: "
)

WRONG_FUNCTIONS = {
    "data_none": "the data set `parts:data_none` returned None, expected a fedcb2o.Dataset",
    "data_raises": "the data set `parts:data_raises` failed at line {line} of {folder}/parts.py: KeyError",
    "data_high": "has labels outside 0 to 9: 1 to 10",
    "data_negative": "has labels outside 0 to 9: -1 to 8",
    "data_short": "holds 1557 samples and 1556 labels",
    "data_int32": "must hold dense tensors on the CPU, its labels of type int64",
    "data_numpy": "must hold dense tensors on the CPU, its labels of type int64",
    "data_nan": "must hold samples of pixels (uint8), tokens (int32 or int64) or finite floating-point features",
    "data_empty": "in its pool, holds 0 samples and 0 labels",
    "data_other": (
        "the samples of the pool of the data set `parts:data_other` have shape (1, 8, 4), and those"
        " of its test set (1, 8, 8)"
    ),
    "data_flat": "`num_clusters` = 2 turns square images, and the samples have shape (64,); set `num_clusters` = 1",
    "data_one_class": "the data set `parts:data_one_class` has 1 class name: it needs two or more",
    "data_names": "has class names that are not a tuple of strings: 10",
    "model_none": "the model `parts:model_none` returned None, expected a torch.nn.Module",
    "model_raises": "the model `parts:model_raises` failed at line {line} of {folder}/parts.py: KeyError: 'boom'",
    "model_no_arguments": "takes 0 positional arguments but 2 were given",
    "model_outputs": "returned (2, 9) for 2 samples, expected shape (2, 10)",
    "model_inputs": "the model `parts:model_inputs` cannot read samples of shape (1, 8, 8): ",
    "model_batch_norm": "the model's norm `1` keeps no statistics (track_running_stats=False), so its output for a sample ",
    "model_lazy": "the model has a lazy layer, which has no parameters yet: give its size",
    "model_buffer": "the model `parts:model_buffer` changes its buffer `mask` in training, which is neither a ",
    "model_double": "the model needs parameters to train, all of type float32",
    "model_nothing": "the model needs parameters to train (requires_grad): it has none",
    "model_train_raises": "the model `parts:model_train_raises` failed at line ",
    "model_train_detached": "the model `parts:model_train_detached` has outputs without a gradient in training, so ",
    "model_train_one": "`training.batch_size` must be 2 or more, got 1: the model's batch norms refuse a single ",
    "attack_none": "the attack {part} returned None, expected a fedcb2o.Shard",
    "attack_tuple": "the attack {part} returned a tuple, expected a fedcb2o.Shard",
    "attack_fewer": "the attack {part} returned samples of shape (5, 1, 8, 8) and type torch.float32, expected (30, ",
    "attack_shape": "the attack {part} returned samples of shape (30, 1, 8, 4)",
    "attack_labels": "the attack {part} returned labels outside 0 to 9",
    "attack_raises": "the attack `parts:attack_raises` failed at line {line} of {folder}/parts.py: IndexError: ",
    "criterion_scalar": "the criterion {part} returned shape (), expected (3,): a value for each received model",
    "criterion_wide": "the criterion {part} returned shape (3, 10), expected (3,): a value for each received model",
    "criterion_none": "the criterion {part} returned None, expected numbers: is a `return` missing?",
    "criterion_raises": "the criterion `parts:criterion_raises` failed at line {line} of {folder}/parts.py: Attribut",
    "criterion_local": "the criterion `parts:criterion_local` failed at line {line} of {folder}/parts.py: "
    + SEVERAL,
    "selection_strangers": "the selection {part} chose [101, 102, 103, 104, 105], expected different ones of [1, ",
    "selection_twice": "the selection {part} chose [1, 1], expected different ones of [1, 2, 3, 4, 5]",
    "selection_many": "the selection {part} chose 4 peers, more than `budget` = 3: [1, 2, 3, 4]",
    "selection_none": "the selection {part} returned None, expected numbers: is a `return` missing?",
    "selection_floats": "the selection {part} chose [1.5, 2.5], expected different ones of [1, 2, 3, 4, 5]",
    "selection_raises": "the selection `parts:selection_raises` failed at line {line} of {folder}/parts.py: IndexError",
    "rule_short": "the rule {part} returned weights of shape (1,), expected (3,) or (4,)",
    "rule_sum": "the rule {part} returned weights that are not positive with sum 1: [1.0, 1.0, 1.0]",
    "rule_negative": "the rule {part} returned weights that are not positive with sum 1: [2.0, -1.0, 0.0]",
    "rule_nan": "the rule {part} returned weights that are not positive with sum 1: [nan, nan, nan]",
    "rule_none": "the rule {part} returned None, expected numbers: is a `return` missing?",
    "rule_raises": "the rule `parts:rule_raises` failed at line {line} of {folder}/parts.py: ZeroDivisionError: ",
    "rule_local": "the rule `parts:rule_local` failed at line {line} of {folder}/parts.py: "
    + SEVERAL,
    "algorithm_none": "the algorithm returned None, expected an Algorithm",
    "notes": "the model `parts:notes` is of type int, not a function",
    "nothing": "the model `parts:nothing` cannot be imported: module 'parts' has no attribute",
    "no_module:f": "the model `no_module:f` cannot be imported: ModuleNotFoundError: No module named 'no_module'",
    "raises:f": "the model `raises:f` cannot be imported: RuntimeError: at import",
    "leaves:f": "the model `leaves:f` cannot be imported: SystemExit: 3",
    "syntax:f": "the model `syntax:f` cannot be imported: SyntaxError: ",
    ":f": "the model `:f` cannot be imported: ValueError: Empty module name",
}


def change_for(name: str) -> dict[str, object]:
    """Return the changes of the tiny experiment that use a function."""
    function_name = name if ":" in name else f"parts:{name}"
    if name == "model_train_one":
        return {"model": {"name": function_name}, "training": {"batch_size": 1}}
    match name.split("_")[0]:
        case "data" | "attack" as section:
            return {section: {"name": function_name}}
        case "criterion" | "selection" as key:
            return {"algorithm": {key: function_name}}
        case "rule":
            return {"algorithm": {"name": "by_rule", "rule": function_name}}
        case "algorithm":
            return {"algorithm": {"name": function_name}}
    return {"model": {"name": function_name}}


DRIVER = """
import json, sys, traceback
from tests.tiny import run_cli, save_time
save_time()
found = {}
for name in json.load(open("cases.json")):
    try:
        done = run_cli("run", name + ".toml", "--out", "run-" + name, "--workers", 1)
        found[name] = [done.status, done.out, done.err]
    except BaseException:
        found[name] = [-1, "", traceback.format_exc()]
json.dump(found, open("found.json", "w"))
"""


@pytest.fixture(scope="module")
def case_outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    (folder / "parts.py").write_text(USER_MODULE)
    (folder / "raises.py").write_text('raise RuntimeError("at import")')
    (folder / "leaves.py").write_text("import sys\nsys.exit(3)")
    (folder / "syntax.py").write_text("def f(:")
    for name in WRONG_FUNCTIONS:
        write(folder / f"{name}.toml", **change_for(name))
    (folder / "cases.json").write_text(json.dumps(list(WRONG_FUNCTIONS)))
    environment = {
        **ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT, ROOT / "src"))),
    }
    subprocess.run(
        [sys.executable, "-c", DRIVER], cwd=folder, env=environment, check=True, timeout=200
    )
    return folder, json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("name", WRONG_FUNCTIONS)
def test_a_wrong_user_function_gives_a_one_line_error(case_outcomes, name):
    folder, outcomes = case_outcomes
    done = CommandResult(*outcomes[name])
    assert done.out == ""
    line = next(
        (
            i
            for i, text in enumerate(USER_MODULE.splitlines(), 1)
            if text.startswith(f"def {name}(")
        ),
        None,
    )
    result = WRONG_FUNCTIONS[name].format(folder=folder, line=line, part=f"`parts:{name}`")
    assert result in done.one_line()
