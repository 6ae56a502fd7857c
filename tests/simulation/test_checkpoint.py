"""Checkpoints: complete files, detection of damage, and refusal of other configurations."""

import json
import math
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.tiny import ENVIRONMENT, FEDCB2O, bits, command, run_cli, write

from fedcb2o.data import Dataset, sets
from fedcb2o.errors import RunError
from fedcb2o.experiments import load
from fedcb2o.federated.contacts import AgentState, ContactTable
from fedcb2o.federated.ragged import Ragged
from fedcb2o.records import Manifest
from fedcb2o.simulation import checkpoint

MODELS = torch.arange(12.0).view(3, 4) / 7
CONTACTS = ContactTable(
    Ragged(np.array([0, 2, 1]), np.array([0, 2, 1])), np.array([0.25, np.nan, 5e-324])
)
MEMORY = AgentState(CONTACTS, ({}, {}, {}))
STATES = (
    {
        "sums": torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3),
        "ids": torch.tensor([3, 2**40]),
    },
    {},
    {
        "seen": torch.tensor([True, False, True]),
        "nobody": torch.zeros(0, dtype=torch.int64),
        "no rows": torch.zeros(0, 5),
        "a.b": torch.tensor([math.nan, math.inf, -0.0]),
        **{
            f"of {dtype}": torch.arange(3).to(dtype)
            for dtype in (
                torch.float16,
                torch.bfloat16,
                torch.int8,
                torch.uint8,
                torch.int16,
                torch.int32,
            )
        },
    },
)
STATEFUL = AgentState(CONTACTS, STATES)


