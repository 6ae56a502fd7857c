"""What is faster is chosen by a margin, from what a run does, and kept when it is resumed."""

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
from tests.pretend import pretended
from tests.tiny import StopError, bits, stop_after, tiny
from torch import nn

from fedcb2o.errors import ConfigError
from fedcb2o.experiments import run
from fedcb2o.kernels import _autotune, _fft_conv, _onednn
from fedcb2o.nn import architectures, memory_layout, parameters

IMAGES = {"name": "cnn", "hidden": 4}
META = torch.device("meta")
needs_onednn = pytest.mark.skipif(not _onednn.is_available(), reason="this PyTorch has no oneDNN")


def told_of(folder):
    return json.loads((folder / "seed-1000/environment.json").read_text())


@needs_onednn
def test_dense_layers_go_the_faster_way_by_a_margin(monkeypatch):
    chosen = _autotune.fastest_linear.__wrapped__
    for gain, expected in ((2.0, "onednn"), (1.02, "torch"), (0.5, "torch")):
        monkeypatch.setattr(_autotune, "onednn_speedup", lambda gain=gain: gain)
        assert chosen() == expected
    monkeypatch.setattr(_onednn, "is_available", lambda: False)
    assert chosen() == "torch"


@needs_onednn
def test_a_timing_that_fails_puts_the_threads_back(monkeypatch):
    def stop(*_):
        raise StopError

    monkeypatch.setattr(_autotune, "_speedup", stop)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(StopError):
            _autotune.onednn_speedup()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@needs_onednn
def test_a_run_keeps_its_dense_layers_when_it_is_resumed(tmp_path, monkeypatch):
    experiment = tiny(rounds=2, model={"hidden": [1100, 1000]})
    run({**experiment, "linear": "onednn"}, out=tmp_path / "given", workers=1)
    monkeypatch.setattr(_autotune, "fastest_linear", lambda: "onednn")
    with pytest.raises(StopError):
        run(experiment, out=tmp_path / "probed", workers=1, watch=stop_after(1))
    monkeypatch.setattr(_autotune, "fastest_linear", lambda: "torch")
    run(experiment, out=tmp_path / "probed", workers=2, resume=True)
    probed, given = bits(tmp_path / "probed"), bits(tmp_path / "given")
    assert {name for name in probed if probed[name] != given[name]} == {"config.toml"}
    assert told_of(tmp_path / "probed")["linear"] == "onednn"


def test_bfloat16_is_for_devices_that_have_it(monkeypatch):
    cpu = torch.device("cpu")
    assert 0 < _autotune._bfloat16_speedup(cpu) < math.inf
    seen = []

    def gain(default, other, _):
        default()
        other()
        return 7.0

    with monkeypatch.context() as patched:
        patched.setattr(_autotune, "_speedup", gain)
        patched.setattr(torch, "matmul", lambda x, _: seen.append(x.dtype) or x)
        assert _autotune._bfloat16_speedup.__wrapped__(cpu) == 7.0
    assert seen == [torch.float32, torch.bfloat16]
    assert _autotune._bfloat16_speedup(META) == 0.0  # no number comes from there
    for gain, expected in ((2.0, "bfloat16"), (0.5, "bfloat16"), (0.01, "float32")):
        monkeypatch.setattr(_autotune, "_bfloat16_speedup", lambda _, gain=gain: gain)
        assert _autotune.supported_precision("bfloat16", cpu) == expected
    monkeypatch.setattr(_autotune, "_bfloat16_speedup", lambda _: pytest.fail("timed"))
    assert _autotune.supported_precision("float32", cpu) == "float32"


@pytest.mark.parametrize(("began", "later"), [(0.01, 2.0), (2.0, 0.01)], ids=["without", "with"])
def test_a_run_keeps_its_precision_when_it_is_resumed(tmp_path, monkeypatch, caplog, began, later):
    experiment = tiny(rounds=2, training={"precision": "bfloat16"})
    takes = "float32" if began < 1 else "bfloat16"
    monkeypatch.setattr(_autotune, "_bfloat16_speedup", lambda _: began)
    run(tiny(rounds=2, training={"precision": takes}), out=tmp_path / "given", workers=1)
    with pytest.raises(StopError):
        run(experiment, out=tmp_path / "probed", workers=1, watch=stop_after(1))
    told = caplog.text
    caplog.clear()
    assert ("tiny seed 1000 trains in float32: bfloat16 is far slower here" in told) == (
        takes == "float32"
    )
    monkeypatch.setattr(_autotune, "_bfloat16_speedup", lambda _: later)
    run(experiment, out=tmp_path / "probed", workers=2, resume=True)
    told = caplog.text
    caplog.clear()
    slower = "" if takes == "float32" else ", though bfloat16 is far slower here"
    assert f"tiny seed 1000 began in {takes}, and keeps it{slower}.\n" in told
    assert "trains in" not in told
    probed, given = bits(tmp_path / "probed"), bits(tmp_path / "given")
    assert {name for name in probed if probed[name] != given[name]} <= {"config.toml"}
    assert told_of(tmp_path / "probed")["precision"] == takes


