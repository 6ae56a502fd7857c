"""Records: written and read without loss, also after a full disk, a power cut or a partial line."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from fedcb2o.errors import RunError
from fedcb2o.federated.evaluation.metrics import (
    AttackGoal,
    EvaluationResult,
    Score,
    compute_metrics,
)
from fedcb2o.federated.ragged import AgentIds
from fedcb2o.peer.report.peer_records import RoundRecord
from fedcb2o.records import (
    METRICS,
    OPTIONAL_METRICS,
    RoundLog,
    Run,
    atomic_write,
    write_json,
    write_toml,
)
from tests.report.synthetic import write_run


def lines(path):
    return [json.loads(text) for text in path.read_text().splitlines()]


def rounds(path):
    return [line["round"] for line in lines(path)]


@pytest.fixture
def records(tmp_path):
    records = RoundLog(tmp_path)
    for n in range(1, 6):
        records.append("metrics", {"round": n, "train_loss": [0.5 / n, 1.0]})
        records.append(
            "pairs", {"round": n, "ids": [[1], [0]], "weights": [[0.25], [1.0]], "own": [0.75, 0.0]}
        )
        records.append("timing", {"round": n, "train": 0.1})
    return records


def test_append_writes_arrays_tensors_and_null(tmp_path):
    records = RoundLog(tmp_path)
    line = {
        "round": np.int64(1),
        "train_loss": torch.tensor([0.5, float("nan")]),
        "answered": np.array([2, 3]),
        "more": (float("inf"), None, np.float32(0.25), True, "text"),
    }
    records.append("metrics", line)
    assert lines(tmp_path / "metrics.jsonl") == [
        {
            "round": 1,
            "train_loss": [0.5, None],
            "answered": [2, 3],
            "more": [None, None, 0.25, True, "text"],
        }
    ]


def test_floats_are_read_to_the_bit(tmp_path):
    values = np.random.default_rng(0).random(100)
    RoundLog(tmp_path).append("metrics", {"round": 1, "train_loss": values})
    assert lines(tmp_path / "metrics.jsonl")[0]["train_loss"] == values.tolist()


def test_truncate_drops_later_rounds_and_a_partial_line(records, tmp_path):
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 6, "train_l')
    records.truncate(3)
    for name in ("metrics", "pairs", "timing"):
        assert rounds(tmp_path / f"{name}.jsonl") == [1, 2, 3]
    records.append("metrics", {"round": 4})
    assert rounds(tmp_path / "metrics.jsonl") == [1, 2, 3, 4]
    result = sorted(path.name for path in tmp_path.iterdir())
    assert result == ["metrics.jsonl", "pairs.jsonl", "timing.jsonl"]


def test_truncate_handles_round_0_and_missing_records(records, tmp_path):
    records.truncate(0)
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    (tmp_path / "new").mkdir()
    RoundLog(tmp_path / "new").truncate(0)


def test_truncate_drops_zero_bytes_after_the_checkpoint(records, tmp_path):
    with (tmp_path / "pairs.jsonl").open("ab") as file:
        file.write(b"\0" * 40 + b"\n")
    records.truncate(5)
    assert rounds(tmp_path / "pairs.jsonl") == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("keep", [[1, 2, 4], [1, 2], [1, 2, 2, 3, 4]])
def test_truncate_refuses_records_that_lack_rounds_of_the_checkpoint(records, tmp_path, keep):
    text = "".join(json.dumps({"round": n}) + "\n" for n in keep)
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(RunError, match="lacks rounds before the checkpoint's round 4"):
        records.truncate(4)
    assert (tmp_path / "metrics.jsonl").read_text() == text


def test_truncate_ignores_missing_times(records, tmp_path):
    records.truncate(5)
    (tmp_path / "timing.jsonl").write_text('{"round": 1, "train": 0.1}\n')
    records.truncate(5)


FULL = """
import resource, sys
from pathlib import Path
from fedcb2o.errors import RunError
from fedcb2o.records import RoundLog, atomic_write, write_json
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
records = RoundLog(Path(sys.argv[1]))
write_json(records.folder / "summary.json", {"old": 1})
try:
    for n in range(1, 100):
        records.append("metrics", {"round": n, "train_loss": [1 / 3] * 20})
except RunError as error:
    print(n, error)
try:
    atomic_write(records.folder / "summary.json", b"x" * 5000)
except RunError as error:
    print(error)
try:
    import numpy, safetensors.numpy
    model = {"theta": numpy.zeros(10000)}
    atomic_write(records.folder / "summary.json", safetensors.numpy.save(model))
