"""The command line and its Python functions, with real processes and files."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import tomllib
from importlib.metadata import version

import pandas as pd
import pytest
import tomli_w

import fedcb2o
from fedcb2o.cli import runs, signals
from fedcb2o.errors import ConfigError
from fedcb2o.experiments.config.tables import presets
from fedcb2o.experiments.grid import load_grid
from fedcb2o.report import read_grid
from tests.tiny import (
    ENVIRONMENT,
    FEDCB2O,
    bits,
    cells_in_this_process,
    command,
    run_cli,
    set_processors,
    tiny,
    write,
)

COMMANDS = {
    "": "run bench assess compare report track watch new presets keys schema minimize data peer --install-completion",
    "run": "--set --seeds --out --data-dir --workers --track --resume --clean-twin Example:",
    "bench": "GRID --list --out --jobs --data-dir --resume Example:",
    "assess": "PRESET_OR_FILE.toml --full --out --jobs Example:",
    "compare": "{RUN}... --over",
    "report": "{RUN_OR_GRID}... --out --reference",
    "presets": "[PRESET]",
    "watch": "RUN_OR_GRID --port --refresh Example:",
    "new": "DIR --template Example:",
    "track": "{RUN}... --to TRACKER",
    "keys": "[NAME]",
    "schema": "--grid #:schema",
    "minimize": "[PROBLEM] --list --lower --upper --dynamics --set --tol --out",
    "data": "emnist mnist fashion_mnist cifar10",
    "data emnist": "--from --data-dir",
    "peer": "identity renew federation amend sign check run report proof demo",
    "peer identity": "--name --endpoint --out --days",
    "peer run": "--identity --data --resume",
    "peer federation": "--member --out --set --synchronous --deadline-seconds",
}
"""Words that the help of each command contains."""


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_contains_its_words(command):
    words = command.split()
    done = run_cli(*words, "--help")
    assert (done.status, done.err) == (0, "")
    for word in ("Usage: fedcb2o", "--help", *COMMANDS[command].split()):
        assert word in done.out
    assert run_cli(*words, "-h").out == done.out
    assert len(done.out.splitlines()) <= 45  # one screen


def test_help_lists_rare_options_separately_and_no_types_of_flags():
    text = run_cli("run", "--help").out
    assert "<bool>" not in text
    assert "Rarely needed" in text


@pytest.mark.parametrize("template", ["images", "text", "peers"])
def test_the_files_of_a_template_load(tmp_path, template, monkeypatch):
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    assert run_cli("new", tmp_path / template, "--template", template).status == 0
    experiment = fedcb2o.load(tmp_path / template / "mine.toml")
    assert experiment.name == "mine"
    if template != "peers":
        grid = load_grid(tmp_path / template / "compare.toml")
        assert "FedCBO" in grid.defences


def test_new_writes_an_experiment_that_runs_from_toml_and_python(tmp_path, monkeypatch):
    assert run_cli("new", str(tmp_path)).status == 0
    assert "exists: choose another folder" in run_cli("new", str(tmp_path)).one_line()
    monkeypatch.chdir(tmp_path)
    set_processors(monkeypatch, 1)  # workers would import PyTorch
    text = (tmp_path / "mine.toml").read_text().replace("rounds = 15", "rounds = 2")
    (tmp_path / "mine.toml").write_text(text)
    assert run_cli("run", "mine.toml", "--seeds", "0", "--quiet").status == 0

    settings = tomllib.loads(text) | {"name": "mine", "seeds": [0]}
    run = fedcb2o.run(settings, out="python")
    columns = ["round", "agent", "accuracy"]
    expected = fedcb2o.Run("runs/mine").records[columns]
    pd.testing.assert_frame_equal(run.records[columns], expected, check_exact=True)

    with cells_in_this_process():
        words = ("bench", "compare.toml", "--seeds", "0", "--jobs", "1", "--quiet")
        assert run_cli(*words).status == 0
    results = read_grid(tmp_path / "runs/compare")
    assert results.defences == ["Mine", "FedAssay", "FedCBO", "Trimmed mean", "Local training"]
    assert len(results.rows.query("role == 'attack'").accuracy.dropna()) == 10
    # Without a criterion of its own, the row FedAssay would have that of mine.toml.
    algorithms = [results.table["defences"][name]["algorithm"] for name in ("Mine", "FedAssay")]
    assert [part["criterion"] for part in algorithms] == ["mine:criterion", "class_loss_excess"]


def test_keys_and_parts_are_listed_and_described():
    keys = run_cli("keys").out
    assert "agents.budget: 1 to N - 1 (default: needed)\n    M, the number of models" in keys
    assert "](" not in keys
    attacks = run_cli("keys", "attack").out
    assert "ipm: eps = 0.5\n    Reverse the mean update" in attacks
    assert "data_dir" not in run_cli("keys", "data").out
    assert "Blanchard, El Mhamdi" in run_cli("keys", "krum").out
    budget = run_cli("keys", "agents.budget").out
    assert budget == run_cli("keys", "budget").out
    assert budget.startswith("agents.budget: 1 to N - 1 (default: needed)\n    M, the number")
    message = run_cli("keys", "krumm").one_line()
    assert "'krumm' is no key, no built-in part" in message
    assert "Did you mean `krum`" in message
    message = run_cli("keys", "algorithm.alpha").one_line()
    assert (
        "`alpha` is a parameter of fedassay, fedcb2o, fedcbo: such as `fedcb2o keys fed" in message
    )


def test_keys_describe_a_function_of_a_user(tmp_path, monkeypatch):
    (tmp_path / "own_parts.py").write_text(
        'def shrink(models, *, by: float = 0.5, times: int):\n    """Shrink the models."""\n'
        "def plain(models): ...\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    shown = run_cli("keys", "own_parts:shrink").out
    assert shown == "own_parts:shrink: by = 0.5, times\n\nShrink the models.\n"
    assert run_cli("keys", "own_parts:plain").out == "own_parts:plain: no parameters\n"
    assert "has no attribute 'shrnk'. Did you mean" in run_cli("keys", "own_parts:shrnk").one_line()


def test_a_file_of_another_kind_is_named(tmp_path):
    experiment = write(tmp_path / "mine.toml")
    message = run_cli("bench", experiment).one_line()
    assert "mine.toml has no `defences`: an experiment is run by `fedcb2o run`" in message
    grid = tmp_path / "grid.toml"
    grid.write_text("[attacks.Flip]\n[defences.Mean]\n", encoding="utf-8")
    assert "grid.toml is a grid: `fedcb2o bench` runs it" in run_cli("run", grid).one_line()
    child = tmp_path / "child.toml"
    child.write_text('extends = "gone.toml"\n', encoding="utf-8")
    assert f"cannot read {tmp_path / 'gone.toml'}: No such file" in run_cli("run", child).one_line()


def test_the_error_of_a_parameter_names_its_algorithm(tmp_path):
    words = ("run", "digits-fedcbo", "--set", "algorithm.rule=krum", "--out", str(tmp_path))
    assert "It is a parameter of `by_rule`" in run_cli(*words).one_line()


def test_a_signal_interrupts_again_a_few_seconds_after_an_ignored_one(monkeypatch):
    monkeypatch.setattr(signals, "IGNORE_SECONDS", 0.3)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    stop = signals.SignalGuard()
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)  # ignored, because the command ends already
        assert stop.exit_status == 128 + signal.SIGTERM
        time.sleep(0.4)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)
        assert (stop.outcome, stop.exit_status) == ("Terminated", 128 + signal.SIGHUP)
    finally:
        stop.restore()
        signal.signal(signal.SIGHUP, before)


def test_a_call_without_a_command_prints_help():
    assert "Usage: fedcb2o" in run_cli().out
    assert run_cli("--version").out.strip() == version("fedcb2o")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["fly"], "No such command 'fly'. See `fedcb2o --help`."),
        (["prests"], "No such command 'prests'. Did you mean 'presets'? See `fedcb2o --help`."),
        (["run"], "Missing argument 'PRESET_OR_FILE.toml'. See `fedcb2o run --help`."),
        (["run", "x", "--workers", "0"], ". See `fedcb2o run --help`."),
        (["run", "x", "--resme"], "No such option: --resme"),
        (["compare", "x", "--over", "best"], ". See `fedcb2o compare --help`."),
        (["data", "cifar"], "Did you mean 'cifar10'? See `fedcb2o data --help`."),
    ],
)
def test_the_error_of_a_wrong_command_is_one_line_with_its_help(words, line):
    assert line in run_cli(*words).one_line()


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (["run", "x", "--rounds", "3"], "rounds"),
        (["bench", "quick", "--checkpoint-every=3"], "checkpoint_every"),
        (["run", "x", "--agents.budget", "3"], "agents.budget"),
        (["peer", "federation", "--budget", "3"], "agents.budget"),
        (["minimize", "circle-ackley", "--beta", "0.05"], "beta"),
    ],
)
def test_an_unknown_option_with_the_name_of_a_setting_leads_to_set(words, setting):
    option = next(word for word in words if word.startswith("--")).partition("=")[0]
    message = f"No such option: {option}. Did you mean --set {setting}=VALUE? See `fedcb2o "
    assert message in run_cli(*words).one_line()


def test_an_unknown_option_of_a_command_without_set_leads_to_similar_options():
    assert "(Possible options: --out, --own)" in run_cli("report", "x", "--rounds", "3").one_line()
    assert "Option '--seeds' requires an argument" in run_cli("run", "x", "--seeds").one_line()


def test_presets_have_one_line_per_preset_with_recommended_ones_first():
    done = run_cli("presets")
    assert done.status == 0
    lines = done.out.splitlines()
    named = [line.split() for line in lines if line.startswith("  ")]
    assert sorted(words[0] for words in named) == list(presets())
    assert all(len(words) > 3 for words in named)
    headings = [i for i, line in enumerate(lines) if line.endswith(":")]
    assert len(headings) + len(named) == len(lines)
    assert all("fedassay" in lines[i + 1] for i in headings)


def test_the_printed_file_of_a_preset_is_the_same_experiment(tmp_path):
    (tmp_path / "copy.toml").write_text(run_cli("presets", "digits-fedcb2o-released").out)
    result = fedcb2o.load(tmp_path / "copy.toml").settings()
    assert result == fedcb2o.load("digits-fedcb2o-released").settings()
    assert "Did you mean `digits-fedassay`?" in run_cli("presets", "digit-fedassay").one_line()
    assert "Did you mean `digits-fedassay`?" in run_cli("presets", "digits").one_line()
    assert "Did you mean `har-fedassay` or" in run_cli("presets", "fedassay").one_line()


def test_the_version_is_printed_by_the_module():
    assert fedcb2o.__version__ == version("fedcb2o")
    done = command("-m", "fedcb2o", "--version", program=sys.executable)
    assert (done.status, done.out.strip(), done.err) == (0, version("fedcb2o"), "")


BASH = """
eval "$(cat "$HOME/.bash_completions/fedcb2o.sh")"
COMP_WORDS=($1 "$2") COMP_CWORD=${3:-1}
_fedcb2o_completion fedcb2o
printf '%s ' "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_completion_is_installed_and_completes(tmp_path):
    environment = {
        **ENVIRONMENT,
        "HOME": str(tmp_path),
        "PATH": f"{FEDCB2O.parent}:{os.environ['PATH']}",
    }
    (tmp_path / "mine.toml").touch()

    def bash(script, *words):
        done = subprocess.run(
            ["bash", "--norc", "-c", script, "bash", *words],
            env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "bash completion installed" in bash("fedcb2o --install-completion; true")
    assert (
        tmp_path / ".bashrc"
    ).read_text().strip() == f"source '{tmp_path}/.bash_completions/fedcb2o.sh'"
    assert bash(BASH, "fedcb2o", "pre") == "presets "
    words = bash(BASH, "fedcb2o run", "digits-fedassay", "2")
    assert words == "digits-fedassay digits-fedassay-backdoors "
    assert bash(BASH, "fedcb2o run", "mi", "2") == "mine.toml "
    assert bash(BASH, "fedcb2o track runs/mine --to", "t", "4") == "tensorboard "


@pytest.mark.parametrize(
    ("text", "seeds"), [("3", [3]), ("0,1,2", [0, 1, 2]), ("7, 5", [7, 5]), ("0-2,7", [0, 1, 2, 7])]
)
def test_seeds_are_parsed(text, seeds):
    assert runs._parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "1,,2", "a", "1;2", "0-", "3-1", "0-1-2", "1.5"])
