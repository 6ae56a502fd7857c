"""Records and output of a run: summary, asked peers, progress and versions."""

import importlib
import io
import json
import linecache
import os
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.text import Text
from tests.tiny import bits, lines_of, run_cli, tiny, write
from torch import nn

import fedcb2o
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.experiments import load, run
from fedcb2o.experiments.runs import Progress, _provenance
from fedcb2o.federated.evaluation import models
from fedcb2o.records import _parquet
from fedcb2o.report import compare, left_out_note, report, summary
from fedcb2o.rng import stream

FILES = (
    "agents.json",
    "checkpoint.safetensors",
    "environment.json",
    "metrics.jsonl",
    "pairs.jsonl",
    "samples.safetensors",
    "summary.json",
    "sums.json",
    "timing.jsonl",
)


def test_the_summary_file_equals_the_report(tmp_path):
    done = run(tiny(rounds=5, evaluate_every=2), out=tmp_path, workers=1, seeds=[1000, 1001])
    for seed, expected in summary(done.records).set_index("seed", drop=False).iterrows():
        written = json.loads((tmp_path / f"seed-{seed}" / "summary.json").read_text())
        assert written == expected.to_dict()
        assert (written["seed"], written["round"], written["rounds"]) == (seed, 5, 5)
        assert written["accuracy_worst"] == written["accuracy_worst_tenth"] <= written["accuracy"]
    accuracies = [
        json.loads((tmp_path / f"seed-{s}/summary.json").read_text())["accuracy"]
        for s in (1000, 1001)
    ]
    assert compare([done]).loc["Overall accuracy", "tiny"] == f"{50 * sum(accuracies):.1f}"


def test_asked_peers_without_an_answer_are_recorded(tmp_path):
    run(tiny(rounds=8, agents={"participation": 0.6}), out=tmp_path, workers=1)
    unanswered = 0
    for line, metrics in zip(
        lines_of(tmp_path, "pairs"), lines_of(tmp_path, "metrics"), strict=True
    ):
        online = [j for j, asked in enumerate(line["asked"]) if asked]
        for asked, ids in zip(line["asked"], line["ids"], strict=True):
            assert ids == [i for i in asked if i in online]
            unanswered += len(asked) - len(ids)
        assert metrics["answered"] == [len(ids) for ids in line["ids"]]
    assert unanswered


def test_an_evaluation_in_parts_changes_no_bit(tmp_path, monkeypatch):
    settings = tiny(rounds=2, attack={"name": "backdoor", "target": 3})
    run(settings, out=tmp_path / "whole", workers=1)
    monkeypatch.setattr(models, "_MAX_OUTPUTS", 1)
    run(settings, out=tmp_path / "parts", workers=1)
    assert bits(tmp_path / "parts") == bits(tmp_path / "whole")