def have_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two tensors have the same type, shape and bits."""
    is_same_kind = (a.dtype, a.shape) == (b.dtype, b.shape)
    return is_same_kind and (
        not a.numel() or a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8))
    )


def assert_same_memory(memory: AgentState, expected: AgentState) -> None:
    assert memory.contacts.ids.values.tolist() == expected.contacts.ids.values.tolist()
    assert memory.contacts.ids.sizes.tolist() == expected.contacts.ids.sizes.tolist()
    assert memory.contacts.likelihood.tobytes() == expected.contacts.likelihood.tobytes()
    assert len(memory.rule_states) == len(expected.rule_states)
    for state, expected_state in zip(memory.rule_states, expected.rule_states, strict=True):
        assert state.keys() == expected_state.keys()
        assert all(have_same_bits(state[name], expected_state[name]) for name in expected_state), (
            state,
            expected_state,
        )


@pytest.mark.parametrize(
    "memory", [MEMORY, STATEFUL, AgentState.initial(3)], ids=["contacts", "states", "nothing"]
)
def test_a_saved_checkpoint_is_loaded(tmp_path, memory):
    checkpoint.save(tmp_path, 5, [MODELS], memory, "mine")
    models = torch.zeros(3, 4)
    rounds, loaded = checkpoint.load_models_(tmp_path, models, "mine")
    assert rounds == 5
    assert models.equal(MODELS)
    assert_same_memory(loaded, memory)


def test_a_state_may_be_a_scalar_tensor(tmp_path):
    memory = AgentState(
        CONTACTS, ({}, {"n": torch.tensor(3), "mean": torch.tensor(2.5, dtype=torch.float64)}, {})
    )
    checkpoint.save(tmp_path, 5, [MODELS], memory, "mine")
    _, loaded = checkpoint.load_models_(tmp_path, torch.zeros(3, 4), "mine")
    assert_same_memory(loaded, memory)


def test_models_saved_in_parts_give_the_same_file(tmp_path):
    checkpoint.save(tmp_path, 5, [MODELS], STATEFUL, "mine")
    expected = (tmp_path / checkpoint.FILE).read_bytes()
    # rows that do not follow each other in memory
    strided = torch.zeros(3, 16)[:, :4].copy_(MODELS)
    for parts in (
        MODELS.split(1),
        [MODELS[:2], MODELS[2:]],
        [MODELS[:0], MODELS],
        iter(strided.split(2)),
    ):
        checkpoint.save(tmp_path, 5, parts, STATEFUL, "mine")
        assert (tmp_path / checkpoint.FILE).read_bytes() == expected


def test_selected_rows_are_loaded(tmp_path):
    checkpoint.save(tmp_path, 5, [MODELS], STATEFUL, "mine")
    for rows in (slice(1, 3), slice(0, 1), slice(None, None, 2), slice(2, 2)):
        models = torch.full_like(MODELS[rows], math.nan)
        rounds, loaded = checkpoint.load_models_(tmp_path, models, "mine", rows)
        assert rounds == 5
        assert models.equal(MODELS[rows])
        assert_same_memory(loaded, STATEFUL)
    with pytest.raises(RunError, match="is damaged"):
        checkpoint.load_models_(tmp_path, torch.zeros(2, 4), "mine", slice(2, 4))


def test_safetensors_can_read_the_file(tmp_path):
    checkpoint.save(tmp_path, 5, [MODELS], STATEFUL, "mine")
    tensors = load_file(tmp_path / checkpoint.FILE)
    states = {
        f"state.{j}.{name}": tensor
        for j, state in enumerate(STATES)
        for name, tensor in state.items()
    }
    assert tensors.keys() == {"models", "met", "ids", "likelihood", *states}
    assert tensors["models"].equal(MODELS)
    assert (tensors["met"].tolist(), tensors["ids"].tolist()) == ([0, 2, 1], [0, 2, 1])
    assert tensors["likelihood"].numpy().tobytes() == CONTACTS.likelihood.tobytes()
    assert all(have_same_bits(tensors[name], tensor) for name, tensor in states.items())
    with safe_open(tmp_path / checkpoint.FILE, framework="pt") as file:
        header = file.metadata()
        assert all(
            file.get_tensor(name).data_ptr() % tensor.element_size() == 0
            for name, tensor in tensors.items()
        )
    assert header.keys() == {"rounds", "fingerprint", "lines", "sums"}
    assert (header["rounds"], header["fingerprint"]) == ("5", "mine")


def test_a_checkpoint_without_rule_states_is_loaded(tmp_path):
    """The test writes the file as older versions of the library did."""
    tensors = {
        "models": MODELS,
        "met": torch.from_numpy(CONTACTS.ids.sizes),
        "ids": torch.from_numpy(CONTACTS.ids.values),
        "likelihood": torch.from_numpy(CONTACTS.likelihood),
    }
    sums = {name: f"{t.dtype} {zlib.crc32(t.numpy().tobytes())}" for name, t in tensors.items()}
    header = {"rounds": "5", "fingerprint": "mine", "sums": json.dumps({"rounds": 5, **sums})}
    save_file(tensors, tmp_path / checkpoint.FILE, metadata=header)
    models = torch.zeros(3, 4)
    rounds, loaded = checkpoint.load_models_(tmp_path, models, "mine")
    assert rounds == 5
    assert models.equal(MODELS)
    assert_same_memory(loaded, MEMORY)


def test_a_missing_checkpoint_is_none(tmp_path):
    assert checkpoint.load_models_(tmp_path, torch.zeros(3, 4), "mine") is None
    (tmp_path / f"{checkpoint.FILE}.tmp").write_bytes(b"half")
    assert checkpoint.load_models_(tmp_path, torch.zeros(3, 4), "mine") is None


def test_another_fingerprint_or_shape_is_refused(tmp_path):
    checkpoint.save(tmp_path, 5, [torch.ones(3, 4)], MEMORY, "mine")
    models = torch.zeros(3, 4)
    with pytest.raises(RunError, match=r"of another configuration: choose another --out"):
        checkpoint.load_models_(tmp_path, models, "yours")
    assert not models.any()
    with pytest.raises(RunError, match="is damaged"):
        checkpoint.load_models_(tmp_path, torch.zeros(3, 5), "mine")


def test_every_flipped_byte_and_every_truncation_is_detected(tmp_path):
    state = AgentState(CONTACTS, ({}, {"sums": torch.ones(2)}, {}))
    checkpoint.save(tmp_path, 5, [torch.arange(12.0).view(3, 4)], state, "mine")
    path = tmp_path / checkpoint.FILE
    content = path.read_bytes()
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
    assert names == {"models", "met", "ids", "likelihood", "state.1.sums"}
    expected = checkpoint.load_models_(tmp_path, torch.zeros(3, 4), "mine")
    for position in range(len(content)):
        path.write_bytes(
            content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
        )
        models = torch.zeros(3, 4)
        try:
            loaded = checkpoint.load_models_(tmp_path, models, "mine")
        except RunError:
            assert not models.any(), position
        else:  # a change without effect, if any
            assert models.equal(torch.arange(12.0).view(3, 4)), position
            assert loaded is not None
            assert loaded[0] == expected[0], position
            assert_same_memory(loaded[1], expected[1])
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(RunError, match="is damaged"):
            checkpoint.load_models_(tmp_path, torch.zeros(3, 4), "mine")


@pytest.fixture
def interrupted(tmp_path):
    """Return files of a run of 4 rounds and of its first 2, a folder, and the bits of 4 rounds."""
    path = write(tmp_path / "tiny.toml", rounds=4, evaluate_every=9)
    assert run_cli("run", path, "--out", tmp_path / "whole", "--workers", 1).status == 0
    short = write(tmp_path / "short.toml", rounds=2, evaluate_every=9)
    return path, short, tmp_path / "run", bits(tmp_path / "whole")


def run_two_rounds(short, out):
    """Run two rounds and leave the files as if interrupted after the checkpoint."""
    assert run_cli("run", short, "--out", out, "--workers", 1).status == 0
    seed = out / "seed-1000"
    (seed / "summary.json").unlink()
    Manifest.create(seed, 1000, load(str(short)).settings(), 2)


def resume(path, out):
    return run_cli("run", path, "--out", out, "--workers", 1, "--resume")


def without_scores(files):
    """Return the bits without metrics, which a shorter run also evaluates in its last round."""
    return {name: content for name, content in files.items() if name != "metrics.jsonl"}


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "garbage"])
def test_a_damaged_checkpoint_is_a_one_line_error_and_its_cure_works(interrupted, damage):
    path, short, out, expected = interrupted
    run_two_rounds(short, out)
    file = out / "seed-1000" / checkpoint.FILE
    content = file.read_bytes()
    broken = {
        "flip": content[:-100] + bytes([content[-100] ^ 4]) + content[-99:],
        "truncate": content[: len(content) // 2],
        "empty": b"",
        "garbage": b"garbage" * 1000,
    }
    file.write_bytes(broken[damage])
    metrics = (out / "seed-1000/metrics.jsonl").read_bytes()
    assert "is damaged" in resume(path, out).one_line()
    assert (out / "seed-1000/metrics.jsonl").read_bytes() == metrics
    (out / "seed-1000").rename(out / "away")  # the cure in the message
    assert resume(path, out).status == 0
    assert bits(out) == expected


def test_half_written_files_of_a_killed_run_are_ignored(interrupted):
    path, short, out, expected = interrupted
    run_two_rounds(short, out)
    (out / "seed-1000/checkpoint.safetensors.tmp").write_bytes(b"half")
    (out / "config.toml.tmp").write_bytes(b"half")
    with (out / "seed-1000/metrics.jsonl").open("ab") as file:
        file.write(b'{"round": 3, "train_loss": [0.')
    with (out / "seed-1000/pairs.jsonl").open("ab") as file:
        file.write(b"\0\0\0\0\0\n")
    assert resume(path, out).status == 0
    assert without_scores(bits(out)) == without_scores(expected)
    assert not list(out.rglob("*.tmp"))


def test_a_run_killed_before_its_first_file_can_restart(interrupted):
    path, _, out, expected = interrupted
    out.mkdir()
    (out / "config.toml.tmp").write_bytes(b"half")
    assert run_cli("run", path, "--out", out, "--workers", 1).status == 0
    assert bits(out) == expected


def test_a_changed_fingerprint_in_a_checkpoint_is_damage(interrupted):
    path, short, out, _ = interrupted
    run_two_rounds(short, out)
    file = out / "seed-1000" / checkpoint.FILE
    file.write_bytes(file.read_bytes().replace(b"batch_size", b"batch_sizf", 1))
    assert "is damaged: its header does not add up" in resume(path, out).one_line()


def test_lost_metrics_are_an_error(interrupted):
    path, short, out, _ = interrupted
    run_two_rounds(short, out)
    (out / "seed-1000/metrics.jsonl").write_text("garbage\n")
    message = (
        "metrics.jsonl is damaged: it lacks rounds before the checkpoint's round 2, "
        "or has some twice"
    )
    assert message in resume(path, out).one_line()


def test_another_configuration_is_refused_with_the_differing_setting(interrupted):
    path, short, out, expected = interrupted
    run_two_rounds(short, out)
    other = run_cli(
        "run", path, "--out", out, "--workers", 1, "--resume", "--set", "algorithm.alpha=3"
    )
    assert other.one_line() == (
        f"{out} holds another run (`algorithm.alpha` is 2.0 there and 3 here): choose another --out"
    )
    # With a replaced configuration file, the checkpoint itself detects the change.
    config = out / "config.toml"
    config.write_text(config.read_text().replace("alpha = 2.0", "alpha = 3"))
    other = run_cli(
        "run", path, "--out", out, "--workers", 1, "--resume", "--set", "algorithm.alpha=3"
    )
    assert "seed-1000 holds another seed or another run, by its sums.json" in other.one_line()
    with pytest.raises(RunError, match="is the checkpoint of another configuration"):
        checkpoint.read_checkpoint(out / "seed-1000", "{} data none", (1, 1))
    config.write_text(config.read_text().replace("alpha = 3", "alpha = 2.0"))
    assert resume(path, out).status == 0
    assert without_scores(bits(out)) == without_scores(expected)


def test_a_changed_data_set_of_the_same_name_is_refused(interrupted, monkeypatch):
    path, short, out, _ = interrupted
    run_two_rounds(short, out)

    def changed(*, data_dir: None = None, test_per_class: int = 24) -> Dataset:
        digits = original(test_per_class=test_per_class)
        digits.pool.x[0, 0, 0, 0] += 0.5
        return digits

    original = sets.digits
    monkeypatch.setattr(sets, "digits", changed)
    assert "is the checkpoint of another configuration" in resume(path, out).one_line()


def test_fewer_rounds_than_recorded_are_refused(interrupted):
    path, short, out, _ = interrupted
    run_two_rounds(short, out)
    fewer = run_cli("run", path, "--out", out, "--workers", 1, "--resume", "--set", "rounds=1")
    assert "holds this run with `rounds` = 2: it can only be made longer" in fewer.one_line()


# Full disks: RLIMIT_FSIZE limits every file of a process, so writing fails as on a full disk.

LIMITED = """
import resource, runpy, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
sys.argv[:] = sys.argv[2:]
from fedcb2o.cli import main
main()
"""


@pytest.mark.parametrize(
    ("limit", "file"),
    [
        pytest.param(6_000, "metrics.jsonl", marks=pytest.mark.slow),
        (100_000, "checkpoint.safetensors"),
    ],
)
def test_a_full_disk_is_a_one_line_error_without_data_loss(tmp_path, limit, file):
    # A checkpoint of 6 agents has 4 kB with 1 hidden unit, 150 kB with 80; a metrics line 0.5 kB.
    hidden, rounds = (80, 2) if file == "checkpoint.safetensors" else (1, 16)
    path = write(tmp_path / "tiny.toml", rounds=rounds, model={"hidden": [hidden]})
    out = tmp_path / "run"
    arguments = ["run", path, "--out", out, "--workers", "1"]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(limit), "fedcb2o", *arguments],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    messages = [line for line in done.stderr.splitlines() if not line.startswith("tiny seed")]
    assert done.returncode == 2, done.stderr
    assert len(messages) == 1, done.stderr
    assert messages[0].startswith(f"Error: cannot write {out}/seed-1000/{file}: ")
    assert messages[0].endswith(
        "make room (or repair the folder) and give the command again, that of a run with --resume"
    )
    for text in (out / "seed-1000/metrics.jsonl").read_text().splitlines():
        json.loads(text)
    assert not list(out.rglob("*.tmp"))
    assert resume(path, out).status == 0
    assert run_cli("run", path, "--out", tmp_path / "whole", "--workers", 1).status == 0
    assert bits(out) == bits(tmp_path / "whole")


@pytest.mark.slow
def test_a_full_standard_output_is_a_one_line_error(tmp_path):
    with open("/dev/full", "w") as full:  # noqa: PTH123 (a device)
        done = command("presets", stdout=full)
    assert done.one_line() == "cannot write the output: No space left on device"
    path = write(tmp_path / "tiny.toml", rounds=1)
    assert run_cli("run", path, "--out", tmp_path / "run", "--workers", 1).status == 0
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = command("compare", tmp_path / "run", stdout=full)
    assert done.one_line() == "cannot write the output: No space left on device"


@pytest.mark.slow
def test_a_closed_pipe_of_the_output_prints_no_error():
    reader = subprocess.Popen(
        [FEDCB2O, "presets"], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    reader.stdout.close()
    assert reader.stderr.read() == b""
    assert reader.wait(timeout=60) == 1
    reader.stderr.close()