def test_the_error_of_wrong_seeds_is_one_line(tmp_path, text):
    with pytest.raises(ConfigError, match="--seeds needs whole numbers with commas, such as 0,1,2"):
        runs._parse_seeds(text)
    path = write(tmp_path / "tiny.toml")
    message = "--seeds needs whole numbers"
    assert message in run_cli("run", path, "--seeds", text, "--out", tmp_path / "run").one_line()


@pytest.mark.parametrize("change", ["rounds", "=3", "", "rounds:3"])
def test_set_needs_a_key_and_a_value(tmp_path, change):
    line = run_cli(
        "run", write(tmp_path / "tiny.toml"), "--set", change, "--out", tmp_path / "run"
    ).one_line()
    assert line == f"--set needs KEY=VALUE, such as rounds=10, got {change!r}"


def test_a_run_has_a_clean_twin_a_local_baseline_and_a_table(tmp_path):
    path, out = write(tmp_path / "tiny.toml"), tmp_path / "run"
    done = run_cli("run", path, "--set", "rounds=2", "--set", "agents.budget = 2", "--seeds", "5,1001", "--clean-twin", "--local-baseline",
                "--out", out, "--workers", 1)  # fmt: skip
    assert (done.status, done.out) == (0, "")
    assert "tiny seed 1001: round 2/2 accuracy" in done.err
    run = fedcb2o.Run(out)
    assert run.complete
    assert run.seeds == (5, 1001)
    assert (run.config["rounds"], run.config["agents"]["budget"]) == (2, 2)
    assert set(run.records["round"]) == {1, 2}
    assert fedcb2o.Run(tmp_path / "run-clean").config["agents"]["malicious_role"] == "clean"
    assert fedcb2o.Run(tmp_path / "run-local").config["algorithm"] == {"name": "local_training"}
    table = run_cli("compare", out, tmp_path / "run-clean")
    assert table.status == 0
    assert "Gain over training alone" in table.out
    assert "Attack success rate" in table.out


