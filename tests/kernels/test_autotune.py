"""The fastest kernels are chosen by a margin and kept when a run is resumed."""

import copy
import itertools
import json
import math
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from tests.networks import needs_onednn
from tests.simulated_device import simulated_device
from tests.tiny import StopError, bits, stop_after, tiny
from torch import nn

from fedcb2o.errors import ConfigError
from fedcb2o.experiments import run
from fedcb2o.kernels import _autotune, _fft_conv
from fedcb2o.nn import architectures, memory_layout

IMAGES = {"name": "cnn", "hidden": 4}
CPU = torch.device("cpu")
META = torch.device("meta")
SMALL = torch.zeros(2, 1, 8, 8)


def convolutions(input_shape, num_classes):
    first = nn.Conv2d(input_shape[0], 4, 3, padding=1)
    last = nn.Linear(4 * math.prod(input_shape[1:]), num_classes)
    return nn.Sequential(first, nn.ReLU(), nn.Flatten(), last)


class Views(nn.Sequential):
    """A network that reads its images in one order only."""

    def forward(self, x):
        x = self[0](x)
        return self[1](x.view(len(x), -1))


def views(input_shape, num_classes):
    size = 4 * math.prod(n - 2 for n in input_shape[1:])
    return Views(nn.Conv2d(input_shape[0], 4, 3), nn.Linear(size, num_classes))


def recorded_kernels(folder):
    return json.loads((folder / "seed-1000/environment.json").read_text())


def models_of(folder):
    return load_file(folder / "seed-1000/checkpoint.safetensors")["models"]


def assert_differ_in_settings_only(result, expected):
    result, expected = bits(result), bits(expected)
    assert {name for name in result if result[name] != expected[name]} <= {"config.toml"}


def forbid_timing(monkeypatch, name="_speedup"):
    monkeypatch.setattr(_autotune, name, lambda *_: pytest.fail("timed"))


def set_clock(monkeypatch, seconds):
    """Let the second of two computations take `seconds`, and the first one 1 second."""
    now = itertools.accumulate(itertools.cycle([0.0, 1.0, 0.0, seconds]))
    clock = dict.fromkeys(("thread_time", "perf_counter"), lambda: next(now))
    monkeypatch.setattr(_autotune, "time", SimpleNamespace(**clock))


def batched_convolution(module=None, agents=3, device=CPU):
    module = module or architectures.cnn((1, 8, 8), 10, hidden=4)
    return _autotune.fastest_batched_convolution(module, SMALL, "float32", device, agents)


def single_convolution(module=None, x=None, precision="float32"):
    module = module or architectures.cnn((1, 28, 28), 10, hidden=4)
    x = torch.rand(8, 1, 28, 28) if x is None else x
    torch.manual_seed(0)
    return _autotune.fastest_single_convolution(module, x, precision)


# Choices


@pytest.mark.parametrize(
    ("choose", "choices"),
    [
        pytest.param(
            _autotune.fastest_linear.__wrapped__,
            {0.5: "onednn", 0.98: "torch", 2.0: "torch"},
            marks=needs_onednn,
        ),
        (batched_convolution, {0.5: "unfolded", 0.95: "grouped", 2.0: "grouped"}),
        (single_convolution, {0.7: "fourier", 0.8: "grouped", 2.0: "grouped"}),
    ],
)
def test_another_kernel_is_chosen_only_by_a_margin(monkeypatch, choose, choices):
    torch.manual_seed(0)  # with some draws all of the few hidden units are 0
    for seconds, expected in choices.items():
        set_clock(monkeypatch, seconds)
        assert choose() == expected


@pytest.mark.parametrize(
    ("speedups", "expected"),
    [((1.2, 1.5), "mixed"), ((1.5, 1.2), "unfolded"), ((0.5, 1.05), "grouped")],
)
def test_the_fastest_of_several_kernels_is_chosen(monkeypatch, speedups, expected):
    monkeypatch.setattr(_autotune, "_speedup", Mock(side_effect=speedups))
    assert batched_convolution() == expected


def test_bfloat16_needs_a_device_with_bfloat16(monkeypatch):
    assert 0 < _autotune._bfloat16_speedup(CPU) < math.inf
    assert _autotune._bfloat16_speedup(META) == 0.0  # the meta device computes no values
    for speedup, expected in ((2.0, "bfloat16"), (0.5, "bfloat16"), (0.01, "float32")):
        monkeypatch.setattr(_autotune, "_bfloat16_speedup", lambda _, speedup=speedup: speedup)
        assert _autotune.supported_precision("bfloat16", CPU) == expected
    forbid_timing(monkeypatch, "_bfloat16_speedup")
    assert _autotune.supported_precision("float32", CPU) == "float32"


