"""Checksums of a run: readers and `--resume` refuse a damaged file and name it."""

import json
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tomli_w

from fedcb2o.errors import RunError
from fedcb2o.experiments import load, run
from fedcb2o.records import NON_RESULT_SETTINGS, Manifest, Run, checksum_file
from tests.tiny import run_cli, write

SEED = "seed-1000"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of two seeds, with its configuration file."""
    folder = tmp_path_factory.mktemp("checksums")
    path = write(folder / "tiny.toml", rounds=4, seeds=[1000, 1001], checkpoint_every=2)
    assert run_cli("run", path, "--out", folder / "run", "--workers", 1).status == 0
    return path, folder / "run"


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of the run to damage."""
    path, out = finished
    shutil.copytree(out, tmp_path / "run")
    return path, tmp_path / "run"


def resume(path, out, *changes):
    return run_cli("run", path, "--out", out, "--workers", 1, "--resume", *changes)


def contents(folder):
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder): path.read_bytes() for path in files}


def test_a_finished_seed_has_a_checksum_of_each_of_its_files(finished):
    _, out = finished
    for seed in (1000, 1001):
        folder = out / f"seed-{seed}"
        manifest = Manifest.read(folder)
        assert manifest.files.keys() == {path.name for path in folder.iterdir()} - {"sums.json"}
        assert {name: checksum_file(folder / name) for name in manifest.files} == manifest.files
        assert (manifest.seed, manifest.complete, manifest.rounds) == (seed, True, 4)
    Run(out).check()


def cut(path):
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b"\n", len(content) // 2) + 1])


def one_digit(path):
    text = path.read_text()
    position = text.rindex('"accuracy": [0.') + len('"accuracy": [0.')
    path.write_text(text[:position] + str((int(text[position]) + 1) % 10) + text[position + 1 :])


def more_rounds(path):
    path.write_text(path.read_text().replace('"rounds": 4', '"rounds": 9'))


def other_seed(path):
    shutil.copy(path.parent.with_name("seed-1001") / path.name, path)


def null(path):
    path.write_text("null")


READ_BY = {
    "metrics.jsonl": "compare",
    "agents.json": "compare",
    "pairs.jsonl": "report",
    "sums.json": "compare",
}
DAMAGE = [
    ("metrics.jsonl", cut),
    ("metrics.jsonl", Path.unlink),
    ("metrics.jsonl", one_digit),
    ("pairs.jsonl", other_seed),
    ("checkpoint.safetensors", Path.unlink),
    ("checkpoint.safetensors", other_seed),
    ("environment.json", null),
    ("agents.json", null),
    ("agents.json", Path.unlink),
    ("samples.safetensors", null),
    ("summary.json", more_rounds),
    ("summary.json", Path.unlink),
    ("sums.json", other_seed),
    ("sums.json", null),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGE, ids=[f"{n}-{d.__name__}" for n, d in DAMAGE])
@pytest.mark.usefixtures("no_figures")
def test_a_damaged_file_is_named_refused_and_not_changed(copy, tmp_path, name, damage):
    path, out = copy
    damage(out / SEED / name)
    expected = contents(out)
    if name in READ_BY:
        options = ["--out", tmp_path / "page"] if READ_BY[name] == "report" else []
        assert str(out / SEED) in run_cli(READ_BY[name], out, *options).one_line()
    with pytest.raises(RunError, match=SEED):
        Run(out).check()
    assert str(out / SEED) in resume(path, out).one_line()
    assert contents(out) == expected


def test_a_removed_seed_runs_again_with_the_same_bits(copy):
    path, out = copy
    before = contents(out)
    one_digit(out / SEED / "metrics.jsonl")
    advice = f"restore it, or move {SEED} away: --resume then runs it again"
    assert advice in resume(path, out).one_line()
    (out / SEED).rename(out / "away")
    assert resume(path, out).status == 0
    after = contents(out)
    for name, content in before.items():
        if name.name not in ("timing.jsonl", "sums.json"):
            assert after[name] == content


def test_times_and_samples_may_be_removed(copy):
    path, out = copy
    cut(out / SEED / "timing.jsonl")
    with pytest.raises(RunError, match="remove it to do without its seconds"):
        _ = Run(out).timing
    for name in ("timing.jsonl", "samples.safetensors"):
        (out / SEED / name).unlink()
    assert Run(out).timing.seed.unique().tolist() == [1001]
    assert resume(path, out).status == 0