def test_pairs_of_many_agents_are_recorded_for_some_at_equal_distances(tmp_path, monkeypatch):
    settings = tiny(rounds=2, records="jsonl", algorithm={"name": "by_rule", "rule": "multi_krum"})
    whole = run(settings, out=tmp_path / "whole", workers=1)
    count = len(whole.agents)
    monkeypatch.setattr(_parquet, "MAX_PAIR_AGENTS", count - 2)
    part = run(settings, out=tmp_path / "part", workers=1)
    recorded = [k * count // (count - 2) for k in range(count - 2)]
    for line, of_all in zip(
        lines_of(tmp_path / "part", "pairs"), lines_of(tmp_path / "whole", "pairs"), strict=True
    ):
        assert line.pop("agents") == recorded
        assert line == {
            key: [value[j] for j in recorded] if isinstance(value, list) else value
            for key, value in of_all.items()
        }
    expected = whole.pairs[whole.pairs.agent.isin(recorded)].reset_index(drop=True)
    assert part.pairs.equals(expected)
    assert part.records.equals(whole.records)


def test_an_extended_run_keeps_the_evaluation_of_its_former_last_round(tmp_path):
    settings = tiny(evaluate_every=3)
    run({**settings, "rounds": 2}, out=tmp_path / "further", workers=1)
    run({**settings, "rounds": 4}, out=tmp_path / "further", workers=1, resume=True)
    run({**settings, "rounds": 4}, out=tmp_path / "at once", workers=1)
    further, at_once = bits(tmp_path / "further"), bits(tmp_path / "at once")
    assert {name for name in further if further[name] != at_once[name]} == {"metrics.jsonl"}
    evaluated = [
        line["round"] for line in lines_of(tmp_path / "further", "metrics") if "accuracy" in line
    ]
    assert evaluated == [2, 3, 4]


def test_partial_files_of_a_killed_run_are_removed_and_user_files_are_kept(tmp_path):
    out, experiment = tmp_path / "run", tiny(rounds=1)
    run(experiment, out=out, workers=1)
    partial_files = [
        out / "config.toml.tmp",
        *(out / "seed-1000" / f"{name}.tmp" for name in FILES),
    ]
    user_files = [
        out / "notes.tmp",
        out / "seed-1000" / "picture.png.tmp",
        out / "elsewhere" / "metrics.jsonl.tmp",
    ]
    (out / "elsewhere").mkdir()
    for path in partial_files + user_files:
        path.write_bytes(b"half")
    run(experiment, out=out, workers=1, resume=True)
    assert [path for path in partial_files + user_files if path.exists()] == user_files


def test_files_of_a_run_are_private(tmp_path):
    before = os.umask(0o022)
    try:
        run(tiny(rounds=1), out=tmp_path / "run", workers=1)
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {*FILES, "config.toml"}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_other_versions_on_resume_give_a_note(tmp_path, monkeypatch):
    path, out = write(tmp_path / "tiny.toml", rounds=2), tmp_path / "run"
    assert run_cli("run", path, "--out", out, "--workers", 1).status == 0
    same = run_cli("run", path, "--out", out, "--workers", 1, "--resume", "--set", "rounds=3")
    assert (same.status, "Note: " in same.err) == (0, False)
    versions = {"fedcb2o": version("fedcb2o"), "numpy": version("numpy"), "torch": "99.0"}
    monkeypatch.setattr(_provenance, "_version", versions.get)
    other = run_cli("run", path, "--out", out, "--workers", 1, "--resume", "--set", "rounds=4")
    assert other.status == 0
    notes = [line for line in other.err.splitlines() if line.startswith("Note: ")]
    assert notes == [
        (
            f"Note: {out / 'seed-1000'} began with torch {version('torch')}, now 99.0: its next "
            f"rounds may differ in bits."
        )
    ]
    finished = run_cli("run", path, "--out", out, "--workers", 1, "--resume", "--set", "rounds=4")
    assert "Note: " not in finished.err  # nothing is left to run


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_the_first_phase_at_once(capsys, terminal):
    stream = io.StringIO()
    experiment = load(tiny(rounds=3))
    with Progress(Console(file=stream, force_terminal=terminal, width=100), every=60.0) as progress:

        def output():
            progress._bars.refresh()
            return stream.getvalue() if terminal else capsys.readouterr().err

        progress.phase(experiment, 7, 1, "training")
        first = output()
        assert "training" in first
        assert ("0/3" if terminal else "tiny seed 7: round 1/3 training\n") in first
        progress.phase(experiment, 7, 1, "evaluating")
        # without a terminal only after `every` seconds
        assert ("evaluating" in output()) == terminal
        scores = {
            "accuracy": [0.5, None],
            "source_accuracy": [None, None],
            "attack_success_rate": [None, None],
        }
        progress(experiment, 7, {"round": 3, **scores})
        assert "3/3" in (last := output())
        assert "accuracy 50.0%" in last


def test_a_line_of_progress_names_the_round_of_its_scores(capsys):
    experiment = load(tiny(rounds=300))
    scores = {
        "accuracy": [0.5, None],
        "source_accuracy": [0.25, None],
        "attack_success_rate": [None, None],
    }
    with Progress(Console(file=io.StringIO()), every=0.0) as progress:
        progress(experiment, 7, {"round": 1})
        progress(experiment, 7, {"round": 2, **scores})
        progress.phase(experiment, 7, 3, "mixing")
        progress(experiment, 7, {"round": 3})
        progress.phase(experiment, 7, 4, "training")
        progress(experiment, 7, {"round": 300, **scores})
    assert [
        line.removeprefix("tiny seed 7: ") for line in capsys.readouterr().err.splitlines()
    ] == [
        "round 1/300 done",
        "round 2/300 accuracy 50.0%, source 25.0%",
        "round 2/300 accuracy 50.0%, source 25.0%; 3: mixing",
        "round 2/300 accuracy 50.0%, source 25.0%; 3: done",
        "round 2/300 accuracy 50.0%, source 25.0%; 4: training",
        "round 300/300 accuracy 50.0%, source 25.0%",
    ]


def test_progress_is_not_truncated_at_80_columns(tmp_path):
    stream = io.StringIO()
    experiment = load(tiny(rounds=300, name="digits-fedassay"))
    scores = {"accuracy": [0.5], "source_accuracy": [0.25], "attack_success_rate": [0.125]}
    with Progress(Console(file=stream, force_terminal=True, width=80)) as progress:
        for n in range(1, 5):
            progress(experiment, 1000, {"round": n, **scores})
            progress.phase(
                experiment, 1000, n + 1, "mixing, 12.5 MiB a round, slowest 3 on second.example"
            )
    text = Text.from_ansi(stream.getvalue()).plain
    assert all(
        word in text
        for word in ("digits-fedassay seed 1000 ", " 4/300 0:00", "12.5%", "second.example")
    )
    assert "…" not in text


def test_a_run_that_failed_in_its_first_round_is_repeated_without_resume(tmp_path):
    has_error = [True]

    def criterion(inputs):
        if has_error[0]:
            raise ValueError("wrong")
        return inputs.losses.mean

    experiment = tiny(algorithm={"criterion": criterion})
    with pytest.raises(ConfigError, match="wrong"):
        run(experiment, out=tmp_path / "run", workers=1)
    has_error[0] = False
    assert run(experiment, out=tmp_path / "run", workers=1).complete
    with pytest.raises(RunError, match="already holds seed 1000"):
        run(experiment, out=tmp_path / "run", workers=1)


def test_a_run_is_overwritten_on_request_only(tmp_path):
    out = tmp_path / "run"
    first = run(tiny(), seeds=[1000, 1001], out=out, workers=1).records
    (out / "notes.txt").write_text("mine")
    second = run(tiny(rounds=2), seeds=[1000], out=out, workers=1, overwrite=True)
    assert second.records["round"].max() == 2
    assert first["round"].max() == 3
    # A seed that the new run lacks is gone, too; other files stay.
    assert sorted(path.name for path in out.iterdir()) == ["config.toml", "notes.txt", "seed-1000"]
    with pytest.raises(ConfigError, match="give one of resume and overwrite"):
        run(tiny(), out=out, resume=True, overwrite=True)

    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("mine")
    with pytest.raises(RunError, match="is not empty and holds no run"):
        run(tiny(), out=tmp_path / "other", workers=1, overwrite=True)


NETWORK = """
import math

from torch import nn

SIZE = {size}


class Net(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(inputs, SIZE), nn.{layer}(), nn.Linear(SIZE, outputs))

    def forward(self, x):
        return self.layers(x){comment}


def build(input_shape, num_classes):
    return Net(math.prod(input_shape), num_classes)
"""


def test_a_changed_source_is_named_on_resume(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def again(module="net_of_user", **options):
        Path(f"{module}.py").write_text(NETWORK.format_map({**before, **options}))
        sys.modules.pop(module, None)
        linecache.clearcache()
        importlib.invalidate_caches()
        caplog.clear()
        table = tiny(rounds=1, model={"name": f"{module}:build"})
        return run(table, out=tmp_path / "run", workers=1, resume=True)

    before = {"size": 4, "layer": "ReLU", "comment": ""}
    again()
    again(comment="  # unchanged")
    assert not caplog.text
    for change in ({"size": 5}, {"layer": "Tanh"}):
        again(**change)
        assert "run/seed-1000 began with another source of `net_of_user:build`" in caplog.text
    table = tiny(rounds=1, model={"name": "net_of_user:build"})
    with pytest.raises(RunError) as error:
        run(table, out=tmp_path / "run", workers=1)
    assert str(error.value) == (
        f"{tmp_path / 'run'} already holds seed 1000 of this run, with another source of "
        "`net_of_user:build`: resume=True continues it, overwrite=True begins anew, or choose "
        "another `out`"
    )


def test_a_changed_class_of_a_network_object_is_named(tmp_path, caplog):
    def network(layer):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(64, 10)

            def forward(self, x):
                return layer(self.linear(x.flatten(1)))

        torch.manual_seed(0)
        return Net()

    options = {"data": "digits", "rounds": 1, "benign_samples": 20, "out": tmp_path, "workers": 1}
    run(model=network(abs), **options)
    run(model=network(abs), **options, resume=True)
    assert "another source" not in caplog.text
    run(model=network(lambda y: -y), **options, resume=True)
    assert "another source" in caplog.text


def far_targets():
    x = stream(0, "x").normal(size=(80, 3)).astype(np.float32)
    y = x.sum(1)
    return fedcb2o.dataset(x[:60], y[:60], x_test=x[60:], y_test=1e25 * y[60:], numbers=True)


def one_far_owner():
    """Three owners with y = sum(x); test targets of the last one overflow a squared error."""
    x = stream(0, "x").normal(size=(80, 3)).astype(np.float32)
    y = x.sum(1)
    owner = np.arange(80) % 3
    tests = np.where(owner == 2, 1e25 * y, y)
    return fedcb2o.dataset(
        x[:60], y[:60], owner=owner[:60], x_test=x[60:], y_test=tests[60:],
        owner_test=owner[60:], numbers=True,
    )  # fmt: skip


def linear(shape, outputs):
    return nn.Linear(shape[0], outputs)


@pytest.mark.filterwarnings("ignore:the targets of .* standard deviation")
def test_a_test_loss_that_overflows_is_one_clear_error_of_run_and_report(tmp_path):
    table = tiny(data={"name": far_targets}, rounds=2)
    table["model"] = {"name": linear}
    table["agents"] = {
        "num_clusters": 1,
        "benign": 2,
        "malicious": 0,
        "budget": 1,
        "benign_samples": 20,
    }
    table["training"] = {"gamma": 0.01, "loss": "squared_error"}
    table.pop("attack", None)
    with pytest.raises(
        RunError, match=r"seed-1000 at its last round are not finite.*divide the targets"
    ):
        run(table, out=tmp_path / "run")
    with pytest.raises(RunError, match="has run all rounds, and none of its results is finite"):
        report([fedcb2o.Run(tmp_path / "run")], tmp_path / "report")


@pytest.mark.filterwarnings("ignore:the targets of .* standard deviation")
def test_agents_whose_test_loss_overflows_are_counted(tmp_path, caplog):
    table = tiny(data={"name": one_far_owner}, rounds=2)
    table["model"] = {"name": linear}
    table["agents"] = {"num_clusters": 1, "benign": 3, "malicious": 0, "budget": 2}
    table["training"] = {"gamma": 0.01, "loss": "squared_error"}
    table.pop("attack", None)
    finished = run(table, out=tmp_path / "run")
    note = "seed 1000: the mean of `test_loss` leaves out 1 of 3 agents without a"
    assert note in caplog.text
    last = finished.records[finished.records["round"] == 2].set_index("agent").test_loss
    assert last.isna().tolist() == [False, False, True]
    assert summary(finished.records).test_loss[0] == pytest.approx(last[:2].mean())
    assert note in left_out_note(finished)
    assert note in " ".join(run_cli("compare", tmp_path / "run").err.split())