@needs_onednn
def test_a_failed_timing_restores_the_threads(monkeypatch):
    monkeypatch.setattr(_autotune, "_speedup", Mock(side_effect=StopError))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(StopError):
            _autotune.onednn_speedup()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_kernels_that_do_not_apply_are_not_timed(monkeypatch):
    forbid_timing(monkeypatch)
    mlp = architectures.mlp((1, 8, 8), 10)
    cnn = architectures.cnn((1, 28, 28), 10, hidden=4)
    images = torch.rand(8, 1, 28, 28)
    assert batched_convolution(agents=1) == "grouped"
    for module in (mlp, nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.Flatten())):
        assert batched_convolution(module) == "grouped"
    strided = architectures.cnn((1, 28, 28), 10, hidden=4, down="stride")
    assert single_convolution(mlp, images) == single_convolution(strided, images) == "grouped"
    assert single_convolution(cnn, images, "bfloat16") == "grouped"
    assert single_convolution(cnn, images[:, :, :8, :8]) == "grouped"  # unreadable images


def test_a_device_without_memory_for_a_trial_takes_the_default(monkeypatch):
    monkeypatch.setattr(_autotune, "_speedup", Mock(side_effect=torch.OutOfMemoryError("full")))
    assert batched_convolution(agents=4) == "grouped"


def test_a_trial_leaves_no_trace():
    module = nn.Sequential(
        architectures.cnn((1, 28, 28), 10, hidden=4), nn.BatchNorm1d(10), nn.Dropout()
    )
    x, before = torch.rand(8, 1, 28, 28), copy.deepcopy(module.state_dict())
    threads, rng_state = torch.get_num_threads(), torch.get_rng_state()
    _autotune.fastest_single_convolution(module, x, "float32")
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng_state)
    assert torch.get_num_threads() == threads
    module.held = module(x)  # a tensor that cannot be copied
    assert _autotune.fastest_single_convolution(module, x, "float32") == "grouped"


# Runs