def test_small_models_are_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(_autotune, "fastest_linear", lambda: pytest.fail("timed"))
    run(tiny(rounds=1), out=tmp_path / "run", workers=1)
    assert told_of(tmp_path / "run")["linear"] == "torch"


def convolutions(input_shape, num_classes):
    first = nn.Conv2d(input_shape[0], 4, 3, padding=1)
    return nn.Sequential(
        first, nn.ReLU(), nn.Flatten(), nn.Linear(4 * math.prod(input_shape[1:]), num_classes)
    )


class Views(nn.Sequential):
    def forward(self, x):
        x = self[0](x)
        return self[1](x.view(len(x), -1))


def views(input_shape, num_classes):
    return Views(
        nn.Conv2d(input_shape[0], 4, 3),
        nn.Linear(4 * math.prod(n - 2 for n in input_shape[1:]), num_classes),
    )


def test_images_lie_the_faster_way_by_a_margin(monkeypatch):
    x = torch.zeros(2, 1, 8, 8)
    monkeypatch.setattr(_autotune, "_has_channels_last_overrun", lambda: False)
    for last, expected in ((0.5, "channels_last"), (0.8, "contiguous"), (2.0, "contiguous")):
        now = itertools.accumulate(
            itertools.cycle([0.0, 1.0, 0.0, last])
        )  # before and after, one way and the other
        monkeypatch.setattr(_autotune.time, "thread_time", lambda now=now: next(now))
        assert _autotune.fastest_layout(convolutions((1, 8, 8), 10), x, "float32") == expected


def test_where_gradients_overrun_their_memory_the_other_way_is_not_tried(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(_autotune, "_speedup", lambda *_: pytest.fail("timed"))
    assert (
        _autotune.fastest_layout(convolutions((1, 8, 8), 10), torch.zeros(2, 1, 8, 8), "float32")
        == "contiguous"
    )


@pytest.mark.parametrize("size", [8, 28])
def test_the_networks_that_are_built_in_are_far_from_the_margin(size):
    """Trials agree, so that two runs of one experiment have the same bits."""
    module, x = architectures.resnet((1, size, size), 10), torch.rand(8, 1, size, size)
    assert {_autotune.fastest_layout(module, x, "float32") for _ in range(4)} == {"contiguous"}


def test_a_start_that_is_killed_before_the_first_round_keeps_what_was_chosen(tmp_path, monkeypatch):
    experiment = tiny(model={"name": convolutions}, rounds=1)
    run({**experiment, "layout": "channels_last"}, out=tmp_path / "given", workers=1)

    def stopped(*_):
        raise StopError

    with monkeypatch.context() as patched:
        patched.setattr(_autotune, "fastest_layout", lambda *_: "channels_last")
        patched.setattr(
            sys.modules["fedcb2o.experiments.runs._local_backend"], "open_local_engine", stopped
        )
        with pytest.raises(StopError):
            run(experiment, out=tmp_path / "killed", workers=1)
    monkeypatch.setattr(_autotune, "fastest_layout", lambda *_: pytest.fail("timed"))
    run(experiment, out=tmp_path / "killed", workers=1)
    killed, given = bits(tmp_path / "killed"), bits(tmp_path / "given")
    assert {name for name in killed if killed[name] != given[name]} == {"config.toml"}


def test_some_networks_read_images_as_they_come(monkeypatch):
    x = torch.zeros(2, 1, 8, 8)
    assert _autotune.fastest_layout(views((1, 8, 8), 10), x, "float32") == "contiguous"
    monkeypatch.setattr(_autotune.time, "thread_time", lambda: pytest.fail("timed"))
    for module in (architectures.mlp((1, 8, 8), 10), architectures.cnn((1, 8, 8), 10, hidden=8)):
        assert _autotune.fastest_layout(module, x, "float32") == "contiguous"
    assert _autotune.fastest_layout(nn.Linear(30, 2), torch.zeros(2, 30), "float32") == "contiguous"


def test_a_layout_is_kept_and_agrees_to_rounding(tmp_path, monkeypatch):
    experiment = tiny(model={"name": convolutions}, evaluate_every=3)
    run({**experiment, "layout": "channels_last"}, out=tmp_path / "given", workers=1)
    run({**experiment, "layout": "contiguous"}, out=tmp_path / "plain", workers=1)
    monkeypatch.setattr(_autotune, "fastest_layout", lambda *_: "channels_last")
    with pytest.raises(StopError):
        run(experiment, out=tmp_path / "probed", workers=1, watch=stop_after(1))
    monkeypatch.setattr(_autotune, "fastest_layout", lambda *_: pytest.fail("timed"))
    run(experiment, out=tmp_path / "probed", workers=2, resume=True)
    probed, given = bits(tmp_path / "probed"), bits(tmp_path / "given")
    assert {name for name in probed if probed[name] != given[name]} == {"config.toml"}
    models_of = [
        load_file(tmp_path / name / "seed-1000/checkpoint.safetensors")
        for name in ("given", "plain")
    ]
    torch.testing.assert_close(*(found["models"] for found in models_of), rtol=1e-4, atol=1e-6)


def test_a_layout_that_a_network_cannot_read_is_an_error(tmp_path):
    with pytest.raises(
        ConfigError, match=r'cannot read samples of shape .* with `layout` = "channels_last"'
    ):
        run(tiny(model={"name": views}, layout="channels_last"), out=tmp_path / "run", workers=1)


def test_convolutions_go_the_faster_way_by_a_margin(monkeypatch):
    module, x = (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 10)),
        torch.zeros(2, 1, 8, 8),
    )
    for unfolded, expected in ((0.5, "unfolded"), (0.95, "grouped"), (2.0, "grouped")):
        now = itertools.accumulate(itertools.cycle([0.0, 1.0, 0.0, unfolded]))
        monkeypatch.setattr(
            _autotune, "time", SimpleNamespace(perf_counter=lambda now=now: next(now))
        )
        assert (
            _autotune.fastest_batched_convolution(module, x, "float32", torch.device("cpu"), 3)
            == expected
        )


