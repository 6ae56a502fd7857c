"""Large dense layers by oneDNN: the same numbers to rounding for any network, and a choice that a run keeps."""

import itertools
import json
import math

import pytest
import torch
from safetensors.torch import load_file
from tests.runtime.test_determinism import VARIANTS, StopError, stop_after
from tests.tiny import bits, here, tiny, write
from torch import nn
from torch.nn import functional as F

from fedcb2o import models
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.experiments import run
from fedcb2o.federated.evaluate import outputs_of
from fedcb2o.runtime import primitives

pytestmark = pytest.mark.skipif(not primitives.available(), reason="this PyTorch has no oneDNN")
WIDE = (1100, 1000)


def gradients(inputs, linear):
    with primitives.by(linear):
        y = F.linear(*inputs)
    needed = [t for t in inputs if t is not None and t.requires_grad]
    g = torch.linspace(-1, 1, y.shape[1]).expand(y.shape)  # without memory of its own
    return y, torch.autograd.grad(y, needed, g)


LAYOUTS = {
    "rows": lambda x: x,
    "columns": lambda x: x.T.contiguous().T,
    "a slice": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "one sample again and again": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_and_its_gradients_agree_to_rounding(layout, bias):
    draw = torch.Generator().manual_seed(0)
    x = LAYOUTS[layout](torch.randn(6, WIDE[0], generator=draw)).requires_grad_()
    weight = torch.randn(WIDE[1], WIDE[0], generator=draw).requires_grad_()
    inputs = x, weight, torch.randn(WIDE[1], generator=draw).requires_grad_() if bias else None
    y, found = gradients(inputs, "onednn")
    assert "Products" in type(y.grad_fn).__name__
    assert y.is_contiguous()
    expected_y, expected = gradients(inputs, "torch")
    torch.testing.assert_close(y, expected_y, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)


def test_what_is_small_of_another_type_or_shape_is_pytorchs():
    x, weight = torch.randn(6, WIDE[0]), torch.randn(*WIDE[::-1], requires_grad=True)
    with primitives.by("onednn"):
        found = [
            F.linear(x[:, :8], weight[:8, :8]),
            F.linear(x.double(), weight.double()),
            F.linear(x[None], weight),
            F.linear(input=x[0], weight=weight),
        ]
        with torch.autocast("cpu", torch.bfloat16):
            found.append(F.linear(x, weight))
    assert all("Products" not in type(y.grad_fn).__name__ for y in found)
    assert found[-1].dtype == torch.bfloat16


def test_a_layer_that_is_used_twice_trains_right():
    layer = nn.Linear(1100, 1100)
    x = torch.randn(4, 1100, generator=torch.Generator().manual_seed(0))
    found = []
    for linear in ("torch", "onednn"):
        with primitives.by(linear):
            y = layer(layer(x).relu())
        found.append(torch.autograd.grad(y.square().sum(), list(layer.parameters())))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-3)


def test_several_networks_at_once_are_pytorchs():
    module = nn.Sequential(nn.Linear(1100, 1000), nn.Tanh(), nn.Linear(1000, 2))
    thetas = torch.stack([models.flatten(module)] * 2)
    x = torch.randn(1, 3, 1100, generator=torch.Generator().manual_seed(0))
    found = []
    for linear in ("torch", "onednn"):
        with primitives.by(linear):
            parameters = [p.requires_grad_() for p in models.stacked(module, thetas)]
            y = outputs_of(module, thetas.shape[1])(parameters, x)
        found.append(torch.autograd.grad(y.sum(), parameters))
    assert all(map(torch.equal, *found))


def test_the_choice_is_the_faster_one_by_a_margin(monkeypatch):
    chosen = primitives.fastest_linear.__wrapped__
    for onednn, expected in ((0.5, "onednn"), (0.98, "torch"), (2.0, "torch")):
        monkeypatch.setattr(primitives, "timings", lambda onednn=onednn: {"torch": 1.0, "onednn": onednn})
        assert chosen() == expected
    monkeypatch.setattr(primitives, "available", lambda: False)
    assert chosen() == "torch"