def test_quiet_prints_results_and_errors_only(tmp_path):
    path = write(tmp_path / "tiny.toml", rounds=1, agents={"malicious_role": "clean"})
    out = tmp_path / "run"
    done = run_cli("run", path, "--clean-twin", "--out", out, "--workers", 1)
    assert "Note: tiny has no clean counterpart" in done.err
    assert "Done. For a table: fedcb2o compare" in done.err
    for words in (("--quiet", "run", path), ("run", path, "--quiet", "--clean-twin")):
        quiet = run_cli(*words, "--out", out, "--workers", 1, "--resume")
        assert (quiet.status, quiet.out, quiet.err) == (0, "", "")
    assert run_cli("--quiet", "compare", out).out == run_cli("compare", out).out != ""
    assert run_cli("--quiet", "run", path, "--out", out).one_line().startswith(str(out))
    assert "processes" in run_cli("--verbose", "run", path, "--out", out, "--seeds", "3").err


def test_several_experiments_each_have_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [write(tmp_path / f"{name}.toml", name=name, rounds=1) for name in ("one", "two")]
    assert run_cli("run", *paths, "--out", "both", "--workers", 1).status == 0
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == ["one", "two"]
    assert run_cli("run", paths[0], "--workers", 1).status == 0
    assert fedcb2o.Run(tmp_path / "runs" / "one").complete
    nested = run_cli("compare", "both")
    assert nested.one_line().endswith("it holds the runs one, two: name those")