def test_the_fastest_of_the_others_is_taken(monkeypatch):
    module, x = (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 10)),
        torch.zeros(2, 1, 8, 8),
    )
    for gains, expected in (
        ((1.2, 1.5), "mixed"),
        ((1.5, 1.2), "unfolded"),
        ((0.5, 1.05), "grouped"),
    ):
        monkeypatch.setattr(_autotune, "_speedup", Mock(side_effect=gains))
        assert (
            _autotune.fastest_batched_convolution(module, x, "float32", torch.device("cpu"), 3)
            == expected
        )


def test_what_is_timed_is_a_training_step_of_a_team(monkeypatch):
    module, x, teams = (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 10)),
        torch.zeros(5, 1, 8, 8),
        [],
    )
    made = _autotune.batched_forward

    def seen(module, dim):
        at_once = made(module, dim)
        return lambda parameters, x: (
            teams.append((x.shape, len(parameters[0]))),
            at_once(parameters, x),
        )[1]

    monkeypatch.setattr(_autotune, "batched_forward", seen)
    fastest_convolution = _autotune.fastest_batched_convolution
    with pretended(monkeypatch) as mode:
        assert fastest_convolution(module, x, "float32", META, 40) in (
            "grouped",
            "unfolded",
            "mixed",
        )
    assert set(teams) == {((_autotune._TIMED_AGENTS, 5, 1, 8, 8), _autotune._TIMED_AGENTS)}
    assert len(teams) == 4 * (_autotune._REPEATS + 1) == mode.waits.total()


def test_what_cannot_be_tried_is_grouped(monkeypatch):
    x, device = torch.zeros(2, 1, 8, 8), torch.device("cpu")

    def full(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(_autotune, "_speedup", full)
    module = architectures.cnn((1, 8, 8), 10, hidden=4)
    assert _autotune.fastest_batched_convolution(module, x, "float32", device, 4) == "grouped"
    monkeypatch.setattr(_autotune, "_speedup", lambda *_: pytest.fail("timed"))
    assert _autotune.fastest_batched_convolution(module, x, "float32", device, 1) == "grouped"
    for other in (
        architectures.mlp((1, 8, 8), 10),
        nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.Flatten()),
    ):
        assert _autotune.fastest_batched_convolution(other, x, "float32", device, 4) == "grouped"


@pytest.mark.slow
def test_a_run_keeps_its_convolutions_when_it_is_resumed(tmp_path, monkeypatch):
    experiment = tiny(model=IMAGES, device="meta")
    with pretended(monkeypatch):
        run({**experiment, "convolution": "unfolded"}, out=tmp_path / "given")
        run({**experiment, "convolution": "grouped"}, out=tmp_path / "other")
        asked = []
        monkeypatch.setattr(
            _autotune,
            "fastest_batched_convolution",
            lambda *given: asked.append(given[2:]) or "unfolded",
        )
        with pytest.raises(StopError):
            run(experiment, out=tmp_path / "probed", watch=stop_after(1))
        monkeypatch.setattr(
            _autotune, "fastest_batched_convolution", lambda *_: pytest.fail("timed")
        )
        run(experiment, out=tmp_path / "probed", resume=True)
    assert asked == [("float32", META, 6)]
    probed, given_, other = (bits(tmp_path / name) for name in ("probed", "given", "other"))
    assert {name for name in probed if probed[name] != given_[name]} == {"config.toml"}
    assert probed["checkpoint models"] != other["checkpoint models"]
    assert told_of(tmp_path / "probed")["convolution"] == "unfolded"


