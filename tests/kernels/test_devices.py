"""Models and data on another device: a GPU, or a simulated device that computes on the CPU."""

import contextlib
import json

import pytest
import torch
from tests.simulated_device import assume_fast_bfloat16, simulated_device
from tests.tiny import StopError, bits, first_quick, lines_of, run_cli, stop_after, tiny, write
from torch import nn

import fedcb2o
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.experiments import run
from fedcb2o.federated.local_update import allow_tf32
from fedcb2o.kernels import devices

IMAGES = {"name": "cnn", "hidden": 4}


BACKDOOR = {"name": "backdoor", "target": 4}


FLIP = {"name": "label_flip", "source": 9, "target": 4}


def by_rule(name, **more):
    return {"name": "by_rule", "rule": {"name": name}, **more}


RUNS = {
    "dense": {"agents": {"participation": 0.8}},
    "convolutions": {"model": IMAGES, "training": {"momentum": 0.0}},
    "unfolded": {"model": IMAGES, "convolution": "unfolded"},
    "mixed": {"model": IMAGES, "convolution": "mixed"},
    "unlike numbers": {
        "model": IMAGES,
        "agents": {"split": "released", "benign": 4, "benign_samples": 40},
    },
    "two by two": {"model": IMAGES, "together": 2, "training": {"local_steps": 2}},
    "a backdoor, tiles": {
        "attack": BACKDOOR,
        "algorithm": {"criterion": "trigger_sensitivity", "own_model": "judged"},
    },
    "a backdoor, perturbations": {
        "model": IMAGES,
        "attack": BACKDOOR,
        "algorithm": {
            "criterion": {"name": "perturbation_gap", "steps": 2, "z": 0.5, "against": "majority"},
            "own_model": "judged",
        },
    },
    "distance": {"algorithm": {"criterion": "distance", "own_model": "judged"}},
    "half-way": {
        "algorithm": {
            "guards": {"loss_tolerance": 1.0, "interpolation": 0.5},
            "own_model": "judged",
        }
    },
    "noise": {"attack": {"name": "gaussian_noise"}, "algorithm": by_rule("trimmed_mean")},
    "broken": {"attack": {"name": "not_finite"}, "algorithm": by_rule("krum", pre_step="nnm")},
    "farthest": {"attack": {"name": "min_max"}, "algorithm": by_rule("geometric_median")},
    "for each receiver": {"attack": {"name": "dissensus"}, "algorithm": by_rule("clipped_gossip")},
    "aware of the gap": {"attack": {"name": "gap_aware", "data": FLIP}},
    "drift": {"attack": {"name": "slow_drift", "data": FLIP}, "algorithm": by_rule("bulyan")},
    "heads": {"algorithm": by_rule("lfighter")},
    "before": {"algorithm": by_rule("norm_clipping")},
    "a memory": {"algorithm": by_rule("foolsgold", needs_losses=False)},
    "a coordinator": {"algorithm": {"name": "ifca", "models": 2}},
}

QUICK = [
    "dense",
    "mixed",
    "half-way",
    "noise",
    "for each receiver",
    "heads",
    "a memory",
    "a coordinator",
]
"""One run per way in which tensors reach a device; the others are slow."""
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]


def are_close(result, expected):
    """Return True if two records are equal, with numbers equal to rounding."""
    if isinstance(expected, list):
        return len(result) == len(expected) and all(map(are_close, result, expected))
    return result == (
        pytest.approx(expected, rel=1e-3, abs=1e-4) if isinstance(expected, float) else expected
    )


no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
DEVICES = ["meta", pytest.param("cuda", marks=no_gpu)]