# A user's functions: in a module next to the configuration, in a script, on standard input.

PARTS = textwrap.dedent("""
    import torch
    from torch import nn

    import fedcb2o
    from fedcb2o import Dataset, Shard


    def data(*, num_samples: int = 300) -> Dataset:
        from fedcb2o.data import digits

        whole = digits()
        pool = Shard(whole.pool.x[:num_samples], whole.pool.y[:num_samples])
        return Dataset(pool, whole.test, whole.class_names)


    class Network(nn.Module):
        def __init__(self, classes, width):
            super().__init__()
            self.first, self.last = nn.Linear(64, width), nn.Linear(width, classes)

        def forward(self, x):
            return self.last(self.first(x.flatten(1)).tanh())


    def model(shape, classes, *, width: int = 4):
        return Network(classes, width)


    def attack(shard, draw, *, source: int, target: int):
        return Shard(shard.x, torch.where(shard.y == source, target, shard.y))


    def criterion(judged, *, power: float = 1.0):
        return judged.losses.mean ** power


    def selection(contacts, candidates, budget, draw):
        return candidates[-budget:]


    def rule(judged):
        return torch.ones(len(judged.received.ids)) / len(judged.received.ids)
""")

SCRIPT = """
import sys
experiment = dict(
    name="mine", seeds=[1000], rounds=2,
    data=dict(name=data, num_samples=250), model=dict(name=model, width=5),
    agents=dict(benign=2, malicious=1, benign_samples=20, malicious_samples=30, budget=3),
    training=dict(gamma=0.05),
    algorithm=dict(name="fedcb2o", mixing_factor=1.0, selection=selection, criterion=dict(name=criterion, power=2.0)),
    attack=dict(name=attack, source=9, target=4),
)
mine = fedcb2o.run(experiment, out=sys.argv[1], workers=2)
averaging = dict(name="by_rule", rule=rule)
by_rule = fedcb2o.run({**experiment, "algorithm": averaging}, out=sys.argv[1] + "-rule", workers=2)
again = fedcb2o.run(experiment, out=sys.argv[1], workers=2, resume=True)
print(mine.complete, by_rule.complete, len(mine.records), again.records.equals(mine.records))
"""