@needs_onednn
@pytest.mark.parametrize("has_rounds", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_resumed_run_keeps_its_kernel(tmp_path, monkeypatch, has_rounds):
    experiment = tiny(rounds=2, model={"hidden": [1100, 1000]})
    run({**experiment, "linear": "onednn"}, out=tmp_path / "given", workers=1)
    run({**experiment, "linear": "torch"}, out=tmp_path / "other", workers=1)
    watch = stop_after(1)
    with monkeypatch.context() as patched:
        patched.setattr(_autotune, "fastest_linear", lambda: "onednn")
        if not has_rounds:
            backend = sys.modules["fedcb2o.experiments.runs._local_backend"]
            patched.setattr(backend, "open_local_engine", Mock(side_effect=StopError))
        with pytest.raises(StopError):
            run(experiment, out=tmp_path / "resumed", workers=1, watch=watch)
    forbid_timing(monkeypatch, "fastest_linear")
    run(experiment, out=tmp_path / "resumed", workers=2, resume=True)
    assert_differ_in_settings_only(tmp_path / "resumed", tmp_path / "given")
    assert recorded_kernels(tmp_path / "resumed")["linear"] == "onednn"
    expected = models_of(tmp_path / "other")
    torch.testing.assert_close(models_of(tmp_path / "given"), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("first_speedup", "later_speedup"), [(0.01, 2.0), (2.0, 0.01)], ids=["without", "with"]
)
def test_a_resumed_run_keeps_its_precision(
    tmp_path, monkeypatch, caplog, first_speedup, later_speedup
):
    experiment = tiny(rounds=2, training={"precision": "bfloat16"})
    precision = "float32" if first_speedup < 1 else "bfloat16"
    monkeypatch.setattr(_autotune, "_bfloat16_speedup", lambda _: first_speedup)
    run(tiny(rounds=2, training={"precision": precision}), out=tmp_path / "given", workers=1)
    with pytest.raises(StopError):
        run(experiment, out=tmp_path / "resumed", workers=1, watch=stop_after(1))
    message = "tiny seed 1000 trains in float32: bfloat16 is far slower here"
    assert (message in caplog.text) == (precision == "float32")
    caplog.clear()
    monkeypatch.setattr(_autotune, "_bfloat16_speedup", lambda _: later_speedup)
    run(experiment, out=tmp_path / "resumed", workers=2, resume=True)
    slower = "" if precision == "float32" else ", though bfloat16 is far slower here"
    assert f"tiny seed 1000 began in {precision}, and keeps it{slower}.\n" in caplog.text
    assert "trains in" not in caplog.text
    assert_differ_in_settings_only(tmp_path / "resumed", tmp_path / "given")
    assert recorded_kernels(tmp_path / "resumed")["precision"] == precision


def test_dense_layers_of_small_models_are_not_timed(tmp_path, monkeypatch):
    forbid_timing(monkeypatch, "fastest_linear")
    run(tiny(rounds=1), out=tmp_path / "run", workers=1)
    assert recorded_kernels(tmp_path / "run")["linear"] == "torch"


def test_a_layout_that_a_network_cannot_read_is_an_error(tmp_path):
    message = r'cannot read samples of shape .* with `layout` = "channels_last"'
    with pytest.raises(ConfigError, match=message):
        run(tiny(model={"name": views}, layout="channels_last"), out=tmp_path / "run", workers=1)


@pytest.mark.slow
def test_a_resumed_run_on_a_device_keeps_its_convolutions(tmp_path, monkeypatch):
    experiment = tiny(model=IMAGES, device="meta")
    choose = Mock(return_value="unfolded")
    with simulated_device(monkeypatch):
        for convolution in ("unfolded", "grouped"):
            run({**experiment, "convolution": convolution}, out=tmp_path / convolution)
        monkeypatch.setattr(_autotune, "fastest_batched_convolution", choose)
        with pytest.raises(StopError):
            run(experiment, out=tmp_path / "resumed", watch=stop_after(1))
        forbid_timing(monkeypatch, "fastest_batched_convolution")
        run(experiment, out=tmp_path / "resumed", resume=True)
    assert choose.call_args.args[2:] == ("float32", META, 6)
    assert_differ_in_settings_only(tmp_path / "resumed", tmp_path / "unfolded")
    assert not models_of(tmp_path / "resumed").equal(models_of(tmp_path / "grouped"))
    assert recorded_kernels(tmp_path / "resumed")["convolution"] == "unfolded"


def test_on_the_cpu_only_single_networks_are_timed(tmp_path, monkeypatch):
    forbid_timing(monkeypatch, "fastest_batched_convolution")
    choose = Mock(return_value="fourier")
    monkeypatch.setattr(_autotune, "fastest_single_convolution", choose)
    for changes, expected in (
        ({}, "fourier"),
        ({"together": 3}, "grouped"),
        ({"convolution": "grouped"}, "grouped"),
    ):
        folder = tmp_path / str(changes)
        run(tiny(model=IMAGES, rounds=1, **changes), out=folder, workers=1)
        assert recorded_kernels(folder)["convolution"] == expected
    ((_, x, precision), _) = choose.call_args
    assert (choose.call_count, x.shape[1:], precision) == (1, (1, 8, 8), "float32")
    channels_last = tiny(model={"name": convolutions}, rounds=1, layout="channels_last")
    run(channels_last, out=tmp_path / "last", workers=1)
    assert isinstance(choose.call_args.args[0][0], memory_layout.ChannelsLast)


def test_a_run_with_fourier_convolutions_agrees_with_pytorch_to_rounding(tmp_path, monkeypatch):
    monkeypatch.setattr(_fft_conv, "MIN_SAVING", 0)
    experiment = tiny(model={"name": "cnn", "hidden": 8}, evaluate_every=3)
    fourier = {**experiment, "convolution": "fourier"}
    run({**experiment, "convolution": "grouped"}, out=tmp_path / "grouped", workers=1)
    run(fourier, out=tmp_path / "fourier", workers=1)
    with pytest.raises(StopError):
        run(fourier, out=tmp_path / "resumed", workers=1, watch=stop_after(1))
    run(fourier, out=tmp_path / "resumed", workers=1, resume=True)
    assert bits(tmp_path / "fourier") == bits(tmp_path / "resumed")
    result, expected = models_of(tmp_path / "fourier"), models_of(tmp_path / "grouped")
    assert not result.equal(expected)
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-5)