@pytest.mark.usefixtures("no_figures")
def test_a_report_omits_damaged_samples(copy, tmp_path):
    _, out = copy
    (out / SEED / "samples.safetensors").write_bytes(b"no")
    done = run_cli("report", out, "--out", tmp_path / "page")
    assert done.status == 0
    assert "Note: the page shows no samples: " in done.err
    assert "samples.safetensors is damaged" in (tmp_path / "page" / "report.html").read_text()
    assert (tmp_path / "page" / "curves.png").exists()
    assert not (tmp_path / "page" / "samples.png").exists()


def test_a_seed_with_another_number_or_from_another_run_is_refused(copy, tmp_path):
    path, out = copy
    shutil.copytree(out / SEED, out / "seed-7")
    message = f"{out / 'seed-7'} holds seed 1000, by its sums.json: put back what was there, or move seed-7 away"
    assert message in run_cli("compare", out).one_line()
    shutil.rmtree(out / "seed-7")
    other = write(tmp_path / "other.toml", rounds=4, seeds=[1000], algorithm={"alpha": 3.0})
    assert run_cli("run", other, "--out", tmp_path / "other", "--workers", 1).status == 0
    shutil.rmtree(out / SEED)
    shutil.copytree(tmp_path / "other" / SEED, out / SEED)
    assert "was run with other settings than those in" in run_cli("compare", out).one_line()
    assert "holds another seed or another run, by its sums.json" in resume(path, out).one_line()


def test_settings_changed_by_hand_are_refused(copy):
    path, out = copy
    config = out / "config.toml"
    config.write_text(config.read_text().replace("alpha = 2.0", "alpha = 2.1"))
    assert "was run with other settings than those in" in run_cli("compare", out).one_line()
    assert "holds another run (`algorithm.alpha`" in resume(path, out).one_line()


@pytest.mark.parametrize("line", ["rounds = 'x'", "seeds = [1.5]", "agents = 5"])
def test_the_error_of_wrong_types_in_a_config_is_one_line(copy, line):
    _, out = copy
    config = out / "config.toml"
    key = line.partition(" = ")[0]
    settings = tomllib.loads(config.read_text())
    del settings[key]
    config.write_text(f"{line}\n{tomli_w.dumps(settings)}")
    assert "config.toml is damaged" in run_cli("compare", out).one_line()


@pytest.mark.parametrize("damage", [Path.unlink, null])
def test_a_missing_or_damaged_config_is_refused_and_not_changed(copy, damage):
    path, out = copy
    damage(out / "config.toml")
    damaged = contents(out)
    for refused in (run_cli("compare", out), resume(path, out)):
        assert "config.toml" in refused.one_line()
        assert "restore it" in refused.err
    assert contents(out) == damaged


def test_equal_settings_may_be_written_differently(copy):
    path, out = copy
    before = contents(out)
    assert resume(path, out, "--set", "algorithm.alpha=2").status == 0
    after = contents(out)
    for name, content in before.items():
        if name.name != "config.toml":
            assert after[name] == content
    assert run_cli("compare", out).status == 0


def test_an_unreadable_file_is_not_reported_as_damaged(copy, monkeypatch):
    path, out = copy
    before = contents(out)
    for name in ("sums.json", "config.toml", "summary.json"):

        def refuse(self, name=name, read=Path.read_bytes):
            if self.name == name:
                raise OSError(24, "Too many open files", str(self))
            return read(self)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", refuse)
            for done in (run_cli("compare", out), resume(path, out)):
                if done.status:
                    assert f"{name}: Too many open files" in done.one_line()
                assert "damaged" not in done.err
        assert contents(out) == before


def test_a_manifest_without_its_own_checksum_is_refused(copy):
    _, out = copy
    path = out / SEED / "sums.json"
    keys = json.loads(path.read_text()).keys() - {"sha256"}
    path.write_text(json.dumps(dict.fromkeys(keys, 3)))
    assert "sums.json is damaged" in run_cli("compare", out).one_line()
    assert "damaged" in repr(Run(out))


# Runs in progress, and old runs without manifests


def make_unfinished(out):
    """Write the manifest of a run that is being extended."""
    Manifest.create(out / SEED, 1000, load(str(out / "config.toml")).settings(), 4)


def test_a_running_seed_is_read_up_to_its_last_line(copy):
    _, out = copy
    seed = out / SEED
    make_unfinished(out)
    (seed / "summary.json").unlink()
    last = (seed / "metrics.jsonl").read_text().splitlines()[-1]
    with (seed / "metrics.jsonl").open("a") as file:
        file.write(last.replace('"round": 4', '"round": 5') + "\n" + last[:20])
    running = Run(out)
    assert running.records[running.records.seed == 1000]["round"].max() == 5
    assert not running.complete