def device_context(device, monkeypatch):
    """Return a context in which the device exists: a real or the simulated one."""
    return simulated_device(monkeypatch) if device == "meta" else contextlib.nullcontext()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_a_run_on_a_device_agrees_with_the_cpu_to_rounding(tmp_path, monkeypatch, name, device):
    experiment = tiny(rounds=2, **RUNS[name])
    run({**experiment, "together": None}, out=tmp_path / "cpu", workers=1)
    with device_context(device, monkeypatch):
        run({**experiment, "device": device}, out=tmp_path / "device")
    for file in ("metrics", "pairs"):
        for result, expected in zip(
            lines_of(tmp_path / "device", file), lines_of(tmp_path / "cpu", file), strict=True
        ):
            for key in expected:
                assert are_close(result[key], expected[key]), key
    models = [
        torch.frombuffer(bytearray(bits(tmp_path / side)["checkpoint models"]), dtype=torch.float32)
        for side in ("device", "cpu")
    ]
    torch.testing.assert_close(*models, rtol=1e-3, atol=1e-4, equal_nan=True)


@pytest.mark.slow
def test_a_round_waits_for_the_device_only_a_few_times(tmp_path, monkeypatch):
    def waits(**changes):
        with simulated_device(monkeypatch) as mode:
            run(
                tiny(device="meta", rounds=1, **changes),
                out=tmp_path / f"run{len(list(tmp_path.iterdir()))}",
            )
        return mode.waits

    for convolution in ("grouped", "unfolded", "mixed"):
        assert waits(model=IMAGES, convolution=convolution) == waits(model=IMAGES)
    waits_of_one_epoch = waits()
    assert set(waits_of_one_epoch) == {"transfer"}
    assert waits(training={"local_epochs": 3}) == waits_of_one_epoch  # no wait in a step
    assert waits_of_one_epoch.total() < 25


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("convolution", first_quick(["mixed", "grouped", "unfolded"]))
def test_a_run_on_a_device_is_resumed_and_repeated_to_the_bit(
    tmp_path, monkeypatch, device, convolution
):
    experiment = tiny(rounds=2, device=device, convolution=convolution, **RUNS["convolutions"])
    with device_context(device, monkeypatch):
        run(experiment, out=tmp_path / "whole")
        with pytest.raises(StopError):
            run(experiment, out=tmp_path / "parts", watch=stop_after(1))
        # the recorded number of agents counts
        monkeypatch.setattr(devices, "device_memory", lambda device: 1)
        run(experiment, out=tmp_path / "parts", resume=True)
        name = devices.device_name(torch.device(device))
    assert bits(tmp_path / "parts") == bits(tmp_path / "whole")
    environment = json.loads((tmp_path / "parts/seed-1000/environment.json").read_text())
    assert (environment["device"], environment["together"], environment["workers"]) == (name, 6, 1)


def dropout(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, classes))


BATCHED_RUNS = {
    "convolutions": {"model": IMAGES, "together": 3, "training": {"precision": "bfloat16"}},
    "unfolded": {"model": IMAGES, "together": 3, "convolution": "unfolded"},
    "residual": {
        "model": {"name": "resnet", "width": 8},
        "together": 8,
        "training": {"batch_size": 16},
    },
    "dropout": {"model": {"name": dropout}, "together": 4},
}


@pytest.mark.parametrize("name", BATCHED_RUNS)
def test_batched_training_repeats_its_bits(tmp_path, monkeypatch, name):
    assume_fast_bfloat16(monkeypatch)
    experiment = tiny(rounds=2, **BATCHED_RUNS[name])
    run(experiment, out=tmp_path / "whole", workers=1)
    with pytest.raises(StopError):
        run(experiment, out=tmp_path / "parts", workers=2, watch=stop_after(1))
    run(experiment, out=tmp_path / "parts", workers=1, resume=True)
    assert bits(tmp_path / "parts") == bits(tmp_path / "whole")


def stubborn(shape, classes):
    class Stubborn(nn.Linear):
        def forward(self, x):
            x = x.flatten(1)
            return super().forward(x if float(x.sum() * self.weight.sum()) > 0 else -x)

    return Stubborn(64, classes)


def test_a_network_that_cannot_be_batched_trains_one_by_one(tmp_path, monkeypatch):
    message = r"`.*stubborn` cannot be computed for several agents at once: leave out `together`"
    with pytest.raises(ConfigError, match=message):
        run(tiny(model={"name": stubborn}, together=4), out=tmp_path / "run")
    module, x = stubborn((1, 8, 8), 10), torch.zeros(4, 1, 8, 8)
    assert devices.max_batched_agents(torch.device("cpu"), 0, module, x) == 1