except RunError as error:
    print(error)
"""


def test_a_full_disk_raises_one_error_and_loses_no_record(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True
    )
    first, second, third = done.stdout.splitlines()
    failed_round, _, message = first.partition(" ")
    expected = f"cannot write {tmp_path / 'metrics.jsonl'}: File too large; nothing already written is lost: make room (or repair the folder) and give the command again, that of a run with --resume"
    assert message == expected
    assert rounds(tmp_path / "metrics.jsonl") == list(range(1, int(failed_round)))
    assert (tmp_path / "metrics.jsonl").read_text().endswith("\n")
    assert "summary.json: File too large" in second
    assert "summary.json" in third
    assert json.loads((tmp_path / "summary.json").read_text()) == {"old": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "summary.json"]


def test_a_device_without_space_raises_an_error(tmp_path, monkeypatch):
    full = lambda path, flags: os.open("/dev/full", os.O_WRONLY)  # noqa: E731
    monkeypatch.setattr("fedcb2o.records._jsonl.open_private", full)
    message = r"metrics\.jsonl: No space left on device; nothing already written is lost"
    with pytest.raises(RunError, match=message):
        RoundLog(tmp_path).append("metrics", {"round": 1})


def test_sync_ignores_missing_files(records, tmp_path):
    (tmp_path / "timing.jsonl").unlink()
    records.sync()


def test_atomic_write_removes_its_temporary_file_and_keeps_the_old_content(tmp_path):
    path = tmp_path / "checkpoint"
    atomic_write(path, b"old")

    def fails(temporary):
        temporary.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        atomic_write(path, fails)
    assert path.read_bytes() == b"old"
    atomic_write(path, save({"x": np.ones(2)}))
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]
    with pytest.raises(RunError, match="cannot write"):
        atomic_write(tmp_path / "missing" / "file", b"")


def test_toml_omits_none_and_json_writes_null(tmp_path):
    write_toml(
        tmp_path / "a.toml", {"name": "x", "none": None, "inner": {"beta": None, "seeds": (0, 1)}}
    )
    result = tomllib.loads((tmp_path / "a.toml").read_text())
    assert result == {"name": "x", "inner": {"seeds": [0, 1]}}
    write_json(tmp_path / "a.json", {"loss": float("nan"), "list": np.arange(2)})
    assert json.loads((tmp_path / "a.json").read_text()) == {"loss": None, "list": [0, 1]}


# Reading

SMALL = {
    "cluster": [0, 0, 0],
    "malicious": [False, False, True],
    "num_samples": [50, 60, 120],
    "source_in_validation": [0, 2, None],
}


def write_small_run(folder, **options):
    metrics = [
        {
            "round": 1,
            "train_loss": [1, 2, None],
            "malicious_weight": [0.5, 0.0, None],
            "answered": [2, 1, 0],
        },
        {
            "round": 2,
            "train_loss": [0.5, 1, 2],
            "validation_loss": [1, 1, None],
            "malicious_weight": [0.25, 0.0, None],
            "answered": [2, 1, 0],
            "accuracy": [0.5, 0.75, None],
            "source_accuracy": [0.25, 1.0, None],
            "attack_success_rate": [0.5, 0.0, None],
        },
    ]
    pairs = [
        {
            "round": 1,
            "ids": [[1, 2], [0], []],
            "weights": [[0.25, 0.5], [1.0], []],
            "own": [0.25, 0.0, 1.0],
        },
        {
            "round": 2,
            "ids": [[2], [], [0]],
            "weights": [[0.25], [], [0.5]],
            "own": [0.75, 1.0, 0.5],
        },
    ]
    return write_run(
        folder, {"rounds": 2}, agents=SMALL, metrics={7: metrics}, pairs={7: pairs}, **options
    )


def test_a_run_reads_the_written_records(tmp_path):
    run = write_small_run(tmp_path / "out")
    assert run.folder == tmp_path / "out"
    assert run.seeds == (7,)
    assert run.complete
    assert run.title == "out"
    records = run.records
    assert list(records.columns[:3]) == ["seed", "round", "agent"]
    assert len(records) == 6
    row = records[(records["round"] == 2) & (records.agent == 1)].iloc[0]
    result = (row.seed, row.cluster, row.malicious, row.num_samples, row.source_in_validation)
    assert result == (7, 0, False, 60, 2)
    result = (row.train_loss, row.accuracy, row.source_accuracy, row.attack_success_rate)
    assert result == (1, 0.75, 1, 0)
    assert records[records["round"] == 1].accuracy.isna().all()
    assert records.malicious.dtype == bool
    assert run.agents.source_in_validation.isna().tolist() == [False, False, True]


def test_pairs_of_an_agent_with_itself_hold_its_own_weight(tmp_path):
    pairs = write_small_run(tmp_path / "out").pairs
    assert pairs.groupby(["seed", "round", "agent"]).weight.sum().eq(1).all()
    own = pairs[pairs.agent == pairs.peer]
    assert own.weight.tolist() == [0.25, 0.0, 1.0, 0.75, 1.0, 0.5]
    assert pairs[(pairs["round"] == 1) & (pairs.agent == 0)].peer.tolist() == [1, 2, 0]


def test_a_run_in_progress_is_read_without_its_partial_line(tmp_path):
    run = write_small_run(tmp_path / "out", complete=False)
    for name in ("metrics", "pairs", "timing"):
        with (run.folder / "seed-7" / f"{name}.jsonl").open("a") as file:
            file.write('{"round": 3, "ids": [[1')
    assert not run.complete
    assert "incomplete" in repr(run)
    assert run.records["round"].max() == run.pairs["round"].max() == 2
    assert run.timing["round"].tolist() == [1, 2]


def test_a_run_that_has_not_begun_has_empty_tables(tmp_path):
    write_toml(tmp_path / "config.toml", {"name": "x", "seeds": [0]})
    run = Run(str(tmp_path))
    assert run.seeds == ()
    assert not run.complete
    assert run.records.empty
    assert run.pairs.empty
    assert run.agents.empty
    assert run.timing.empty


def test_the_error_of_a_folder_without_a_run_names_the_cure(tmp_path):
    with pytest.raises(RunError, match=r"there is no run in .*nowhere: give the folder"):
        Run(tmp_path / "nowhere")
    with pytest.raises(RunError, match=r"holds no config\.toml"):
        Run(tmp_path)
    write_small_run(tmp_path / "first")
    write_small_run(tmp_path / "second")
    with pytest.raises(RunError, match="holds the runs first, second: name those"):
        Run(tmp_path)
    (tmp_path / "first" / "config.toml").write_text("name = [")
    with pytest.raises(RunError, match=r"config\.toml cannot be read"):
        Run(tmp_path / "first")


def test_damaged_records_are_named(tmp_path):
    run = write_small_run(tmp_path / "out")
    seed = run.folder / "seed-7"
    good = (seed / "metrics.jsonl").read_text()
    (seed / "metrics.jsonl").write_text("nonsense\n" + good)
    with pytest.raises(RunError, match=r"metrics\.jsonl is damaged: line 1 is no record"):
        _ = Run(run.folder).records
    (seed / "metrics.jsonl").write_text('{"round": 1, "train_loss": [1, 2]}\n')
    with pytest.raises(RunError, match="round 1 has 2 values of train_loss for 3 agents"):
        _ = Run(run.folder).records
    (seed / "pairs.jsonl").write_text(
        '{"round": 1, "ids": [[1]], "weights": [[1, 2]], "own": [0]}\n'
    )
    with pytest.raises(RunError, match="not as many weights as peers"):
        _ = Run(run.folder).pairs
    (seed / "samples.safetensors").write_bytes(b"no")
    with pytest.raises(RunError, match=r"samples\.safetensors is damaged"):
        run.samples(7)
    (seed / "agents.json").write_text("{}")
    with pytest.raises(RunError, match=r"agents\.json is damaged"):
        _ = Run(run.folder).agents


def test_computed_metrics_have_an_entry():
    score = Score(np.eye(3, dtype=np.int32)[None], np.array([0.5]))
    computed = compute_metrics(
        EvaluationResult(AgentIds(np.zeros(1, np.int64)), score, common=score), AttackGoal()
    )
    assert set(computed) == set(METRICS) - {"malicious_weight", "epsilon"}


@pytest.mark.parametrize("page", ["runs.md", "operation.md"])
def test_metrics_are_documented(page):
    text = (Path(__file__).parents[1] / "docs" / page).read_text(encoding="utf-8")
    documented = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\|.*", text, re.MULTILINE))))
    recorded_by_nodes = set(METRICS) - {"malicious_weight"}
    assert documented >= (set(METRICS) if page == "runs.md" else recorded_by_nodes)


def test_nodes_record_all_metrics_of_an_evaluation():
    assert set(RoundRecord.model_fields) >= {"accuracy", "source_accuracy", *OPTIONAL_METRICS}