def test_a_run_keeps_its_choice_when_it_is_resumed(tmp_path, monkeypatch):
    experiment = VARIANTS["onednn"].copy()
    run(experiment, out=tmp_path / "given", workers=1)
    del experiment["linear"]
    monkeypatch.setattr(primitives, "fastest_linear", lambda: "onednn")
    with pytest.raises(StopError):
        run(experiment, out=tmp_path / "probed", workers=1, watch=stop_after(1))
    monkeypatch.setattr(primitives, "fastest_linear", lambda: "torch")
    run(experiment, out=tmp_path / "probed", workers=2, resume=True)
    probed, given = bits(tmp_path / "probed"), bits(tmp_path / "given")
    assert {name for name in probed if probed[name] != given[name]} == {"config.toml"}
    told = json.loads((tmp_path / "probed/seed-1000/environment.json").read_text())
    assert told["linear"] == "onednn"


def test_small_models_are_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(primitives, "fastest_linear", lambda: pytest.fail("timed"))
    run(tiny(rounds=1), out=tmp_path / "run", workers=1)
    assert json.loads((tmp_path / "run/seed-1000/environment.json").read_text())["linear"] == "torch"


def test_a_choice_that_this_pytorch_lacks_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(primitives, "available", lambda: False)
    with pytest.raises(RunError, match="needs oneDNN, which this PyTorch lacks"):
        run(tiny(linear="onednn"), out=tmp_path / "run", workers=1)


def test_verbose_says_what_was_chosen(tmp_path):
    path = write(tmp_path / "tiny.toml", rounds=1)
    done = here("run", path, "--out", tmp_path / "run", "--workers", 1, "--verbose")
    assert "tiny seed 1000: processes 1, large dense layers by torch" in done.err


def convolutions(input_shape, num_classes):
    first = nn.Conv2d(input_shape[0], 4, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), nn.Flatten(), nn.Linear(4 * math.prod(input_shape[1:]), num_classes))


class Views(nn.Sequential):
    def forward(self, x):
        x = self[0](x)
        return self[1](x.view(len(x), -1))


def views(input_shape, num_classes):
    return Views(nn.Conv2d(input_shape[0], 4, 3), nn.Linear(4 * math.prod(n - 2 for n in input_shape[1:]), num_classes))


def test_images_lie_the_faster_way_by_a_margin(monkeypatch):
    x = torch.zeros(2, 1, 8, 8)
    for last, expected in ((0.5, "channels_last"), (0.98, "contiguous"), (2.0, "contiguous")):
        now = itertools.accumulate(itertools.cycle([0.0, 1.0, 0.0, last]))  # before and after, one way and the other
        monkeypatch.setattr(primitives.time, "thread_time", lambda now=now: next(now))
        assert primitives.fastest_layout(convolutions((1, 8, 8), 10), x, "float32") == expected


def test_some_networks_read_images_as_they_come(monkeypatch):
    x = torch.zeros(2, 1, 8, 8)
    assert primitives.fastest_layout(views((1, 8, 8), 10), x, "float32") == "contiguous"
    monkeypatch.setattr(primitives.time, "thread_time", lambda: pytest.fail("timed"))
    for module in (models.mlp((1, 8, 8), 10), models.cnn((1, 8, 8), 10, hidden=8)):
        assert primitives.fastest_layout(module, x, "float32") == "contiguous"
    assert primitives.fastest_layout(nn.Linear(30, 2), torch.zeros(2, 30), "float32") == "contiguous"


def test_a_layout_is_kept_and_agrees_to_rounding(tmp_path, monkeypatch):
    experiment = tiny(model={"name": convolutions}, evaluate_every=3)
    run({**experiment, "layout": "channels_last"}, out=tmp_path / "given", workers=1)
    run({**experiment, "layout": "contiguous"}, out=tmp_path / "plain", workers=1)
    monkeypatch.setattr(primitives, "fastest_layout", lambda *_: "channels_last")
    with pytest.raises(StopError):
        run(experiment, out=tmp_path / "probed", workers=1, watch=stop_after(1))
    monkeypatch.setattr(primitives, "fastest_layout", lambda *_: pytest.fail("timed"))
    run(experiment, out=tmp_path / "probed", workers=2, resume=True)
    probed, given = bits(tmp_path / "probed"), bits(tmp_path / "given")
    assert {name for name in probed if probed[name] != given[name]} == {"config.toml"}
    models_of = [load_file(tmp_path / name / "seed-1000/checkpoint.safetensors") for name in ("given", "plain")]
    torch.testing.assert_close(*(found["models"] for found in models_of), rtol=1e-4, atol=1e-6)


def test_a_layout_that_a_network_cannot_read_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r'cannot read samples of shape .* with `layout` = "channels_last"'):
        run(tiny(model={"name": views}, layout="channels_last"), out=tmp_path / "run", workers=1)
