"""What a run has written is held against its sums: what does not fit is refused by name, mended, or shown harmless."""

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
from fedcb2o.experiments.runs import provenance
from fedcb2o.records import Manifest, RoundLog, Run
from fedcb2o.records.checksums import NON_RESULT_SETTINGS, checksum_file
from tests.tiny import here, write

SEED = "seed-1000"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of two seeds, with the file that it came from."""
    folder = tmp_path_factory.mktemp("sums")
    path = write(folder / "tiny.toml", rounds=4, seeds=[1000, 1001], checkpoint_every=2)
    assert here("run", path, "--out", folder / "run", "--workers", 1).status == 0
    return path, folder / "run"


@pytest.fixture
def copy(finished, tmp_path):
    """The same, to be damaged."""
    path, out = finished
    shutil.copytree(out, tmp_path / "run")
    return path, tmp_path / "run"


def resume(path, out):
    return here("run", path, "--out", out, "--workers", 1, "--resume")


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_complete_seed_has_the_sum_of_each_of_its_files(finished):
    _, out = finished
    for seed in (1000, 1001):
        sums, inside = Manifest.read(out / f"seed-{seed}"), out / f"seed-{seed}"
        assert sums.files.keys() == {path.name for path in inside.iterdir()} - {"sums.json"}
        assert {name: checksum_file(inside / name) for name in sums.files} == sums.files
        assert (sums.seed, sums.complete, sums.rounds) == (seed, True, 4)
    Run(out).check()


# What happened to people's runs


def cut(path):
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b"\n", len(whole) // 2) + 1])


def one_digit(path):
    text = path.read_text()
    at = text.rindex('"accuracy": [0.') + len('"accuracy": [0.')
    path.write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])


def more_rounds(path):
    path.write_text(path.read_text().replace('"rounds": 4', '"rounds": 9'))


def incomplete(path):
    path.write_text(path.read_text().replace('"complete": true', '"complete": false'))


def inverted(path):
    about = json.loads(path.read_text())
    path.write_text(json.dumps({**about, "malicious": [not each for each in about["malicious"]]}))


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
MENDED = ("agents.json", "samples.safetensors", "summary.json", "sums.json", "config.toml")
DAMAGE = [
    ("metrics.jsonl", cut),
    ("metrics.jsonl", Path.unlink),
    ("metrics.jsonl", one_digit),
    ("metrics.jsonl", other_seed),
    ("pairs.jsonl", cut),
    ("pairs.jsonl", Path.unlink),
    ("checkpoint.safetensors", Path.unlink),
    ("checkpoint.safetensors", other_seed),
    ("checkpoint.safetensors", null),
    ("environment.json", null),
    ("environment.json", Path.unlink),
    ("agents.json", inverted),
    ("agents.json", null),
    ("agents.json", Path.unlink),
    ("samples.safetensors", null),
    ("samples.safetensors", Path.unlink),
    ("summary.json", more_rounds),
    ("summary.json", null),
    ("summary.json", Path.unlink),
    ("sums.json", other_seed),
    ("sums.json", null),
    ("sums.json", incomplete),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGE, ids=[f"{n}-{d.__name__}" for n, d in DAMAGE])
def test_what_does_not_fit_is_refused_by_name_or_made_again(copy, tmp_path, name, damage):
    path, out = copy
    before = contents(out)
    damage(out / SEED / name)
    if name in READ_BY:
        command = here(
            READ_BY[name], out, *(["--out", tmp_path / "page"] if READ_BY[name] == "report" else [])
        )
        assert str(out / SEED) in command.one_line()
    if name != "sums.json" and (name, damage) != ("samples.safetensors", Path.unlink):
        with pytest.raises(RunError, match=f"{SEED}/{name} is damaged"):
            Run(out).check()
    again = resume(path, out)
    if name in MENDED and damage != other_seed:
        assert again.status == 0, again.err
        assert f"Note: {out / SEED / name} was damaged or lost; it is made again." in again.err
        assert contents(out) == before
    else:
        assert str(out / SEED) in again.one_line()
        assert {name for name, content in contents(out).items() if before[name] != content} <= {
            Path(SEED, name)
        }


def test_the_cure_for_what_cannot_be_made_again_is_to_move_the_seed_away(copy):
    path, out = copy
    before = contents(out)
    one_digit(out / SEED / "metrics.jsonl")
    assert (
        f"restore it, or move {SEED} away: --resume then runs it again"
        in resume(path, out).one_line()
    )
    (out / SEED).rename(out / "away")
    assert resume(path, out).status == 0
    bits = {
        name: content
        for name, content in before.items()
        if name.name not in ("timing.jsonl", "sums.json")
    }
    assert {name: content for name, content in contents(out).items() if name in bits} == bits


def test_seconds_and_samples_are_done_without_by_whoever_removes_them(copy):
    path, out = copy
    cut(out / SEED / "timing.jsonl")
    with pytest.raises(RunError, match="remove it to do without its seconds"):
        _ = Run(out).timing
    (out / SEED / "timing.jsonl").unlink()
    assert Run(out).timing.seed.unique().tolist() == [1001]
    assert resume(path, out).status == 0


def test_damaged_samples_cost_the_pictures_alone(copy, tmp_path, monkeypatch):
    _, out = copy
    (out / SEED / "samples.safetensors").write_bytes(b"no")
    done = here("report", out, "--out", tmp_path / "page")
    assert done.status == 0
    assert "Note: the page shows no samples: " in done.err
    assert "samples.safetensors is damaged" in (tmp_path / "page" / "report.html").read_text()
    assert (tmp_path / "page" / "curves.png").exists()
    assert not (tmp_path / "page" / "samples.png").exists()


def test_a_seed_of_another_name_or_another_run_is_refused(copy, tmp_path):
    path, out = copy
    shutil.copytree(out / SEED, out / "seed-7")
    assert (
        f"{out / 'seed-7'} holds seed 1000, by its sums.json: put back what was there, or move seed-7 away"
        in here("compare", out).one_line()
    )
    shutil.rmtree(out / "seed-7")
    other = write(tmp_path / "other.toml", rounds=4, seeds=[1000], algorithm={"alpha": 3.0})
    assert here("run", other, "--out", tmp_path / "other", "--workers", 1).status == 0
    shutil.rmtree(out / SEED)
    shutil.copytree(tmp_path / "other" / SEED, out / SEED)
    assert "was run with other settings than those in" in here("compare", out).one_line()
    assert "holds another seed or another run, by its sums.json" in resume(path, out).one_line()


@pytest.mark.parametrize("change", ["rounds = 4", "alpha = 2.0", "benign = 2"])
def test_settings_that_were_changed_by_hand_are_refused_and_put_back(copy, change):
    path, out = copy
    config, before = out / "config.toml", contents(out)
    config.write_text(config.read_text().replace(change, change[:-1] + "1"))
    assert "was run with other settings than those in" in here("compare", out).one_line()
    assert resume(path, out).status == 0
    assert contents(out) == before


@pytest.mark.parametrize(
    "line", ["rounds = 'x'", "seeds = 3", "seeds = [1.5]", "name = []", "agents = 5"]
)
def test_a_config_of_wrong_types_is_one_line(copy, line):
    _, out = copy
    config = out / "config.toml"
    key = line.partition(" = ")[0]
    settings = {
        name: each for name, each in tomllib.loads(config.read_text()).items() if name != key
    }
    config.write_text(f"{line}\n{tomli_w.dumps(settings)}")
    assert "config.toml is damaged" in here("compare", out).one_line()


def test_lost_and_damaged_configs_are_written_anew_by_a_resume(copy):
    path, out = copy
    before = contents(out)
    for damage in (Path.unlink, null):
        damage(out / "config.toml")
        assert resume(path, out).status == 0
        assert contents(out) == before
    (out / "config.toml").unlink()
    other = here("run", path, "--out", out, "--resume", "--set", "algorithm.alpha=3")
    assert (
        "config.toml is gone: restore it, or give the same experiment with --resume"
        in other.one_line()
    )


def test_settings_that_mean_the_same_are_the_same_however_they_are_written(copy):
    path, out = copy
    before = contents(out)
    same = here("run", path, "--out", out, "--workers", 1, "--resume", "--set", "algorithm.alpha=2")
    assert same.status == 0, same.err
    assert {name: each for name, each in contents(out).items() if name.name != "config.toml"} == {
        name: each for name, each in before.items() if name.name != "config.toml"
    }
    assert here("compare", out).status == 0
    longer = "run", path, "--out", out, "--workers", 1, "--resume", "--set", "rounds=5"
    assert here(*longer, "--set", "algorithm.alpha=2").status == 0
    Run(out).check()


def test_nothing_is_overwritten_for_a_seed_of_another_run(copy, tmp_path):
    _, out = copy
    other = write(tmp_path / "other.toml", rounds=4, seeds=[1000], algorithm={"alpha": 3.0})
    assert here("run", other, "--out", tmp_path / "other", "--workers", 1).status == 0
    shutil.copy(tmp_path / "other" / "config.toml", out / "config.toml")
    before = contents(out)
    refused = here("run", other, "--out", out, "--workers", 1, "--resume").one_line()
    assert f"{out / SEED} holds another seed or another run, by its sums.json" in refused
    assert contents(out) == before


def test_what_cannot_be_read_now_is_not_taken_for_damaged(copy, monkeypatch):
    path, out = copy
    before = contents(out)
    for name in ("sums.json", "config.toml", "summary.json"):

        def refuses(self, name=name, read=Path.read_bytes):
            if self.name == name:
                raise OSError(24, "Too many open files", str(self))
            return read(self)

        with monkeypatch.context() as few:
            few.setattr(Path, "read_bytes", refuses)
            for words in (
                ("compare", out),
                ("run", path, "--out", out, "--workers", 1, "--resume"),
            ):
                done = here(*words)
                if done.status:
                    assert f"{name}: Too many open files" in done.one_line()
                assert "damaged" not in done.err
        assert contents(out) == before


def test_a_seed_that_lost_a_file_is_not_begun_anew_without_resume(copy):
    path, out = copy
    before = contents(out)
    (out / SEED / "agents.json").unlink()
    assert (
        "already holds seed 1000 of this run"
        in here("run", path, "--out", out, "--workers", 1).one_line()
    )
    (out / "config.toml").unlink()
    assert (
        "give the same experiment with --resume"
        in here("run", path, "--out", out, "--workers", 1).one_line()
    )
    assert resume(path, out).status == 0
    assert contents(out) == before


def test_samples_that_cannot_be_made_again_as_they_were_may_be_removed(copy, monkeypatch):
    path, out = copy
    samples = out / SEED / "samples.safetensors"
    samples.write_bytes(b"no")
    with monkeypatch.context() as other:  # another version of what writes them
        other.setattr(provenance, "save", lambda tensors: b"other")
        assert "remove it to do without pictures" in resume(path, out).one_line()
        samples.unlink()
        assert resume(path, out).status == 0
    assert here("compare", out).status == 0


def test_sums_without_their_own_sum_are_not_believed(copy):
    path, out = copy
    before = contents(out)
    sums = out / SEED / "sums.json"
    sums.write_text(
        json.dumps({name: 3 for name in json.loads(sums.read_text()) if name != "sha256"})
    )
    assert "sums.json is damaged" in here("compare", out).one_line()
    assert resume(path, out).status == 0
    assert contents(out) == before


def test_a_run_whose_seed_is_damaged_can_be_shown(copy):
    _, out = copy
    null(out / SEED / "sums.json")
    assert "damaged" in repr(Run(out))


# Runs in progress, and those from before there were sums


def goes_on(out):
    """As if the run were to be made longer, and had begun with it."""
    Manifest.create(out / SEED, 1000, load(str(out / "config.toml")).settings(), 4)


def test_a_running_seed_is_read_up_to_its_last_line(copy):
    _, out = copy
    seed = out / SEED
    goes_on(out)
    (seed / "summary.json").unlink()
    last = (seed / "metrics.jsonl").read_text().splitlines()[-1]
    with (seed / "metrics.jsonl").open("a") as file:
        file.write(last.replace('"round": 4', '"round": 5') + "\n" + last[:20])
    running = Run(out)
    assert running.records[running.records.seed == 1000]["round"].max() == 5
    assert not running.complete


@pytest.mark.parametrize("name", ["metrics.jsonl", "pairs.jsonl"])
def test_what_a_running_seed_had_at_its_last_checkpoint_must_be_there(copy, name):
    path, out = copy
    goes_on(out)
    cut(out / SEED / name)
    refused = f"{out / SEED / name} is damaged: it does not hold what was written"
    assert refused in here("report" if name == "pairs.jsonl" else "compare", out).one_line()
    refused = f"{out / SEED / name} is damaged: it lacks rounds before the checkpoint's round 4"
    assert refused in here("run", path, "--out", out, "--resume", "--set", "rounds=5").one_line()


def test_a_lost_or_older_checkpoint_of_a_running_seed_is_not_started_over(copy):
    path, out = copy
    goes_on(out)
    checkpoint, metrics = (
        out / SEED / "checkpoint.safetensors",
        (out / SEED / "metrics.jsonl").read_bytes(),
    )
    checkpoint.rename(out / "away")
    longer = "run", path, "--out", out, "--workers", 1, "--resume", "--set", "rounds=5"
    assert "checkpoint.safetensors is damaged: it is gone" in here(*longer).one_line()
    short = write(
        out.with_name("short.toml"), rounds=3, seeds=[1000], checkpoint_every=2, evaluate_every=1
    )
    assert here("run", short, "--out", out.with_name("short"), "--workers", 1).status == 0
    shutil.copy(out.with_name("short") / SEED / checkpoint.name, checkpoint)
    assert "is damaged" in here(*longer).one_line()
    assert (out / SEED / "metrics.jsonl").read_bytes() == metrics


def test_a_run_that_is_made_longer_is_read_by_who_opened_it_before(copy):
    path, out = copy
    before = Run(out)
    assert before.complete
    assert (
        here("run", path, "--out", out, "--workers", 1, "--resume", "--set", "rounds=5").status == 0
    )
    assert before.records["round"].max() == 5


def test_a_seed_without_sums_is_told_and_gets_them(copy):
    path, out = copy
    before = contents(out)
    (out / SEED / "sums.json").unlink()
    told = here("compare", out)
    assert told.status == 0
    assert "there is no sums.json to hold the files of seed 1000 against" in told.err
    assert resume(path, out).status == 0
    assert contents(out) == before
    (out / SEED / "sums.json").unlink()
    one_digit(out / SEED / "metrics.jsonl")
    assert (
        "metrics.jsonl is damaged: it does not hold what it did when checkpoint"
        in resume(path, out).one_line()
    )


@pytest.mark.parametrize("ended", [True, False])
def test_without_sums_the_checkpoint_says_what_the_records_were(copy, ended):
    path, out = copy
    pairs = out / SEED / "pairs.jsonl"
    (out / SEED / "sums.json").unlink()
    if not ended:
        (out / SEED / "summary.json").unlink()
    text = pairs.read_text()
    at = text.index('"own": [0.') + len('"own": [0.')
    pairs.write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])
    refused = here(
        "run", path, "--out", out, "--resume", "--set", f"rounds={4 if ended else 5}"
    ).one_line()
    assert (
        f"{pairs} is damaged: it does not hold what it did when checkpoint.safetensors was written"
        in refused
    )


def test_without_sums_the_records_that_the_checkpoint_knows_give_the_summary(copy):
    path, out = copy
    before = contents(out)
    (out / SEED / "sums.json").unlink()
    one_digit_of_summary = out / SEED / "summary.json"
    one_digit_of_summary.write_text(
        one_digit_of_summary.read_text().replace('"accuracy": 0.', '"accuracy": 0.9', 1)
    )
    assert resume(path, out).status == 0
    assert contents(out) == before


def test_a_lost_config_is_told_to_readers(copy):
    _, out = copy
    (out / "config.toml").unlink()
    assert (
        "config.toml is gone; `fedcb2o run` of the experiment with this --out"
        in here("compare", out).one_line()
    )


def test_a_seed_without_sums_and_surroundings_does_not_choose_anew(copy):
    path, out = copy
    for name in ("sums.json", "environment.json"):
        (out / SEED / name).unlink()
    assert "environment.json is damaged: it is gone" in resume(path, out).one_line()


def test_records_without_any_sum_must_say_what_the_summary_says(tmp_path, monkeypatch):
    path, out = write(tmp_path / "tiny.toml", rounds=4), tmp_path / "run"
    with monkeypatch.context() as before:
        before.setattr(RoundLog, "checksums", lambda *_: {})
        assert here("run", path, "--out", out, "--workers", 1).status == 0
    (out / SEED / "sums.json").unlink()
    one_digit(out / SEED / "metrics.jsonl")
    refused = resume(path, out)
    assert refused.status == 2
    assert "metrics.jsonl is damaged: it does not say what summary.json says" in refused.err


# One byte


def figures(folder):
    """All that a report draws on."""
    found = Run(folder)
    samples = [found.samples(seed).tobytes() for seed in found.seeds]
    about = [found.about(seed) for seed in found.seeds]
    summaries = [found.summary_of(seed) for seed in found.seeds]
    config = {key: value for key, value in found.config.items() if key not in NON_RESULT_SETTINGS}
    return (found.records, found.pairs, found.agents, found.timing), (
        samples,
        about,
        summaries,
        config,
    )


def same(one, other):
    for a, b in zip(one[0], other[0], strict=True):
        pd.testing.assert_frame_equal(a, b, check_exact=True)
    return one[1] == other[1]


def outcome(doing):
    """What comes of it, or the line that refuses it."""
    try:
        return doing(), ""
    except RunError as error:
        return None, str(error)


def one_byte_changes(path, out, count):
    """Change one byte of one file `count` times: what a reader and a resume make of it, by kind."""
    rng, experiment = np.random.default_rng(13), load(str(path))
    before, expected = contents(out), figures(out)
    names = sorted(before)
    found = {"refused": 0, "mended": 0, "harmless": 0}
    for _ in range(count):
        name = names[rng.integers(len(names))]
        whole = before[name]
        at = rng.integers(len(whole))
        (out / name).write_bytes(
            whole[:at] + bytes([whole[at] ^ rng.integers(1, 256)]) + whole[at + 1 :]
        )
        seen, refused = outcome(lambda: figures(out))
        if refused:
            assert str(out / name) in refused or name.name == "config.toml", (name, at, refused)
        else:
            assert same(seen, expected) or name.name == "config.toml", (name, at)
        _, refused = outcome(
            lambda: run(experiment, out=out, workers=1, resume=True, watch=lambda *_: None)
        )
        if refused:
            assert str(out / name) in refused, (name, at, refused)
            found["refused"] += 1
        else:
            found["mended" if contents(out)[name] == whole else "harmless"] += 1
            assert same(figures(out), expected), (name, at)
        changed = {other for other, content in contents(out).items() if before[other] != content}
        assert changed <= {name}, (name, at, changed)
        (out / name).write_bytes(whole)
    return found


def test_a_changed_byte_is_refused_mended_or_harmless(copy):
    found = one_byte_changes(*copy, 60)
    assert found["refused"] > 10
    assert found["mended"] > 10


@pytest.mark.slow
def test_a_thousand_changed_bytes_are_refused_mended_or_harmless(copy):
    print(one_byte_changes(*copy, 1000))