def test_on_the_cpu_only_agents_one_by_one_may_go_another_way(tmp_path, monkeypatch):
    monkeypatch.setattr(_autotune, "fastest_batched_convolution", lambda *_: pytest.fail("timed"))
    asked = []
    monkeypatch.setattr(
        _autotune, "fastest_single_convolution", lambda *given: asked.append(given) or "fourier"
    )
    for changes, expected in (
        ({}, "fourier"),
        ({"together": 3}, "grouped"),
        ({"convolution": "grouped"}, "grouped"),
    ):
        folder = tmp_path / str(changes)
        run(tiny(model=IMAGES, rounds=1, **changes), out=folder, workers=1)
        assert told_of(folder)["convolution"] == expected
    ((_, x, precision),) = asked
    assert (x.shape[1:], precision) == ((1, 8, 8), "float32")
    monkeypatch.setattr(_autotune, "fastest_layout", lambda *_: "channels_last")
    run(tiny(model={"name": convolutions}, rounds=1), out=tmp_path / "last", workers=1)
    assert isinstance(asked[-1][0][0], memory_layout.ChannelsLast)  # timed as it is computed


def test_convolutions_of_one_network_go_by_spectra_by_a_margin(monkeypatch):
    torch.manual_seed(
        0
    )  # with one draw of twenty nothing gets through so few hidden units, however it is computed
    x = torch.rand(8, 1, 28, 28)
    module = architectures.cnn((1, 28, 28), 10, hidden=4)
    before = parameters.flatten(module)
    for spectra, expected in ((0.7, "fourier"), (0.8, "grouped"), (2.0, "grouped")):
        now = itertools.accumulate(itertools.cycle([0.0, 1.0, 0.0, spectra]))
        monkeypatch.setattr(
            _autotune, "time", SimpleNamespace(thread_time=lambda now=now: next(now))
        )
        assert _autotune.fastest_single_convolution(module, x, "float32") == expected
    assert torch.equal(parameters.flatten(module), before)
    monkeypatch.setattr(_autotune, "_speedup", lambda *_: pytest.fail("timed"))
    strided = architectures.cnn((1, 28, 28), 10, hidden=4, down="stride")
    for other, seen, precision in (
        (architectures.mlp((1, 8, 8), 10), x, "float32"),
        (strided, x, "float32"),
        (module, x, "bfloat16"),
        (module, x[:, :, :8, :8], "float32"),  # which it cannot read
    ):
        assert _autotune.fastest_single_convolution(other, seen, precision) == "grouped"


def test_what_is_timed_by_spectra_leaves_no_trace():
    module = nn.Sequential(
        architectures.cnn((1, 28, 28), 10, hidden=4), nn.BatchNorm1d(10), nn.Dropout()
    )
    x, before, threads = (
        torch.rand(8, 1, 28, 28),
        copy.deepcopy(module.state_dict()),
        torch.get_num_threads(),
    )
    drawn = torch.get_rng_state()
    _autotune.fastest_single_convolution(module, x, "float32")
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.get_num_threads() == threads
    module.held = module(x)  # of which there is no copy
    assert _autotune.fastest_single_convolution(module, x, "float32") == "grouped"


def test_a_run_by_spectra_finds_what_it_finds_by_pytorch(tmp_path, monkeypatch):
    monkeypatch.setattr(_fft_conv, "MIN_SAVING", 0)
    experiment = tiny(model={"name": "cnn", "hidden": 8}, evaluate_every=3)
    for convolution in ("grouped", "fourier"):
        run({**experiment, "convolution": convolution}, out=tmp_path / convolution, workers=1)
    with pytest.raises(StopError):
        run(
            {**experiment, "convolution": "fourier"},
            out=tmp_path / "resumed",
            workers=1,
            watch=stop_after(1),
        )
    run({**experiment, "convolution": "fourier"}, out=tmp_path / "resumed", workers=1, resume=True)
    grouped, spectra, resumed = (
        bits(tmp_path / name) for name in ("grouped", "fourier", "resumed")
    )
    assert spectra == resumed
    assert spectra["checkpoint models"] != grouped["checkpoint models"]
    found = [
        load_file(tmp_path / name / "seed-1000/checkpoint.safetensors")
        for name in ("grouped", "fourier")
    ]
    torch.testing.assert_close(found[0]["models"], found[1]["models"], rtol=1e-3, atol=1e-5)