@pytest.mark.parametrize("name", ["metrics.jsonl", "pairs.jsonl"])
@pytest.mark.usefixtures("no_figures")
def test_a_running_seed_with_damaged_rounds_is_refused(copy, tmp_path, name):
    path, out = copy
    make_unfinished(out)
    cut(out / SEED / name)
    options = ["report", out, "--out", tmp_path / "page"] if name == "pairs.jsonl" else ["compare"]
    refused = f"{out / SEED / name} is damaged: it does not hold what was written"
    assert refused in run_cli(*options, *([out] if len(options) == 1 else [])).one_line()
    assert f"{out / SEED / name} is damaged" in resume(path, out, "--set", "rounds=5").one_line()


def test_a_missing_or_older_checkpoint_of_a_running_seed_is_refused(copy):
    path, out = copy
    make_unfinished(out)
    checkpoint = out / SEED / "checkpoint.safetensors"
    metrics = (out / SEED / "metrics.jsonl").read_bytes()
    checkpoint.rename(out / "away")
    refused = resume(path, out, "--set", "rounds=5").one_line()
    assert "checkpoint.safetensors is damaged: it is gone" in refused
    short = write(
        out.with_name("short.toml"), rounds=3, seeds=[1000], checkpoint_every=2, evaluate_every=1
    )
    assert run_cli("run", short, "--out", out.with_name("short"), "--workers", 1).status == 0
    shutil.copy(out.with_name("short") / SEED / checkpoint.name, checkpoint)
    assert "is damaged" in resume(path, out, "--set", "rounds=5").one_line()
    assert (out / SEED / "metrics.jsonl").read_bytes() == metrics


def test_an_open_run_can_be_extended(copy):
    path, out = copy
    opened = Run(out)
    assert opened.complete
    assert resume(path, out, "--set", "rounds=5").status == 0
    assert opened.records["round"].max() == 5


def test_a_run_with_a_damaged_summary_is_not_extended(copy):
    path, out = copy
    summary = out / SEED / "summary.json"
    cut(summary)
    damaged = summary.read_bytes()
    assert f"{summary} is damaged" in resume(path, out, "--set", "rounds=5").one_line()
    assert summary.read_bytes() == damaged


def test_a_seed_without_a_manifest_is_read_with_a_note(copy):
    _, out = copy
    (out / SEED / "sums.json").unlink()
    done = run_cli("compare", out)
    assert done.status == 0
    assert "the files of seed 1000 are not verified, because there is no sums.json" in done.err


# Changes of one byte


def report_data(folder):
    """Return all data of a report."""
    run = Run(folder)
    samples = [run.samples(seed).tobytes() for seed in run.seeds]
    metadata = [run.about(seed) for seed in run.seeds]
    summaries = [run.summary_of(seed) for seed in run.seeds]
    config = {key: value for key, value in run.config.items() if key not in NON_RESULT_SETTINGS}
    tables = (run.records, run.pairs, run.agents, run.timing)
    return tables, (samples, metadata, summaries, config)


def is_same(first, second):
    for a, b in zip(first[0], second[0], strict=True):
        pd.testing.assert_frame_equal(a, b, check_exact=True)
    return first[1] == second[1]


def outcome(function):
    """Return the result of a function and no error, or None and the text of its RunError."""
    try:
        return function(), ""
    except RunError as error:
        return None, str(error)


def change_bytes(path, out, count):
    """Change one byte of one file `count` times; return the number of refused changes."""
    rng = np.random.default_rng(13)
    experiment = load(str(path))
    before = contents(out)
    expected = report_data(out)
    names = sorted(before)
    refused = 0
    for _ in range(count):
        name = names[rng.integers(len(names))]
        content = before[name]
        position = rng.integers(len(content))
        byte = bytes([content[position] ^ rng.integers(1, 256)])
        (out / name).write_bytes(content[:position] + byte + content[position + 1 :])

        data, error = outcome(lambda: report_data(out))
        if error:
            assert str(out / name) in error or name.name == "config.toml", (name, position, error)
        else:
            assert is_same(data, expected) or name.name == "config.toml", (name, position)
        _, error = outcome(
            lambda: run(experiment, out=out, workers=1, resume=True, watch=lambda *_: None)
        )
        if error:
            # A key of config.toml may have become another key: then it is another run.
            place = out if name.name == "config.toml" else out / name
            assert str(place) in error, (name, position, error)
            refused += 1
        else:
            assert is_same(report_data(out), expected), (name, position)
        changed = {other for other, text in contents(out).items() if before[other] != text}
        assert changed <= {name}, (name, position, changed)
        (out / name).write_bytes(content)
    return refused


def test_a_changed_byte_is_refused_or_harmless(copy):
    assert change_bytes(*copy, 40) > 10


@pytest.mark.slow
def test_a_thousand_changed_bytes_are_refused_or_harmless(copy):
    change_bytes(*copy, 1000)