def test_the_number_of_batched_agents_fits_the_memory(monkeypatch):
    monkeypatch.setattr(devices, "device_memory", lambda device: 2**30)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 1000), nn.ReLU(), nn.Linear(1000, 10))
    x = torch.rand(8, 1, 8, 8)
    bytes_per_agent = devices.training_bytes(module, x)
    d = sum(p.numel() for p in module.parameters())
    assert 24 * d < bytes_per_agent < 24 * d + 4 * 128 * (64 + 2 * 1000 + 10)
    assert devices.training_bytes(module, torch.rand(128, 1, 8, 8)) - 24 * d == 2 * (
        bytes_per_agent - 24 * d
    )
    result = devices.max_batched_agents(torch.device("cpu"), 2**29, module, x)
    assert result == 2**28 // bytes_per_agent
    assert devices.max_batched_agents(torch.device("cpu"), 2**30, module, x) == 1


def test_unfolded_patches_count_as_memory():
    module = nn.Sequential(nn.Conv2d(4, 8, 5, padding=2), nn.Flatten(), nn.Linear(512, 10))
    x = torch.rand(64, 4, 8, 8)
    extra_bytes = devices.training_bytes(module, x, "unfolded") - devices.training_bytes(module, x)
    patches, images = 4 * 64 * 64 * 100, 4 * 64 * 4 * 64
    assert 2 * (patches - images) <= extra_bytes < 2 * patches + 2**20


@pytest.mark.parametrize("name", ["cuda", "cuda:3", "mps", "quantum", "meta"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device")
def test_a_missing_device_is_a_one_line_error(tmp_path, name):
    path = write(tmp_path / "tiny.toml")
    message = run_cli("run", path, "--out", tmp_path / "run", "--device", name).one_line()
    assert message.startswith(f"`device` = '{name}' is not a device that PyTorch")
    assert not (tmp_path / "run").exists()


def test_the_cpu_by_name_is_the_default(tmp_path):
    path = write(tmp_path / "tiny.toml", rounds=1)
    assert run_cli("run", path, "--out", tmp_path / "run", "--device", "cpu").status == 0
    assert "device" not in (tmp_path / "run/config.toml").read_text()


def test_settings_incompatible_with_a_device_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r'"tf32" needs a CUDA device, and `device` is "cpu"'):
        fedcb2o.load(tiny(training={"precision": "tf32"}))
    result = fedcb2o.load(tiny(training={"precision": "tf32"}, device="cuda:1")).training.precision
    assert result == "tf32"
    with simulated_device(monkeypatch):
        message = "one process works on `device` = 'meta', and `workers` is 2"
        with pytest.raises(ConfigError, match=message):
            run(tiny(device="meta"), out=tmp_path / "run", workers=2)
        run(tiny(device="meta", rounds=1), out=tmp_path / "run")
    message = r"holds another run \(`device` is 'meta' there and not set here\)"
    with pytest.raises(RunError, match=message):
        run(tiny(), out=tmp_path / "run", resume=True)


def test_a_full_device_is_a_run_error(tmp_path, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("fedcb2o.federated.local_update.batched_local_update_", full)
    with (
        simulated_device(monkeypatch),
        pytest.raises(RunError, match=r"meta is out of memory: .* by `together`"),
    ):
        run(tiny(device="meta"), out=tmp_path / "run")


def test_tf32_is_used_only_within_its_context():
    def precisions():
        return torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision

    before = precisions()
    with allow_tf32(False, "cuda"):
        assert precisions() == ("ieee", "ieee")
        with allow_tf32(True, "cuda"):
            assert precisions() == ("tf32", "tf32")
        assert precisions() == ("ieee", "ieee")
    with allow_tf32(True, "cpu"):
        assert precisions() == before
    assert precisions() == before