FILE = tiny(
    name="mine",
    rounds=2,
    data={"name": "parts:data", "num_samples": 250},
    model={"name": "parts:model", "width": 5},
    training={"batch_size": 64, "local_epochs": 5},
    attack={"name": "parts:attack", "source": 9, "target": 4},
)
FILE["algorithm"] = {
    "name": "fedcb2o",
    "mixing_factor": 1.0,
    "selection": "parts:selection",
    "criterion": {"name": "parts:criterion", "power": 2.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("words", [["script.py"], ["-"]], ids=["file", "stdin"])
def test_a_users_functions_give_the_same_bits_in_a_script_and_a_configuration(
    tmp_path, monkeypatch, words
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "mine.toml").write_text(tomli_w.dumps(FILE))
    (tmp_path / "script.py").write_text(PARTS + SCRIPT)
    done = run_cli("run", "mine.toml", "--out", "configured", "--workers", 1)
    assert done.status == 0, done.err
    del sys.modules["parts"]
    with (tmp_path / "script.py").open() as script:
        python = subprocess.run(
            [sys.executable, *words, "scripted"],
            env=ENVIRONMENT, stdin=script, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert python.returncode == 0, python.stderr
    assert python.stdout == "True True 12 True\n"
    result, expected = bits(tmp_path / "scripted"), bits(tmp_path / "configured")
    del result["config.toml"], expected["config.toml"]
    assert result == expected
    value = json.loads((tmp_path / "scripted/seed-1000/agents.json").read_text())["dim"]
    assert value == 64 * 5 + 5 + 5 * 10 + 10


def test_python_and_the_command_line_have_the_same_errors(tmp_path):
    message = r"there is no preset `digit-fedassay`\. Did you mean `digits-fedassay`\?"
    with pytest.raises(ConfigError, match=message):
        fedcb2o.run("digit-fedassay")
    with pytest.raises(ConfigError, match="there is no key `roundz`"):
        fedcb2o.run({**tiny(), "roundz": 3})
    finished_rounds = []
    run = fedcb2o.run(
        tiny(rounds=2),
        out=tmp_path,
        seeds=range(2),
        watch=lambda e, seed, line: finished_rounds.append((seed, line["round"])),
    )
    assert finished_rounds == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert run.seeds == (0, 1)
